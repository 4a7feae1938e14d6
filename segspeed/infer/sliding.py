"""Whole volumes through a patch network: sliding window with Gaussian weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from monai.inferers import sliding_window_inference
from torch import Tensor, nn

from segspeed.model.networks import as_logits
from segspeed.speed.precision import Precision
from segspeed.types import Shape3


@dataclass(frozen=True)
class Window:
    """How a volume is cut: patch in voxels, overlap of neighbours as a share, windows a forward pass."""

    patch: Shape3
    overlap: float = 0.5
    batch: int = 2


@torch.inference_mode()
def predict_logits(
    model: nn.Module,
    image: Tensor,
    window: Window,
    precision: Precision,
    mirror: Iterable[int] = (),
    swap_on_flip: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """Logits ``(K, D, H, W)`` float32 of one normalised volume ``(C, D, H, W)``, on the device of the volume.

    Windows are weighted by a Gaussian (sigma an eighth of the patch, as nnU-Net). A volume smaller than the
    patch is padded evenly with zeros, as in training. ``mirror`` names axes (0 to 2 of D, H, W) over whose
    flips the probabilities are averaged; the result is then their logarithm. ``swap_on_flip`` pairs the class
    indices that trade places when W (left and right) is mirrored.
    """
    volume = image.unsqueeze(0)
    plain = _slide(model, volume, window, precision)
    axes = tuple(mirror)
    if not axes:
        return plain
    total = plain.softmax(0)
    flips = [c for n in range(1, len(axes) + 1) for c in combinations(axes, n)]
    for flip in flips:
        turned = volume.flip([a + 2 for a in flip])
        scores = _slide(model, turned, window, precision).flip([a + 1 for a in flip])
        total += (_swapped(scores, swap_on_flip) if 2 in flip else scores).softmax(0)
    return total.div_(len(flips) + 1).clamp_min_(1e-12).log_()


def _slide(model: nn.Module, volume: Tensor, window: Window, precision: Precision) -> Tensor:
    def forward(windows: Tensor) -> Tensor:
        with precision.autocast():
            return as_logits(model(windows)).float()

    out = sliding_window_inference(
        volume,
        window.patch,
        window.batch,
        forward,
        overlap=window.overlap,
        mode="gaussian",
        sigma_scale=0.125,
        padding_mode="constant",
    )
    assert isinstance(out, Tensor)
    return out[0]


def _swapped(scores: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    order = list(range(scores.shape[0]))
    for a, b in pairs:
        order[a], order[b] = order[b], order[a]
    return scores[order]
