"""The two steps of a segspeed bundle that MONAI has no transform for. This file travels in the bundle as scripts/transforms.py, so
it imports MONAI, numpy, scipy and torch alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.data import MetaTensor
from monai.transforms import InvertibleTransform, MapTransform

AIR_HU = -1024.0  # of CT nothing is kept below: padding of -32768 would ring through a spline


def above_minimum(image: torch.Tensor) -> torch.Tensor:
    """Which voxels of ``(C, D, H, W)`` are content: those above their channel's minimum. A constant volume is kept whole."""
    values = image.as_tensor() if isinstance(image, MetaTensor) else image
    inside = values > values.amin((1, 2, 3), keepdim=True)
    return inside if bool(inside.any()) else torch.ones_like(inside)


class OntoPlan(MapTransform, InvertibleTransform):
    """``(C, D, H, W)`` of any spacing to the spacing and the intensities that the network was trained on.

    Cubic splines with grid corners aligned, linear along the coarse axis; CT channels are clipped and scaled by constants, the
    others by their own mean and standard deviation before resampling. The inverse brings logits ``(K, D, H, W)`` back linearly.
    ``spacing`` is mm, (D, H, W); ``ct`` holds low, high, mean and std of each CT channel, None for others.
    """

    def __init__(
        self,
        keys: Sequence[str] | str,
        spacing: Sequence[float],
        ct: Sequence[Mapping[str, float] | None],
        coarse_axis: int | None = None,
    ) -> None:
        super().__init__(keys)
        self.spacing, self.ct, self.coarse_axis = tuple(spacing), list(ct), coarse_axis

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        found = dict(data)
        for key in self.key_iterator(found):
            image = found[key]
            raw = image.as_tensor().cpu().numpy().astype(np.float32)
            own = np.sqrt((np.asarray(image.affine)[:3, :3] ** 2).sum(0))
            shape = tuple(
                max(1, round(n * float(s) / t)) for n, s, t in zip(raw.shape[1:], own, self.spacing, strict=True)
            )
            made = np.stack([self._channel(channel, n, shape) for n, channel in enumerate(raw)])
            result = MetaTensor(torch.from_numpy(made), meta=image.meta, applied_operations=image.applied_operations)
            self.push_transform(result, extra_info={"size": list(raw.shape[1:])})
            found[key] = result
        return found

    def _channel(self, channel: np.ndarray, number: int, shape: tuple[int, ...]) -> np.ndarray:
        ct = self.ct[number]
        if ct is not None:
            channel = np.maximum(channel, np.float32(AIR_HU))
            low, high, mean, std = ct["low"], ct["high"], ct["mean"], ct["std"]
        else:
            mean, std = float(channel.mean(dtype=np.float64)), float(channel.std(dtype=np.float64))
            low, high, std = float(channel.min()), float(channel.max()), std if std > 1e-8 else 1.0
        return (np.clip(self._resampled(channel, shape), low, high) - np.float32(mean)) / np.float32(std)

    def _resampled(self, channel: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if channel.shape == shape:
            return channel
        if self.coarse_axis is None:
            return zoom(channel, shape, 3)
        axis = self.coarse_axis
        plane = tuple(channel.shape[a] if a == axis else n for a, n in enumerate(shape))
        if plane != channel.shape:  # slice by slice: no spline runs across thick slices
            flat = tuple(n for a, n in enumerate(shape) if a != axis)
            channel = np.stack([zoom(part, flat, 3) for part in np.moveaxis(channel, axis, 0)], axis)
        return zoom(channel, shape, 1)

    def inverse(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        found = dict(data)
        for key in self.key_iterator(found):
            logits = found[key]
            size = self.pop_transform(logits)["extra_info"]["size"]
            back = F.interpolate(logits.as_tensor()[None].float(), size=size, mode="trilinear", align_corners=False)[0]
            found[key] = MetaTensor(back, meta=logits.meta, applied_operations=logits.applied_operations)
        return found


def zoom(array: np.ndarray, shape: tuple[int, ...], order: int) -> np.ndarray:
    """``array`` resampled to ``shape`` by splines of an order, grid corners aligned."""
    from scipy import ndimage

    if array.shape == shape:
        return array
    ratio = np.array(array.shape) / np.array(shape)
    return ndimage.affine_transform(
        array, ratio, 0.5 * ratio - 0.5, output_shape=shape, order=order, mode="nearest", output=np.float32
    )


class LabelValues(MapTransform):
    """Logits ``(K, D, H, W)`` to a label map ``(1, D, H, W)`` in the values of the training data's files.

    ``values[n]`` is the value of outcome n: of the largest logit, or with ``regions`` of the set of regions whose logit is
    over 0, the set as a number with one bit a region.
    """

    def __init__(self, keys: Sequence[str] | str, values: Sequence[int], regions: bool = False) -> None:
        super().__init__(keys)
        self.values, self.regions = list(values), regions

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        found = dict(data)
        for key in self.key_iterator(found):
            logits = found[key]
            if self.regions:
                weight = 2 ** torch.arange(logits.shape[0], device=logits.device)
                outcome = ((logits.as_tensor() > 0).long() * weight.view(-1, 1, 1, 1)).sum(0, keepdim=True)
            else:
                outcome = logits.as_tensor().argmax(0, keepdim=True)
            table = torch.tensor(self.values, device=logits.device)
            found[key] = MetaTensor(table[outcome], meta=logits.meta, applied_operations=logits.applied_operations)
        return found


def volumes(folder: str, channels: int) -> list[dict[str, Any]]:
    """The cases of a folder as ``{"image": path or paths}``: CASE_0000.nii.gz, CASE_0001.nii.gz ... a channel where there are
    such files, else one file a case."""
    import re
    from pathlib import Path

    files = [p for p in sorted(Path(folder).iterdir()) if re.search(r"(?i)\.nii(\.gz)?$", p.name)]
    firsts = [p for p in files if re.search(r"(?i)_0000\.nii(\.gz)?$", p.name)]
    if not files:
        raise ValueError(f"{folder} holds no NIfTI files")
    if channels == 1 or not firsts:
        return [{"image": str(p)} for p in files]
    name = [
        re.sub(r"(?i)_0000(\.nii(\.gz)?)$", r"_{:04d}\1", str(p).replace("{", "{{").replace("}", "}}")) for p in firsts
    ]
    return [{"image": [n.format(c) for c in range(channels)]} for n in name]
