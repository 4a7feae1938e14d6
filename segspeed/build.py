"""From configuration to objects. Besides the doors the only room that knows Hydra."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from segspeed.augment.torch_backend import source_shape
from segspeed.config import Component, Config, DataConfig
from segspeed.config_inference import InferenceConfig
from segspeed.data.cache import CacheEntry, resident
from segspeed.data.labels import choose_labels
from segspeed.data.sampling import PatchSampler
from segspeed.engine import Learner
from segspeed.evaluation import Predictor
from segspeed.infer.sliding import Window
from segspeed.loader.device import DeviceStage
from segspeed.loader.residence import DeviceLoader, choose_residence
from segspeed.model.checkpointing import apply_checkpointing
from segspeed.model.losses import RegionTargets
from segspeed.record.loggers import Listener
from segspeed.record.run_record import RunRecord
from segspeed.speed.compiler import ensure_compiler
from segspeed.speed.cpus import available_cpus, loader_workers
from segspeed.speed.ema import WeightAverage
from segspeed.speed.precision import Precision
from segspeed.speed.ranks import local_rank, rank, ranks
from segspeed.speed.schedule import BudgetHorizon, Horizon, StepHorizon, learning_rate_factor, rate_scale
from segspeed.types import Batch, Case, Cohort, DataError, LabelTable, Plan, SettingError

NO_LOGGER = "segspeed.record.loggers.Silent"


def make(component: Component, /, *args: Any, **supplied: Any) -> Any:
    """Build the object a component names. Of ``supplied``, only what its signature knows and the user left open."""
    accepted = _signature(component)
    anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    given = component.kwargs
    own = set(type(component).model_fields) - {"target"}
    wanted = {k: v for k, v in supplied.items() if k not in given and (k in accepted or (anything and k not in own))}
    # partial: Hydra resolves what the user wrote; what we supply (a Plan, parameters) never becomes configuration
    try:
        factory = instantiate({"_target_": component.target, "_convert_": "all", "_partial_": True, **given})
    except InstantiationException as error:
        raise SettingError(f"{component.target}: {error.__cause__ or error}") from error
    try:
        return factory(*args, **wanted)
    except DataError:
        raise
    except (ValueError, TypeError) as error:
        raise SettingError(f"{component.target}: {error}") from error


def _signature(component: Component) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(get_object(component.target)).parameters
    except ValueError:  # a builtin that tells nothing about itself gets nothing but the user's own keys
        return {}


def accepted_by(component: Component) -> set[str]:
    """Names of the arguments that a component's object takes."""
    return set(_signature(component))


def cohort_from(data: DataConfig) -> Cohort:
    """The cohort of a data section: the source's cases, renamed and with exclusions applied.

    Raises DataError when an excluded id or a class of ``swap_on_flip`` does not exist.
    """
    cohort = make(data, exclude=data.exclude)
    if not isinstance(cohort, Cohort):
        raise SettingError(f"{data.target} returned {type(cohort).__name__}; a data source returns a Cohort")
    ids = {c.id for c in cohort.cases} | {p.case for p in cohort.problems}
    unknown = [i for i in data.exclude if i not in ids]
    if unknown:
        raise SettingError(f"data.exclude names cases the cohort does not have: {', '.join(unknown)}")
    _check_cases(cohort)
    kept = tuple(_known(c, data) for c in cohort.cases if c.id not in set(data.exclude))
    if not kept:
        raise DataError(f"the cohort {cohort.name} has no cases left")
    table = choose_labels(
        cohort.table,
        classes=data.classes or {},
        background=data.background,
        ignore=data.ignore,
        regions=data.regions or {},
    )
    chosen = dataclasses.replace(
        cohort, name=data.name or cohort.name, cases=kept, labels=table.classes, background=table.background,
        ignore=table.ignore, regions=table.regions, problems=tuple(p for p in cohort.problems if p.case not in data.exclude),
    )  # fmt: skip
    output_pairs(data, chosen)
    return chosen


def _check_cases(cohort: Cohort) -> None:
    """Raises DataError with the cases that no report could name, or that have no image."""
    odd = [c.id for c in cohort.cases if not _is_text(c)]
    bare = [c.id for c in cohort.cases if not c.images]
    if odd:
        raise DataError(f"file names that are no text (UTF-8); rename: {', '.join(map(ascii, odd[:10]))}")
    if bare:
        raise DataError(f"cases without an image: {', '.join(bare[:10])}")


