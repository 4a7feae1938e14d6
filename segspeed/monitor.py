"""What happens between two optimiser steps: watch, record, evaluate, save, stop when asked to."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from segspeed.engine import Learner, Progress, Step
from segspeed.model.checkpointing import apply_checkpointing
from segspeed.record.checkpoints import BEST, save_atomic, save_last
from segspeed.record.live import LiveBar, say
from segspeed.record.run_record import RunRecord
from segspeed.speed.cadence import Cadence
from segspeed.speed.clock import Clock
from segspeed.speed.health import Health
from segspeed.speed.memory import peak_memory_bytes
from segspeed.speed.meter import gpu_utilisation
from segspeed.speed.ranks import agree, is_main
from segspeed.speed.signals import Interrupted, StopRequest
from segspeed.speed.watch import LateReader, LossGuard
from segspeed.types import Batch, RunStopped, first_line

HOPELESS = 30  # fp16 updates skipped in a row: the loss scale has been halved a billion times over
RECORD_SECONDS = 2.0  # a step line in run.jsonl at most this often: 24 hours stay under 10 MB


@dataclass
class Tally:
    """Sums over a run that a checkpoint carries on."""

    waited: float = 0.0
    step_seconds: float = 0.0
    samples: int = 0
    best: float = -1.0
    last_dice: float | None = None


@dataclass
class Monitor:
    """Called by `segspeed.engine.fit` after each step. ``evaluate`` scores the validation cases, records the scores
    and returns their mean Dice (None where not all of them could be scored); ``remaining`` estimates the seconds left,
    ``share_done`` the share of the run."""

    learner: Learner
    progress: Progress
    folder: Path
    record: RunRecord
    bar: LiveBar
    clock: Clock
    cadence: Cadence
    stop: StopRequest
    evaluate: Callable[[], float | None]
    remaining: Callable[[Progress], float]
    share_done: Callable[[Progress], float]
    save_every: float
    tally: Tally = field(default_factory=Tally)
    guard: LossGuard = field(default_factory=LossGuard)
    health: Health = field(default_factory=Health)
    reader: LateReader[Step] = field(default_factory=LateReader)
    last_batches: tuple[Batch, ...] = ()
    _saved: float = field(default_factory=time.perf_counter)
    _saved_step: int = -1
    _recorded: float = 0.0
    _entered: float | None = None  # since when a step is looked after, which `Progress.elapsed` does not know yet

    def __call__(self, step: Step) -> None:
        self._entered = time.perf_counter()
        try:
            self._after(step)
        finally:
            self._entered = None

    def _after(self, step: Step) -> None:
        self.last_batches = step.batches
        self.tally.samples += step.samples
        self.tally.waited += step.waited
        self.tally.step_seconds += step.seconds
        self.clock.add("train", step.seconds)
        finished = self.reader.push(step, step.loss, step.norm)
        if finished is not None:
            self.note(finished[0], *finished[1])
        due = self.cadence.due(self.progress.elapsed, self.remaining(self.progress))
        stopped, due_now = (int(v) for v in agree(self.stop.signal or 0, due))
        if stopped:
            raise self.stopped(stopped)
        if due_now:
            try:
                self.evaluate_now()
            except Interrupted as broken:
                raise self.stopped(*broken.args) from None
        if time.perf_counter() - self._saved >= self.save_every:
            self.save()

    def stopped(self, number: int) -> RunStopped:
        """Save, between two steps; returns what to raise after signal ``number``."""
        self.finish()
        return RunStopped(
            f"{signal.Signals(number).name} after step {self.progress.step}; all is saved. "
            f"The same command with run.name={self.folder.name} goes on from here.",
            exit_code=128 + number,
        )

    def saving(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of ``loader``. What fails in it fails between two steps, so that all of them can be saved first.

        A loader process that dies is told by a signal, in the middle of a step most often; then the last checkpoint stands.
        """
        try:
            yield from loader
        except (RuntimeError, ValueError, OSError, MemoryError):
            if self.stop.signal is not None:  # the signal reached the processes of the loader, too
                raise self.stopped(self.stop.signal) from None
            if self.progress.step > 0:
                self.finish()
            raise

    def note(self, step: Step, loss: float, norm: float) -> None:
        """Check, record and show one step whose numbers are on the host."""
        precision = self.learner.precision
        verdict = self.guard.verdict(loss, norm, scaled=precision.scaler.is_enabled())
        if verdict is not None:
            raise RunStopped(self._fault(step, verdict))
        if precision.skipped_in_a_row >= HOPELESS:
            raise RunStopped(
                f"step {step.number}: fp16 skipped {HOPELESS} updates in a row, down to a loss scale of "
                f"{precision.scaler.get_scale():.3g}; it does not recover. Use precision=bf16 or precision=fp32"
            )
        for name, text in (
            *(("memory", text) for text in self.learner.notes),
            *(("health", text) for text in self.health.step(loss, self.share_done(self.progress))),
        ):
            self.warn(name, f"step {step.number}: {text}")
        self.learner.notes.clear()
        now = time.perf_counter()
        rate = step.samples / step.seconds
        wait = self.tally.waited / self.tally.step_seconds
        if now - self._recorded >= RECORD_SECONDS or step.number == 1:
            self._recorded = now
            self.record.write(
                "step",
                step=step.number,
                loss=loss,
                lr=step.rate,
                grad_norm=norm if norm < float("inf") else None,
                samples_per_s=rate,
                wait_share=wait,
                skipped=precision.skipped,
                memory_bytes=peak_memory_bytes(precision.device),
                split=self.learner.meter.shares(),
                gpu_percent=gpu_utilisation(precision.device),
                train_s=self.clock["train"],
            )
        self.bar.update(
            step=step.number,
            loss=loss,
            samples_per_s=self.tally.samples / self.tally.step_seconds,
            wait_share=wait,
            dice=self.tally.last_dice,
            remaining=self.remaining(self.progress),
            done=self.share_done(self.progress),
        )

    def warn(self, name: str, text: str) -> None:
        """Into the record, and before the person's eyes."""
        self.record.write("event", name=name, message=text)
        say(f"warning: {text}")

    def evaluate_now(self) -> None:
        """One evaluation in the middle of the run; the best weights so far are kept apart as ``best.pt``."""
        start = time.perf_counter()
        dice = self.evaluate()
        self.cadence.done(time.perf_counter() - start)
        if dice is None:
            return
        self.tally.last_dice = dice
        if dice > self.tally.best:
            self.tally.best = dice
            if not is_main():
                return
            save_atomic(self.weights() | {"step": self.progress.step, "mean_dice": dice}, self.folder / BEST)

    def finish(self) -> None:
        """Read the last step's numbers and save."""
        finished = self.reader.flush()
        if finished is not None:
            self.note(finished[0], *finished[1])
        self.save()

    def weights(self) -> dict[str, Any]:
        """The weights that are evaluated: averaged where there is an average."""
        if self.learner.ema is None:
            return {"model": self.learner.model.state_dict()}
        with self.learner.ema.swapped(self.learner.model):
            return {"model": {k: v.detach().clone() for k, v in self.learner.model.state_dict().items()}}

    def save(self) -> None:
        """Write ``last.pt``: everything that a resumed run needs to go on as if nothing had happened. Rank 0 does it, once a
        step."""
        start = self._saved = time.perf_counter()
        if not is_main() or self._saved_step == self.progress.step:
            return
        path = save_last(self.state(), self.folder)
        self._saved, self._saved_step = time.perf_counter(), self.progress.step
        self.record.write("save", step=self.progress.step, path=path.name, seconds=self._saved - start)

    def state(self) -> dict[str, Any]:
        """All that changes in a run, as tensors and plain values."""
        device = self.learner.precision.device
        inside = time.perf_counter() - self._entered if self._entered is not None else 0.0
        return {
            "model": self.learner.model.state_dict(),
            "optimizer": self.learner.optimizer.state_dict(),
            "scaler": self.learner.precision.scaler.state_dict(),
            "ema": self.learner.ema.state_dict() if self.learner.ema else None,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "parts": self.learner.parts,
            "recomputes": bool(getattr(self.learner.model, "segspeed_recomputes", False)),
            "progress": {**dataclasses.asdict(self.progress), "elapsed": self.progress.elapsed + inside},
            "tally": dataclasses.asdict(self.tally),
            "meter": dict(self.learner.meter.seconds),
            "clock": dict(self.clock.spent),
            "evaluation": {"spent": self.cadence.spent, "cost": self.cadence.cost},
            "first_loss": self.guard.first,
            "health": self.health.state_dict(),
            "skipped": self.learner.precision.skipped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint made by `state`."""
        self.learner.model.load_state_dict(state["model"])
        self.learner.optimizer.load_state_dict(state["optimizer"])
        self.learner.precision.scaler.load_state_dict(state["scaler"])
        if self.learner.ema is not None:
            self.learner.ema.load_state_dict(state["ema"])
        torch.set_rng_state(state["rng"])
        if state.get("cuda_rng") is not None and self.learner.precision.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.learner.precision.device)
        self.learner.parts = state.get("parts", 1)  # a step that did not fit into memory stays cut as it was
        if state.get("recomputes") and not getattr(self.learner.model, "segspeed_recomputes", False):
            apply_checkpointing(self.learner.model, "all")
        for name, value in state["progress"].items():
            setattr(self.progress, name, value)
        self.tally = Tally(**state["tally"])
        self.learner.meter.seconds.update(state["meter"])
        self.clock.spent.update(state["clock"])
        self.cadence.spent, self.cadence.cost = state["evaluation"]["spent"], state["evaluation"]["cost"]
        self.guard.first = state["first_loss"]
        self.health.load_state_dict(state.get("health", {}))
        self._saved_step = self.progress.step
        self.learner.precision.skipped = state["skipped"]

    def _fault(self, step: Step, verdict: str) -> str:
        path = self.folder / f"fault_step_{step.number:06d}.pt"
        cases = [c for b in step.batches for c in b.cases]
        batches = [
            {"image": b.image, "label": b.label, "norm": b.norm, "index": b.index, "cases": list(b.cases)}
            for b in step.batches
        ]
        patches = f"their raw patches are in {path}. Look at them, then"
        try:
            save_atomic({"step": step.number, "verdict": verdict, "batches": batches}, path)
            self.record.write("event", name="fault", message=f"step {step.number}: {verdict}; cases {', '.join(cases)}")
        except RunStopped as error:  # the disk is full as well; the fault is what to tell first
            patches = f"their raw patches could not be kept ({first_line(error)}). Then"
        return (
            f"step {step.number}: {verdict}. The cases were {', '.join(cases)}; {patches} lower optimizer.lr, or try "
            "precision=fp32. Checkpoints before the fault are intact."
        )
