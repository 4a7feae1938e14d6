"""Losses over logits ``(B, K, D, H, W)`` and class indices ``(B, D, H, W)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DiceCELoss(nn.Module):
    """Soft Dice (background left out, each sample and class apart) plus cross-entropy.

    Softmax and all sums run in float32 whatever the logits are: 262,144 ones already overflow a float16 sum.
    Soft Dice after Milletari et al. 2016 with plain sums in the denominator (as Drozdzal et al. 2016); the mean over
    samples makes gradient accumulation exact, which a Dice pooled over the batch is not.

    A class absent from a sample counts with ``smooth``: predicting none of it costs nothing, as in MONAI.
    """

    def __init__(self, dice_weight: float = 1.0, ce_weight: float = 1.0, smooth: float = 1e-5) -> None:
        super().__init__()
        self.dice_weight, self.ce_weight, self.smooth = dice_weight, ce_weight, smooth

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            log_p = F.log_softmax(logits.float(), dim=1)
            target = label.long()
            ce = F.nll_loss(log_p, target)
            classes = torch.arange(1, logits.shape[1], device=label.device).view(1, -1, 1, 1, 1)
            hit = target.unsqueeze(1) == classes  # (B, K-1, D, H, W) bool
            p = log_p[:, 1:].exp()
            overlap = torch.where(hit, p, 0).sum((2, 3, 4))
            total = p.sum((2, 3, 4)) + hit.sum((2, 3, 4))
            dice = 1 - (2 * overlap + self.smooth) / (total + self.smooth)
            return self.ce_weight * ce + self.dice_weight * dice.mean()


def halving_weights(heads: int) -> list[float]:
    """1, 1/2, 1/4 ... normalised to sum 1 (nnU-Net's weights of the deep-supervision heads)."""
    raw = [0.5**level for level in range(heads)]
    return [w / sum(raw) for w in raw]


def deep_supervision(loss: Callable[[Tensor, Tensor], Tensor], heads: Sequence[Tensor], label: Tensor) -> Tensor:
    """Weighted sum of ``loss`` over heads of falling resolution; the label is subsampled to each head's grid."""
    value = label.new_zeros((), dtype=torch.float32)
    for weight, logits in zip(halving_weights(len(heads)), heads, strict=True):
        value = value + weight * loss(logits, subsample(label, tuple(logits.shape[2:])))
    return value


def subsample(label: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Every n-th voxel of ``label (B, D, H, W)``, so that its grid is ``shape``."""
    steps = [full // small for full, small in zip(label.shape[1:], shape, strict=True)]
    out = label[:, :: steps[0], :: steps[1], :: steps[2]]
    if tuple(out.shape[1:]) != tuple(shape):
        raise ValueError(f"a head of size {tuple(shape)} does not divide the patch {tuple(label.shape[1:])}")
    return out
