"""Losses over logits ``(B, K, D, H, W)`` and class indices ``(B, D, H, W)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DiceCELoss(nn.Module):
    """Soft Dice (background left out, each sample and class apart) plus cross-entropy.

    With ``regions`` (class indices of each) the logits are one a region, which may overlap: sigmoid in the place of softmax,
    binary cross-entropy in that of cross-entropy. Voxels whose index is ``ignore_index`` are in no sum, and a sample that
    holds nothing else costs nothing.

    Softmax and all sums run in float32 whatever the logits are: 262,144 ones already overflow a float16 sum.
    Soft Dice after Milletari et al. 2016 with plain sums in the denominator (as Drozdzal et al. 2016); the mean over
    samples makes gradient accumulation exact, which a Dice pooled over the batch is not.

    A class absent from a sample counts with ``smooth``: predicting none of it costs nothing, as in MONAI.
    """

    def __init__(
        self,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        smooth: float = 1e-5,
        regions: Sequence[Sequence[int]] = (),
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        self.dice_weight, self.ce_weight, self.smooth = dice_weight, ce_weight, smooth
        self.regions, self.ignore_index = tuple(map(tuple, regions)), ignore_index

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            target = label.long()
            counts = None if self.ignore_index is None else target != self.ignore_index  # (B, D, H, W) bool
            if counts is not None:
                target = torch.where(counts, target, 0)
            if self.regions:
                hit = in_regions(target, self.regions)
                p = logits.float().sigmoid()
                ce = F.binary_cross_entropy_with_logits(logits.float(), hit.float(), reduction="none").mean(1)
            else:
                log_p = F.log_softmax(logits.float(), dim=1)
                ce = F.nll_loss(log_p, target, reduction="none")
                classes = torch.arange(1, logits.shape[1], device=label.device).view(1, -1, 1, 1, 1)
                hit = target.unsqueeze(1) == classes  # (B, K-1, D, H, W) bool
                p = log_p[:, 1:].exp()
            if counts is None:
                entropy = ce.mean()
            else:
                p, hit = p * counts.unsqueeze(1), hit & counts.unsqueeze(1)
                entropy = ((ce * counts).sum((1, 2, 3)) / counts.sum((1, 2, 3)).clamp_min(1)).mean()
            overlap = torch.where(hit, p, 0).sum((2, 3, 4))
            total = p.sum((2, 3, 4)) + hit.sum((2, 3, 4))
            dice = 1 - (2 * overlap + self.smooth) / (total + self.smooth)
            return self.ce_weight * entropy + self.dice_weight * dice.mean()


def in_regions(target: Tensor, regions: Sequence[Sequence[int]]) -> Tensor:
    """Class indices ``(B, D, H, W)`` to the regions they lie in, ``(B, R, D, H, W)`` bool. Every class is in a region."""
    table = torch.zeros((len(regions), 1 + max(max(members) for members in regions)), dtype=torch.bool)
    for row, members in enumerate(regions):
        table[row, list(members)] = True
    return table.to(target.device)[:, target].movedim(0, 1)


class RegionTargets(nn.Module):
    """``loss`` with binary targets ``(B, R, D, H, W)`` float instead of class indices: what losses written for overlapping
    regions take (MONAI's with ``sigmoid=True``)."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], regions: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.loss, self.regions = loss, tuple(map(tuple, regions))

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        return self.loss(logits, in_regions(label.long(), self.regions).float())


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
