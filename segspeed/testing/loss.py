"""The contract of a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from segspeed.model.losses import in_regions
from segspeed.testing.contract import ContractError, name_of, require
from segspeed.types import Shape3, first_line

SURE = 6.0  # logits of a prediction that leaves no doubt


def check_loss(
    loss: Callable[..., Any],
    *,
    out_channels: int = 3,
    ignore_index: int | None = None,
    patch: Shape3 = (8, 8, 8),
    batch: int = 2,
) -> None:
    """Whether ``loss(logits (B, K, D, H, W), label (B, D, H, W) int16)`` can be trained by: a finite scalar with a gradient,
    lower for a better prediction, finite where a patch holds no foreground and in bf16.

    A loss with an attribute ``ignore_index`` (or the one given) must not look at such voxels; one with ``regions`` gets a logit a
    region. Raises ContractError.
    """
    name = name_of(loss)
    ignored = ignore_index if ignore_index is not None else getattr(loss, "ignore_index", None)
    regions = tuple(getattr(loss, "regions", ()) or ())
    classes = max(c for members in regions for c in members) if regions else out_channels - 1
    outputs = len(regions) or out_channels
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, classes + 1, (batch, *patch), generator=generator, dtype=torch.int16)
    noise = torch.randn(batch, outputs, *patch, generator=generator)
    right = _sure(label, outputs, regions)

    _value(name, loss, noise, label, "noise")
    logits = noise.clone().requires_grad_()
    value = loss(logits, label)
    require(
        value.requires_grad,
        f"{name} gives no gradient; look for detach(), argmax, .item() or comparisons on the way to its value",
    )
    (gradient,) = torch.autograd.grad(value, logits)
    require(bool(torch.isfinite(gradient).all()), f"the gradient of {name} is not finite for standard normal logits")
    require(bool(gradient.any()), f"the gradient of {name} is 0 for standard normal logits; nothing would be learnt")

    good, middle, bad = (_value(name, loss, x, label, what) for x, what in (
        (right, "the right answer"), (noise, "noise"), (-right, "the wrong answer"),
    ))  # fmt: skip
    require(
        good < middle < bad,
        f"{name} is {good:.4g} for the right answer, {middle:.4g} for noise and {bad:.4g} for the wrong one; it must be lowest "
        "for the right one. Is a sign missing, a score returned instead of 1 - score, are channels in another order?",
    )
    empty = torch.zeros_like(label)
    logits = noise.clone().requires_grad_()
    _value(name, loss, logits, empty, "a patch without foreground")
    (gradient,) = torch.autograd.grad(loss(logits, empty), logits, allow_unused=True)
    require(
        gradient is None or bool(torch.isfinite(gradient).all()),
        f"the gradient of {name} is not finite for a patch without foreground; add a small constant to its denominators",
    )
    _value(name, loss, noise.bfloat16(), label, "logits in bf16 (convert them: logits.float())")
    if ignored is not None:
        _ignoring(name, loss, noise, label, int(ignored))


def _sure(label: Tensor, outputs: int, regions: tuple[Any, ...]) -> Tensor:
    """Logits ``(B, K, D, H, W)`` that say ``label`` without a doubt."""
    if regions:
        hit = in_regions(label.long(), regions)
    else:
        hit = torch.nn.functional.one_hot(label.long(), outputs).movedim(-1, 1).bool()
    return torch.where(hit, SURE, -SURE)


def _value(name: str, loss: Callable[..., Any], logits: Tensor, label: Tensor, what: str) -> float:
    try:
        value = loss(logits, label)
    except Exception as error:
        raise ContractError(
            f"{name} fails for {what}, logits {list(logits.shape)} {logits.dtype} and label {list(label.shape)} {label.dtype} "
            f"({type(error).__name__}: {first_line(error)}); it takes class indices of any integer type: label.long()"
        ) from error
    require(isinstance(value, Tensor), f"{name} returns {type(value).__name__}; a loss returns a tensor")
    require(
        value.ndim == 0 and value.is_floating_point(),
        f"{name} returns {value.dtype} of shape {list(value.shape)}; a loss is one floating-point number: take the mean",
    )
    number = float(value.detach())
    require(math.isfinite(number), f"{name} is {number} for {what}; it must be finite")
    return number


def _ignoring(name: str, loss: Callable[..., Any], logits: Tensor, label: Tensor, ignored: int) -> None:
    """Voxels of ``ignored`` have no say in value and gradient."""
    where = torch.rand(label.shape, generator=torch.Generator().manual_seed(2)) < 0.3
    label = label.masked_fill(where, ignored)
    other = torch.where(where.unsqueeze(1), -3 * logits + 1, logits)
    a, b = (_value(name, loss, x, label, "ignored voxels") for x in (logits, other))
    require(
        abs(a - b) <= 1e-4 * max(1.0, abs(a)),
        f"{name} changes from {a:.6g} to {b:.6g} with the logits of voxels whose label is {ignored}, which it should ignore; mask "
        "every sum, the denominators too",
    )
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, label), leaf)
    reached = float((gradient * where.unsqueeze(1)).abs().max())
    require(
        reached < 1e-7,
        f"{name} has a gradient ({reached:.3g}) at voxels whose label is {ignored}, which it should ignore",
    )
    _value(name, loss, logits, torch.full_like(label, ignored), "a patch of ignored voxels only")
