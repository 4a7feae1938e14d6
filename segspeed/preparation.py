"""From a cohort to a cache ready for training: inspect, split, fingerprint, plan, preprocess."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from segspeed.build import cache_root
from segspeed.config import Config
from segspeed.data.cache import CacheEntry, Storage
from segspeed.data.cohort_checks import cohort_problems
from segspeed.data.fingerprint import fingerprint
from segspeed.data.inspect import ACCEPTABLE, Rules, inspect_cases
from segspeed.data.plan import grid_of, make_plan
from segspeed.data.prepare import prepare_cases
from segspeed.data.split import choose_split
from segspeed.finetune import source_of
from segspeed.memory.within import plan_within
from segspeed.record.live import say
from segspeed.shards import Shard
from segspeed.speed.cpus import available_cpus
from segspeed.types import CaseFacts, Cohort, DataError, Fingerprint, Plan, Problem, SettingError, Split

T = TypeVar("T")
ALL_SAMPLES = 1_000_000  # foreground intensities a channel that are kept of a whole cohort; a case has 2000 at most
FEWEST_SAMPLES = 20  # of a case, however large the cohort
BYTES_A_VOXEL = 20  # that preparing a case takes at its peak: image and label as read, cropped and resampled
Track = Callable[[Iterable[T], int, str], Iterator[T]]  # shows progress over an iterable


@dataclass(frozen=True)
class Prepared:
    """What training needs of the data, and what its making took."""

    cohort: Cohort
    facts: dict[str, CaseFacts]
    warnings: tuple[Problem, ...]
    split: Split
    fingerprint: Fingerprint
    plan: Plan
    entries: dict[str, CacheEntry]
    built: int
    bytes: int


def preparation_workers(cfg: Config, facts: Mapping[str, CaseFacts] | None = None) -> int:
    """Processes that read and prepare: one a CPU, fewer where cases of the size that ``facts`` tell would not fit into memory
    beside each other."""
    if cfg.cache.workers != "auto":
        return int(cfg.cache.workers)
    largest = max((prod(f.shape) for f in facts.values()), default=0) if facts else 0
    fitting = psutil.virtual_memory().available // (BYTES_A_VOXEL * largest) if largest else available_cpus()
    return max(1, min(available_cpus(), int(fitting)))


def inspect_cohort(
    cfg: Config, cohort: Cohort, track: Track[Any], pictures: Path | None = None, shard: Shard | None = None
) -> tuple[dict[str, CaseFacts], list[Problem]]:
    """Read every case once (or recall it): facts by case id, and all problems of the cohort. ``pictures`` is a folder for a
    thumbnail of each readable case; with a ``shard`` its cases are read first, and of the others what nobody else has read.
    Raises SettingError when ``data.accept`` names what cannot be accepted."""
    if cfg.cache.shard is not None and shard is None:
        raise SettingError(f"cache.shard={cfg.cache.shard} goes with python -m data_prep.prepare; leave it out here")
    wrong = sorted(set(cfg.data.accept) - set(ACCEPTABLE))
    if wrong:
        raise SettingError(f"data.accept names {', '.join(wrong)}; what can be accepted: {', '.join(ACCEPTABLE)}")
    rules = Rules(
        labels=cohort.table,
        channels=cohort.channels,
        tolerance_mm=cfg.data.tolerance_mm,
        resample_labels=cfg.data.resample_labels,
        pictures=pictures,
    )
    found = inspect_cases(
        cohort,
        rules,
        memo=None if cfg.cache.verify else cache_root(cfg),
        workers=preparation_workers(cfg),
        shard=shard,
    )
    samples = max(FEWEST_SAMPLES, ALL_SAMPLES // len(cohort.cases))
    facts = {f.id: thinned(f, samples) for f in track(found, len(cohort.cases), "reading cases")}
    ordered = [facts[c.id] for c in cohort.cases]
    problems = [p for f in ordered for p in f.problems] + cohort_problems(cohort, ordered)
    return facts, [_weighed(p, cfg) for p in problems]


def thinned(facts: CaseFacts, samples: int) -> CaseFacts:
    """``facts`` with at most so many of its foreground intensities a channel, evenly spaced, so that those of a large cohort do
    not fill the memory."""
    if all(len(values) <= samples for values in facts.foreground):
        return facts
    kept = tuple(tuple(v[n * len(v) // samples] for n in range(min(samples, len(v)))) for v in facts.foreground)
    return dataclasses.replace(facts, foreground=kept)


def _weighed(problem: Problem, cfg: Config) -> Problem:
    """Sides are a guess in an image without a coded orientation, so classes that have sides make that an error; and what the
    user accepts is none."""
    if problem.kind == "no-orientation" and cfg.data.swap_on_flip and "no-orientation" not in cfg.data.accept:
        text = f"{problem.message}; the classes of data.swap_on_flip need it (data.accept=[no-orientation] if you know it is right)"
        return dataclasses.replace(problem, severity="error", message=text)
    if problem.kind in cfg.data.accept and problem.severity == "error":
        return dataclasses.replace(problem, severity="warning")
    return problem


def split_for(cfg: Config, cohort: Cohort, facts: Mapping[str, CaseFacts]) -> Split:
    """The fold to train on. Raises DataError."""
    data = cfg.data
    return choose_split(
        cohort, fold=data.fold, folds=data.folds, seed=data.split_seed, splits=data.splits, excluded=data.exclude,
        facts=facts, accept=data.accept,
    )  # fmt: skip


def refuse(problems: list[Problem], command: str) -> None:
    """Raise DataError with every error among ``problems``, if there is one."""
    errors = [p for p in problems if p.severity == "error"]
    if not errors:
        return
    lines = [f"  {p.case}: {p.message} [{p.kind}] {p.file}" for p in errors[:20]]
    if len(errors) > 20:
        lines.append(f"  ... and {len(errors) - 20} more")
    cases = sorted({p.case for p in errors})
    raise DataError(
        f"{len(errors)} errors in {len(cases)} cases; training would be wrong:\n"
        + "\n".join(lines)
        + f"\nMend the files, or leave cases out with 'data.exclude=[{','.join(cases[:3])}]'. Full report: {command}"
    )


def plan_for(
    cfg: Config, cohort: Cohort, facts: dict[str, CaseFacts], split: Split, device: str
) -> tuple[Fingerprint, Plan]:
    """The fingerprint of the training cases, and the Plan made of it (and of the run in ``init.run``)."""
    measured = fingerprint([facts[i] for i in split.train])
    source = source_of(cfg, cohort)
    plan = make_plan(
        measured,
        channels=cohort.channels,
        classes=len(cohort.class_names),
        device=device,
        overrides=cfg.plan,
        accumulate=1 if cfg.train.accumulate == "auto" else cfg.train.accumulate,
        source=source.plan if source else None,
    )
    return measured, plan


def prepare(
    cfg: Config,
    cohort: Cohort,
    device: str,
    track: Track[Any],
    frozen: Plan | None = None,
    shard: Shard | None = None,
) -> Prepared:
    """Everything up to the cache. ``frozen`` is the Plan of a run that is resumed.

    With a ``shard`` only its cases are built. Split, fingerprint and grid are those of the whole cohort, so that all shards, and
    whoever comes after them, mean the same entries; what fits into ``memory.limit`` is left to the one who comes after.
    Raises DataError.
    """
    facts, problems = inspect_cohort(cfg, cohort, track, shard=shard)
    refuse(problems, "python -m data_prep.check with the same data settings")
    split = split_for(cfg, cohort, facts)
    if frozen is not None:
        measured, plan = fingerprint([facts[i] for i in split.train]), frozen
    else:
        measured, plan = plan_for(cfg, cohort, facts, split, device)
    if frozen is None and cfg.memory.limit is not None and shard is None:
        plan = plan_within(cfg, cohort, measured, torch.device(device), say)
    wanted = [i for part in (split.train, split.val) for i in part]
    wanted = shard.own(wanted) if shard else wanted
    subset = dataclasses.replace(cohort, cases=tuple(cohort.case(i) for i in wanted))
    done = list(
        track(
            prepare_cases(
                subset,
                facts,
                grid_of(plan),
                cache_root(cfg),
                preparation_workers(cfg, facts),
                Storage(cfg.cache.format, cfg.cache.dtype, plan.patch),
                cfg.data.tolerance_mm if cfg.data.resample_labels else None,
            ),
            len(wanted),
            "preparing the cache",
        )
    )
    refuse([p.problem for p in done if p.problem is not None], "python -m data_prep.check with the same data settings")
    return Prepared(
        cohort=cohort,
        facts=facts,
        warnings=tuple(p for p in problems if p.severity == "warning"),
        split=split,
        fingerprint=measured,
        plan=plan,
        entries={p.case_id: CacheEntry(p.path) for p in done if p.path is not None},
        built=sum(p.built for p in done),
        bytes=sum(p.bytes for p in done),
    )
