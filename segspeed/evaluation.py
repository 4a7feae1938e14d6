"""Dice of whole volumes on the original grid, each case once, each class apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from segspeed.augment.intensity import normalise
from segspeed.data.cache import CacheEntry
from segspeed.infer.export import to_native
from segspeed.infer.sliding import Window, predict_logits
from segspeed.metric.overlap import dice_per_class
from segspeed.speed.precision import Precision


@dataclass(frozen=True)
class Predictor:
    """A network with everything it takes to turn a cached volume into scores."""

    model: nn.Module
    window: Window
    precision: Precision
    mirror: tuple[int, ...] = ()
    swap_on_flip: Sequence[tuple[int, int]] = ()

    def scores(self, image: np.ndarray, norm: np.ndarray) -> np.ndarray:
        """Logits ``(K, D, H, W)`` float32 of a raw volume ``(C, D, H, W)`` with constants ``(C, 4)``."""
        device = self.precision.device
        volume = torch.from_numpy(np.array(image[:], dtype=np.float32)).to(device)
        volume = normalise(volume[None], torch.from_numpy(norm)[None].to(device))[0]
        self.model.eval()
        logits = predict_logits(self.model, volume, self.window, self.precision, self.mirror, self.swap_on_flip)
        return logits.cpu().numpy()


def evaluate_cases(
    predictor: Predictor, entries: Sequence[CacheEntry], norms: Sequence[np.ndarray], classes: int
) -> Iterator[tuple[str, list[float | None]]]:
    """Case id and Dice a foreground class (None: absent from reference and prediction), as they are scored."""
    for entry, norm in zip(entries, norms, strict=True):
        scores = predictor.scores(entry.image, norm)
        prediction = to_native(scores, entry.geometry)
        yield entry.case_id, dice_per_class(entry.native_label, prediction, classes)
