"""From scores on the planned grid to a label map on the original one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np
from scipy import ndimage

from segspeed.data.geometry import to_file_axes
from segspeed.data.labels import class_dtype, to_file_values
from segspeed.types import Geometry


def to_native(scores: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Scores ``(K, D, H, W)`` on ``geometry.target_shape`` -> class indices ``(D, H, W)`` on the uncropped canonical
    grid. Scores are resampled linearly, class after class into a running maximum, so that no more than two classes
    exist at native size; what was cropped away is background."""
    assert scores.shape[1:] == geometry.target_shape, f"{scores.shape} is not on the grid {geometry.target_shape}"
    kind = class_dtype(len(scores) - 1)
    if not geometry.resampled:
        inside = scores.argmax(0).astype(kind)
    else:
        best = _resize(scores[0], geometry)
        inside = np.zeros(geometry.crop_shape, dtype=kind)
        for index in range(1, len(scores)):
            score = _resize(scores[index], geometry)
            wins = score > best
            inside[wins] = index
            np.maximum(best, score, out=best)
    out = np.zeros(geometry.shape, dtype=kind)
    out[tuple(slice(a, b) for a, b in geometry.crop)] = inside
    return out


def _resize(score: np.ndarray, geometry: Geometry) -> np.ndarray:
    factors = [n / m for n, m in zip(geometry.crop_shape, score.shape, strict=True)]
    return ndimage.zoom(score.astype(np.float32, copy=False), factors, order=1, mode="nearest", grid_mode=True)


def save_label_map(path: Path, indices: np.ndarray, geometry: Geometry, labels: Mapping[str, tuple[int, ...]]) -> None:
    """Write class indices ``(D, H, W)`` as NIfTI on the original grid: the affine bit for bit, the user's own label
    values in the smallest integer type, slope 1, and no text of the source file."""
    values = to_file_values(to_file_axes(indices, geometry), labels)
    affine = np.array(geometry.affine)
    image = nib.Nifti1Image(values, affine)
    image.header.set_slope_inter(1, 0)
    image.set_sform(affine, code=1)
    rebuilt = _qform_of(image, affine)
    image.set_qform(affine if rebuilt else None, code=1 if rebuilt else 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        nib.save(image, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _qform_of(image: nib.Nifti1Image, affine: np.ndarray) -> bool:
    """Whether a quaternion can hold ``affine`` (it cannot hold shear)."""
    trial = image.header.copy()
    trial.set_qform(affine, code=1, strip_shears=True)
    return bool(np.allclose(trial.get_qform(), affine, atol=1e-3))
