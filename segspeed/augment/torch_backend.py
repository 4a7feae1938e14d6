"""Augment a batch on the device it lies on. In plain torch there is no loop over the samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from segspeed.augment import intensity
from segspeed.augment.draw import Params
from segspeed.augment.spatial import spatial
from segspeed.config import AugmentConfig
from segspeed.types import Shape3, Triple


def source_shape(patch: Shape3, config: AugmentConfig) -> Shape3:
    """Voxels to read for a patch: ``margin`` times as many an axis, so that a rotation finds content in the corners."""
    d, h, w = (round(n * config.margin) for n in patch)
    return (d, h, w)


def augment(
    image: Tensor,
    label: Tensor,
    params: Params,
    *,
    patch: Shape3,
    spacing: Triple,
    swap_on_flip: Sequence[tuple[int, int]] = (),
    norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise by ``norm (B, C, 4)`` if given, then apply ``params``, to ``image (B, C, D, H, W)`` float32 and
    ``label (B, D, H, W)``; the inputs are left as they are. Returns both with sides ``patch``. ``spacing`` in mm.

    Order: rotation, scale and flip; noise; blur; brightness; contrast; low resolution; gamma (nnU-Net's order). Tensors in
    RAM take compiled loops (`segspeed.augment.cpu_backend`), others plain torch.
    """
    if compiled(image):
        from segspeed.augment.cpu_backend import augment_on_cpu

        return augment_on_cpu(
            image, label, params, norm=norm, patch=patch, spacing=spacing, swap_on_flip=swap_on_flip
        )  # fmt: skip
    if norm is not None:
        image = intensity.normalise(image, norm)
    out, label = spatial(image, label, params, patch, spacing, swap_on_flip)
    batch, channels = out.shape[:2]
    rows = out.view(batch * channels, *patch)
    intensity.add_noise(out, params.noise, params.noise_seed)
    intensity.blur(rows, params.blur.ravel())
    intensity.multiply(rows, params.brightness.ravel())
    intensity.contrast(rows, params.contrast.ravel())
    intensity.low_resolution(rows, params.zoom.ravel())
    intensity.gamma(rows, np.repeat(params.gamma, channels), np.repeat(params.invert, channels))
    return out, label


def compiled(image: Tensor) -> bool:
    """Whether the compiled loops can work on ``image (B, C, D, H, W)``."""
    return image.device.type == "cpu"
