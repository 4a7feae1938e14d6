"""A U-Net that never convolves the finest grid: blocks of voxels become channels on the way in and voxels again on the way out."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from segspeed.model.networks import as_heads, dynunet
from segspeed.types import Plan, Shape3


class ShuffleUNet(nn.Module):
    """``inner`` on blocks of voxels, with a small correction at full resolution.

    In a U-Net whose width doubles a level, the finest level takes two thirds of the arithmetic and most of the memory. Here the
    voxels of a block (2 x 2 x 2, or as the Plan's first stride) are channels of one coarser voxel, so that nothing of the image
    is lost, and the logits of a block are put back in place (Shi et al. 2016, in 3D). ``refine`` channels look once more at
    image and logits voxel by voxel, which smooths the seams between blocks.
    """

    def __init__(self, inner: nn.Module, block: Shape3, channels: int, classes: int, refine: int) -> None:
        super().__init__()
        self.inner, self.block = inner, block
        self.refine: nn.Module | None = None
        if refine:
            last = nn.Conv3d(refine, classes, 1)
            nn.init.zeros_(last.weight)  # begins as no correction at all
            assert last.bias is not None
            nn.init.zeros_(last.bias)
            self.refine = nn.Sequential(
                nn.Conv3d(channels + classes, refine, 3, padding=1), nn.LeakyReLU(0.01, inplace=True), last
            )

    def forward(self, x: Tensor) -> Any:
        """``(B, C, D, H, W)`` -> logits ``(B, K, D, H, W)``; in training a list of them if ``inner`` gives one."""
        heads = [to_voxels(head, self.block) for head in as_heads(self.inner(to_channels(x, self.block)))]
        if self.refine is not None:
            heads[0] = heads[0] + self.refine(torch.cat([x.to(heads[0].dtype), heads[0]], 1))
        return heads if len(heads) > 1 else heads[0]


def to_channels(x: Tensor, block: Shape3) -> Tensor:
    """``(B, C, D, H, W)`` -> ``(B, C d h w, D / d, H / h, W / w)`` for blocks of ``(d, h, w)`` voxels."""
    n, c, *sides = x.shape
    (d, h, w), (big_d, big_h, big_w) = block, (side // b for side, b in zip(sides, block, strict=True))
    x = x.reshape(n, c, big_d, d, big_h, h, big_w, w)
    return x.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(n, c * prod(block), big_d, big_h, big_w)


def to_voxels(x: Tensor, block: Shape3) -> Tensor:
    """The way back: ``(B, C d h w, D, H, W)`` -> ``(B, C, D d, H h, W w)``."""
    n, c, big_d, big_h, big_w = x.shape
    d, h, w = block
    x = x.reshape(n, c // prod(block), d, h, w, big_d, big_h, big_w)
    return x.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(n, -1, big_d * d, big_h * h, big_w * w)


def shuffle_unet(
    plan: Plan,
    in_channels: int,
    out_channels: int,
    deep_supervision: bool = True,
    residual: bool = False,
    dropout: float | None = None,
    refine: int = 8,
) -> nn.Module:
    """`ShuffleUNet` around a `dynunet` with the Plan's levels but the finest, whose place the blocks take.

    Raises ValueError when the Plan has fewer than four levels.
    """
    if len(plan.features) < 4:
        raise ValueError(
            f"the Plan has {len(plan.features)} resolution levels and a ShuffleUNet needs at least 4: the patch {plan.patch} is "
            "too small; set plan.patch to at least 32 voxels a side"
        )
    block = plan.strides[1]
    inner = dynunet(
        dataclasses.replace(
            plan, features=plan.features[1:], strides=((1, 1, 1), *plan.strides[2:]), kernels=plan.kernels[1:]
        ),
        in_channels * prod(block),
        out_channels * prod(block),
        deep_supervision=deep_supervision,
        residual=residual,
        dropout=dropout,
    )
    return ShuffleUNet(inner, block, in_channels, out_channels, refine)
