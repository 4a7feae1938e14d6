"""The ladder climbed: every rung with every seed, each in its own process, from where an interrupted climb stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from segspeed import build
from segspeed.config import Config
from segspeed.jsonio import to_plain, write_json
from segspeed.preparation import Prepared
from segspeed.proof.declared import refuse_changed, refuse_other_machine
from segspeed.proof.processes import STOPPED, Ended, run_child
from segspeed.proof.rows import Attempt, Row, attempt_from_json, attempt_of_run, attempt_of_throughput, compared
from segspeed.proof.rungs import Rung, pinned, rungs_of, with_length, with_values
from segspeed.record.live import say
from segspeed.record.versions import environment
from segspeed.speed.precision import choose_precision
from segspeed.types import RunStopped, SettingError

FASTER = 1.02  # a rung must train so many times as fast as the one that it stands on, or it did not pay


@dataclass(frozen=True)
class Climb:
    """A ladder so far. ``base`` is the user's configuration with the Plan pinned."""

    folder: Path
    base: Config
    classes: tuple[str, ...]
    patients: Mapping[str, str]
    rows: tuple[Row, ...] = ()

    @property
    def finished(self) -> list[Row]:
        """Rungs that ran with at least one seed."""
        return [row for row in self.rows if row.done]


def ladder_folder(cfg: Config, prepared: Prepared) -> Path:
    """``<run.root>/<cohort>/ladder/<name>``."""
    return Path(cfg.run.root) / prepared.cohort.folder_name / "ladder" / cfg.ladder.name


def check_ladder(cfg: Config) -> None:
    """Raise SettingError for rungs that cannot be, before any data is read: unknown ones, settings of one's own that do not exist,
    or no length of training."""
    rungs_of(cfg)
    for name, changes in (cfg.ladder.own or {}).items():
        try:
            with_values(cfg, changes)
        except SettingError as error:
            raise SettingError(f"ladder.own.{name}: {error}") from error
    if cfg.ladder.equal == "time" and cfg.train.budget is None and not cfg.ladder.quick:
        raise SettingError("ladder.equal=time needs train.budget=..., the training time of every rung")


def begin(cfg: Config, prepared: Prepared) -> Climb:
    """The ladder's folder, new or gone on with. Raises DataError when it holds a ladder of other settings or of another machine."""
    folder = ladder_folder(cfg, prepared)
    base = pinned(cfg, prepared.plan)
    path = folder / "ladder.json"
    raw = base.model_dump(mode="json", by_alias=True)
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        refuse_other_machine(folder, "ladder", kept["versions"])
        refuse_changed(folder, "ladder", kept["config"], raw, free=("rungs", "margin"))
    patients = {c.id: c.patient for c in prepared.cohort.cases}
    return Climb(folder, base, prepared.cohort.table.targets, patients)


def climb(climb: Climb) -> Climb:
    """Measure every rung; what was measured before is taken from the folder. Writes ``ladder.json`` after each."""
    cfg = climb.base
    if not (climb.folder / "ladder.json").exists():
        save(climb)  # what was begun is known even if no rung is finished
    rungs = rungs_of(cfg)
    first = rungs[0]
    start = first.change(cfg, cfg)
    below = start  # what the next rung stands on
    for number, rung in enumerate(rungs):
        settings = start if rung is first else rung.change(below, cfg)
        row = same_here(rung, settings, below) if rung is not first else None
        if row is None:
            say(f"\nRung {number} of {len(rungs) - 1}, {rung.name}: {rung.title}")
            row = Row(rung.name, rung.title, tuple(_attempt(climb, rung, settings, seed) for seed in cfg.ladder.seeds))
            row = _judge(climb, rung, row)
        climb = dataclasses.replace(climb, rows=(*climb.rows, row))
        if row.kept and row.done and cfg.ladder.mode == "cumulative":
            below = settings
        save(climb)
        if rung is first and not row.done:
            raise RunStopped(f"the first rung failed, and all others are measured by it: {row.attempts[0].error}")
    return climb


