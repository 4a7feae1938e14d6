"""One run from its configuration to its result: data, plan, cache, training, evaluation, report."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from segspeed import build
from segspeed.config import Config
from segspeed.data.cache import CacheEntry
from segspeed.data.wholeness import refuse_shortened, remove_abandoned
from segspeed.engine import Learner
from segspeed.jsonio import read_json, write_json
from segspeed.loader.torch_loader import worker_death
from segspeed.model.networks import count_parameters
from segspeed.outcome import disk_faults, finish_run
from segspeed.preparation import Prepared, prepare
from segspeed.record.live import say, silence, track
from segspeed.record.report import write_report
from segspeed.record.run_folder import RunFolder, choose_folder, differing_keys
from segspeed.record.run_record import RunRecord
from segspeed.record.versions import git_changes
from segspeed.run import Run
from segspeed.speed.clock import Clock
from segspeed.speed.precision import Precision, choose_precision
from segspeed.speed.ranks import first, is_main, joined, rank, ranks, same
from segspeed.speed.signals import catch_stop_signals
from segspeed.types import Cohort, DataError, Plan, RunStopped, first_line

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited", "nccl")


def train(cfg: Config) -> dict[str, Any]:
    """Run, or go on with, the training that ``cfg`` describes; returns what stands in ``result.json``.

    Under torchrun the processes train together: rank 0 prepares, speaks and writes. Raises DataError when data or settings
    are wrong and RunStopped when the run ended early (it can be resumed).
    """
    build.require_logger(cfg)
    clock = Clock()
    with clock.measure("setup"):
        device = build.device_from(cfg)
    with joined(device.type == "cuda"), ExitStack() as held:
        if not is_main():
            silence()
        with clock.measure("setup"):
            cohort = first(lambda: build.cohort_from(cfg.data))

        def open_folder() -> RunFolder | None:
            if not is_main():
                return None
            if cfg.run.name is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
                say("warning: torchrun starts the processes again where one dies; without run.name that is a new run")
            chosen = choose_folder(cfg.run.root, cohort.folder_name, cfg.run.name)
            held.enter_context(chosen.locked())
            return chosen

        opened = first(open_folder)
        folder = RunFolder(Path(same(str(opened.path) if opened else "")))
        frozen = first(lambda: reopen(folder, cfg))
        result = first(lambda: complete(folder))
        if result is not None:
            return result
        return train_in(folder, cfg, cohort, device, frozen, clock)


def train_in(
    folder: RunFolder, cfg: Config, cohort: Cohort, device: torch.device, frozen: tuple[str, Plan] | None, clock: Clock
) -> dict[str, Any]:
    """The run itself, in a folder that is ours."""
    with clock.measure("cache"):
        prepared = prepare_once(cfg, cohort, device, frozen[1] if frozen else None)
    with clock.measure("setup"):
        name, reason = (frozen[0], "as the run began") if frozen else choose_precision(cfg.precision, device)
        name = same(name)
        precision = Precision(name, device)
        first(lambda: write_start(folder, cfg, prepared, name) if is_main() else None)
        same_data(folder, prepared)
        record = RunRecord(folder.record if is_main() else None)
        model = build.network_from(cfg, prepared.plan, cohort, precision)
        learner = build.learner_from(cfg, model, precision, prepared.cohort.table, prepared.plan)
    announce(prepared, precision, reason, learner, folder)
    if cfg.schedule.scaling != "none":
        say(build.scaling_text(cfg, prepared.plan, learner))
    with build.listening(cfg, folder.path, record), catch_stop_signals() as stop:
        run = Run(cfg, prepared, learner, folder, record, clock, stop)
        with advice([prepared.entries[i] for i in prepared.split.train]):
            run.go()
            return finish_run(run)


def complete(folder: RunFolder) -> dict[str, Any] | None:
    """The result of a run that is complete, whose report is written where it is missing; None for any other."""
    if not folder.finished:
        return None
    if is_main():
        say(f"This run is already complete: {folder.result}. For a longer one choose another run.name.")
        if not (folder.path / "report.html").exists():
            with disk_faults(folder.path):
                write_report(folder.path)
    return folder.outcome()


def prepare_once(cfg: Config, cohort: Cohort, device: torch.device, frozen: Plan | None) -> Prepared:
    """`prepare` by rank 0; the others then find its cache and take its Plan."""

    def by_main() -> Prepared | None:
        if not is_main():
            return None
        remove_abandoned(build.cache_root(cfg) / cohort.folder_name)
        return prepare(cfg, cohort, device.type, track, frozen)

    prepared = first(by_main)
    plan = same(prepared.plan if prepared else None)
    return prepared or prepare(cfg, cohort, device.type, track, plan)


@contextmanager
def advice(entries: Iterable[CacheEntry] = ()) -> Iterator[None]:
    """Faults that the machine brings in are answered with what to change: no memory left, a dead loader process, a full disk,
    another rank that ended. ``entries`` are those that training reads."""
    try:
        yield
    except RunStopped:
        raise
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise RunStopped(
            f"{error}: the disk is full. What was saved before is intact; make room, then go on"
        ) from error
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError, as is the CPU's
        died = worker_death(error) if isinstance(error, RuntimeError) else None
        if died is not None:
            refuse_shortened(entries)  # what a map reads beyond the end of its file ends the process that reads it
            raise died from error
        if ranks() > 1 and is_lost_rank(error):
            raise RunStopped(
                f"rank {rank()} ends, since another rank did ({first_line(error)}). Its message, or what killed it, tells why; the "
                "same command goes on from the last checkpoint"
            ) from error
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise RunStopped(
            f"out of memory ({first_line(error)}). In this order: a smaller plan.batch with train.accumulate to make up for it; "
            "memory.checkpointing=all; a smaller plan.patch; or memory.limit, which chooses all three"
        ) from error


def is_lost_rank(error: BaseException) -> bool:
    """Whether torch.distributed tells that the process at the other end is gone."""
    return any(text in str(error).lower() for text in LOST)


def reopen(folder: RunFolder, cfg: Config) -> tuple[str, Plan] | None:
    """Precision and Plan as a run began with them, if ``folder`` holds one; refuses settings that differ."""
    if not folder.config.exists():
        return None
    if cfg.resume == "never":
        raise DataError(f"{folder.path} holds a run already and resume=never; choose another run.name")
    try:
        began = json.loads(folder.config.read_text(encoding="utf-8"))
        plan = read_json(folder.plan, Plan)
    except ValueError as error:
        raise DataError(f"{folder.path} holds a damaged run ({error}); choose another run.name") from error
    changed = differing_keys(began["config"], cfg.model_dump(mode="json", by_alias=True))
    if changed:
        raise DataError(
            f"{folder.path} holds a run with other settings:\n  "
            + "\n  ".join(changed)
            + "\nGive the old settings to go on with it, or choose another run.name."
        )
    return began["precision"], plan


def write_start(folder: RunFolder, cfg: Config, prepared: Prepared, precision: str) -> None:
    """Freeze what a resumed run must find again: settings, precision, Plan, fingerprint and split."""
    if folder.config.exists():
        return
    write_json(folder.plan, prepared.plan)
    write_json(folder.path / "cohort.json", prepared.cohort)
    write_json(folder.path / "fingerprint.json", prepared.fingerprint)
    write_json(folder.path / "split.json", prepared.split)
    write_json(folder.path / "data.json", data_of(prepared))
    if changes := git_changes(Path(__file__).parent):
        (folder.path / "changes.diff").write_bytes(changes)  # its SHA-256 stands in the record
    settings = {"config": cfg.model_dump(mode="json", by_alias=True), "precision": precision}
    write_json(folder.config, settings)


def data_of(prepared: Prepared) -> dict[str, Any]:
    """What the weights of a run depend on beside the settings: classes, channels, the split, every case's files."""
    cohort, split = prepared.cohort, prepared.split
    return {
        "classes": {name: list(values) for name, values in cohort.labels.items()},
        "background": sorted(cohort.background),
        "ignore": sorted(cohort.ignore),
        "regions": {name: list(parts) for name, parts in cohort.regions.items()},
        "channels": list(cohort.channels),
        "train": {i: prepared.facts[i].digest for i in split.train},
        "val": {i: prepared.facts[i].digest for i in split.val},
    }


