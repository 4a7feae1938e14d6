"""Several runs as rows of one table, read from their folders alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segspeed.proof.ladder_table import duration, markdown_table, size
from segspeed.record.run_folder import RunFolder, flatten
from segspeed.record.run_record import read_record
from segspeed.types import DataError, first_line

APART = (
    "run",
    "save",
    "resume",
    "bench",
    "ladder",
    "speedrun",
    "sweep",
)  # they say nothing about how a run was trained
Curve = tuple[tuple[float, float], ...]  # seconds of training, mean Dice


@dataclass(frozen=True)
class Entry:
    """One run. Times in seconds of training, memory in bytes; ``result`` is None while the run is not finished. ``judged_by`` holds
    the digest of each validation case, and the classes: Dice compare between runs where it is equal."""

    folder: Path
    name: str
    start: Mapping[str, Any]
    config: Mapping[str, Any]
    result: Mapping[str, Any] | None
    seconds: float
    samples_per_s: float
    peak_bytes: int
    dice: Mapping[str, float | None]
    mean_dice: float | None
    curve: Curve
    judged_by: tuple[Any, ...]

    @property
    def finished(self) -> bool:
        """Whether it was trained and scored to the end."""
        return self.result is not None

    @property
    def machine(self) -> str:
        """The GPU, or the CPU and its threads."""
        versions = self.start.get("versions") or {}
        cpu = versions.get("cpu") or {}
        if str(self.start.get("device", "")).startswith("cuda"):
            return str(versions.get("gpu") or self.start["device"])
        return f"{self.start.get('device')}, {cpu.get('threads')} threads, {cpu.get('model')}"


def read_entries(folders: Sequence[Path]) -> list[Entry]:
    """The runs in these folders, finished or not. Raises DataError with everything that is wrong with any of them."""
    found, problems = [], []
    names = _names(folders)
    for folder, name in zip(folders, names, strict=True):
        try:
            found.append(_entry(folder, name))
        except FileNotFoundError as error:
            problems.append(f"{folder} holds no run: {Path(str(error.filename)).name} is missing")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{folder} holds a damaged run ({type(error).__name__}: {first_line(error)})")
    if problems:
        raise DataError("runs that cannot be shown:\n  " + "\n  ".join(problems) + "\nLeave them out of runs=[...]")
    return found


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell all of them apart."""
    parts = [f.resolve().parts for f in folders]
    depth = 1
    while len({p[-depth:] for p in parts}) < len(parts):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def _entry(folder: Path, name: str) -> Entry:
    paths = RunFolder(folder)
    config = json.loads(paths.config.read_text(encoding="utf-8"))["config"]
    data = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    events = read_record(paths.record)
    start = next((e for e in events if e["kind"] == "start"), None)
    if start is None:
        raise ValueError("run.jsonl has no beginning; the run has not trained a step")
    evaluations = [e for e in events if e["kind"] == "evaluation"]
    steps = [e for e in events if e["kind"] == "step"]
    last = evaluations[-1] if evaluations else {"dice": {}, "mean_dice": None}
    result = paths.outcome()
    rates = [e["samples_per_s"] for e in steps if e.get("samples_per_s") is not None]
    return Entry(
        folder=folder,
        name=name,
        start=start,
        config=config,
        result=result,
        seconds=float(result["train_s"] if result else max((e["train_s"] for e in steps), default=0.0)),
        samples_per_s=float(result["samples_per_s"] if result else sum(rates) / len(rates) if rates else 0.0),
        peak_bytes=int(
            result["peak_memory_bytes"] if result else max((e.get("memory_bytes") or 0 for e in steps), default=0)
        ),
        dice=dict(result["dice"] if result else last["dice"]),
        mean_dice=result["mean_dice"] if result else last["mean_dice"],
        curve=tuple((float(e["train_s"]), float(e["mean_dice"])) for e in evaluations if e["mean_dice"] is not None),
        judged_by=(tuple(sorted(data["val"].items())), json.dumps([data["classes"], data["regions"]])),
    )


def headings(entries: Sequence[Entry]) -> list[str]:
    """Heads of the columns of `cells`."""
    classes = list(dict.fromkeys(c for e in entries for c in e.dice))
    fixed = ["run", "recipe", "network", "machine", "precision", "training", "patches/s", "peak memory", "judged by"]
    return [*fixed, "mean Dice", *classes]


def cells(entry: Entry, entries: Sequence[Entry]) -> list[str]:
    """One run's row: every figure as text, "" where there is none."""
    group = groups(entries).index(entry.judged_by)
    classes = headings(entries)[10:]
    dices = [entry.mean_dice, *(entry.dice.get(c) for c in classes)]
    return [
        entry.name + ("" if entry.finished else " (not finished)"),
        str(entry.config["run"].get("experiment") or ""),
        _network(entry),
        entry.machine,
        str(entry.start.get("precision", "")),
        duration(entry.seconds),
        f"{entry.samples_per_s:.1f}",
        size(entry.peak_bytes) if entry.peak_bytes else "",
        f"{'ABCDEFGHIJKLMNOPQRSTUVWXYZ'[group % 26]}: {len(entry.judged_by[0])} cases",
        *("" if d is None else f"{d:.3f}" for d in dices),
    ]


def _network(entry: Entry) -> str:
    name = str(entry.config["model"]["_target_"]).rpartition(".")[2]
    count = (entry.result or {}).get("parameters")
    return f"{name}, {count / 1e6:.1f} M" if count else name


def groups(entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
    """The different sets of validation cases and classes, in the order of the runs."""
    return list(dict.fromkeys(e.judged_by for e in entries))


def notes(entries: Sequence[Entry]) -> list[str]:
    """What a reader must know before comparing."""
    found = []
    sets = groups(entries)
    if len(sets) > 1:
        listed = "; ".join(", ".join(e.name for e in entries if e.judged_by == s) for s in sets)
        found.append(
            f"warning: these runs are judged by other cases or classes than each other, so their Dice do not compare: {listed}"
        )
    machines = {(e.machine, e.start.get("device")) for e in entries}
    if len(machines) > 1:
        found.append("note: they ran on different machines, so their times do not compare")
    found += [f"note: {e.name} is not finished; shown as far as it is" for e in entries if not e.finished]
    found += [
        f"note: {len(e.result['failed'])} validation cases of {e.name} could not be scored"
        for e in entries
        if e.result and e.result.get("failed")
    ]
    return found


def differences(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Settings in which the runs differ: key -> the value of each run, as JSON; "" where a run has no such key."""
    flat = [{k: json.dumps(v) for k, v in flatten(e.config) if k.split(".")[0] not in APART} for e in entries]
    keys = sorted({k for f in flat for k in f})
    rows = {k: [f.get(k, "") for f in flat] for k in keys}
    return {k: row for k, row in rows.items() if len(set(row)) > 1}


def markdown(entries: Sequence[Entry]) -> str:
    """The table as Markdown."""
    return "\n".join(markdown_table(headings(entries), (cells(e, entries) for e in entries)))