def _is_text(case: Case) -> bool:
    try:
        "".join([case.id, *map(str, case.images), str(case.label or "")]).encode()
    except UnicodeEncodeError:
        return False
    return True


def _known(case: Case, data: DataConfig) -> Case:
    """``case`` with the patient and the site that its id tells. Raises SettingError when a pattern finds nothing in it."""
    told: dict[str, Any] = {}
    for key, pattern in (("patient", data.patient_pattern), ("site", data.site_pattern)):
        if pattern is None:
            continue
        try:
            found = re.search(pattern, case.id)
        except re.error as error:
            raise SettingError(f"data.{key}_pattern={pattern} is no regular expression: {error}") from error
        if found is None or not found.groups() or not found[1]:
            raise SettingError(
                f"data.{key}_pattern={pattern} finds nothing in the case id {case.id}; it needs a group in brackets that holds "
                f"text, as in 'data.{key}_pattern=\"(p[0-9]+)\"'"
            )
        told[key] = found[1]
    return dataclasses.replace(case, **told) if told else case


def swap_pairs(data: DataConfig, cohort: Cohort) -> list[tuple[int, int]]:
    """``data.swap_on_flip`` as class indices."""
    names = cohort.class_names
    unknown = [n for pair in data.swap_on_flip for n in pair if n not in names]
    if unknown:
        raise SettingError(f"data.swap_on_flip names unknown classes: {', '.join(unknown)}; known: {', '.join(names)}")
    named = [n for pair in data.swap_on_flip for n in pair]
    twice = sorted({n for n in named if named.count(n) > 1})
    if twice:
        raise SettingError(f"data.swap_on_flip names {', '.join(twice)} more than once; each class has one partner")
    return [(names.index(a) + 1, names.index(b) + 1) for a, b in data.swap_on_flip]


def output_pairs(data: DataConfig, cohort: Cohort) -> list[tuple[int, int]]:
    """`swap_pairs` as channels of the logits. Raises SettingError when mirroring a region makes none of the others."""
    pairs = swap_pairs(data, cohort)
    if not cohort.regions:
        return pairs
    partner = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    members = [frozenset(m) for m in cohort.table.members]
    found = []
    for place, own in enumerate(members):
        other = frozenset(partner.get(c, c) for c in own)
        if other not in members:
            raise SettingError(
                f"data.swap_on_flip turns the region {cohort.table.targets[place]} into one that data.regions does not have; "
                "regions of one side need their partner"
            )
        if members.index(other) > place:
            found.append((place, members.index(other)))
    return found


def device_from(cfg: Config | InferenceConfig) -> torch.device:
    """The device to train on, with the number of CPU threads and TF32 set as a side effect."""
    name = cfg.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        name = f"cuda:{local_rank()}"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SettingError(f"device={cfg.device}, but torch sees no CUDA device; use device=cpu or device=auto")
    if name == "mps" and not torch.backends.mps.is_available():
        raise SettingError("device=mps, but torch sees no Apple GPU; use device=cpu or device=auto")
    if name.startswith("cuda"):
        torch.cuda.set_device(torch.device(name))
    torch.set_num_threads(available_cpus() if cfg.threads == "auto" else int(cfg.threads))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    exact = isinstance(cfg, Config) and cfg.train.deterministic
    if exact:
        # read when cuBLAS starts; without it torch refuses to go on
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if (
        exact != torch.are_deterministic_algorithms_enabled()
    ):  # the call alone loads torch's compiler, which takes seconds
        torch.use_deterministic_algorithms(exact)
    torch.backends.cudnn.benchmark = not exact
    return torch.device(name)


def channels_last(cfg: Config, precision: str) -> bool:
    """Channels-last pays where convolutions run in half precision (tensor cores, AMX), and where what lies between them is
    compiled; eager normalisation in single precision copies back and forth instead."""
    return precision != "fp32" or cfg.compile if cfg.channels_last == "auto" else bool(cfg.channels_last)


def network_from(cfg: Config, plan: Plan, cohort: Cohort, precision: Precision) -> nn.Module:
    """The network on its device, with the same weights for the same seed, checkpointed and compiled as asked for."""
    torch.manual_seed(cfg.seed)
    model = make(
        cfg.model,
        plan=plan,
        spatial_dims=3,
        in_channels=len(cohort.channels),
        out_channels=cohort.table.outputs,
    )
    if not isinstance(model, nn.Module):
        raise SettingError(f"{cfg.model.target} returned {type(model).__name__}; a model is a torch.nn.Module")
    model = model.to(precision.device)
    if channels_last(cfg, precision.name):
        model = model.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    choice = cfg.memory.checkpointing
    apply_checkpointing(model, plan.checkpointing if choice == "auto" else choice)
    if cfg.compile:
        ensure_compiler(precision.device)
        model.compile()
    return model


