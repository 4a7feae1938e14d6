"""The contract of a network."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segspeed.model.checkpointing import apply_checkpointing
from segspeed.model.networks import as_heads
from segspeed.testing.contract import ContractError, name_of, require
from segspeed.types import Shape3, few, first_line

RTOL, ATOL = 1e-3, 1e-5  # sums in another order


def check_network(
    model: nn.Module,
    *,
    in_channels: int = 1,
    out_channels: int = 2,
    patch: Shape3 = (32, 32, 32),
    batch: int = 2,
    checkpointing: bool = True,
    export: bool = True,
) -> None:
    """Whether ``model`` maps ``(B, in_channels, D, H, W)`` to logits ``(B, out_channels, D, H, W)`` as training, prediction and
    activation checkpointing need it. It is left as it was.

    ``patch`` (D, H, W) is one that you train on. ``checkpointing`` and ``export`` turn these parts of the check off, for a
    network that will never be used so. Raises ContractError.
    """
    name = name_of(model)
    require(isinstance(model, nn.Module), f"{name} is no torch.nn.Module; derive your network from it")
    try:
        model = copy.deepcopy(model)
    except Exception as error:
        raise ContractError(
            f"{name} cannot be copied by copy.deepcopy ({first_line(error)}), which averaged weights and timings need; keep open "
            "files, locks and tensors with a gradient history out of the module"
        ) from error
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, in_channels, *patch, generator=generator)
    _heads(name, model.train(), x, out_channels)
    _gradients(name, model, x)
    _evaluation(name, model.eval(), x, out_channels)
    if checkpointing:
        _checkpointing(name, model.train(), x)
    if export:
        _export(name, model.eval(), x, generator)


def _forward(name: str, model: nn.Module, x: Tensor) -> list[Tensor]:
    mode = "training" if model.training else "evaluation"
    torch.manual_seed(0)  # dropout
    try:
        return as_heads(model(x))
    except Exception as error:
        raise ContractError(
            f"{name} fails in {mode} mode on an image {list(x.shape)} ({type(error).__name__}: {first_line(error)}). If the "
            "patch is too small or no multiple of its strides, check it with one that you train on: patch=(D, H, W)"
        ) from error


def _heads(name: str, model: nn.Module, x: Tensor, out_channels: int) -> None:
    """Logits in training, and the order of the heads of deep supervision."""
    heads = _forward(name, model, x)
    _logits(name, heads[0], x, out_channels)
    sizes = [tuple(h.shape[2:]) for h in heads]
    listed = ", ".join("x".join(map(str, s)) for s in sizes)
    for size, finer in zip(sizes[1:], sizes, strict=False):
        require(
            all(a <= b for a, b in zip(size, finer, strict=True)),
            f"{name} returns logits of sizes {listed}; with deep supervision the finest comes first: reverse the list",
        )
    for head, size in zip(heads, sizes, strict=True):
        require(
            head.shape[:2] == heads[0].shape[:2],
            f"{name} returns heads of shapes {[list(h.shape) for h in heads]}; each has the batch and {out_channels} channels",
        )
        require(
            all(full % small == 0 for full, small in zip(x.shape[2:], size, strict=True)),
            f"{name} returns a head of size {size}, which does not divide the patch {tuple(x.shape[2:])}; its label is every n-th "
            "voxel, so let each head lie on a grid of whole strides",
        )


def _logits(name: str, logits: Tensor, x: Tensor, out_channels: int) -> None:
    expected = [len(x), out_channels, *x.shape[2:]]
    require(
        list(logits.shape) == expected,
        f"{name} maps an image {list(x.shape)} to {list(logits.shape)}; logits are {expected} (B, K, D, H, W): one channel a "
        "class with the background, at the size of the patch",
    )
    require(logits.is_floating_point(), f"{name} returns {logits.dtype}; return logits, not classes: no argmax")
    require(bool(torch.isfinite(logits).all()), f"{name} returns values that are not finite on standard normal noise")


def _gradients(name: str, model: nn.Module, x: Tensor) -> None:
    gradients = _gradients_of(_forward(name, model, x), model)
    lost = [n for n, g in gradients.items() if g is None]
    require(
        not lost,
        f"no gradient reaches {few(lost)} of {name}: what the forward pass does not use cannot learn, and stops training on "
        "several GPUs. Use them, remove them, or set requires_grad=False",
    )
    bad = [n for n, g in gradients.items() if g is not None and not torch.isfinite(g).all()]
    require(not bad, f"the gradients of {few(bad)} of {name} are not finite on standard normal noise")


def _gradients_of(heads: Sequence[Tensor], model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by parameter of a sum that weighs every logit differently."""
    generator = torch.Generator().manual_seed(1)
    model.zero_grad(set_to_none=True)
    total = sum((h.float() * torch.randn(h.shape, generator=generator)).mean() for h in heads)
    require(
        isinstance(total, Tensor) and total.requires_grad,
        f"the output of {name_of(model)} has no gradient; look for detach(), torch.no_grad() and argmax in its forward",
    )
    assert isinstance(total, Tensor)
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def _evaluation(name: str, model: nn.Module, x: Tensor, out_channels: int) -> None:
    with torch.no_grad():
        first = _forward(name, model, x)[0]
        torch.manual_seed(1)
        again = as_heads(model(x))[0]
    _logits(name, first, x, out_channels)
    require(
        torch.allclose(first, again, rtol=RTOL, atol=ATOL),
        f"{name} gives another result for the same image after model.eval(); draw nothing there: nn.Dropout instead of F.dropout, "
        "which needs training=self.training",
    )


