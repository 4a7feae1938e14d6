"""What there is to choose from under a memory limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from segspeed.config import Config
from segspeed.data.plan import BUDGET, make_plan
from segspeed.memory.settings import Subject, with_batch
from segspeed.types import DataError, Fingerprint, Plan, SettingError

USEFUL = {"cpu": 96**3, "cuda": 192**3}  # voxels of a patch; more costs time for little context
SMALLEST = 32**3
SHRINK = 0.72  # of the voxels, from one patch to the next


def patches(subject: Subject, fp: Fingerprint) -> list[Plan]:
    """A Plan for every patch to consider, the largest first; ``batch`` is the one that the Plan's rule wants a step.

    Raises SettingError where ``plan.*`` set by hand goes with none.
    """
    cfg, cohort, kind = subject.cfg, subject.cohort, subject.device.split(":")[0]
    accumulate = 1 if cfg.train.accumulate == "auto" else cfg.train.accumulate
    found: dict[tuple[int, ...], Plan] = {}
    wrong: DataError | None = None
    budget = float(max(USEFUL.get(kind, USEFUL["cpu"]), BUDGET.get(kind, BUDGET["cpu"])))
    while budget >= SMALLEST:
        try:
            plan = make_plan(
                fp, channels=cohort.channels, classes=len(cohort.class_names), device=kind, overrides=cfg.plan,
                accumulate=accumulate, patch_voxels=int(budget),
            )  # fmt: skip
            found.setdefault(plan.patch, plan)
        except SettingError as error:  # plan.features goes with the levels of other patches
            wrong = error
        budget *= SHRINK
    if not found:
        assert wrong is not None
        raise wrong
    return sorted(found.values(), key=voxels, reverse=True)


def micro_batches(cfg: Config, plan: Plan) -> list[Plan]:
    """The ways to reach the wanted batch, the smallest micro-batch first."""
    by_hand = cfg.train.accumulate
    if cfg.plan.batch != "auto":
        return [plan]
    if by_hand != "auto":
        return [with_batch(plan, -(-plan.batch // by_hand), by_hand)]
    return [with_batch(plan, n, plan.batch // n) for n in range(1, plan.batch + 1) if plan.batch % n == 0]


def recomputing(plan: Plan, names: tuple[str, ...]) -> Plan:
    """``plan`` with these blocks recomputed."""
    return dataclasses.replace(plan, checkpointing=names)


def voxels(plan: Plan) -> int:
    """Voxels of the patch."""
    d, h, w = plan.patch
    return d * h * w


def shape(plan: Plan) -> str:
    """The patch as text: 96x96x96."""
    return "x".join(map(str, plan.patch))


def fewest(plan: Plan, names: tuple[str, ...], fits: Callable[[Plan], bool]) -> Plan:
    """``plan`` with the shortest beginning of ``names`` recomputed that fits, found by halving; with all of them where
    nothing less does."""
    few, enough = -1, len(names)
    while enough - few > 1:
        middle = (few + enough) // 2
        if fits(recomputing(plan, names[:middle])):
            enough = middle
        else:
            few = middle
    return recomputing(plan, names[:enough])
