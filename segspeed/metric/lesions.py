"""Lesion-wise detection: how many connected components were found, missed, invented."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

TOUCHING = np.ones((3, 3, 3), bool)  # 26-neighbourhood: voxels that share a corner are one lesion


@dataclass(frozen=True)
class Detection:
    """Counts of lesions: reference ones ``found`` and ``missed``, predicted ones where no reference is (``false``).

    Ratios are None where there is nothing to divide by. Found counts reference lesions, so a prediction that joins
    two of them into one component has found two.
    """

    found: int
    missed: int
    false: int

    @property
    def sensitivity(self) -> float | None:
        """Share of the reference's components that were found; None without any."""
        return _ratio(self.found, self.found + self.missed)

    @property
    def precision(self) -> float | None:
        """Share of the predicted components that are real; None without any."""
        return _ratio(self.found, self.found + self.false)

    @property
    def f1(self) -> float | None:
        """Harmonic mean of sensitivity and precision; None without any component."""
        return _ratio(2 * self.found, 2 * self.found + self.missed + self.false)


def detect(prediction: np.ndarray, reference: np.ndarray, min_voxels: int = 1, overlap: float = 0.0) -> Detection:
    """Compare the components of two masks ``(D, H, W)``.

    A reference component is found when the prediction covers at least one voxel of it and at least the share
    ``overlap`` of it. A predicted component is false when it has no voxel in common with the reference. Predicted
    components of fewer than ``min_voxels`` voxels are dropped first; reference components as small are not counted,
    but a prediction that meets one is not false.
    """
    if prediction.shape != reference.shape or prediction.ndim != 3:
        raise ValueError(f"prediction {prediction.shape} and reference {reference.shape} are not on one 3D grid")
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap is a share from 0 to 1, not {overlap}")
    guessed, guessed_size = _components(prediction)
    true, true_size = _components(reference)
    covered, touched = np.zeros_like(true_size), np.zeros_like(guessed_size)
    for g, t in zip(guessed, true, strict=True):  # a plane at a time: the indices of a whole organ are gigabytes
        hit = (g > 0) & (t > 0)
        of_guess, of_true = g[hit], t[hit]
        touched += np.bincount(of_guess, minlength=len(touched))
        covered += np.bincount(of_true[guessed_size[of_guess] >= min_voxels], minlength=len(covered))
    counted = true_size >= min_voxels
    found = counted & (covered > 0) & (covered / true_size >= overlap)
    false = (guessed_size >= min_voxels) & (touched == 0)
    # entry 0 is the background of each map
    return Detection(int(found[1:].sum()), int((counted & ~found)[1:].sum()), int(false[1:].sum()))


def _components(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Component map ``(D, H, W)``, 0 outside, and the voxels of each component; entry 0 is 1, never used."""
    labels, count = ndimage.label(mask, TOUCHING)
    sizes = np.zeros(count + 1, np.int64)
    for plane in labels:
        sizes += np.bincount(plane.ravel(), minlength=count + 1)
    sizes[0] = 1  # a share of the background is computed beside the others and left out
    return labels, sizes


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
