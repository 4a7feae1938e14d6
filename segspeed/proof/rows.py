"""What a rung came to: read from its runs' files, pooled over seeds, compared with the first rung."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from segspeed.jsonio import from_plain
from segspeed.metric.compare import Comparison, compare
from segspeed.record.run_record import read_record


@dataclass(frozen=True)
class Attempt:
    """One rung with one seed. Seconds and bytes. ``cases`` holds each validation case's mean Dice over its classes; ``curve`` the
    (seconds of training, mean Dice) of the evaluations on the way; ``error`` why it failed, "" otherwise."""

    seed: int
    seconds: float = 0.0  # of training
    preparation: float = 0.0
    evaluation: float = 0.0
    samples_per_s: float = 0.0
    wait_share: float = 0.0
    peak_bytes: int = 0  # of the training process, or of the GPU
    tree_bytes: int = 0  # of all its processes
    gpu_percent: float | None = None
    precision: str = ""
    dice: dict[str, float | None] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    mean_dice: float | None = None
    cases: dict[str, float] = field(default_factory=dict)
    curve: tuple[tuple[float, float], ...] = ()
    error: str = ""

    @property
    def reason(self) -> str:
        """The first line of ``error``, which an attempt that failed always has."""
        return self.error.splitlines()[0]


@dataclass(frozen=True)
class Row:
    """One rung. ``note`` says what a reader must know: why it was left out, or that it changes nothing here."""

    name: str
    title: str
    attempts: tuple[Attempt, ...] = ()
    kept: bool = True
    note: str = ""
    against: Comparison | None = None  # its Dice against that of the first rung

    @property
    def done(self) -> tuple[Attempt, ...]:
        """The attempts that came to an end."""
        return tuple(a for a in self.attempts if not a.error)

    @property
    def lost(self) -> tuple[Attempt, ...]:
        """The attempts that failed."""
        return tuple(a for a in self.attempts if a.error)

    def median(self, name: str) -> float | None:
        """Median over the seeds of one of the Attempt's numbers."""
        found = [getattr(a, name) for a in self.done]
        found = [v for v in found if v is not None]
        return float(median(found)) if found else None

    @property
    def mean_dice(self) -> float | None:
        """Mean over the seeds; None without any."""
        found = [a.mean_dice for a in self.done if a.mean_dice is not None]
        return mean(found) if found else None

    def class_dice(self, name: str) -> float | None:
        """Mean over the seeds of one class's Dice; None where none has it."""
        found = [a.dice[name] for a in self.done if a.dice.get(name) is not None]
        return mean(v for v in found if v is not None) if found else None


def attempt_of_run(folder: Path, seed: int, tree: int) -> Attempt:
    """Read a finished run's ``result.json`` and ``run.jsonl``."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    events = read_record(folder / "run.jsonl")
    evaluations = [e for e in events if e["kind"] == "evaluation"]
    last = evaluations[-1]
    gpu = [e["gpu_percent"] for e in events if e["kind"] == "step" and e.get("gpu_percent") is not None]
    scored = {case: [v for v in scores.values() if v is not None] for case, scores in last["cases"].items()}
    return Attempt(
        seed=seed,
        seconds=result["train_s"],
        preparation=result["setup_s"] + result["cache_s"],
        evaluation=result["evaluation_s"],
        samples_per_s=result["samples_per_s"],
        wait_share=result["wait_share"],
        peak_bytes=result["peak_memory_bytes"],
        tree_bytes=tree,
        gpu_percent=mean(gpu) if gpu else None,
        precision=result["precision"],
        dice=result["dice"],
        interval=tuple(result["interval"]) if result["interval"] else None,
        mean_dice=result["mean_dice"],
        cases={case: mean(values) for case, values in scored.items() if values},
        curve=tuple((e["train_s"], e["mean_dice"]) for e in evaluations if e["mean_dice"] is not None),
    )


def attempt_of_throughput(found: Mapping[str, Any], seed: int, tree: int) -> Attempt:
    """From what `segspeed.proof.throughput.throughput` measured."""
    return Attempt(
        seed=seed,
        samples_per_s=found["samples_per_s"],
        wait_share=found["wait_share"],
        peak_bytes=found["peak_memory_bytes"],
        tree_bytes=tree,
        gpu_percent=found["gpu_percent"],
        precision=found["precision"],
    )


def pooled(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Each case's Dice, averaged over the seeds that scored it."""
    found: dict[str, list[float]] = {}
    for attempt in attempts:
        for case, dice in attempt.cases.items():
            found.setdefault(case, []).append(dice)
    return {case: mean(values) for case, values in found.items()}


def compared(row: Row, first: Row, patients: Mapping[str, str], margin: float) -> Row:
    """``row`` with its Dice against that of ``first``, paired over the cases that both scored."""
    ours, theirs = pooled(row.done), pooled(first.done)
    if not set(ours) & set(theirs):
        return row
    known = {case: patients.get(case) or case for case in {*ours, *theirs}}
    return dataclasses.replace(row, against=compare(theirs, ours, patients=known, margin=margin))


def attempt_from_json(raw: Mapping[str, Any]) -> Attempt:
    """An attempt from its plain values. Raises ValueError."""
    return from_plain(raw, Attempt)