def _checkpointing(name: str, model: nn.Module, x: Tensor) -> None:
    recomputed = copy.deepcopy(model)
    plain = _forward(name, model, x)
    expected = _gradients_of(plain, model)
    try:
        apply_checkpointing(recomputed, "all")
        heads = _forward(name, recomputed, x)
        found = _gradients_of(heads, recomputed)
    except Exception as error:
        raise ContractError(
            f"{name} fails with memory.checkpointing=all ({type(error).__name__}: {first_line(error)}); the modules that the root "
            "calls take and return tensors, and do the same when they are run a second time"
        ) from error
    same = len(heads) == len(plain) and all(
        torch.allclose(a, b, rtol=RTOL, atol=ATOL) for a, b in zip(heads, plain, strict=True)
    )
    require(
        same, f"{name} gives other logits with memory.checkpointing=all; its blocks must keep no state between calls"
    )
    other = [n for n, g in expected.items() if g is not None and not _close(found.get(n), g)]
    require(
        not other,
        f"{name} has other gradients with memory.checkpointing=all, first in {few(other)}; recomputed blocks must do the same "
        "twice: no state that a forward pass changes, no random numbers of numpy or random",
    )


def _close(a: Tensor | None, b: Tensor) -> bool:
    scale = float(b.abs().max())
    return a is not None and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * scale + 1e-8)


def _export(name: str, model: nn.Module, x: Tensor, generator: torch.Generator) -> None:
    """Traced, or else exported, it must do the same on another image."""
    other = torch.randn(x.shape, generator=generator)
    with torch.no_grad():
        expected = _forward(name, model, other)[0]
        faults = []
        for way, exported in (
            ("torch.jit.trace", lambda: torch.jit.trace(model, x, check_trace=False)),
            ("torch.export", lambda: torch.export.export(model, (x,)).module()),
        ):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = as_heads(exported()(other))[0]
            except Exception as error:
                faults.append(f"{way}: {type(error).__name__}: {first_line(error)}")
                continue
            if torch.allclose(found, expected, rtol=RTOL, atol=ATOL):
                return
            faults.append(f"{way}: another result on another image, so the forward pass depends on values")
    raise ContractError(
        f"{name} cannot be exported ({'; '.join(faults)}). Keep numpy, .item() and branches on the values of tensors out of its "
        "forward, or check with export=False"
    )
