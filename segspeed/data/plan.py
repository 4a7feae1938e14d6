"""From the fingerprint to a Plan, each value by a stated rule (after nnU-Net's, Isensee et al. 2021), or by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from segspeed.config import PlanConfig
from segspeed.data.preprocess import Grid, is_ct
from segspeed.types import ChannelNorm, DataError, Fingerprint, Plan, SettingError, Shape3, Triple

COARSE_RATIO = 3.0  # an axis this many times coarser than the others is anisotropic
MIN_FEATURE_MAP = 4  # voxels; an axis is not halved below this
MAX_LEVELS = 6
MAX_FEATURES = 320
BUDGET = {"cpu": 40 * 56 * 40, "cuda": 128**3}  # voxels of a patch
FIRST_FEATURES = {"cpu": 16, "cuda": 32}
MAX_BATCH = {"cpu": 8, "cuda": 32}
BATCH_VOXELS = {"cpu": 8 * 40 * 56 * 40, "cuda": 2 * 128**3}
DATASET_SHARE = 0.05  # of all voxels; a larger batch would overfit few small cases


def make_plan(
    fp: Fingerprint,
    *,
    channels: Sequence[str],
    classes: int,
    device: str,
    overrides: PlanConfig,
    accumulate: int = 1,
    patch_voxels: int | None = None,
    source: Plan | None = None,
) -> Plan:
    """The Plan for a fingerprint on a "cpu" or "cuda" device; ``patch_voxels`` takes the place of the device's usual most.

    ``source`` is the Plan of a run whose weights are to fit: its network, and its spacing and patch unless set by hand; batch and
    normalisation follow from the fingerprint as ever. Raises DataError for values that cannot work.
    """
    kind = device if device in BUDGET else "cpu"
    why: dict[str, str] = {}
    spacing, coarse = _spacing(fp, overrides, why, source)
    median = _median_shape(fp, spacing)
    if source is None:
        patch, strides, kernels = _patch_and_levels(median, spacing, patch_voxels or BUDGET[kind], overrides, why)
        features = _features(len(strides), kind, overrides, why)
    else:
        patch, strides, kernels, features = _network_of(source, kind, overrides, why)
    batch = _batch(fp, spacing, patch, kind, overrides, why)
    normalisation, ct = _normalisation(fp, channels, overrides, why)
    if classes < 1:
        raise DataError("the cohort declares no foreground class")
    why["accumulate"] = "as set by train.accumulate (auto is 1)"
    return Plan(
        spacing=spacing,
        patch=patch,
        batch=batch,
        accumulate=accumulate,
        features=features,
        strides=strides,
        kernels=kernels,
        normalisation=normalisation,
        ct_norm=ct,
        coarse_axis=coarse,
        reasons=why,
    )


def grid_of(plan: Plan) -> Grid:
    """What preprocessing needs to know of a Plan."""
    return Grid(plan.spacing, plan.coarse_axis, tuple(name == "ct" for name in plan.normalisation))


def _network_of(
    source: Plan, kind: str, overrides: PlanConfig, why: dict[str, str]
) -> tuple[Shape3, tuple[Shape3, ...], tuple[Shape3, ...], tuple[int, ...]]:
    """Patch, strides, kernels and features of a run whose weights are to fit."""
    patch, that = source.patch, "that of the run in init.run"
    why["patch"] = why["levels"] = why["features"] = that
    if overrides.patch != "auto":
        patch, why["patch"] = _by_hand(overrides.patch, np.array(source.divisor)), "set by hand"
    if (overrides.features, overrides.width, overrides.finest_width) != ("auto", "auto", "auto"):
        wanted = _features(len(source.strides), kind, overrides, why)
        if wanted != source.features:
            raise SettingError(
                f"the network of init.run has {list(source.features)} channels a level, and plan.features, plan.width or "
                f"plan.finest_width ask for {list(wanted)}; set these to auto, or leave init.run out"
            )
    return patch, source.strides, source.kernels, source.features


def _spacing(
    fp: Fingerprint, overrides: PlanConfig, why: dict[str, str], source: Plan | None = None
) -> tuple[Triple, int | None]:
    if source is not None and overrides.spacing == "auto":
        why["spacing"] = "that of the run in init.run, so that structures have the size its features know"
        return source.spacing, source.coarse_axis
    all_spacings = np.array(fp.spacings)
    target = np.median(all_spacings, axis=0)
    shape = np.median(np.array(fp.crop_shapes), axis=0)
    axis = int(target.argmax())
    others = [a for a in range(3) if a != axis]
    coarse = axis if target[axis] >= COARSE_RATIO * target[others].max() else None
    if coarse is not None and shape[axis] * 3 > shape[others].min():
        coarse = None  # thick slices, but many of them: no rule of its own
    why["spacing"] = "median spacing of the training cases an axis"
    if coarse is not None:
        target[coarse] = max(float(np.percentile(all_spacings[:, coarse], 10)), float(target[others].max()))
        why["spacing"] += f"; axis {'DHW'[coarse]} is {COARSE_RATIO:g} times coarser and takes its 10th percentile"
    if overrides.spacing != "auto":
        why["spacing"] = "set by hand"
        target = np.array(overrides.spacing)
    d, h, w = (float(round(v, 6)) for v in target)
    return (d, h, w), coarse


def _median_shape(fp: Fingerprint, spacing: Triple) -> np.ndarray:
    shapes = np.array(fp.crop_shapes) * np.array(fp.spacings) / np.array(spacing)
    return np.maximum(np.median(shapes, axis=0), 1)


def _patch_and_levels(
    median: np.ndarray, spacing: Triple, budget: int, overrides: PlanConfig, why: dict[str, str]
) -> tuple[Shape3, tuple[Shape3, ...], tuple[Shape3, ...]]:
    by_hand = overrides.patch != "auto"
    if by_hand:
        wanted = np.array(overrides.patch, dtype=float)
        why["patch"] = "set by hand"
    else:
        # A cube in mm first, then no axis longer than the median volume, then down to the budget.
        side = np.prod(median) ** (1 / 3) * (np.prod(spacing)) ** (1 / 3)
        wanted = np.minimum(np.full(3, max(side, 1.0)) / np.array(spacing) * 4, median)
        while np.prod(wanted) > budget:
            longest = int((wanted * np.array(spacing)).argmax())
            wanted[longest] *= 0.97
        why["patch"] = (
            f"the median volume ({'x'.join(str(round(v)) for v in median)} voxels), shortened where it is longest in "
            f"mm to at most {budget:,} voxels, and rounded so that the strides divide it"
        )
    strides, kernels = _levels(wanted, spacing)
    divisor = np.prod(np.array(strides), axis=0)
    if overrides.patch != "auto":
        d, h, w = _by_hand(overrides.patch, divisor)
    else:
        d, h, w = (int(max(1, math.ceil(n / q - 0.25)) * q) for n, q in zip(wanted, divisor, strict=True))
        while d * h * w > 1.15 * budget:
            sides = [(d, 0), (h, 1), (w, 2)]
            _, axis = max((n * spacing[a], a) for n, a in sides if n > divisor[a])
            d, h, w = (n - int(divisor[a]) * (a == axis) for n, a in sides)
    why["levels"] = (
        f"an axis is halved while it keeps {MIN_FEATURE_MAP} voxels and is at most twice as fine as the coarsest; "
        f"at most {MAX_LEVELS} levels; a kernel is 1 thick along an axis twice as coarse as the finest"
    )
    return (d, h, w), strides, kernels


def _by_hand(patch: Shape3, divisor: np.ndarray) -> Shape3:
    """``patch`` (D, H, W) in voxels, if the strides divide it. Raises SettingError with the nearest one that they do."""
    if (np.array(patch) % divisor).any():
        near = [max(int(d), int(round(n / d) * d)) for n, d in zip(patch, divisor, strict=True)]
        raise SettingError(
            f"plan.patch={list(patch)} is not a multiple of the strides {divisor.tolist()}; "
            f"nearest: [{','.join(map(str, near))}]"
        )
    return patch


def _levels(patch: np.ndarray, spacing: Triple) -> tuple[tuple[Shape3, ...], tuple[Shape3, ...]]:
    size, mm = np.array(patch, dtype=float), np.array(spacing, dtype=float)
    strides: list[Shape3] = [(1, 1, 1)]
    kernels: list[Shape3] = [_kernel(mm)]
    while len(strides) < MAX_LEVELS:
        halve = (np.ceil(size / 2 - 0.25) >= MIN_FEATURE_MAP) & (mm < 2 * mm.min())
        if not halve.any():
            break
        strides.append(_shape(np.where(halve, 2, 1)))
        size, mm = np.where(halve, size / 2, size), np.where(halve, mm * 2, mm)
        kernels.append(_kernel(mm))
    return tuple(strides), tuple(kernels)


def _kernel(mm: np.ndarray) -> Shape3:
    return _shape(np.where(mm >= 2 * mm.min(), 1, 3))


def _shape(values: np.ndarray) -> Shape3:
    d, h, w = (int(v) for v in values)
    return (d, h, w)


def _features(levels: int, kind: str, overrides: PlanConfig, why: dict[str, str]) -> tuple[int, ...]:
    if overrides.features != "auto":
        if len(overrides.features) != levels:
            raise SettingError(
                f"plan.features has {len(overrides.features)} values, but the patch gives {levels} levels; "
                "give one number of channels a level, finest first"
            )
        why["features"] = "set by hand"
        return tuple(overrides.features)
    first = FIRST_FEATURES[kind] if overrides.width == "auto" else int(overrides.width)
    by = f"on {kind}" if overrides.width == "auto" else "as set by plan.width"
    why["features"] = f"{first} {by}, doubled a level, at most {MAX_FEATURES}"
    features = [min(first * 2**level, MAX_FEATURES) for level in range(levels)]
    if overrides.finest_width != "auto":
        features[0] = max(first // 2, 1) if overrides.finest_width == "half" else overrides.finest_width
        why["features"] += f"; {features[0]} at the finest level, as set by plan.finest_width"
    return tuple(features)


def _batch(
    fp: Fingerprint, spacing: Triple, patch: Shape3, kind: str, overrides: PlanConfig, why: dict[str, str]
) -> int:
    if overrides.batch != "auto":
        why["batch"] = "set by hand"
        return int(overrides.batch)
    voxels = np.prod(np.array(fp.crop_shapes) * np.array(fp.spacings) / np.array(spacing), axis=1).sum()
    fits = BATCH_VOXELS[kind] // int(np.prod(patch))
    seen = int(DATASET_SHARE * float(voxels) / float(np.prod(patch)))
    why["batch"] = (
        f"{BATCH_VOXELS[kind]:,} voxels a batch on {kind}, at most {MAX_BATCH[kind]} patches and "
        f"{DATASET_SHARE:.0%} of the training voxels, at least 2"
    )
    return max(2, min(fits, seen, MAX_BATCH[kind]))


def _normalisation(
    fp: Fingerprint, channels: Sequence[str], overrides: PlanConfig, why: dict[str, str]
) -> tuple[tuple[str, ...], tuple[ChannelNorm | None, ...]]:
    if overrides.normalisation != "auto":
        names = tuple(overrides.normalisation)
        if len(names) != len(channels):
            raise SettingError(f"plan.normalisation has {len(names)} values for {len(channels)} channels")
        why["normalisation"] = "set by hand"
    else:
        names = tuple("ct" if is_ct(c) else "zscore" for c in channels)
        why["normalisation"] = (
            "channels named CT: clipped to the 0.5 and 99.5 percentiles of the training foreground, minus its mean, "
            "over its std; others: each case's own mean and std"
        )
    constants: list[ChannelNorm | None] = []
    for name, stats in zip(names, fp.intensity, strict=True):
        if name != "ct":
            constants.append(None)
            continue
        if not stats:
            raise DataError("every training image is constant, so there are no intensities to normalise by")
        std = stats["std"] if stats["std"] > 1e-8 else 1.0
        constants.append(ChannelNorm(stats["percentile_00_5"], stats["percentile_99_5"], stats["mean"], std))
    return names, tuple(constants)
