"""Learning-rate schedules over progress in [0, 1]: of the optimiser steps, or of the wall-clock budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Horizon(Protocol):
    """When a run is over, and how far it is."""

    def progress(self, step: int, elapsed: float) -> float:
        """How much of the run is over, 0 to 1, after ``step`` steps and ``elapsed`` seconds."""

    def done(self, step: int, elapsed: float) -> bool:
        """Whether the run is over after ``step`` steps and ``elapsed`` seconds."""


@dataclass(frozen=True)
class StepHorizon:
    """A run of a number of optimiser steps."""

    steps: int

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the steps that are done, 0 to 1; ``elapsed`` seconds do not count."""
        return step / self.steps

    def done(self, step: int, elapsed: float) -> bool:
        """Whether all steps are done; ``elapsed`` seconds do not count."""
        return step >= self.steps


@dataclass
class BudgetHorizon:
    """A run of a number of seconds; it ends before a step that would not fit any more.

    ``elapsed`` is the wall clock of the training loop, evaluation inside it included, over all sessions of the run.
    """

    seconds: float
    _last: tuple[int, float] | None = None
    _step_seconds: float = 0.0

    def progress(self, step: int, elapsed: float) -> float:
        """Where the step that starts now will end, so that the last one runs at the final learning rate; ``elapsed`` in seconds."""
        if self._last is not None and step > self._last[0]:
            spent = (elapsed - self._last[1]) / (step - self._last[0])
            # The smaller of recent and new, so that an evaluation between two steps does not count as a slow step.
            self._step_seconds = spent if not self._step_seconds else min(spent, 1.5 * self._step_seconds)
        self._last = (step, elapsed)
        return min(1.0, (elapsed + self._step_seconds) / self.seconds)

    def done(self, step: int, elapsed: float) -> bool:
        """Whether half a step more would end after the budget; ``elapsed`` in seconds."""
        return elapsed + 0.5 * self._step_seconds >= self.seconds


def learning_rate_factor(progress: float, *, name: str, warmup: float, power: float = 0.9, final: float = 0.0) -> float:
    """Share of the peak learning rate at ``progress``: linear warmup, then cosine (Loshchilov & Hutter 2017),
    poly (Chen et al. 2018, power 0.9 in nnU-Net) or constant, down to ``final``."""
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    x = min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))
    if name == "constant":
        return 1.0
    shape = 0.5 * (1 + math.cos(math.pi * x)) if name == "cosine" else (1 - x) ** power
    return final + (1 - final) * shape


def rate_scale(scaling: str, effective: int, reference: int | None) -> float:
    """Factor on the learning rate of a batch of ``reference`` patches for one of ``effective``: linear (Goyal et al. 2017),
    or the square root (Krizhevsky 2014; with Adam the better founded, Malladi et al. 2022); 1 for "none"."""
    if scaling == "none":
        return 1.0
    assert reference is not None, "the settings refuse scaling without a reference"
    ratio = effective / reference
    return ratio if scaling == "linear" else math.sqrt(ratio)
