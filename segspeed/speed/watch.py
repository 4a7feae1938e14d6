"""Losses and gradient norms read one step late on CUDA, so that reading them never stalls the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass
class _Pending(Generic[T]):
    item: T
    values: Tensor
    ready: torch.cuda.Event | None


class LateReader(Generic[T]):
    """`push` takes a step's tensors and gives back an earlier step with its numbers, once they are on the host."""

    def __init__(self) -> None:
        self._pending: _Pending[T] | None = None

    def push(self, item: T, *tensors: Tensor) -> tuple[T, list[float]] | None:
        """On CPU the same step comes back; on CUDA the one before (None the first time). ``tensors``: scalar each."""
        values = torch.stack([t.detach().float() for t in tensors])
        if values.device.type != "cuda":
            return item, values.tolist()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        earlier, self._pending = self.flush(), _Pending(item, host, event)
        return earlier

    def flush(self) -> tuple[T, list[float]] | None:
        """The step still waiting, if there is one."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        if pending.ready is not None:
            pending.ready.synchronize()
        return pending.item, pending.values.tolist()


class LossGuard:
    """Says when a loss is lost: not finite, or a hundred times what the run began with."""

    def __init__(self, factor: float = 100.0) -> None:
        self.factor = factor
        self.first: float | None = None

    def verdict(self, loss: float, norm: float, *, scaled: bool) -> str | None:
        """None, or what is wrong. With loss scaling (``scaled``) an infinite norm is a skipped step, not a fault."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm) and not scaled:
            return f"the gradient norm is {norm} (loss {loss:.4g})"
        if self.first is None:
            self.first = max(abs(loss), 1.0)
        if abs(loss) > self.factor * self.first:
            return f"the loss exploded to {loss:.4g} (it began at {self.first:.4g})"
        return None
