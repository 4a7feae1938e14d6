"""The user's own augmentation, after the built-in one, on the device: whatever loader made the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from segspeed.loader.torch_loader import worker_death
from segspeed.speed.oom import is_out_of_memory
from segspeed.streams import OWN_AUGMENTATION, stream
from segspeed.types import SettingError, first_line


@dataclass
class OwnAugmentation:
    """One component of ``augment.extra``: ``call`` takes image ``(B, C, D, H, W)`` float32, label ``(B, D, H, W)`` integer and
    B seeds (whole numbers below 2^63), and returns image and label of the same shapes and types.

    A sample's seed is a function of (seed of the run, number of the sample, ``place`` among the components), so that a resumed
    run, another loader and another number of workers give the same.
    """

    name: str
    call: Callable[[Tensor, Tensor, list[int]], Any]
    place: int = 0
    _unread: Tensor | None = field(default=None, repr=False)  # on a GPU: whether the last image was finite

    def seeds(self, seed: int, indices: Sequence[int]) -> list[int]:
        """One for each of the samples with these numbers."""
        return [int(stream(seed, int(i), OWN_AUGMENTATION).integers(2**63, size=self.place + 1)[-1]) for i in indices]

    def __call__(self, image: Tensor, label: Tensor, seed: int, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Both as the component returns them; it may write into what it is given.

        Raises SettingError that names the component where it fails, or returns what no network can be trained on. On a GPU
        values that are not finite are told one batch later, since asking at once would make the device wait.
        """
        return self.checked(image, label, self.seeds(seed, indices))

    def checked(self, image: Tensor, label: Tensor, seeds: list[int]) -> tuple[Tensor, Tensor]:
        """Image ``(B, C, D, H, W)`` and label ``(B, D, H, W)`` or ``(B, R, D, H, W)`` changed with given seeds, and held
        against what they were. Raises SettingError."""
        try:
            made = self.call(image, label, seeds)
        except Exception as error:  # anybody's code; what is not its own fault is told elsewhere
            if is_out_of_memory(error) or (isinstance(error, RuntimeError) and worker_death(error)):
                raise
            raise SettingError(
                f"augment.extra {self.name} failed on a batch of image {list(image.shape)} and label {list(label.shape)} "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error
        if not (isinstance(made, (tuple, list)) and len(made) == 2 and all(isinstance(t, Tensor) for t in made)):
            raise SettingError(
                f"augment.extra {self.name} returned {type(made).__name__}; it returns (image, label), two tensors"
            )
        for what, before, after in zip(("image", "label"), (image, label), made, strict=True):
            self._same(what, before, after)
        self._finite(torch.isfinite(made[0]).all())
        return made[0], made[1]

    def _same(self, what: str, before: Tensor, after: Tensor) -> None:
        for told, was, now in (
            ("shape", list(before.shape), list(after.shape)),
            ("type", before.dtype, after.dtype),
            ("device", before.device, after.device),
        ):
            if was != now:
                raise SettingError(
                    f"augment.extra {self.name} returned the {what} with {told} {now}; it was {was}, and has to stay so"
                )

    def _finite(self, finite: Tensor) -> None:
        if finite.device.type == "cuda":
            finite, self._unread = self._unread if self._unread is not None else torch.tensor(True), finite
        if not finite:
            raise SettingError(
                f"augment.extra {self.name} returned an image with values that are not finite (nan, inf); look at divisions "
                "by zero, and at roots and powers of negative intensities: images are normalised about 0"
            )
