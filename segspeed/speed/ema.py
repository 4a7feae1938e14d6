"""Exponential moving average of the weights, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Averaged weights (Polyak & Juditsky 1992). The decay warms up as (1 + n) / (10 + n), so that a short run
    does not average its random start in. Buffers (BatchNorm statistics) are copied, not averaged."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = [p.detach().clone().float() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        torch._foreach_lerp_(self.shadow, [p.detach().float() for p in model.parameters()], 1 - decay)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Run a block with the averaged weights in the model; its own come back bit for bit."""
        own = [p.detach().clone() for p in model.parameters()]
        _assign(model, self.shadow)
        try:
            yield
        finally:
            _assign(model, own)

    def put_into(self, model: nn.Module) -> None:
        """Give the model the averaged weights for good."""
        _assign(model, self.shadow)

    def state_dict(self) -> dict[str, object]:
        """The average, and how often it was updated."""
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from what `state_dict` gave. Raises ValueError where the number of tensors is another."""
        self.updates = int(state["updates"])  # type: ignore[call-overload]
        for mine, theirs in zip(self.shadow, state["shadow"], strict=True):  # type: ignore[call-overload]
            mine.copy_(theirs)


@torch.no_grad()
def _assign(model: nn.Module, values: list[Tensor]) -> None:
    for p, v in zip(model.parameters(), values, strict=True):
        p.copy_(v)
