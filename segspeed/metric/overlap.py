"""Dice of label maps (Dice 1945): twice the common voxels over the sum of both."""

from __future__ import annotations

import numpy as np


def dice_per_class(reference: np.ndarray, prediction: np.ndarray, classes: int) -> list[float | None]:
    """Dice of each foreground class 1 to ``classes`` of two maps of class indices of the same shape.

    A class that is in neither map has no Dice (None). In one of them only, it has Dice 0: a missed structure and
    an invented one are both failures.
    """
    if reference.shape != prediction.shape:
        raise ValueError(f"reference {reference.shape} and prediction {prediction.shape} lie on different grids")
    size = classes + 1
    pairs = reference.ravel().astype(np.int64) * size + prediction.ravel()
    table = np.bincount(pairs, minlength=size * size).reshape(size, size)  # [reference, prediction] voxel counts
    out: list[float | None] = []
    for c in range(1, size):
        total = int(table[c].sum() + table[:, c].sum())
        out.append(2 * int(table[c, c]) / total if total else None)
    return out