def same_here(rung: Rung, settings: Config, below: Config) -> Row | None:
    """A row without a run where the rung changes nothing on this machine."""
    device = build.device_from(settings)
    if _decided(settings, device) != _decided(below, device):
        return None
    reason = "the settings are the same"
    if settings.precision != below.precision:
        reason = _precision(settings.precision, device)[1]
    return Row(rung.name, rung.title, kept=False, note=f"changes nothing here: {reason}")


@lru_cache
def _precision(name: str, device: torch.device) -> tuple[str, str]:
    """`choose_precision`, measured once."""
    return choose_precision(name, device)


def _decided(cfg: Config, device: torch.device) -> Config:
    """``cfg`` with what "auto" comes to."""
    name = _precision(cfg.precision, device)[0]
    return with_values(cfg, {"precision": name, "channels_last": build.channels_last(cfg, name)})


def _attempt(climb: Climb, rung: Rung, settings: Config, seed: int) -> Attempt:
    """One run of a rung, or what is known of it from an earlier session."""
    ladder = climb.base.ladder
    name = f"{rung.name}_seed{seed}"
    kept = climb.folder / "attempts" / f"{name}.json"
    if kept.exists():
        found = attempt_from_json(json.loads(kept.read_text(encoding="utf-8")))
        if not found.error:
            say(f"{rung.name}, seed {seed}: measured before")
            return found
    job = climb.folder / "jobs" / f"{name}.json"
    runs = climb.folder / "runs"
    changes: dict[str, Any] = {
        "seed": seed,
        "run": {"name": name, "root": str(runs)},
        "cache": {"root": str(build.cache_root(climb.base))},
    }
    if ladder.quick:
        changes["train"] = {"steps": None, "budget": ladder.quick_time}
    one = with_values(settings, changes)
    if not ladder.quick and ladder.equal == "samples":
        one = with_length(one, ladder.samples)
    ended = run_child(one, job, quick=ladder.quick)
    attempt = _read(ended, job, runs, name, seed, ladder.quick)
    write_json(kept, attempt)
    return attempt


def _read(ended: Ended, job: Path, runs: Path, name: str, seed: int, quick: bool) -> Attempt:
    if ended.code in STOPPED:
        raise RunStopped("the ladder was stopped; the same command goes on from here.", exit_code=ended.code)
    if ended.code:
        say(f"{name} failed: {ended.error.splitlines()[0] if ended.error else 'no reason told'}")
        return Attempt(seed, error=ended.error or "failed")
    if quick:
        found = json.loads(job.with_suffix(".result.json").read_text(encoding="utf-8"))
        return attempt_of_throughput(found, seed, ended.tree_bytes)
    (folder,) = runs.glob(f"*/{name}")
    return attempt_of_run(folder, seed, ended.tree_bytes)


def _judge(climb: Climb, rung: Rung, row: Row) -> Row:
    """Compare a rung with the first one, and say whether the next ones stand on it."""
    ladder = climb.base.ladder
    if not row.done:
        return dataclasses.replace(row, kept=False, note=f"failed: {row.attempts[0].reason}")
    if not climb.finished:
        return row
    row = compared(row, climb.finished[0], climb.patients, ladder.margin)
    if ladder.mode == "single" or ladder.keep == "all" or not rung.pays:
        return row
    standing = [r for r in climb.finished if r.kept][-1]
    before, now = standing.median("samples_per_s"), row.median("samples_per_s")
    assert before is not None
    assert now is not None
    if now < FASTER * before:
        return dataclasses.replace(
            row, kept=False, note=f"{now / before:.2f} times as fast as {standing.name}: the next rungs do without it"
        )
    return row


def save(climb: Climb) -> None:
    """``ladder.json``: settings, machine and rows, from which every table and picture is drawn."""
    write_json(
        climb.folder / "ladder.json",
        {
            "config": climb.base.model_dump(mode="json", by_alias=True),
            "versions": environment(),
            "classes": climb.classes,
            "rows": to_plain(climb.rows),
        },
    )
