"""The training loop. It knows no Hydra, no files and no layout of folders."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor, nn

from segspeed.model.checkpointing import apply_checkpointing
from segspeed.model.losses import deep_supervision
from segspeed.model.networks import as_heads
from segspeed.speed.ema import WeightAverage
from segspeed.speed.meter import StepMeter
from segspeed.speed.oom import OutOfMemory, cut, is_out_of_memory
from segspeed.speed.precision import Precision
from segspeed.speed.schedule import Horizon
from segspeed.types import Batch, RunStopped, SettingError, first_line

T = TypeVar("T")


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
    parts: int = 1  # micro-batches that each batch is cut into, so that a step fits into memory
    notes: list[str] = field(default_factory=list)  # what happened in a step that the record should tell
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
        try:
            for piece, last in with_last(p for batch in batches for p in cut(batch, self.parts)):
                total += self._gradient(piece, samples, last)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.optimizer.zero_grad(set_to_none=True)
            raise OutOfMemory(first_line(error)) from None  # the traceback would hold what fills the memory
        with self.meter("optimiser"):
            norm = self.precision.step(self.optimizer, self.model.parameters(), self.clip)
            self.optimizer.zero_grad(set_to_none=True)
            if self.ema is not None:
                self.ema.update(self.model)
        return total, norm

    def _gradient(self, batch: Batch, samples: int, last: bool) -> Tensor:
        """Add one micro-batch's gradient; returns its share of the loss. Under DDP only the last one is exchanged."""
        no_sync: Callable[[], AbstractContextManager[None]] = getattr(self.model, "no_sync", nullcontext)
        with nullcontext() if last else no_sync():
            with self.meter("forward"):
                with self.precision.autocast():
                    heads = as_heads(self.model(batch.image))
                share = deep_supervision(self.loss, heads, batch.label) * (len(batch.cases) / samples)
                del heads  # the logits need not outlive the loss
            with self.meter("backward"):
                self.precision.backward(share)
        return share.detach()

    def make_room(self, largest: int, reason: str) -> None:
        """After `OutOfMemory`: smaller micro-batches, then recomputed activations; the effective batch stays what it was.

        ``largest`` is the number of patches in a batch. Raises RunStopped when nothing is left to try.
        """
        gc.collect()
        if self.precision.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.parts < largest:
            self.parts = min(2 * self.parts, largest)
            self.notes.append(
                f"out of memory ({reason}): each batch of {largest} now goes in {self.parts} micro-batches"
            )
        elif not getattr(self.model, "segspeed_recomputes", False):
            names = apply_checkpointing(self.model, "all")
            self.notes.append(
                f"out of memory with one patch ({reason}): activations of {len(names)} blocks are recomputed"
            )
        else:
            raise RunStopped(
                f"out of memory with one patch at a time and all blocks recomputed ({reason}). Choose a smaller plan.patch or "
                "plan.features, or a device with more memory"
            )


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last."""
    stream = iter(items)
    try:
        item = next(stream)
    except StopIteration:
        return
    for following in stream:
        yield item, False
        item = following
    yield item, True


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


def surviving_update(
    learner: Learner, stage: Callable[[Batch], Batch], micro: tuple[Batch, ...], samples: int
) -> tuple[Tensor, Tensor]:
    """`Learner.update`, again from the same batches with less memory where there was not enough."""
    while True:
        try:
            return learner.update(map(stage, micro), samples)
        except OutOfMemory as error:
            reason = str(error)
        learner.make_room(max(len(b.cases) for b in micro), reason)


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
        loss, norm = surviving_update(learner, stage, micro, samples)
        progress.step += 1
        progress.sample += samples
        after_step(Step(progress.step, loss, norm, rate, samples, time.perf_counter() - started, waited, micro))
        now = time.perf_counter()
        progress.elapsed += now - mark
        mark = now
