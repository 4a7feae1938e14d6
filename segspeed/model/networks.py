"""Networks. Any ``torch.nn.Module`` that maps ``(B, C, D, H, W)`` to logits ``(B, K, D, H, W)`` fits.

In training a network may return several logits, finest first, each at its own resolution (deep supervision).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai.networks.nets import DynUNet
from torch import Tensor, nn

from segspeed.types import Plan


class DeepDynUNet(DynUNet):
    """MONAI's DynUNet, whose deep-supervision heads stay at their own resolution.

    MONAI enlarges every head to full size, stacks them, and keeps them until the next step; a loss at each head's
    own size needs an eighth of that memory a level, and the heads are freed with the step.
    """

    def forward(self, x: Tensor) -> Any:
        """``(B, C, D, H, W)`` -> logits ``(B, K, D, H, W)``; in training a list of them, finest first."""
        full = self.output_block(self.skip_layers(x))
        if not (self.training and self.deep_supervision):
            return full
        heads = [full, *self.heads]
        for level in range(len(self.heads)):
            self.heads[level] = full.new_empty(0)
        return heads


def dynunet(
    plan: Plan,
    in_channels: int,
    out_channels: int,
    deep_supervision: bool = True,
    residual: bool = False,
    dropout: float | None = None,
) -> nn.Module:
    """A U-Net with instance normalisation, sized by the Plan (features, strides and kernels a level).

    Deep supervision leaves the two coarsest levels out, as nnU-Net does (Isensee et al. 2021).
    """
    levels = len(plan.features)
    if levels < 3:
        raise ValueError(
            f"the Plan has {levels} resolution levels and a DynUNet needs at least 3: "
            f"the patch {plan.patch} is too small; set plan.patch to at least 16 voxels a side"
        )
    heads = levels - 3 if deep_supervision else 0  # besides the full-size one
    return DeepDynUNet(
        spatial_dims=3,
        in_channels=in_channels,
        out_channels=out_channels,
        kernel_size=[list(k) for k in plan.kernels],
        strides=[list(s) for s in plan.strides],
        upsample_kernel_size=[list(s) for s in plan.strides[1:]],
        filters=list(plan.features),
        norm_name=("INSTANCE", {"affine": True}),
        deep_supervision=heads > 0,
        deep_supr_num=max(heads, 1),
        res_block=residual,
        dropout=dropout,
    )


def as_heads(output: Any) -> list[Tensor]:
    """The logits a network returned, finest first: from one tensor, a list, or MONAI's stacked ``(B, H, K, D, H, W)``."""
    if isinstance(output, Tensor):
        return list(output.unbind(1)) if output.ndim == 6 else [output]
    if isinstance(output, Sequence) and output and all(isinstance(o, Tensor) for o in output):
        return list(output)
    raise ValueError(
        f"the network returned {type(output).__name__}; segspeed needs logits (B, K, D, H, W) or a list of them"
    )


def as_logits(output: Any) -> Tensor:
    """The finest logits ``(B, K, D, H, W)``."""
    return as_heads(output)[0]


def count_parameters(model: nn.Module) -> int:
    """Trainable and frozen values of a network."""
    return sum(p.numel() for p in model.parameters())
