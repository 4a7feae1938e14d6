"""Patches made the ordinary way: MONAI's dictionary transforms in CPU processes, from NIfTI files, MONAI's CacheDataset, or the
memory-mapped cache.

The honest baseline to measure the other loaders by, and the door for those who bring their own `monai.transforms.Compose`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from segspeed.config import AugmentConfig
from segspeed.data.sampling import PatchSampler, epoch_order
from segspeed.loader.torch_loader import PatchDataset, TorchLoader
from segspeed.streams import AUGMENTATION, stream
from segspeed.types import Batch, Case, DataError, LabelTable, SettingError, Shape3, Triple

MOST_SAMPLES = 4  # patches cut from a volume once it is decoded, as in MONAI's tutorials


class MonaiLoader(TorchLoader):
    """Endless augmented batches from sample ``first`` on; the same for any number of workers."""

    augments = True  # the batches are normalised and augmented already

    def __init__(
        self,
        sampler: PatchSampler,
        *,
        cases: Sequence[Case],
        labels: LabelTable,
        batch: int,
        patch: Shape3,
        spacing: Triple,
        augment: AugmentConfig,
        first: int = 0,
        workers: int = 1,
        prefetch: int = 4,
        pin_memory: bool = False,
        timeout: float = 60.0,
        swap_on_flip: Sequence[tuple[int, int]] = (),
        transforms: Callable[[Any], Any] | None = None,
        samples: int | None = None,
        cache: Literal["none", "ram", "mmap"] = "none",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """``transforms`` takes {"image": [paths], "label": path, "norm": (C, 4) array, "case": id} and gives a dictionary,
        or a list of ``samples`` of them, with image ``(C, i, j, k)`` and label ``(1, i, j, k)`` in the file's values;
        None takes `segspeed.loader.monai_recipe.recipe`. ``samples`` patches come of a volume (None: the largest divisor
        of the batch up to 4). ``cache`` "ram" keeps what the deterministic transforms made (MONAI's CacheDataset); "mmap" reads
        patches from the memory-mapped cache and leaves MONAI its random transforms, so that it goes with the recipe only.

        Raises SettingError when these do not go together.
        """
        if cache not in ("none", "ram", "mmap"):
            raise SettingError(
                f"loader.cache={cache}: choose none (decode each time), ram (MONAI's CacheDataset) or mmap"
            )
        if cache == "mmap" and (transforms is not None or samples is not None):
            raise SettingError(
                "loader.cache=mmap cuts patches itself: it takes no loader.transforms and no loader.samples"
            )
        per_volume = samples or max(n for n in range(1, MOST_SAMPLES + 1) if batch % n == 0)
        if batch % per_volume:
            raise SettingError(
                f"loader.samples={per_volume} does not divide the batch of {batch} patches (plan.batch); "
                "a volume would be decoded for two batches"
            )
        own = transforms is None
        if cache == "mmap":
            from segspeed.loader.monai_recipe import random_part

            self._dataset: Dataset[Batch] = MonaiPatches(sampler, random_part(augment, patch, swap_on_flip))
        elif own:
            from segspeed.loader.monai_recipe import recipe

            transforms = recipe(
                labels=labels, spacing=spacing, patch=patch, samples=per_volume, foreground=sampler.foreground,
                augment=augment, swap_on_flip=swap_on_flip,
            )  # fmt: skip
        if cache != "mmap":
            own_labels = None if own else labels
            self._dataset = MonaiDataset(sampler, cases, own_labels, patch, per_volume, transforms, cache)
        super().__init__(
            sampler, batch=batch, first=first, workers=workers, prefetch=prefetch, pin_memory=pin_memory, timeout=timeout,
            rank=rank, ranks=ranks,
        )  # fmt: skip

    def dataset(self) -> Dataset[Batch]:
        """What the loader's processes read batches from."""
        return self._dataset

    def _cases(self, samples: Sequence[int]) -> list[str]:
        if not isinstance(self._dataset, MonaiDataset):
            return super()._cases(samples)
        visits = {i // self._dataset.samples for i in samples}
        return sorted({self._dataset.cases[self._dataset.number(v)].id for v in visits})


class MonaiPatches(PatchDataset):
    """Sample numbers in, one augmented `Batch` on the CPU out: patches from the memory-mapped cache, through MONAI's random
    transforms, whose random numbers are a function of (seed, sample)."""

    def __init__(self, sampler: PatchSampler, transforms: Any) -> None:
        super().__init__(sampler)
        self.transforms = transforms

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        raw = super().__getitems__(indices)
        made = [self._augmented(raw, row, index) for row, index in enumerate(indices)]
        images, labels = zip(*made, strict=True)
        return Batch(torch.stack(images), torch.stack(labels), raw.norm, raw.index, raw.cases)

    def _augmented(self, raw: Batch, row: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """image ``(C, D, H, W)`` and label ``(D, H, W)`` of one patch."""
        self.transforms.set_random_state(int(stream(self.sampler.seed, index, AUGMENTATION).integers(2**32)))
        found = self.transforms({"image": raw.image[row], "label": raw.label[row][None], "norm": raw.norm[row]})
        image, label = (torch.as_tensor(found[key]) for key in ("image", "label"))
        return _plain(image).float().contiguous(), _plain(label)[0].to(torch.int16).contiguous()


class MonaiDataset(Dataset[Batch]):
    """Sample numbers in, one augmented `Batch` on the CPU out. Visit v takes ``samples`` patches of one volume; its random
    numbers are a function of (seed, v)."""

    def __init__(
        self,
        sampler: PatchSampler,
        cases: Sequence[Case],
        labels: LabelTable | None,
        patch: Shape3,
        samples: int,
        transforms: Any,
        cache: str,
    ) -> None:
        from monai.data import CacheDataset
        from monai.data import Dataset as MonaiPlain

        self.sampler, self.cases, self.labels, self.patch, self.samples = sampler, cases, labels, patch, samples
        self.transforms = transforms
        data = [
            {"image": [str(p) for p in dict.fromkeys(c.images)], "label": str(c.label), "norm": norm, "case": c.id}
            for c, norm in zip(cases, sampler.norms, strict=True)
        ]
        if cache == "ram":
            self.volumes: Any = CacheDataset(data, transforms, num_workers=None, progress=False)
        else:
            self.volumes = MonaiPlain(data, transforms)

    def number(self, visit: int) -> int:
        """The case of a visit; every case comes once an epoch."""
        return epoch_order(self.sampler.seed, len(self.cases), visit // len(self.cases))[visit % len(self.cases)]

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        visits = dict.fromkeys(i // self.samples for i in indices)
        made = {v: self._visit(v) for v in visits}
        numbers = [self.number(i // self.samples) for i in indices]
        pairs = [made[i // self.samples][i % self.samples] for i in indices]
        return Batch(
            torch.stack([image for image, _ in pairs]),
            torch.stack([label for _, label in pairs]),
            torch.from_numpy(np.stack([self.sampler.norms[n] for n in numbers])),
            torch.tensor(list(indices)),
            tuple(self.cases[n].id for n in numbers),
        )

    def _visit(self, visit: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        number = self.number(visit)
        seed = int(stream(self.sampler.seed, visit, AUGMENTATION).integers(2**32))
        if hasattr(self.volumes.transform, "set_random_state"):
            self.volumes.transform.set_random_state(seed)
        try:
            found = self.volumes[number]
        except Exception as error:  # anything may go wrong in somebody's transforms; it is told with its case
            raise DataError(f"case {self.cases[number].id}: MONAI's transforms failed: {_innermost(error)}") from error
        patches = list(found) if isinstance(found, (list, tuple)) else [found]
        if len(patches) != self.samples:
            raise SettingError(
                f"the transforms give {len(patches)} patches a volume; set loader.samples={len(patches)}"
            )
        return [self._pair(p, self.cases[number].id) for p in patches]

    def _pair(self, patch: Any, case: str) -> tuple[torch.Tensor, torch.Tensor]:
        """image ``(C, D, H, W)`` float32 and label ``(D, H, W)`` int16 class indices of one patch in MONAI's axes."""
        image, label = (torch.as_tensor(patch[key]) for key in ("image", "label"))
        if tuple(image.shape[1:]) != self.patch[::-1] or label.shape[1:] != image.shape[1:]:
            raise SettingError(
                f"case {case}: the transforms give image {list(image.shape)} and label {list(label.shape)}; the plan's patch "
                f"{list(self.patch)} (D, H, W) is {list(self.patch[::-1])} in MONAI's axes. Set plan.patch or the transforms"
            )
        if self.labels is not None:
            from segspeed.loader.monai_recipe import class_indices

            label = class_indices(label, self.labels)
        return _turned(image).float(), _turned(label)[0].to(torch.int16)


def _turned(volume: torch.Tensor) -> torch.Tensor:
    """``(C, i, j, k)`` to ``(C, D, H, W)``, without MONAI's wrapping."""
    return _plain(volume).permute(0, 3, 2, 1).contiguous()


def _plain(volume: torch.Tensor) -> torch.Tensor:
    """Without MONAI's wrapping."""
    plain: torch.Tensor = volume.as_tensor() if hasattr(volume, "as_tensor") else volume
    return plain


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
