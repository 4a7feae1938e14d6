"""The way of a batch on the device: transfer, normalisation, augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from segspeed.augment.draw import draw
from segspeed.augment.intensity import normalise
from segspeed.augment.torch_backend import augment
from segspeed.config import AugmentConfig
from segspeed.loader.extra import OwnAugmentation
from segspeed.speed.meter import StepMeter
from segspeed.types import Batch, Shape3, Triple


@dataclass(frozen=True)
class DeviceStage:
    """Raw batches in, training batches out, on ``device``. All random numbers come from the samples' own streams."""

    device: torch.device
    patch: Shape3
    spacing: Triple
    seed: int
    augment: AugmentConfig | None
    swap_on_flip: Sequence[tuple[int, int]] = ()
    channels_last: bool = False
    finished: bool = False  # the loader has normalised and augmented already
    meter: StepMeter | None = None
    extra: Sequence[OwnAugmentation] = ()  # the user's, after the built-in one

    def __call__(self, batch: Batch) -> Batch:
        meter = self.meter or StepMeter(self.device)
        loaded = batch
        with meter("transfer"):
            batch = batch.to(self.device)
        image, label = batch.image, batch.label
        with meter("augmentation"):
            if self.augment is not None and not self.finished:
                params = draw(self.augment, seed=self.seed, indices=batch.index.tolist(), channels=image.shape[1])
                image, label = augment(
                    image, label, params, patch=self.patch, spacing=self.spacing, swap_on_flip=self.swap_on_flip,
                    norm=batch.norm,
                )  # fmt: skip
            elif not self.finished:
                image = normalise(image, batch.norm)
            if self.extra:  # they may write into what they get; the batch of the loader may be asked for again
                image, label = _apart(image, loaded.image), _apart(label, loaded.label)
            for own in self.extra:
                image, label = own(image, label, self.seed, batch.index.tolist())
        if self.channels_last:
            image = image.contiguous(memory_format=torch.channels_last_3d)
        return Batch(image, label, batch.norm, batch.index, batch.cases)


def _apart(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``tensor``, copied where it shares memory with ``source``."""
    shared = tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return tensor.clone() if shared else tensor
