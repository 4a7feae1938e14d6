"""Label files into class indices, and back into the user's own values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np

from segspeed.data.geometry import Volume, VolumeError

INTEGER_TOLERANCE = 1e-3  # how far a value may lie from an integer, beside what the file's own scaling rounds away


def class_dtype(classes: int) -> type[np.unsignedinteger]:
    """Smallest unsigned type that holds the indices 0 to ``classes``."""
    return np.uint8 if classes < 256 else np.uint16


def to_class_indices(volume: Volume, labels: Mapping[str, tuple[int, ...]], step: float = 0.0) -> np.ndarray:
    """``(D, H, W)`` class indices of a label volume read unscaled (float64).

    ``step`` is the file's scl_slope: nibabel quantises float labels in an integer file to multiples of it, so a
    value may be off by half a step. Raises VolumeError for values that are no integers, that no class declares,
    or that are NaN.
    """
    values = volume.array
    if not np.isfinite(values).all():
        raise VolumeError("nan", f"the label has {int((~np.isfinite(values)).sum())} voxels that are NaN or infinite")
    rounded = np.rint(values)
    off = float(np.abs(values - rounded).max()) if values.size else 0.0
    if off > max(INTEGER_TOLERANCE, abs(step) if abs(step) < 0.01 else 0.0):
        raise VolumeError(
            "non-integer-label",
            f"label values are up to {off:.3g} away from an integer (a probability map, or labels resampled with "
            "interpolation?); give a map of whole numbers",
        )
    found, inverse, counts = np.unique(rounded.astype(np.int64), return_inverse=True, return_counts=True)
    index = {0: 0}
    for position, values_of_class in enumerate(labels.values(), start=1):
        index.update({int(v): position for v in values_of_class})
    unknown = [(int(v), int(n)) for v, n in zip(found, counts, strict=True) if int(v) not in index]
    if unknown:
        listed = ", ".join(f"{v} ({n} voxels)" for v, n in unknown[:8]) + (" ..." if len(unknown) > 8 else "")
        declared = ", ".join(f"{'/'.join(map(str, v))} = {k}" for k, v in labels.items())
        raise VolumeError("unknown-label", f"label values that no class declares: {listed}; declared: {declared}")
    table = np.array([index[int(v)] for v in found], dtype=class_dtype(len(labels)))
    return table[inverse.reshape(values.shape)]


def to_file_values(indices: np.ndarray, labels: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """Class indices into the values of the user's files (the first where several are merged), in the smallest
    unsigned type that holds them (signed where a value is negative)."""
    values = np.array([0, *(v[0] for v in labels.values())], dtype=np.int64)
    kinds = (np.uint8, np.uint16, np.uint32) if values.min() >= 0 else (np.int8, np.int16, np.int32)
    kind = next(k for k in kinds if np.iinfo(k).min <= values.min() and values.max() <= np.iinfo(k).max)
    return values.astype(kind)[indices]


def label_step(path: Path) -> float:
    """The slope that an integer file scales its values by (0 when it does not): the size of its rounding."""
    image = nib.load(path)
    slope, _ = image.header.get_slope_inter() if hasattr(image.header, "get_slope_inter") else (None, None)
    integer = np.issubdtype(image.get_data_dtype(), np.integer)
    return abs(float(slope)) if integer and slope not in (None, 1.0) else 0.0
