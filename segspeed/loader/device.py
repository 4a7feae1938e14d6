"""The way of a batch on the device: transfer, normalisation, augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from segspeed.augment.draw import draw
from segspeed.augment.intensity import normalise
from segspeed.augment.torch_backend import augment
from segspeed.config import AugmentConfig
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

    def __call__(self, batch: Batch) -> Batch:
        meter = self.meter or StepMeter(self.device)
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
        if self.channels_last:
            image = image.contiguous(memory_format=torch.channels_last_3d)
        return Batch(image, label, batch.norm, batch.index, batch.cases)