def loss_from(cfg: Config, labels: LabelTable) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The loss, told of regions and ignored voxels. One that does not know of regions gets binary targets of them.

    Raises SettingError when it cannot ignore voxels that are to be ignored.
    """
    told: dict[str, Any] = {"regions": labels.members} if labels.regions else {}
    if labels.ignore_index is not None:
        told["ignore_index"] = labels.ignore_index
    loss = make(cfg.loss, **told)
    if not callable(loss):
        raise SettingError(f"{cfg.loss.target} returned {type(loss).__name__}; a loss is called with (logits, label)")
    known = getattr(loss, "__dict__", {})
    as_binary = bool(labels.regions) and "regions" not in known
    if labels.ignore and (as_binary or "ignore_index" not in known):
        raise SettingError(
            f"data.ignore is set, but {cfg.loss.target} cannot ignore voxels{' of regions' * as_binary}; use loss=dice_ce, or name "
            "these voxels in data.background"
        )
    return RegionTargets(loss, labels.members) if as_binary else loss


def effective_batch(plan: Plan) -> int:
    """Patches of an optimiser step, over all ranks."""
    return plan.batch * plan.accumulate * ranks()


def learner_from(
    cfg: Config, model: nn.Module, precision: Precision, labels: LabelTable, plan: Plan | None = None
) -> Learner:
    """What learns. The learning rate is scaled to the effective batch of ``plan``, where ``schedule.scaling`` asks for it.

    Raises SettingError when ``train.exact_batch_dice`` is set for a loss that cannot do it.
    """
    optimizer, loss = make(cfg.optimizer, params=list(model.parameters())), loss_from(cfg, labels)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(
            f"{cfg.optimizer.target} returned {type(optimizer).__name__}; it is no torch.optim.Optimizer"
        )
    if cfg.train.exact_batch_dice and not (getattr(loss, "batch_dice", False) and hasattr(loss, "sums")):
        raise SettingError(
            "train.exact_batch_dice=true is for a loss that pools its Dice over the batch and gives its sums, as loss=dice_ce with "
            "loss.batch_dice=true; a Dice of single samples accumulates exactly without it"
        )
    s = cfg.schedule
    cuda = precision.device.type == "cuda" or None
    factor = rate_scale(s.scaling, effective_batch(plan), s.reference_batch) if plan else 1.0
    return Learner(
        model=model,
        loss=loss,
        optimizer=optimizer,
        precision=precision,
        schedule=schedule_from(cfg),
        clip=cfg.train.clip,
        ema=WeightAverage(model, cfg.train.ema) if cfg.train.ema else None,
        exact_batch_dice=cfg.train.exact_batch_dice,
        parallel=DistributedDataParallel(model, device_ids=cuda and [precision.device]) if ranks() > 1 else None,
        peak_rates=[float(group["lr"]) * factor for group in optimizer.param_groups],
    )


def scaling_text(cfg: Config, plan: Plan, learner: Learner) -> str:
    """One line on a scaled learning rate."""
    s = cfg.schedule
    base = learner.peak_rates[0] / rate_scale(s.scaling, effective_batch(plan), s.reference_batch)
    return (
        f"Learning rate {learner.peak_rates[0]:.4g}: optimizer.lr={base:g} for a batch of {s.reference_batch}, {s.scaling} scaling "
        f"to {plan.batch} x {plan.accumulate} x {ranks()} rank{'s' * (ranks() > 1)}, warmup over {s.warmup:.0%} of the run"
    )


def schedule_from(cfg: Config) -> Callable[[float], float]:
    s = cfg.schedule
    return lambda progress: learning_rate_factor(progress, name=s.name, warmup=s.warmup, power=s.power, final=s.final)


def horizon_from(cfg: Config) -> Horizon:
    if cfg.train.steps is not None:
        return StepHorizon(cfg.train.steps)
    assert cfg.train.budget is not None
    return BudgetHorizon(cfg.train.budget)


def loader_from(
    cfg: Config,
    plan: Plan,
    cohort: Cohort,
    entries: list[CacheEntry],
    norms: list[np.ndarray],
    device: torch.device,
    first: int,
) -> Iterable[Batch]:
    """Endless batches from sample number ``first`` on: raw ones, or augmented ones where the loader says so
    (``augments``)."""
    where = choose_residence(cfg.cache.resident, entries, device)
    if where == "device" and cfg.cache.resident == "auto" and not cfg.loader.target.endswith(".TorchLoader"):
        where = "disk"  # another loader reads its patches itself
    kept = tuple(resident(e) for e in entries) if where == "ram" else tuple(entries)
    sampler = PatchSampler(kept, tuple(norms), source_shape(plan.patch, cfg.augment), cfg.loader.foreground, cfg.seed)
    if where == "device":
        return DeviceLoader(sampler, batch=plan.batch, device=device, first=first, rank=rank(), ranks=ranks())
    pin = cfg.loader.pin_memory
    turn = {"rank": rank(), "ranks": ranks()}
    if ranks() > 1 and not set(turn) <= accepted_by(cfg.loader):
        raise SettingError(
            f"{cfg.loader.target} takes no rank and ranks, so it cannot share samples out to several processes"
        )
    return make(
        cfg.loader,
        sampler,
        batch=plan.batch,
        first=first,
        workers=loader_workers(cfg.loader.workers, device.type),
        prefetch=cfg.loader.prefetch,
        timeout=cfg.loader.timeout,
        pin_memory=device.type == "cuda" if pin == "auto" else pin,
        augment=cfg.augment,
        patch=plan.patch,
        spacing=plan.spacing,
        seed=cfg.seed,
        swap_on_flip=swap_pairs(cfg.data, cohort),
        device=device,
        cases=tuple(cohort.case(e.case_id) for e in entries),
        labels=cohort.table,
        **turn,
    )


def stage_from(cfg: Config, plan: Plan, cohort: Cohort, learner: Learner, loader: object) -> DeviceStage:
    """The way of a batch of ``loader`` on the device."""
    return DeviceStage(
        device=learner.precision.device,
        patch=plan.patch,
        spacing=plan.spacing,
        seed=cfg.seed,
        augment=cfg.augment,
        swap_on_flip=swap_pairs(cfg.data, cohort),
        channels_last=channels_last(cfg, learner.precision.name),
        meter=learner.meter,
        finished=getattr(loader, "augments", False),
    )


def predictor_from(cfg: Config, model: nn.Module, plan: Plan, cohort: Cohort, precision: Precision) -> Predictor:
    """The predictor of in-training evaluations; the final one mirrors as well if ``evaluation.mirror``."""
    e = cfg.evaluation
    window = Window(plan.patch, e.overlap, e.windows)
    return Predictor(model, window, precision, cohort.table, (), output_pairs(cfg.data, cohort))


def mirrored(cfg: Config, predictor: Predictor) -> Predictor:
    """The predictor of the final evaluation: over the axes that training mirrored, if asked for."""
    if not cfg.evaluation.mirror:
        return predictor
    axes = tuple(axis for axis, p in enumerate(cfg.augment.flip.probability) if p > 0)
    return dataclasses.replace(predictor, mirror=axes)


def norms_of(entries: list[CacheEntry], plan: Plan) -> list[np.ndarray]:
    """Normalisation constants ``(C, 4)`` a case: the training cases' for CT channels, its own for the others."""
    return [norm_of(entry.norm, plan) for entry in entries]


