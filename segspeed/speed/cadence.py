"""When to evaluate in the middle of a run, so that its cost stays within a stated share of the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Cadence:
    """``share`` of the run's wall clock may go into evaluation; ``cost`` is what one is expected to take (seconds)."""

    share: float
    cost: float
    spent: float = 0.0

    def due(self, elapsed: float, remaining: float) -> bool:
        """Whether one fits now. ``remaining`` seconds are left; the run's own end is evaluated anyway, so none is
        started in the last stretch."""
        return self.spent + self.cost <= self.share * elapsed and remaining > 2 * self.cost

    def done(self, seconds: float) -> None:
        """An evaluation has taken so many seconds."""
        self.spent += seconds
        self.cost = seconds