def same_data(folder: RunFolder, prepared: Prepared) -> None:
    """Refuse to go on with other data: a case that changed sides would be judged after it was trained on."""
    path = folder.path / "data.json"
    try:
        began = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read, so the run cannot be resumed safely; choose another run.name"
        ) from error
    now = data_of(prepared)
    changed = [
        key
        for key in ("classes", "channels", "background", "ignore", "regions")
        if list(began.get(key, [])) != list(now[key]) or began.get(key, now[key]) != now[key]
    ]
    for side in ("train", "val"):
        ids = sorted(i for i in {*began[side], *now[side]} if began[side].get(i) != now[side].get(i))
        changed += [f"{side} case {i}" for i in ids]
    if changed:
        listed = ", ".join(changed[:10]) + (" ..." if len(changed) > 10 else "")
        raise DataError(
            f"the data is not what {folder.path} began with ({listed}). Bring it back to go on with this run, "
            "or choose another run.name"
        )


def announce(prepared: Prepared, precision: Precision, reason: str, learner: Learner, folder: RunFolder) -> None:
    """A few lines on what is about to run."""
    plan, cohort = prepared.plan, prepared.cohort
    for problem in prepared.warnings[:5]:
        say(f"warning: {problem.case}: {problem.message}")
    if len(prepared.warnings) > 5:
        say(f"warning: {len(prepared.warnings) - 5} more; see python -m data_prep.check")
    say(
        f"{cohort.name}: {len(prepared.split.train)} cases to train on, {len(prepared.split.val)} to judge by; "
        + (f"regions {', '.join(cohort.regions)}" if cohort.regions else f"classes {', '.join(cohort.class_names)}")
    )
    say(
        f"Plan: patch {'x'.join(map(str, plan.patch))}, batch {plan.batch} x {plan.accumulate}, "
        f"spacing {' x '.join(f'{s:.2f}' for s in plan.spacing)} mm, "
        f"{count_parameters(learner.model) / 1e6:.1f} M parameters"
    )
    say(f"Device {precision.device}, precision {precision.name}: {reason}")
    for text in learner.cautions(plan.batch, plan.accumulate):
        say(f"warning: {text}")
    say(f"Run folder: {folder.path}")