def norm_of(own: np.ndarray, plan: Plan) -> np.ndarray:
    """A case's constants ``(C, 4)`` with those of the Plan in the place of its CT channels' own."""
    norm = np.array(own, dtype=np.float32)
    for channel, ct in enumerate(plan.ct_norm):
        if ct is not None:
            norm[channel] = (ct.low, ct.high, ct.mean, ct.std)
    return norm


def require_logger(cfg: Config) -> None:
    """Raises SettingError with the command that installs the package which the logger needs."""
    package = getattr(get_object(cfg.logger.target), "package", None)
    if package is not None and find_spec(package) is None:
        raise SettingError(
            f"{cfg.logger.target} needs {package}, not installed here: pip install {package}, or choose logger=none"
        )


@contextmanager
def listening(cfg: Config, folder: Path, record: RunRecord) -> Iterator[None]:
    """While this lasts, the logger hears what is written to ``record``. Only the rank that writes has one."""
    if record.path is None or cfg.logger.target == NO_LOGGER:
        yield
        return
    listener = Listener(make(cfg.logger, folder=folder), folder, record)
    try:
        yield
    finally:
        listener.close()


def cache_root(cfg: Config) -> Path:
    return Path(cfg.cache.root) if cfg.cache.root else Path(cfg.run.root) / "cache"
