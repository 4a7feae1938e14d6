"""From scores on the planned grid to a label map on the original one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from segspeed.data.files import save_nifti
from segspeed.data.geometry import to_file_axes
from segspeed.data.labels import class_dtype, to_file_values
from segspeed.infer.decode import class_indices
from segspeed.types import Geometry, LabelTable

SLAB_BYTES = 64 * 2**20  # of scores at native size at a time


Planes = Iterable[tuple[int, Tensor]]  # first plane along an axis and scores (K, D, H, W) of the next ones, in order


def native_planes(planes: Planes, geometry: Geometry, axis: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Scores on ``geometry.target_shape`` -> scores on ``geometry.crop_shape``, linearly, a few planes at a time.

    Yields the first plane along ``axis`` and scores ``(n, K, A, B)``, A and B being the other two axes in order. What is held
    of a plane at native size stays under `SLAB_BYTES`, however many classes there are.
    """
    length, native = geometry.target_shape[axis], geometry.crop_shape[axis]
    shape = tuple(n for a, n in enumerate(geometry.crop_shape) if a != axis)
    at = np.clip(
        (np.arange(native) + 0.5) * length / native - 0.5, 0, length - 1
    )  # grid corners aligned, as in preprocessing
    below = np.floor(at).astype(int)
    above, share = np.minimum(below + 1, length - 1), (at - below).astype(np.float32)
    tail: Tensor | None = (
        None  # the last plane that was seen: the next native planes may lie between it and what follows
    )
    done = 0
    for first, scores in planes:
        stack = scores.movedim(axis + 1, 0)

        def take(places: np.ndarray) -> Tensor:
            return torch.stack([stack[i - first] if i >= first else tail for i in places])  # type: ignore[misc] # noqa: B023

        ready = int(np.searchsorted(above, first + len(stack)))  # native planes whose neighbours are all here
        few = max(1, SLAB_BYTES // (4 * scores.shape[0] * shape[0] * shape[1]))
        while done < ready:
            rows = slice(done, min(done + few, ready))
            part = take(below[rows])
            if length != native:
                weight = torch.from_numpy(share[rows]).to(part.device).view(-1, 1, 1, 1)
                part = torch.lerp(part, take(above[rows]), weight)
            if tuple(part.shape[2:]) != shape:
                part = F.interpolate(part, size=shape, mode="bilinear", align_corners=False)
            yield done, part
            done = rows.stop
        tail = stack[-1].clone()
    assert done == native, f"{done} of {native} planes came back"


def label_map(native: Planes, geometry: Geometry, labels: LabelTable, axis: int = 0) -> np.ndarray:
    """Class indices ``(D, H, W)`` on the uncropped canonical grid, from the logits that `native_planes` yields. What was
    cropped away is background."""
    out = np.zeros(geometry.shape, dtype=class_dtype(len(labels.classes)))
    inside = np.moveaxis(out[tuple(slice(a, b) for a, b in geometry.crop)], axis, 0)
    for first, scores in native:
        inside[first : first + len(scores)] = class_indices(scores, labels).cpu().numpy()
    return out


def to_native(scores: np.ndarray, geometry: Geometry, labels: LabelTable) -> np.ndarray:
    """Logits ``(K, D, H, W)`` on ``geometry.target_shape`` -> class indices ``(D, H, W)`` on the uncropped canonical grid."""
    assert scores.shape[1:] == geometry.target_shape, f"{scores.shape} is not on the grid {geometry.target_shape}"
    whole = [(0, torch.from_numpy(np.ascontiguousarray(scores, dtype=np.float32)))]
    return label_map(native_planes(whole, geometry), geometry, labels)


def save_label_map(path: Path, indices: np.ndarray, geometry: Geometry, labels: Mapping[str, tuple[int, ...]]) -> None:
    """Write class indices ``(D, H, W)`` as NIfTI on the original grid: the affine bit for bit, the user's own label
    values in the smallest integer type, slope 1, and no text of the source file."""
    _save(path, to_file_values(to_file_axes(indices, geometry), labels), geometry, slope=1.0)


def save_probability(path: Path, share: np.ndarray, geometry: Geometry) -> None:
    """Write 255 times a probability ``(D, H, W)`` uint8 as NIfTI on the original grid; readers see 0 to 1."""
    _save(path, to_file_axes(share, geometry), geometry, slope=1 / 255)


def _save(path: Path, values: np.ndarray, geometry: Geometry, slope: float) -> None:
    affine = np.array(geometry.affine)
    image = nib.Nifti1Image(values, affine)
    image.header.set_slope_inter(slope, 0)
    image.header.set_xyzt_units("mm")
    image.set_sform(affine, code=1)
    rebuilt = _qform_of(image, affine)
    image.set_qform(affine if rebuilt else None, code=1 if rebuilt else 0)
    save_nifti(image, path)


def _qform_of(image: nib.Nifti1Image, affine: np.ndarray) -> bool:
    """Whether a quaternion can hold ``affine`` (it cannot hold shear)."""
    trial = image.header.copy()
    trial.set_qform(affine, code=1, strip_shears=True)
    return bool(np.allclose(trial.get_qform(), affine, atol=1e-3))
