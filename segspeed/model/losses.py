"""Losses over logits ``(B, K, D, H, W)`` and class indices ``(B, D, H, W)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class StepDice:
    """What a micro-batch must know for its Dice to be that of the whole optimiser step: ``sums (2, K)``, overlap and total
    over all patches of the step, and the ``share`` of these patches that it holds."""

    sums: Tensor
    share: float


class DiceCELoss(nn.Module):
    """Soft Dice (background left out, each class apart) plus cross-entropy.

    With ``regions`` (class indices of each) the logits are one a region, which may overlap: sigmoid in the place of softmax,
    binary cross-entropy in that of cross-entropy. Voxels whose index is ``ignore_index`` are in no sum, and a sample that
    holds nothing else costs nothing.

    Softmax and all sums run in float32 whatever the logits are: 262,144 ones already overflow a float16 sum.
    Soft Dice after Milletari et al. 2016 with plain sums in the denominator (as Drozdzal et al. 2016). Each sample has its
    own, and the mean over samples makes gradient accumulation exact. With ``batch_dice`` the sums are pooled over the batch,
    as in nnU-Net's batch_dice: steadier where a patch holds few voxels of a class, but the Dice of micro-batches is not that
    of their union. `sums` and ``step`` make it so: first the sums of all micro-batches, then each one's loss with them.

    A class absent from a sample (from the batch) counts with ``smooth``: predicting none of it costs nothing, as in MONAI.
    """

    def __init__(
        self,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        smooth: float = 1e-5,
        batch_dice: bool = False,
        regions: Sequence[Sequence[int]] = (),
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        self.dice_weight, self.ce_weight, self.smooth, self.batch_dice = dice_weight, ce_weight, smooth, batch_dice
        self.regions, self.ignore_index = tuple(map(tuple, regions)), ignore_index

    def forward(self, logits: Tensor, label: Tensor, step: StepDice | None = None) -> Tensor:
        """The loss of logits ``(B, K, D, H, W)`` against class indices ``(B, D, H, W)``.

        With ``step`` the value is still a mean over these samples, so that micro-batches weighed by their ``share`` add up to
        the loss of the step, value and gradient.
        """
        entropy, overlap, total = self._terms(logits, label)
        if self.batch_dice:
            overlap, total = overlap.sum(0), total.sum(0)
        if step is not None:
            assert self.batch_dice, "a Dice of single samples needs no sums of the step"
            # The step's sums as values; the gradient is that of our own part of them.
            overlap = step.sums[0] + (overlap - overlap.detach())
            total = step.sums[1] + (total - total.detach())
        dice = (1 - (2 * overlap + self.smooth) / (total + self.smooth)).mean()
        if step is not None:  # its gradient is a part of a sum already, which the weight by share must not make smaller
            dice = dice.detach() + (dice - dice.detach()) / step.share
        return self.ce_weight * entropy + self.dice_weight * dice

    @torch.no_grad()
    def sums(self, logits: Tensor, label: Tensor) -> Tensor:
        """Overlap and total ``(2, K)`` float32 over the batch, which add up over micro-batches."""
        _, overlap, total = self._terms(logits, label)
        return torch.stack([overlap.sum(0), total.sum(0)])

    def _terms(self, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy (a scalar), and of each sample and class the overlap and the total ``(B, K)`` of its Dice."""
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
                # F.nll_loss, which has no deterministic kernel on CUDA, in a form that has one
                ce = -log_p.gather(1, target.unsqueeze(1)).squeeze(1)
                classes = torch.arange(1, logits.shape[1], device=label.device).view(1, -1, 1, 1, 1)
                hit = target.unsqueeze(1) == classes  # (B, K-1, D, H, W) bool
                p = log_p[:, 1:].exp()
            if counts is None:
                entropy = ce.mean()
            else:
                p, hit = p * counts.unsqueeze(1), hit & counts.unsqueeze(1)
                entropy = ((ce * counts).sum((1, 2, 3)) / counts.sum((1, 2, 3)).clamp_min(1)).mean()
            overlap = torch.where(hit, p, 0).sum((2, 3, 4))
            return entropy, overlap, p.sum((2, 3, 4)) + hit.sum((2, 3, 4))


def pools_batch(loss: object) -> bool:
    """Whether a loss pools its sums over the batch (our ``batch_dice``, MONAI's ``batch``), so that the mean over micro-batches
    is not the loss of their union."""
    parts = loss.modules() if isinstance(loss, nn.Module) else (loss,)
    return any(getattr(part, name, False) is True for part in parts for name in ("batch_dice", "batch"))


def step_sums(loss: Any, heads: Sequence[Tensor], label: Tensor) -> Tensor:
    """``loss.sums`` of every head against the label on its grid: ``(H, 2, K)`` float32."""
    return torch.stack([loss.sums(logits, subsample(label, tuple(logits.shape[2:]))) for logits in heads])


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
        """The wrapped loss of logits ``(B, R, D, H, W)`` against class indices ``(B, D, H, W)``, as one binary target a region."""
        return self.loss(logits, in_regions(label.long(), self.regions).float())


def halving_weights(heads: int) -> list[float]:
    """1, 1/2, 1/4 ... normalised to sum 1 (nnU-Net's weights of the deep-supervision heads)."""
    raw = [0.5**level for level in range(heads)]
    return [w / sum(raw) for w in raw]


def deep_supervision(
    loss: Callable[..., Tensor],
    heads: Sequence[Tensor],
    label: Tensor,
    sums: Tensor | None = None,
    share: float = 1.0,
) -> Tensor:
    """Weighted sum of ``loss`` over heads of falling resolution; the label is subsampled to each head's grid.

    ``sums (H, 2, K)`` are those of the whole step (`step_sums`, added up over its micro-batches), of which this batch holds
    ``share`` of the patches.
    """
    value = label.new_zeros((), dtype=torch.float32)
    for level, (weight, logits) in enumerate(zip(halving_weights(len(heads)), heads, strict=True)):
        target = subsample(label, tuple(logits.shape[2:]))
        step = () if sums is None else (StepDice(sums[level], share),)
        value = value + weight * loss(logits, target, *step)
    return value


def subsample(label: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Every n-th voxel of ``label (B, D, H, W)``, so that its grid is ``shape``."""
    steps = [full // small for full, small in zip(label.shape[1:], shape, strict=True)]
    out = label[:, :: steps[0], :: steps[1], :: steps[2]]
    if tuple(out.shape[1:]) != tuple(shape):
        raise ValueError(f"a head of size {tuple(shape)} does not divide the patch {tuple(label.shape[1:])}")
    return out
