"""Training that begins from another run's weights: which run, what of it fits, what is new.

Taken from that run: the network (strides, kernels, channels a level) and, unless set by hand, spacing and patch, so that its
features meet structures of the size they know. Normalisation, batch and split come from the new data.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from segspeed import build
from segspeed.config import Config
from segspeed.data.digest import hash_file
from segspeed.record.checkpoints import LAST
from segspeed.record.run_folder import flatten
from segspeed.speed.precision import Precision
from segspeed.trained import StoredRun, put_weights, read_run, read_weights
from segspeed.types import Cohort, DataError, LabelTable, Plan, SettingError

LISTED = 6  # names of tensors in a message


@dataclass(frozen=True)
class Origin:
    """Where a run's first weights come from. ``sha256`` is that of the source's ``last.pt``; ``taken`` counts the tensors that
    were copied, ``new`` names those that keep their random values."""

    run: str
    cohort: str
    step: int
    weights: str  # "ema" or "raw"
    sha256: str
    taken: int
    new: tuple[str, ...]

    @property
    def told(self) -> str:
        """One line for the user."""
        listed = ", ".join(self.new[:LISTED]) + (" ..." if len(self.new) > LISTED else "")
        new = f"{len(self.new)} new for other classes ({listed})" if self.new else "none is new"
        return f"Weights of {self.run} (step {self.step}, {self.weights}): {self.taken} tensors taken, {new}"


def source_of(cfg: Config, cohort: Cohort) -> StoredRun | None:
    """The run that ``init.run`` names; None without one. Its weights are not loaded.

    Raises DataError when it is none, and SettingError when its network or channels are others than those of ``cfg``.
    """
    if cfg.init.run is None:
        return None
    run = read_run(Path(cfg.init.run))
    if not (run.folder / LAST).is_file():
        raise DataError(f"init.run={run.folder} has no {LAST}; has the run been saved yet?")
    if run.cfg.model.target != cfg.model.target:
        raise SettingError(
            f"init.run={run.folder} holds weights of {run.cfg.model.target}, and model._target_ is {cfg.model.target}; choose the "
            "same model=..."
        )
    if len(run.cohort.channels) != len(cohort.channels):
        raise SettingError(
            f"init.run={run.folder} was trained on {len(run.cohort.channels)} channels ({', '.join(run.cohort.channels)}), and "
            f"{cohort.name} has {len(cohort.channels)} ({', '.join(cohort.channels)}); its weights need as many"
        )
    return run


def begin_from(cfg: Config, plan: Plan, cohort: Cohort, model: nn.Module) -> Origin | None:
    """Give ``model`` the last (averaged) weights of the run that ``init.run`` names, where names and shapes agree; what depends on
    the classes keeps its own where those are others. None without such a run.

    Raises DataError when the weights cannot be read, and SettingError when they are of another network.
    """
    run = source_of(cfg, cohort)
    if run is None:
        return None
    state = read_weights(run.folder, "last")
    with torch.random.fork_rng(devices=[]):  # what is drawn after this is as in a run that begins from nothing
        theirs = _bare_network(cfg, run.plan, run.cohort)
        _refuse_others(cfg, run, theirs, state["model"])
        put_weights(theirs, state, run.folder)
        head = _head(cfg, plan, cohort, run, theirs)
    ours, given = model.state_dict(), theirs.state_dict()
    odd = sorted({*ours} ^ {*given} | {k for k in {*ours} & {*given} - head if ours[k].shape != given[k].shape})
    if odd:
        raise SettingError(
            f"init.run={run.folder} holds weights of another network: {len(odd)} of {len(ours)} tensors differ in name or shape "
            f"({', '.join(odd[:LISTED])}). Leave plan.* to that run"
        )
    taken = [name for name in ours if name not in head]
    with torch.no_grad():
        for name in taken:
            ours[name].copy_(given[name])
    return Origin(
        run=str(run.folder),
        cohort=run.cohort.name,
        step=int((state.get("progress") or {}).get("step", 0)),
        weights="ema" if state.get("ema") else "raw",
        sha256=hash_file(run.folder / LAST),
        taken=len(taken),
        new=tuple(name for name in ours if name in head),
    )


def seen_cases(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """Those of the cases (id to the SHA-256 of their files) that the run in ``folder`` was trained on."""
    try:
        trained = set(json.loads((folder / "data.json").read_text(encoding="utf-8"))["train"].values())
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder / 'data.json'} cannot be read, so nobody knows what that run has seen ({error})"
        ) from error
    return sorted(case for case, digest in digests.items() if digest in trained)


def _bare_network(cfg: Config, plan: Plan, cohort: Cohort) -> nn.Module:
    """The network in float32 on the CPU, nothing recomputed or compiled: only its tensors are wanted."""
    bare = cfg.model_copy(update={"memory": cfg.memory.model_copy(update={"checkpointing": "none"}), "compile": False})
    return build.network_from(bare, plan, cohort, Precision("fp32", torch.device("cpu")))


def _refuse_others(cfg: Config, run: StoredRun, theirs: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Raise SettingError where this configuration's network, sized as the run's was, is not the one that was saved."""
    expected = theirs.state_dict()
    odd = sorted({*expected} ^ {*stored} | {k for k in {*expected} & {*stored} if expected[k].shape != stored[k].shape})
    if not odd:
        return
    before, now = dict(flatten(run.cfg.model.kwargs)), dict(flatten(cfg.model.kwargs))
    other = [
        f"model.{k}: {before.get(k)} there, {now.get(k)} here"
        for k in sorted({*before, *now})
        if before.get(k) != now.get(k)
    ]
    raise SettingError(
        f"init.run={run.folder} holds weights of another network: {len(odd)} of {len(stored)} tensors differ in name or shape "
        f"({', '.join(odd[:LISTED])}). Give the same settings of the model"
        + (f" ({'; '.join(other)})" if other else "")
    )


def _head(cfg: Config, plan: Plan, cohort: Cohort, run: StoredRun, theirs: nn.Module) -> set[str]:
    """Names of the tensors whose size depends on the number of outputs, where the targets are others; else none."""
    if _targets(cohort) == _targets(run.cohort):
        return set()
    one_more = LabelTable.numbered(run.cohort.table.outputs).classes
    more = dataclasses.replace(run.cohort, labels=one_more, regions={}, background=(), ignore=())
    wider = _bare_network(cfg, plan, more).state_dict()
    mine = theirs.state_dict()
    return {k for k in mine if k in wider and mine[k].shape != wider[k].shape}


def _targets(cohort: Cohort) -> tuple[bool, tuple[str, ...]]:
    """What the outputs stand for: whether each is a region (sigmoid), and their names in order."""
    return bool(cohort.regions), tuple(cohort.table.targets)
