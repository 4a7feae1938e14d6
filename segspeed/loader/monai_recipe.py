"""The recipe that most people have today: MONAI's dictionary transforms, from NIfTI files to augmented patches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai import transforms as mt
from monai.data import MetaTensor

from segspeed.config import AugmentConfig
from segspeed.data.labels import index_of_values
from segspeed.types import LabelTable, Shape3, Triple

BOTH, IMAGE, LABEL = ("image", "label"), ("image",), ("label",)
MODES = ("bilinear", "nearest")


def recipe(
    *,
    labels: LabelTable,
    spacing: Triple,
    patch: Shape3,
    samples: int,
    foreground: float,
    augment: AugmentConfig,
    swap_on_flip: Sequence[tuple[int, int]] = (),
) -> mt.Compose:
    """Load, orient to RAS, resample, crop to content, normalise, cut ``samples`` patches, augment.

    Takes ``{"image": [path a channel], "label": path, "norm": (C, 4)}``; arrays are ``(C, i, j, k)`` as in MONAI, so that
    ``spacing`` and ``patch``, which are (D, H, W) in mm and voxels, are turned round. What comes before the cut is deterministic.
    """
    size = patch[::-1]
    return mt.Compose(
        [
            # the reader by name: MONAI makes all of them otherwise, and some warn of packages that NIfTI does not need
            mt.LoadImaged(BOTH, reader="NibabelReader", image_only=True),
            mt.EnsureChannelFirstd(BOTH),
            mt.Orientationd(BOTH, axcodes="RAS", labels=None),
            ToClassIndicesd(labels),
            mt.Spacingd(BOTH, pixdim=spacing[::-1], mode=MODES),
            mt.CropForegroundd(BOTH, source_key="image", select_fn=above_minimum, allow_smaller=True),
            Normalised(),
            mt.SpatialPadd(BOTH, spatial_size=size),
            mt.RandCropByPosNegLabeld(
                BOTH, label_key="label", spatial_size=size, pos=foreground, neg=1 - foreground, num_samples=samples
            ),
            *random_transforms(augment, axes=(2, 1, 0), swap_on_flip=swap_on_flip),
        ]
    )


def random_transforms(
    config: AugmentConfig, axes: tuple[int, int, int] = (0, 1, 2), swap_on_flip: Sequence[tuple[int, int]] = ()
) -> list[Any]:
    """MONAI's transforms with the probabilities and ranges of ``config``; ``axes`` says where D, H and W lie in the arrays.

    MONAI rotates in voxels, not in mm, and draws one angle and one factor an axis.
    """
    c = config
    place = np.argsort(axes)
    angles = np.radians(c.rotation.degrees)[place]
    spatial = 1 - (1 - c.rotation.probability) * (1 - c.scale.probability)  # one resampling for both, as in ours
    zoom = (c.scale.range[0] - 1, c.scale.range[1] - 1)
    mirrors = [
        RandMirrord(p, axes[axis], swap_on_flip if axis == 2 else ()) for axis, p in enumerate(c.flip.probability)
    ]
    return [
        mt.RandAffined(
            BOTH, prob=spatial, rotate_range=tuple(angles), scale_range=(zoom,) * 3, mode=MODES, padding_mode="zeros"
        ),
        *mirrors,
        mt.RandGaussianNoised(IMAGE, prob=c.noise.probability, std=c.noise.variance[1] ** 0.5),
        mt.RandGaussianSmoothd(IMAGE, *(c.blur.sigma,) * 3, prob=c.blur.probability * c.blur.channel_probability),
        mt.RandScaleIntensityd(IMAGE, factors=_around_one(c.brightness.range), prob=c.brightness.probability),
        mt.RandScaleIntensityFixedMeand(
            IMAGE, factors=_around_one(c.contrast.range), preserve_range=True, prob=c.contrast.probability
        ),
        mt.RandSimulateLowResolutiond(
            IMAGE,
            prob=c.low_resolution.probability * c.low_resolution.channel_probability,
            zoom_range=c.low_resolution.zoom,
        ),
        mt.RandAdjustContrastd(IMAGE, prob=c.gamma.probability, gamma=c.gamma.range, retain_stats=True),
    ]


def random_part(augment: AugmentConfig, patch: Shape3, swap_on_flip: Sequence[tuple[int, int]] = ()) -> mt.Compose:
    """Normalisation and the random transforms on ``{"image": (C, D, H, W), "label": (1, D, H, W), "norm": (C, 4)}``, cut to
    ``patch`` in the end."""
    return mt.Compose(
        [
            Normalised(),
            *random_transforms(augment, swap_on_flip=swap_on_flip),
            mt.CenterSpatialCropd(BOTH, roi_size=patch),
        ]
    )


def _around_one(factors: tuple[float, float]) -> tuple[float, float]:
    """MONAI's intensity factors are what is added to 1."""
    return (factors[0] - 1, factors[1] - 1)


def above_minimum(image: torch.Tensor) -> torch.Tensor:
    """Voxels of ``image (C, i, j, k)`` above their channel's minimum: everything but padding."""
    return image > image.amin((1, 2, 3), keepdim=True)


def class_indices(label: torch.Tensor, labels: LabelTable) -> torch.Tensor:
    """Values of the file (any shape) into class indices (int16); other values become background."""
    out = torch.zeros(label.shape, dtype=torch.int16)
    for value, index in index_of_values(labels).items():
        out[(label - value).abs() < 0.5] = index
    return out


class ToClassIndicesd(mt.MapTransform):
    """`class_indices` of the label, which keeps its affine."""

    def __init__(self, labels: LabelTable) -> None:
        super().__init__(LABEL)
        self.labels = labels

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        label = data["label"]
        return {**data, "label": MetaTensor(class_indices(label.as_tensor(), self.labels), meta=label.meta)}


class Normalised(mt.MapTransform):
    """The constants under "norm" ``(C, 4)``: clip, subtract the mean, divide by the standard deviation."""

    def __init__(self) -> None:
        super().__init__(IMAGE)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        low, high, mean, std = torch.as_tensor(data["norm"])[..., None, None, None].unbind(1)
        return {**data, "image": (data["image"].clamp(low, high) - mean) / std}


class RandMirrord(mt.MapTransform, mt.RandomizableTransform):
    """MONAI's RandFlipd along one axis, with the classes of each pair exchanged where it flips."""

    def __init__(self, probability: float, axis: int, swap: Sequence[tuple[int, int]] = ()) -> None:
        mt.MapTransform.__init__(self, BOTH)
        mt.RandomizableTransform.__init__(self, probability)
        self.flip, self.swap = mt.Flip(axis), tuple(swap)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        self.randomize(None)
        if not self._do_transform:
            return dict(data)
        label = self.flip(data["label"])
        swapped = label.clone()
        for a, b in self.swap:
            swapped[label == a], swapped[label == b] = b, a
        return {**data, "image": self.flip(data["image"]), "label": swapped}
