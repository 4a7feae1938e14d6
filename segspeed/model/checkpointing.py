"""Activation checkpointing (Chen et al. 2016): recompute a block's activations in the backward pass.

Non-reentrant ``torch.utils.checkpoint``, which restores the random state and works with autocast and compile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from monai.networks.blocks.dynunet_block import UnetBasicBlock, UnetResBlock, UnetUpBlock
from monai.networks.blocks.segresnet_block import ResBlock
from monai.networks.nets.segresnet_ds import SegResBlock
from torch import nn
from torch.utils.checkpoint import checkpoint

from segspeed.types import SettingError

# The outermost of these is recomputed as one: a U-Net's blocks a level, where nearly all activations live.
BLOCKS: tuple[type[nn.Module], ...] = (UnetBasicBlock, UnetResBlock, UnetUpBlock, ResBlock, SegResBlock)


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
    if choice == "none":
        return []
    known = dict(model.named_modules())
    names = block_names(model) if choice == "all" else list(choice)
    unknown = [n for n in names if n not in known or not n]
    if unknown:
        near = {n: get_close_matches(n, list(known), 1) for n in unknown}
        hints = ", ".join(f"{n} (nearest: {c[0]})" if c else n for n, c in near.items())
        raise SettingError(f"memory.checkpointing names modules this network does not have: {hints}")
    passive = [n for n in names if isinstance(known[n], (nn.ModuleList, nn.ModuleDict))]
    if passive:
        raise SettingError(
            f"memory.checkpointing names containers, which are never called: {', '.join(passive)}; name their items"
        )
    for name in names:
        _wrap(known[name])
    return names


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, BLOCKS)


def _wrap(module: nn.Module) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed
