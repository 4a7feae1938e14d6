"""Dice of label maps (Dice 1945): twice the common voxels over the sum of both."""

from __future__ import annotations

import numpy as np

from segspeed.types import LabelTable


def dice_per_target(reference: np.ndarray, prediction: np.ndarray, labels: LabelTable) -> list[float | None]:
    """Dice of each target of ``labels`` (its classes, or its regions) in two maps of class indices of the same shape.

    A target that is in neither map has no Dice (None). In one of them only, it has Dice 0: a missed structure and
    an invented one are both failures. Voxels that the reference ignores are in no sum.
    """
    if reference.shape != prediction.shape:
        raise ValueError(f"reference {reference.shape} and prediction {prediction.shape} lie on different grids")
    size = len(labels.classes) + 1 + bool(labels.ignore)
    table = np.zeros((size, size), np.int64)  # [reference, prediction] voxel counts
    for of_reference, of_prediction in zip(
        reference, prediction, strict=True
    ):  # a plane at a time: indices take 8 bytes
        pairs = of_reference.ravel().astype(np.int64) * size + of_prediction.ravel()
        table += np.bincount(pairs, minlength=size * size).reshape(size, size)
    if labels.ignore_index is not None:
        table[labels.ignore_index] = 0
    out: list[float | None] = []
    for members in map(list, labels.members):
        total = int(table[members].sum() + table[:, members].sum())
        out.append(2 * int(table[np.ix_(members, members)].sum()) / total if total else None)
    return out
