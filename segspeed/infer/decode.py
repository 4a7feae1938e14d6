"""What logits mean: classes that exclude each other, or regions that may overlap."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from segspeed.types import LabelTable


def probabilities(scores: Tensor, labels: LabelTable, dim: int = 1) -> Tensor:
    """Logits ``(B, K, ...)`` to probabilities along ``dim``: softmax over classes with the background first, or a sigmoid a
    region."""
    return scores.sigmoid() if labels.regions else scores.softmax(dim)


def as_scores(shares: Tensor, labels: LabelTable) -> Tensor:
    """The inverse of `probabilities`, up to what softmax forgets: averaged probabilities
    ``(B, K, ...)`` as logits again."""
    shares = shares.clamp(1e-12, 1.0)
    return shares.log() - (1 - shares).clamp_min(1e-12).log() if labels.regions else shares.log()


def class_indices(scores: Tensor, labels: LabelTable) -> Tensor:
    """Logits ``(n, K, ...)`` to class indices ``(n, ...)``.

    A region is there where its logit is over 0. Voxels in the regions of a class, and in no others, are of that class. For
    other combinations (a core outside its tumour) the last region in order that is there decides, as in nnU-Net: it gives
    the class that it shares with the fewest other regions.
    """
    if not labels.regions:
        return scores.max(1).indices  # argmax over a leading axis is ten times slower on CPUs
    there = (scores > 0).long()
    weight = (2 ** torch.arange(scores.shape[1], device=scores.device)).view(-1, *[1] * (scores.ndim - 2))
    return _class_of_combination(labels.members, len(labels.classes)).to(scores.device)[(there * weight).sum(1)]


@lru_cache(maxsize=4)
def _class_of_combination(members: tuple[tuple[int, ...], ...], classes: int) -> Tensor:
    """Class index for each set of regions, the set as a number with one bit a region."""
    signature = {c: sum(1 << r for r, parts in enumerate(members) if c in parts) for c in range(1, classes + 1)}
    exact: dict[int, int] = {0: 0}
    for index, bits in signature.items():
        exact.setdefault(bits, index)
    own = [min(parts, key=lambda c: (signature[c].bit_count(), c)) for parts in members]
    table = [exact.get(bits, own[bits.bit_length() - 1] if bits else 0) for bits in range(1 << len(members))]
    return torch.tensor(table)
