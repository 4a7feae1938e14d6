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

from segspeed.model.batch_norm import batch_norm_caution
from segspeed.model.checkpointing import apply_checkpointing
from segspeed.model.losses import deep_supervision, pools_batch, step_sums
from segspeed.model.networks import as_heads
from segspeed.speed.ema import WeightAverage
from segspeed.speed.meter import StepMeter
from segspeed.speed.oom import OutOfMemory, cut, is_out_of_memory
from segspeed.speed.precision import Precision
from segspeed.speed.ranks import agree, ranks, summed
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

    def count(self, samples: int, seconds: float) -> None:
        """One more step, of ``samples`` patches, that took so many seconds."""
        self.step += 1
        self.sample += samples
        self.elapsed += seconds


@dataclass
class Learner:
    """What learns: network, loss, optimiser, precision, schedule, and the averaged weights if wanted."""

    model: nn.Module
    loss: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    precision: Precision
    schedule: Callable[[float], float]  # progress in [0, 1] -> share of the peak learning rate
    clip: float | None = None
    ema: WeightAverage | None = None
    exact_batch_dice: bool = False  # Dice sums of the whole step, by a second forward pass
    parallel: nn.Module | None = None  # the model as DDP runs it, where several ranks train together
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
        """One optimiser step over this rank's micro-batches, which hold ``samples`` patches together.

        Each micro-batch weighs as many patches as it has, so that the gradient is that of one large batch for
        losses that are means over samples, and with ``exact_batch_dice`` for a Dice over the batch, too. Returns loss and
        gradient norm as tensors, not synchronised.
        """
        self.model.train()
        total = torch.zeros((), device=self.precision.device)
        pieces: Iterable[Batch] = (p for batch in batches for p in cut(batch, self.parts))
        try:
            sums = None
            if self.exact_batch_dice:
                pieces = list(pieces)  # the same augmented patches in both passes
                sums = self._step_sums(pieces) if len(pieces) > 1 or ranks() > 1 else None
            for piece, last in with_last(pieces):
                total += self._gradient(piece, samples, last, sums)
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
        return summed(total) / ranks(), norm

    def _gradient(self, batch: Batch, samples: int, last: bool, sums: Tensor | None) -> Tensor:
        """Add one micro-batch's gradient; returns its share of the loss. Under DDP only the last one is exchanged."""
        weight = len(batch.cases) / samples
        with nullcontext() if last else self._no_sync():
            with self.meter("forward"):
                with self.precision.autocast():
                    heads = as_heads((self.parallel or self.model)(batch.image))
                # DDP divides gradients by the ranks, whose sums are in ``sums``
                share = deep_supervision(self.loss, heads, batch.label, sums, weight / ranks()) * weight
                del heads  # the logits need not outlive the loss
            with self.meter("backward"):
                self.precision.backward(share)
        return share.detach()

    def _step_sums(self, pieces: Iterable[Batch]) -> Tensor:
        """Dice sums ``(H, 2, K)`` of the whole step over all ranks, from a forward pass that leaves no trace: dropout draws
        the same again afterwards, and BatchNorm's running statistics stay."""
        device = self.precision.device
        buffers = [(b, b.detach().clone()) for b in self.model.buffers()]
        found: list[Tensor] = []
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), self._no_sync():
                for piece in pieces:
                    with self.meter("forward"):
                        with self.precision.autocast():
                            heads = as_heads(self.model(piece.image))
                        found.append(step_sums(self.loss, heads, piece.label))
                        del heads
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
        return summed(torch.stack(found).sum(0))

    def _no_sync(self) -> AbstractContextManager[None]:
        no_sync: Callable[[], AbstractContextManager[None]] = getattr(
            self.parallel or self.model, "no_sync", nullcontext
        )
        return no_sync()

    def cautions(self, batch: int, accumulate: int) -> list[str]:
        """What a user should know about steps of ``accumulate`` micro-batches of ``batch`` patches on each rank."""
        found = []
        smaller = min(batch, -(-batch // self.parts))
        pieces = accumulate * self.parts * ranks()
        if pieces > 1 and pools_batch(self.loss) and not self.exact_batch_dice:
            found.append(
                f"the loss pools its Dice over micro-batches of {smaller}, {pieces} a step: that is not the loss of a large batch. "
                "train.exact_batch_dice=true pools over the whole step (loss=dice_ce), for a second forward pass; a Dice of single "
                "samples (loss.batch_dice=false) accumulates exactly as it is"
            )
        norm = batch_norm_caution(self.model, smaller)
        return found + ([norm] if norm else [])

    def make_room(self, largest: int, reason: str) -> None:
        """After `OutOfMemory`: smaller micro-batches, then recomputed activations; the effective batch stays what it was.

        ``largest`` is the number of patches in a batch. Raises RunStopped when nothing is left to try.
        """
        gc.collect()
        if self.precision.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.parts < largest:
            first_cut = self.parts == 1
            self.parts = min(2 * self.parts, largest)
            self.notes.append(
                f"out of memory ({reason}): each batch of {largest} now goes in {self.parts} micro-batches"
            )
            if first_cut:
                self.notes += self.cautions(largest, 1)
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
            if ranks() > 1:  # the others are on their way to exchange gradients that will not come
                raise RunStopped(
                    f"out of memory on one of {ranks()} ranks ({reason}). Choose a smaller plan.batch with train.accumulate, or "
                    "memory.checkpointing=all"
                ) from error
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
        now = time.perf_counter()
        progress.count(samples * ranks(), now - mark)
        mark = now
        after_step(Step(progress.step, loss, norm, rate, samples * ranks(), now - started, waited, micro))
        now = time.perf_counter()
        (progress.elapsed,) = agree(progress.elapsed + now - mark)
        mark = now
