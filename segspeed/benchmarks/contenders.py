"""Ways to make augmented batches, each from the same patches, transforms, probabilities and ranges.

Every maker returns a function that gives one batch a call. The peers get their patches from our sampler and cache, so that
what is compared is the augmentation and what surrounds it, not how a volume is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from segspeed.augment.intensity import normalise
from segspeed.config import AugmentConfig
from segspeed.data.sampling import PatchSampler
from segspeed.loader.device import DeviceStage
from segspeed.types import Shape3

CPU = torch.device("cpu")
SPACING = (1.0, 1.0, 1.0)
NextBatch = Callable[[], object]


def segspeed_torch(sampler: PatchSampler, config: AugmentConfig, patch: Shape3, batch: int, workers: int) -> NextBatch:
    """Our DataLoader, then the batched torch augmentation."""
    from segspeed.loader.torch_loader import TorchLoader

    stage = DeviceStage(CPU, patch, SPACING, 0, config)
    batches = iter(TorchLoader(sampler, batch=batch, workers=workers))
    return lambda: stage(next(batches))


def segspeed_dali(sampler: PatchSampler, config: AugmentConfig, patch: Shape3, batch: int, workers: int) -> NextBatch:
    """Our DALI graph, on the CPU."""
    from segspeed.loader.dali_loader import DaliLoader

    loader = DaliLoader(
        sampler, batch=batch, augment=config, patch=patch, spacing=SPACING, seed=0, device=CPU, workers=workers
    )
    batches = iter(loader)
    return lambda: next(batches)


def monai(sampler: PatchSampler, config: AugmentConfig, patch: Shape3, batch: int, workers: int) -> NextBatch:
    """MONAI's dictionary transforms in a DataLoader."""
    from monai.transforms import Compose

    from segspeed.loader.monai_recipe import random_transforms

    compose = Compose(random_transforms(config))

    def one(image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = compose({"image": image, "label": label[None]})
        return torch.as_tensor(out["image"]), torch.as_tensor(out["label"])[0]

    return _each_sample(sampler, one, batch, workers)


def batchgenerators(sampler: PatchSampler, config: AugmentConfig, patch: Shape3, batch: int, workers: int) -> NextBatch:
    """batchgeneratorsv2, the transforms of nnU-Net v2."""
    from batchgeneratorsv2.transforms.intensity.brightness import MultiplicativeBrightnessTransform
    from batchgeneratorsv2.transforms.intensity.contrast import BGContrast, ContrastTransform
    from batchgeneratorsv2.transforms.intensity.gamma import GammaTransform
    from batchgeneratorsv2.transforms.intensity.gaussian_noise import GaussianNoiseTransform
    from batchgeneratorsv2.transforms.noise.gaussian_blur import GaussianBlurTransform
    from batchgeneratorsv2.transforms.spatial.low_resolution import SimulateLowResolutionTransform
    from batchgeneratorsv2.transforms.spatial.mirroring import MirrorTransform
    from batchgeneratorsv2.transforms.spatial.spatial import SpatialTransform
    from batchgeneratorsv2.transforms.utils.compose import ComposeTransforms
    from batchgeneratorsv2.transforms.utils.random import RandomTransform

    c = config
    angle = float(np.radians(max(c.rotation.degrees)))
    compose = ComposeTransforms(
        [
            SpatialTransform(
                patch, 0, random_crop=False, p_rotation=c.rotation.probability, rotation=(-angle, angle),
                p_scaling=c.scale.probability, scaling=c.scale.range, p_synchronize_scaling_across_axes=1,
                bg_style_seg_sampling=False, mode_seg="nearest",
            ),
            RandomTransform(GaussianNoiseTransform(c.noise.variance, 1, True), c.noise.probability),
            RandomTransform(
                GaussianBlurTransform(c.blur.sigma, False, False, c.blur.channel_probability, benchmark=True),
                c.blur.probability,
            ),
            RandomTransform(
                MultiplicativeBrightnessTransform(BGContrast(c.brightness.range), False, 1), c.brightness.probability
            ),
            RandomTransform(ContrastTransform(BGContrast(c.contrast.range), True, False, 1), c.contrast.probability),
            RandomTransform(
                SimulateLowResolutionTransform(
                    c.low_resolution.zoom, False, True, (), None, c.low_resolution.channel_probability
                ),
                c.low_resolution.probability,
            ),
            RandomTransform(
                GammaTransform(BGContrast(c.gamma.range), c.gamma.invert_probability, False, 1, 1), c.gamma.probability
            ),
            MirrorTransform((0, 1, 2)),
        ]
    )  # fmt: skip

    def one(image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = compose(image=image, segmentation=label[None])
        return out["image"], out["segmentation"][0]

    return _each_sample(sampler, one, batch, workers)


class _Samples(torch.utils.data.IterableDataset):
    """Single patches without end, transformed one by one, as the peers do it."""

    def __init__(self, sampler: PatchSampler, transform: Callable[..., Any]) -> None:
        self.sampler, self.transform = sampler, transform

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        index, step = (info.id, info.num_workers) if info else (0, 1)
        while True:
            number, image, label = self.sampler.read(index)
            norm = torch.from_numpy(self.sampler.norms[number])
            volume = normalise(torch.from_numpy(image)[None], norm[None])[0]
            yield self.transform(volume, torch.from_numpy(label.astype(np.int16)))
            index += step


def _each_sample(sampler: PatchSampler, transform: Callable[..., Any], batch: int, workers: int) -> NextBatch:
    loader = torch.utils.data.DataLoader(
        _Samples(sampler, transform), batch_size=batch, num_workers=workers, prefetch_factor=2 if workers else None
    )
    batches = iter(loader)
    return lambda: next(batches)


CONTENDERS: dict[str, Callable[[PatchSampler, AugmentConfig, Shape3, int, int], NextBatch]] = {
    "segspeed torch": segspeed_torch,
    "segspeed dali": segspeed_dali,
    "monai": monai,
    "batchgeneratorsv2": batchgenerators,
}
