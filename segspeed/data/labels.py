"""Label files into class indices, and back into the user's own values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from segspeed.data.geometry import Volume, VolumeError

INTEGER_TOLERANCE = 1e-3  # how far a value may lie from an integer, beside what the file's own scaling rounds away
LOOKUP = 65536  # widest range of values that is mapped by a table


def class_dtype(classes: int) -> type[np.unsignedinteger]:
    """Smallest unsigned type that holds the indices 0 to ``classes``."""
    return np.uint8 if classes < 256 else np.uint16


def to_class_indices(volume: Volume, labels: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """``(D, H, W)`` class indices of a label volume read unscaled.

    nibabel quantises float labels in an integer file to multiples of its scl_slope (``volume.step``), so a value may be off
    by half of that. Raises VolumeError for values that are no integers, that no class declares, or that are NaN.
    """
    whole = _whole(volume.array, volume.step)
    low, high = (int(whole.min()), int(whole.max())) if whole.size else (0, 0)
    if high - low < LOOKUP:  # counting is ten times faster than sorting
        inverse = whole.ravel().astype(np.intp) - low
        counted = np.bincount(inverse, minlength=high - low + 1)
        found = np.flatnonzero(counted) + low
        counts = counted[found - low]
    else:
        found, inverse, counts = np.unique(whole, return_inverse=True, return_counts=True)
    index = {0: 0}
    for position, values_of_class in enumerate(labels.values(), start=1):
        index.update({int(v): position for v in values_of_class})
    unknown = [(int(v), int(n)) for v, n in zip(found, counts, strict=True) if int(v) not in index]
    if unknown:
        listed = ", ".join(f"{v} ({n} voxels)" for v, n in unknown[:8]) + (" ..." if len(unknown) > 8 else "")
        declared = ", ".join(f"{'/'.join(map(str, v))} = {k}" for k, v in labels.items())
        raise VolumeError("unknown-label", f"label values that no class declares: {listed}; declared: {declared}")
    table = np.zeros(high - low + 1 if high - low < LOOKUP else len(found), class_dtype(len(labels)))
    table[found - low if high - low < LOOKUP else slice(None)] = [index[int(v)] for v in found]
    return table[inverse.reshape(whole.shape)]


def _whole(values: np.ndarray, step: float) -> np.ndarray:
    """``values`` as integers. Raises VolumeError where they are none."""
    if values.dtype.kind in "iu":
        return values
    if not np.isfinite(values).all():
        raise VolumeError("nan", f"the label has {int((~np.isfinite(values)).sum())} voxels that are NaN or infinite")
    rounded = np.rint(values)
    off = float(np.abs(values - rounded).max()) if values.size else 0.0
    if off > max(INTEGER_TOLERANCE, step if step < 0.01 else 0.0):
        raise VolumeError(
            "non-integer-label",
            f"label values are up to {off:.3g} away from an integer (a probability map, or labels resampled with "
            "interpolation?); give a map of whole numbers",
        )
    return rounded.astype(np.int64)


def to_file_values(indices: np.ndarray, labels: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """Class indices into the values of the user's files (the first where several are merged), in the smallest
    unsigned type that holds them (signed where a value is negative)."""
    values = np.array([0, *(v[0] for v in labels.values())], dtype=np.int64)
    kinds = (np.uint8, np.uint16, np.uint32) if values.min() >= 0 else (np.int8, np.int16, np.int32)
    kind = next(k for k in kinds if np.iinfo(k).min <= values.min() and values.max() <= np.iinfo(k).max)
    return values.astype(kind)[indices]
