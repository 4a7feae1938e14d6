"""A speedrun: n runs of one schedule that was fixed before, none left out, against a Dice that was named before."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

from scipy import stats

from segspeed.config import Config
from segspeed.jsonio import from_plain, write_json
from segspeed.proof.declared import refuse_changed, refuse_other_machine
from segspeed.proof.processes import STOPPED, run_child
from segspeed.proof.rows import Attempt, attempt_from_json, attempt_of_run
from segspeed.proof.rungs import with_values
from segspeed.record.live import say
from segspeed.record.versions import environment
from segspeed.types import DataError, RunStopped, SettingError

RULES = (
    "The schedule, the target and the seeds are fixed before the first run; every seed is reported.",
    "Dice: mean over the classes of the whole validation volumes on their original grid, last weights, scored once.",
    "Reached: the mean over the seeds lies above the target, one-sided t-test.",
    "Preparation (reading, planning, cache) is that of the first run, from an empty cache; training holds compiling.",
    "First passage: training time at the first evaluation on the way at or above the target.",
)


@dataclass(frozen=True)
class Record:
    """What ``record.json`` holds. ``data`` is a digest of the cases, their files and the split."""

    name: str
    target: float
    seeds: tuple[int, ...]
    config: dict[str, Any]
    versions: dict[str, Any]
    data: str
    cases: int
    rules: tuple[str, ...]
    runs: tuple[Attempt, ...] = ()

    @property
    def dices(self) -> list[float]:
        """Mean Dice of the runs that have one."""
        return [r.mean_dice for r in self.runs if r.mean_dice is not None]

    @property
    def p(self) -> float | None:
        """One-sided t-test of the mean Dice against the target; None with fewer than two runs or without any spread."""
        found = self.dices
        if len(found) < 2 or len(set(found)) == 1:
            return None
        return float(stats.ttest_1samp(found, self.target, alternative="greater").pvalue)

    @property
    def reached(self) -> bool:
        """Whether the mean over the seeds is at least the target."""
        return bool(self.dices) and mean(self.dices) >= self.target

    @property
    def preparation(self) -> float:
        """Seconds, from an empty cache."""
        return self.runs[0].preparation

    @property
    def passages(self) -> list[float]:
        """Seconds of training at which each run that passed the target on its way did so."""
        found = [next((t for t, dice in r.curve if dice >= self.target), None) for r in self.runs]
        return [t for t in found if t is not None]


def records_folder(cfg: Config) -> Path:
    """``<run.root>/speedruns``."""
    return Path(cfg.run.root) / "speedruns"


def speedrun(cfg: Config) -> tuple[Record, Path]:
    """Run every seed that is not there yet. Returns the record and its folder.

    Raises SettingError without a target, DataError when the folder holds another speedrun or a run failed, RunStopped when it was
    told to stop.
    """
    s = cfg.speedrun
    if s.target is None:
        raise SettingError("say which Dice is to be reached: target=0.87")
    name = s.name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = records_folder(cfg) / name
    declare(cfg, folder)
    runs = [_run(cfg, folder, seed) for seed in s.seeds]
    first = next((folder / "runs").glob(f"*/seed{s.seeds[0]}"))
    data = json.loads((first / "data.json").read_text(encoding="utf-8"))
    record = Record(
        name=name,
        target=s.target,
        seeds=s.seeds,
        config=json.loads((folder / "declared.json").read_text(encoding="utf-8"))["config"],
        versions=environment(),
        data=hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16],
        cases=len(data["val"]),
        rules=RULES,
        runs=tuple(runs),
    )
    write_json(folder / "record.json", record)
    shutil.rmtree(folder / "cache", ignore_errors=True)  # made for this record alone
    return record, folder


def declare(cfg: Config, folder: Path) -> None:
    """Write down what will be run, before anything is. Raises DataError when something else was declared in ``folder``."""
    path, raw = folder / "declared.json", cfg.model_dump(mode="json", by_alias=True)
    if not path.exists():
        write_json(path, {"config": raw, "versions": environment()})
        return
    kept = json.loads(path.read_text(encoding="utf-8"))
    refuse_other_machine(folder, "speedrun", kept["versions"])
    refuse_changed(folder, "speedrun", kept["config"], raw, free=("name", "report", "compare"))


def _run(cfg: Config, folder: Path, seed: int) -> Attempt:
    kept = folder / "attempts" / f"seed{seed}.json"
    if kept.exists():
        say(f"seed {seed}: run before")
        return attempt_from_json(json.loads(kept.read_text(encoding="utf-8")))
    say(f"\nSeed {seed}, {cfg.speedrun.seeds.index(seed) + 1} of {len(cfg.speedrun.seeds)}")
    one = with_values(
        cfg,
        {
            "seed": seed,
            "run": {"name": f"seed{seed}", "root": str(folder / "runs")},
            "cache": {"root": str(folder / "cache")},
        },
    )
    ended = run_child(one, folder / "jobs" / f"seed{seed}.json")
    if ended.code in STOPPED:
        raise RunStopped(
            "the speedrun was stopped; the same command with its speedrun.name goes on.", exit_code=ended.code
        )
    if ended.code:
        raise DataError(f"the run with seed {seed} failed, and none may be left out: {ended.error}")
    attempt = attempt_of_run(next((folder / "runs").glob(f"*/seed{seed}")), seed, ended.tree_bytes)
    write_json(kept, attempt)
    return attempt


def load_records(folders: Sequence[Path]) -> list[Record]:
    """The records of these folders. Raises DataError for one that holds none."""
    found = []
    for folder in folders:
        path = folder / "record.json" if folder.is_dir() else folder
        try:
            found.append(from_plain(json.loads(path.read_text(encoding="utf-8")), Record))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is no record of a finished speedrun ({type(error).__name__})") from error
    return found
