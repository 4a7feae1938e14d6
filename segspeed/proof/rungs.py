"""The rungs of the ladder: what people do today, and one technique after the other on top of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from segspeed.config import Config, PlanConfig
from segspeed.types import Plan, SettingError
from segspeed.validate import SettingsError, validate

Change = Callable[[Config, Config], Config]  # (settings so far, the user's own settings) -> settings

MONAI = "segspeed.loader.monai_loader.MonaiLoader"
TORCH = "segspeed.loader.torch_loader.TorchLoader"


@dataclass(frozen=True)
class Rung:
    """One technique. ``title`` says in a few words what it adds; ``pays`` is false where it buys memory, not time, so that being
    slower is no reason to leave it out."""

    name: str
    title: str
    change: Change
    pays: bool = True


def with_values(cfg: Config, changes: Mapping[str, Any]) -> Config:
    """``cfg`` with other values: ``{"train": {"accumulate": 2}}``. A section with a ``_target_`` that differs is replaced as a
    whole, but keeps what the schema itself knows (workers of a loader). Raises SettingError for what cannot be."""
    raw = cfg.model_dump(mode="json", by_alias=True)
    _merge(raw, changes, cfg)
    try:
        return validate(raw)
    except SettingsError as error:
        raise SettingError("\n".join(error.problems)) from error


def _merge(raw: dict[str, Any], changes: Mapping[str, Any], cfg: Config) -> None:
    for key, value in changes.items():
        if key not in raw:
            raise SettingError(f"ladder: there is no setting {key}")
        if not isinstance(value, Mapping) or not isinstance(raw[key], dict):
            raw[key] = value
            continue
        if "_target_" in value and value["_target_"] != raw[key].get("_target_"):
            section = getattr(cfg, key)
            raw[key] = {k: v for k, v in raw[key].items() if k in type(section).model_fields}
        raw[key] = {**raw[key], **value}


def pinned(cfg: Config, plan: Plan) -> Config:
    """``cfg`` with every value of the Plan set by hand: all rungs train the same network on the same patches."""
    values = PlanConfig(
        spacing=plan.spacing, patch=plan.patch, batch=plan.batch, features=plan.features,
        normalisation=plan.normalisation,
    )  # fmt: skip
    return with_values(
        cfg,
        {
            "plan": values.model_dump(mode="json"),
            "train": {"accumulate": plan.accumulate},
            "memory": {"limit": None, "checkpointing": list(plan.checkpointing) or "none"},
        },
    )


def _baseline(cfg: Config, own: Config) -> Config:
    return with_values(
        cfg,
        {
            "loader": {"_target_": MONAI, "cache": "none", "samples": None, "transforms": None},
            "cache": {"resident": "disk"},
            "precision": "fp32",
            "channels_last": False,
            "compile": False,
            "memory": {"checkpointing": "none"},
        },
    )


def _cache(cfg: Config, own: Config) -> Config:
    return with_values(cfg, {"loader": {"_target_": MONAI, "cache": "mmap", "samples": None, "transforms": None}})


def _augmentation(cfg: Config, own: Config) -> Config:
    chosen = own.loader.model_dump(mode="json", by_alias=True)
    target = TORCH if own.loader.target == MONAI else own.loader.target
    kept = chosen if target == own.loader.target else {}
    return with_values(cfg, {"loader": {**kept, "_target_": target}, "cache": {"resident": own.cache.resident}})


def _precision(cfg: Config, own: Config) -> Config:
    chosen = "auto" if own.precision == "fp32" else own.precision
    return with_values(cfg, {"precision": chosen, "channels_last": own.channels_last})


def _compile(cfg: Config, own: Config) -> Config:
    # Compiled kernels have channels-last forms of everything between the convolutions; eager ones copy back and forth.
    return with_values(cfg, {"compile": True, "channels_last": True})


def _checkpointing(cfg: Config, own: Config) -> Config:
    return with_values(cfg, {"memory": {"checkpointing": "all"}, "plan": {"batch": 2 * batch_of(cfg)}})


def _accumulation(cfg: Config, own: Config) -> Config:
    return with_values(
        cfg,
        {
            "train": {"accumulate": 2 * accumulate_of(cfg)},
            "schedule": {
                "warmup": max(0.1, own.schedule.warmup),
                "scaling": "sqrt",
                "reference_batch": batch_of(own) * accumulate_of(own),
            },
        },
    )


RUNGS = {
    r.name: r
    for r in (
        Rung("baseline", "NIfTI decoded each epoch, dictionary transforms on CPU workers, fp32", _baseline),
        Rung("cache", "patches from memory-mapped arrays, decoded once", _cache),
        Rung("augmentation", "augmentation on the training device", _augmentation),
        Rung("precision", "mixed precision, channels-last", _precision),
        Rung("compile", "torch.compile, channels-last", _compile),
        Rung("checkpointing", "activations recomputed, twice the batch in their place", _checkpointing, pays=False),
        Rung(
            "accumulation",
            "two micro-batches a step, warmup, learning rate by the square root",
            _accumulation,
            pays=False,
        ),
    )
}


def rungs_of(cfg: Config) -> list[Rung]:
    """The rungs that ``cfg.ladder`` names, in its order. Raises SettingError for unknown ones."""
    own = {name: _own(name, changes) for name, changes in (cfg.ladder.own or {}).items()}
    known = {**RUNGS, **own}
    names = [*cfg.ladder.rungs, *(name for name in own if name not in cfg.ladder.rungs)]
    unknown = [n for n in names if n not in known]
    if unknown:
        raise SettingError(f"ladder.rungs names {', '.join(unknown)}; there are {', '.join(known)}")
    if len(set(names)) < len(names):
        raise SettingError("ladder.rungs names a rung twice")
    return [known[n] for n in names]


def _own(name: str, changes: Mapping[str, Any]) -> Rung:
    if not name.isidentifier():
        raise SettingError(f"ladder.own: {name!r} must be a name of letters, digits and _")
    return Rung(name, ", ".join(_flat(changes)), lambda cfg, own: with_values(cfg, changes))


def _flat(changes: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in changes.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}={value}")
    return found


def batch_of(cfg: Config) -> int:
    """Patches a micro-batch of settings with a pinned Plan."""
    assert isinstance(cfg.plan.batch, int), "the Plan is pinned"
    return cfg.plan.batch


def accumulate_of(cfg: Config) -> int:
    """Micro-batches a step of settings with a pinned Plan."""
    assert isinstance(cfg.train.accumulate, int), "the Plan is pinned"
    return cfg.train.accumulate


def with_length(cfg: Config, samples: int) -> Config:
    """``cfg`` for as many optimiser steps as it takes to see ``samples`` patches."""
    a_step = batch_of(cfg) * accumulate_of(cfg)
    return with_values(cfg, {"train": {"steps": max(1, round(samples / a_step)), "budget": None}})
