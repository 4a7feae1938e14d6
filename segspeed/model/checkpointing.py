"""Activation checkpointing (Chen et al. 2016): recompute a block's activations in the backward pass.

Non-reentrant ``torch.utils.checkpoint``, which restores the random state and works with autocast and compile.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from monai.networks.blocks.dynunet_block import UnetBasicBlock, UnetResBlock, UnetUpBlock
from monai.networks.blocks.segresnet_block import ResBlock
from monai.networks.nets.segresnet_ds import SegResBlock
from monai.networks.nets.swin_unetr import SwinTransformerBlock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from segspeed.types import SettingError

Part = Callable[..., Tensor]

# The outermost of these is recomputed: a U-Net's blocks a level, where nearly all activations live.
BLOCKS: tuple[type[nn.Module], ...] = (
    UnetBasicBlock, UnetResBlock, UnetUpBlock, ResBlock, SegResBlock, SwinTransformerBlock,
)  # fmt: skip


def block_names(model: nn.Module) -> list[str]:
    """Names of the outermost convolution blocks; for networks without known blocks, the modules the root calls."""
    names: list[str] = []
    for name, module in model.named_modules():
        if _is_block(module) and not any(name.startswith(f"{outer}.") for outer in names):
            names.append(name)
    return names or _called_children(model)


def _called_children(model: nn.Module, prefix: str = "") -> list[str]:
    """Children with parameters; lists and dictionaries of modules are never called themselves, so their items are."""
    names = []
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            names += _called_children(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            names.append(prefix + name)
    return names


def apply_checkpointing(model: nn.Module, choice: str | Sequence[str]) -> list[str]:
    """Recompute the chosen modules' activations, in place. Returns their names.

    ``choice`` is "none", "all" (see `block_names`), or names from ``model.named_modules()``.
    """
    if choice == "none" or not choice:
        return []
    known = dict(model.named_modules())
    names = block_names(model) if choice == "all" else list(choice)
    unknown = [n for n in names if n not in known or not n]
    if unknown:
        near = {n: get_close_matches(n, list(known), 1) for n in unknown}
        hints = ", ".join(f"{n} (nearest: {c[0]})" if c else n for n, c in near.items())
        raise SettingError(f"memory.checkpointing names modules this network does not have: {hints}")
    last_up = next((m for m in reversed(known.values()) if isinstance(m, UnetUpBlock)), None)
    passive = [n for n in names if isinstance(known[n], (nn.ModuleList, nn.ModuleDict))]
    if passive:
        raise SettingError(
            f"memory.checkpointing names containers, which are never called: {', '.join(passive)}; name their items"
        )
    model.segspeed_recomputes = True  # type: ignore[assignment]
    for name in names:
        _wrap(known[name], finest=known[name] is last_up)
    return names


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, BLOCKS)


def _wrap(module: nn.Module, finest: bool) -> None:
    """Recompute ``module`` in training: a convolution block in parts of one convolution each, so that the backward pass holds
    one of them at a time; anything else in one piece."""
    forward = module.forward
    parts = _parts(module, finest)

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        if parts is None or kwargs:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        out = checkpoint(parts[0], *args, use_reentrant=False)
        for part in parts[1:]:
            out = checkpoint(part, out, args[0], use_reentrant=False)
        return out

    module.forward = recomputed


def _parts(block: nn.Module, finest: bool) -> tuple[Part, ...] | None:
    """A block cut between its convolutions: the first part takes the block's inputs, each later one what the one before made
    and the block's first input. None for other modules."""
    m: Any = block
    if isinstance(block, UnetUpBlock) and type(m.conv_block) is UnetBasicBlock:
        b, act = m.conv_block, _out_of_place(m.conv_block.lrelu)
        if (
            finest
        ):  # the backward pass begins here, with everything else still held: one more tensor kept, three fewer at once
            return (
                lambda x, skip: b.conv1(torch.cat((m.transp_conv(x), skip), dim=1)),
                lambda c, _: b.conv2(act(b.norm1(c))),
                lambda c, _: act(b.norm2(c)),
            )
        return (
            lambda x, skip: act(b.norm1(b.conv1(torch.cat((m.transp_conv(x), skip), dim=1)))),
            lambda a, _: act(b.norm2(b.conv2(a))),
        )
    if isinstance(block, (UnetResBlock, UnetBasicBlock)):
        act = _out_of_place(m.lrelu)
        if isinstance(block, UnetResBlock):
            return (lambda x: act(m.norm1(m.conv1(x))), lambda a, x: act(m.norm2(m.conv2(a)) + _shortcut(m, x)))
        return (lambda x: act(m.norm1(m.conv1(x))), lambda a, _: act(m.norm2(m.conv2(a))))
    if isinstance(block, ResBlock):
        act = _out_of_place(m.act)
        return (lambda x: m.conv1(act(m.norm1(x))), lambda a, x: m.conv2(act(m.norm2(a))) + x)
    if isinstance(block, SegResBlock):
        one, two = _out_of_place(m.act1), _out_of_place(m.act2)
        return (lambda x: m.conv1(one(m.norm1(x))), lambda a, x: m.conv2(two(m.norm2(a))) + x)
    return None


def _out_of_place(act: nn.Module) -> nn.Module:
    """Acting in place on what instance normalisation returns, a view, costs two copies of the gradient going back."""
    if not getattr(act, "inplace", False):
        return act
    other = copy.copy(act)
    other.inplace = False  # type: ignore[assignment]
    return other


def _shortcut(block: Any, x: Tensor) -> Tensor:
    x = block.conv3(x) if hasattr(block, "conv3") else x
    return block.norm3(x) if hasattr(block, "norm3") else x
