"""Dice of whole volumes on the original grid, each case once, each class apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from segspeed.augment.intensity import normalise_
from segspeed.data.cache import CacheEntry
from segspeed.infer.decode import class_indices
from segspeed.infer.export import label_map, native_planes
from segspeed.infer.sliding import Window, finished_planes, forward_of
from segspeed.metric.overlap import dice_per_target
from segspeed.metric.own import Metric, Values, own_values
from segspeed.speed.precision import Precision
from segspeed.types import LabelTable

FEW_PATCHES = 8


@dataclass(frozen=True)
class Predictor:
    """A network with everything it takes to turn a cached volume into scores."""

    model: nn.Module
    window: Window
    precision: Precision
    labels: LabelTable
    mirror: tuple[int, ...] = ()
    swap_on_flip: Sequence[tuple[int, int]] = ()  # output channels

    def planes(self, image: np.ndarray, norm: np.ndarray, axis: int, own: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Scores of a raw volume ``(C, D, H, W)`` with constants ``(C, 4)``, some planes along ``axis`` at a time. ``own``:
        the volume may be overwritten, which saves its size in memory."""
        device = self.precision.device
        raw = image if own else np.array(image[:], dtype=np.float32)
        volume = normalise_(torch.from_numpy(raw).to(device), torch.from_numpy(norm).to(device))
        self.model.eval()
        forward = forward_of(self.model, self.precision, self.labels, self.mirror, self.swap_on_flip)
        return finished_planes(forward, volume, self.window, axis)

    def classes(self, image: np.ndarray, norm: np.ndarray) -> np.ndarray:
        """Class indices ``(D, H, W)`` on the volume's own grid."""
        parts = [class_indices(scores[None], self.labels)[0] for _, scores in self.planes(image, norm, 0)]
        return torch.cat(parts).cpu().numpy()

    def slow_axis(self, shape: Sequence[int]) -> int:
        """The axis along which a volume is done with the least held at a time: one window's depth of it. For one that is a
        few patches large, where memory is no matter, the axis with the fewest layers: batches of windows are then full."""
        depth = [p / max(n, p) for p, n in zip(self.window.patch, shape, strict=True)]
        small = np.prod(shape) <= FEW_PATCHES * np.prod(self.window.patch)
        return int(np.argmax(depth) if small else np.argmin(depth))


@dataclass(frozen=True)
class CaseValues:
    """Dice a target (None: absent from reference and prediction), and the same of the user's own metrics."""

    dice: list[float | None]
    own: Values


def evaluate_cases(
    predictor: Predictor,
    entries: Sequence[CacheEntry],
    norms: Sequence[np.ndarray],
    metrics: Mapping[str, Metric] | None = None,
) -> Iterator[tuple[str, CaseValues]]:
    """Case id and scores, as they are scored. ``norms``: constants ``(C, 4)`` of each entry.

    Raises DataError where one of ``metrics`` fails.
    """
    for entry, norm in zip(entries, norms, strict=True):
        geometry = entry.geometry
        axis = predictor.slow_axis(geometry.target_shape)
        native = native_planes(predictor.planes(entry.image, norm, axis), geometry, axis)
        prediction = label_map(native, geometry, predictor.labels, axis)
        reference, labels = entry.native_label, predictor.labels
        dice = dice_per_target(reference, prediction, labels)
        yield (
            entry.case_id,
            CaseValues(dice, own_values(reference, prediction, labels, geometry.spacing, metrics or {})),
        )
