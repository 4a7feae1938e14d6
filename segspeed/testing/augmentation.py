"""The contract of an augmentation of ``augment.extra``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segspeed.loader.extra import OwnAugmentation
from segspeed.testing.contract import ContractError, name_of, require
from segspeed.types import SettingError, Shape3

TRIES = 50  # batches among which one at least must differ: a transform that acts seldom is fine


def check_augmentation(
    augment: Callable[[Tensor, Tensor, list[int]], Any],
    *,
    channels: int = 1,
    classes: int = 2,
    patch: Shape3 = (12, 12, 12),
    batch: int = 2,
    drawn: bool = True,
) -> None:
    """Whether ``augment(image (B, C, D, H, W), label (B, D, H, W), seeds)`` returns image and label of the same shapes and types,
    finite and without new label values, as a function of each sample and its seed alone: what exact resuming rests on.

    ``drawn=False`` is for a transform without random numbers. Raises ContractError.
    """
    name = name_of(augment)
    own = OwnAugmentation(name, augment)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(batch, channels, *patch, generator=generator)
    label = torch.randint(0, classes + 1, (batch, *patch), generator=generator, dtype=torch.int16)
    seeds = own.seeds(0, range(batch))
    first = _made(own, image, label, seeds, 0)
    _same(name, first, _made(own, image, label, seeds, 1), "for the same seeds")
    allowed = set(label.unique().tolist())
    for number in range(4):
        _, mask = _made(own, image, label, own.seeds(number, range(batch)), number)
        new = sorted(set(mask.unique().tolist()) - allowed - {0})
        require(
            not new,
            f"{name} gives the label values {new[:5]}, which it did not have; move labels by nearest neighbour, never smooth them",
        )
    for row in range(batch):
        alone = _made(own, image[row : row + 1], label[row : row + 1], seeds[row : row + 1], 2)
        _same(
            name,
            (first[0][row : row + 1], first[1][row : row + 1]),
            alone,
            "for a sample alone than for the same sample and seed in a batch (use seeds[row] for row, and no sums over the batch)",
        )
    if drawn:
        differs = any(
            not _equal(first, _made(own, image, label, own.seeds(number, range(batch)), 0))
            for number in range(1, TRIES)
        )
        require(
            differs,
            f"{name} gives the same for {TRIES} different seeds: does it use them? If nothing is random about it, check it with "
            "drawn=False",
        )


def _made(own: OwnAugmentation, image: Tensor, label: Tensor, seeds: list[int], world: int) -> tuple[Tensor, Tensor]:
    """The result for ``seeds``, with the global generators in state ``world``."""
    torch.manual_seed(world)
    np.random.seed(world)  # noqa: NPY002
    random.seed(world)
    try:
        return own.checked(image.clone(), label.clone(), seeds)
    except SettingError as error:
        raise ContractError(str(error)) from error


def _equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.allclose(a[0], b[0], rtol=1e-4, atol=1e-5) and torch.equal(a[1], b[1])


def _same(name: str, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], when: str) -> None:
    require(
        _equal(a, b),
        f"{name} gives another result {when}; draw every random number from a generator of the sample's seed: "
        "torch.Generator().manual_seed(seed) or numpy.random.default_rng(seed), not from the global ones",
    )
