"""Slices of a case with its reference and prediction, kept for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from segspeed.types import Triple

PLANES = ("axial", "coronal", "sagittal")  # across D, H, W


@dataclass(frozen=True)
class Overlay:
    """Three slices (axial, coronal, sagittal) of one case; ``spacing`` is mm, (D, H, W). ``role`` is best, median or
    worst."""

    role: str
    case: str
    dice: float
    image: tuple[np.ndarray, ...]
    reference: tuple[np.ndarray, ...]
    prediction: tuple[np.ndarray, ...]
    spacing: Triple


def make_overlay(
    role: str,
    case: str,
    dice: float,
    image: np.ndarray,
    reference: np.ndarray,
    prediction: np.ndarray,
    spacing: Triple,
) -> Overlay:
    """Cut ``(D, H, W)`` arrays, ``spacing`` in mm, where most of either foreground lies, a plane at a time."""
    either = (reference > 0) | (prediction > 0)
    cuts = []
    for axis in range(3):
        line = either.sum(axis=tuple(a for a in range(3) if a != axis))
        cuts.append(int(line.argmax()) if line.any() else either.shape[axis] // 2)

    def planes(array: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(np.take(array, cut, axis=axis) for axis, cut in enumerate(cuts))

    return Overlay(role, case, dice, planes(image), planes(reference), planes(prediction), spacing)


def save_overlays(path: Path, overlays: Sequence[Overlay]) -> None:
    """One compressed file without pickles."""
    arrays: dict[str, np.ndarray] = {}
    for number, o in enumerate(overlays):
        arrays[f"{number}/about"] = np.array([o.role, o.case])
        arrays[f"{number}/numbers"] = np.array([o.dice, *o.spacing])
        for name in ("image", "reference", "prediction"):
            for plane, values in zip(PLANES, getattr(o, name), strict=True):
                arrays[f"{number}/{name}/{plane}"] = values
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def load_overlays(path: Path) -> list[Overlay]:
    """What `save_overlays` wrote; an empty list if there is no such file."""
    if not path.exists():
        return []
    found = []
    with np.load(path, allow_pickle=False) as data:
        for number in range(len([k for k in data.files if k.endswith("/about")])):
            role, case = (str(v) for v in data[f"{number}/about"])
            dice, d, h, w = (float(v) for v in data[f"{number}/numbers"])
            parts = [tuple(data[f"{number}/{n}/{p}"] for p in PLANES) for n in ("image", "reference", "prediction")]
            found.append(Overlay(role, case, dice, parts[0], parts[1], parts[2], (d, h, w)))
    return found
