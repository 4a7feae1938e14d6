"""The training loop. It knows no Hydra, no files and no layout of folders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn

from segspeed.model.losses import deep_supervision
from segspeed.model.networks import as_heads
from segspeed.speed.ema import WeightAverage
from segspeed.speed.meter import StepMeter
from segspeed.speed.precision import Precision
from segspeed.speed.schedule import Horizon
from segspeed.types import Batch, SettingError


@dataclass
class Progress:
    """How far a run is. ``elapsed`` is the wall clock of the loop in seconds, earlier sessions included;
    ``sample`` is the number of the next patch."""

    step: int = 0
    sample: int = 0
    elapsed: float = 0.0


@dataclass
class Learner:
    """What learns: network, loss, optimiser, precision, schedule, and the averaged weights if wanted."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    precision: Precision
    schedule: Callable[[float], float]  # progress in [0, 1] -> share of the peak learning rate
    clip: float | None = None
    ema: WeightAverage | None = None
    peak_rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meter = StepMeter(self.precision.device)
        self.peak_rates = self.peak_rates or [float(g["lr"]) for g in self.optimizer.param_groups]

    def set_rate(self, progress: float) -> float:
        """Set the learning rate for this progress; returns that of the first parameter group."""
        factor = self.schedule(progress)
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * factor
        return float(self.optimizer.param_groups[0]["lr"])

    def update(self, batches: Iterable[Batch], samples: int) -> tuple[Tensor, Tensor]:
        """One optimiser step over micro-batches that hold ``samples`` patches together.

        Each micro-batch weighs as many patches as it has, so that the gradient is that of one large batch for
        losses that are means over samples. Returns loss and gradient norm as tensors, not synchronised.
        """
        self.model.train()
        total = torch.zeros((), device=self.precision.device)
        for batch in batches:
            with self.meter("forward"):
                with self.precision.autocast():
                    heads = as_heads(self.model(batch.image))
                share = deep_supervision(self.loss, heads, batch.label) * (len(batch.cases) / samples)
                del heads  # the logits need not outlive the loss
            with self.meter("backward"):
                self.precision.backward(share)
            total += share.detach()
        with self.meter("optimiser"):
            norm = self.precision.step(self.optimizer, self.model.parameters(), self.clip)
            self.optimizer.zero_grad(set_to_none=True)
            if self.ema is not None:
                self.ema.update(self.model)
        return total, norm


@dataclass(frozen=True)
class Step:
    """One finished optimiser step; ``seconds`` from the asking for its data on, ``waited`` of them for data."""

    number: int
    loss: Tensor
    norm: Tensor
    rate: float
    samples: int
    seconds: float
    waited: float
    batches: tuple[Batch, ...]  # as they came from the loader


def micro_batches(loader: Iterable[Batch], accumulate: int) -> Iterator[tuple[Batch, ...]]:
    """``accumulate`` batches of ``loader`` at a time, and again from its beginning when it ends; what is left at its end
    makes a smaller step. Raises SettingError where it gives none."""
    while True:
        batches = iter(loader)
        micro = tuple(islice(batches, accumulate))
        if not micro:
            raise SettingError("the loader gives no batches (or cannot begin again after its end)")
        while micro:
            yield micro
            micro = tuple(islice(batches, accumulate))


def fit(
    learner: Learner,
    loader: Iterable[Batch],
    stage: Callable[[Batch], Batch],
    horizon: Horizon,
    progress: Progress,
    *,
    accumulate: int = 1,
    after_step: Callable[[Step], None],
) -> None:
    """Train until ``horizon`` says it is done. ``stage`` takes a raw batch to the device and augments it.

    ``after_step`` records, evaluates and saves; what it takes counts into ``progress.elapsed``. It may raise
    `segspeed.types.RunStopped` to end the run early.
    """
    steps = micro_batches(loader, accumulate)
    mark = time.perf_counter()
    while not horizon.done(progress.step, progress.elapsed):
        started = time.perf_counter()
        micro = next(steps)
        waited = time.perf_counter() - started
        learner.meter.add("waiting", waited)
        samples = sum(len(b.cases) for b in micro)
        rate = learner.set_rate(horizon.progress(progress.step, progress.elapsed))
        loss, norm = learner.update(map(stage, micro), samples)
        progress.step += 1
        progress.sample += samples
        after_step(Step(progress.step, loss, norm, rate, samples, time.perf_counter() - started, waited, micro))
        now = time.perf_counter()
        progress.elapsed += now - mark
        mark = now
