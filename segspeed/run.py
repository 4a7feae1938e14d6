"""The parts of a run in one place, joined for `segspeed.engine.fit`."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from segspeed import build
from segspeed.ceiling import ceiling_samples_per_s
from segspeed.config import Config
from segspeed.data.cache import CacheEntry
from segspeed.data.wholeness import shortened
from segspeed.engine import Learner, Progress, fit
from segspeed.evaluation import Predictor, evaluate_cases
from segspeed.metric.summary import EMPTY_POLICY, Summary, summarise
from segspeed.monitor import Monitor
from segspeed.preparation import Prepared
from segspeed.record.checkpoints import load_last
from segspeed.record.live import LiveBar, say, track
from segspeed.record.run_folder import RunFolder
from segspeed.record.run_record import RunRecord
from segspeed.record.versions import environment
from segspeed.speed.cadence import Cadence
from segspeed.speed.clock import Clock
from segspeed.speed.memory import reset_peak
from segspeed.speed.ranks import gather, ranks, share, together
from segspeed.speed.signals import Interrupted, StopRequest
from segspeed.types import Batch, DataError, RunStopped, first_line


class Stoppable(nn.Module):
    """A network whose work on a volume breaks off between two windows once the end of the run is asked for."""

    def __init__(self, model: nn.Module, stop: StopRequest) -> None:
        super().__init__()
        self.model, self.stop = model, stop

    def forward(self, windows: Tensor) -> Tensor:
        self.stop.check()
        # Not compiled: doing that once more, for these shapes and without gradients, takes longer than a few volumes.
        return self.model.forward(windows)


@dataclass(frozen=True)
class Again:
    """An iterable that begins anew each time."""

    begin: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.begin()


class Run:
    """One run, from its first step (or its last checkpoint) to its last."""

    def __init__(
        self,
        cfg: Config,
        prepared: Prepared,
        learner: Learner,
        folder: RunFolder,
        record: RunRecord,
        clock: Clock,
        stop: StopRequest,
    ) -> None:
        self.cfg, self.prepared, self.learner, self.folder = cfg, prepared, learner, folder
        self.record, self.clock, self.stop = record, clock, stop
        self.progress = Progress()
        self.horizon = build.horizon_from(cfg)
        self.predictor: Predictor = build.predictor_from(
            cfg, Stoppable(learner.model, stop), prepared.plan, prepared.cohort, learner.precision
        )
        self.failed: dict[str, str] = {}  # validation cases that the last evaluation could not score, and why
        self.val_entries = [prepared.entries[i] for i in prepared.split.val]
        self.val_norms = build.norms_of(self.val_entries, prepared.plan)
        self.augmenting_loader = False
        self.ceiling: float | None = None
        self.bar = LiveBar()
        self.monitor = Monitor(
            learner=learner,
            progress=self.progress,
            folder=folder.path,
            record=record,
            bar=self.bar,
            clock=clock,
            cadence=Cadence(cfg.evaluation.share, cost=0.0),
            stop=stop,
            evaluate=self.evaluate_between,
            remaining=self.remaining,
            share_done=self.share_done,
            save_every=cfg.save.every,
        )

    def go(self) -> None:
        """Restore the last checkpoint if there is one, then train to the end."""
        self.start_or_restore()
        plan, device = self.prepared.plan, self.learner.precision.device
        entries = [self.prepared.entries[i] for i in self.prepared.split.train]
        norms = build.norms_of(entries, plan)
        loader = build.loader_from(
            self.cfg, plan, self.prepared.cohort, entries, norms, device, first=self.progress.sample
        )
        stage = build.stage_from(self.cfg, plan, self.prepared.cohort, self.learner, loader)
        self.augmenting_loader = stage.finished
        reset_peak(device)
        with self.bar:
            fit(
                self.learner,
                Again(lambda: self.monitor.saving(loader)),
                stage,
                self.horizon,
                self.progress,
                accumulate=plan.accumulate,
                after_step=self.monitor,
            )
        self.monitor.finish()
        if self.monitor.last_batches and ranks() == 1:  # none where a finished training is only evaluated again
            quiet = dataclasses.replace(stage, meter=None)
            self.ceiling = ceiling_samples_per_s(self.learner, quiet, self.monitor.last_batches)

    def start_or_restore(self) -> None:
        """Load the newest checkpoint, or record a start and time one case: it tells what an evaluation will cost,
        and a fault in it shows now rather than in an hour."""
        state, notes = load_last(self.folder.path)
        for note in notes:
            say(f"warning: {note}")
            self.record.write("event", name="checkpoint", message=note)
        if state is not None:
            self.monitor.restore(state)
            say(f"Going on from step {self.progress.step} of {self.folder.path}")
            self.record.write(
                "event", name="resume", message=f"from step {self.progress.step}", step=self.progress.step
            )
            return
        self.record.write(
            "start",
            config=self.cfg.model_dump(mode="json", by_alias=True),
            versions=environment(),
            device=str(self.learner.precision.device),
            precision=self.learner.precision.name,
            plan=json.loads(self.folder.plan.read_text(encoding="utf-8")),
            cohort=self.prepared.cohort.name,
            classes=list(self.prepared.cohort.class_names),
            cases_train=len(self.prepared.split.train),
            cases_val=len(self.prepared.split.val),
            seed=self.cfg.seed,
            effective_batch=build.effective_batch(self.prepared.plan),
            learning_rate=self.learner.peak_rates[0],
        )
        for text in self.learner.cautions(self.prepared.plan.batch, self.prepared.plan.accumulate):
            self.record.write("event", name="batch", message=text)
        for problem in self.prepared.warnings:
            self.record.write("event", name=problem.kind, message=f"{problem.case}: {problem.message}")
        start = time.perf_counter()
        with self.clock.measure("evaluation"):
            try:
                for entry, norm in list(zip(share(self.val_entries), share(self.val_norms), strict=True))[:1]:
                    next(evaluate_cases(self.predictor, [entry], [norm]))
            except Interrupted as broken:
                raise stopped_before(broken, "the first step; the same command begins again") from None
            except DataError:
                raise
            except ValueError as error:
                raise DataError(
                    f"{self.cfg.model.target} does not work on patches of {list(self.prepared.plan.patch)}: {error}. "
                    "Choose another plan.patch"
                ) from error
        self.monitor.cadence.cost = (time.perf_counter() - start) * len(share(self.val_entries))

    def evaluate_between(self) -> float | None:
        """Mean Dice in the middle of the run; None where a case could not be scored, so that the mean is of other cases."""
        try:
            summary = self.evaluate(final=False)
        except DataError:  # each case is told already; the network learns on, and the end of the run says it again
            return None
        return None if self.failed else summary.mean_dice or 0.0

    def scores(self, predictor: Predictor) -> Iterator[tuple[str, list[float | None] | str]]:
        """This rank's part of the validation cases, as they are done: the Dice of each, or why it has none."""
        for case, entry, norm in zip(
            share(self.prepared.split.val), share(self.val_entries), share(self.val_norms), strict=True
        ):
            yield case, score(predictor, case, entry, norm)

    def evaluate(self, *, final: bool) -> Summary:
        """Score all validation cases, each by one rank, with the averaged weights (the last ones where there is no average).

        A case that cannot be read or predicted is told and left out, and kept in `failed`; DataError is raised where none is
        left. Raises Interrupted in all ranks once one of them is asked to end.
        """
        ema, names = self.learner.ema, self.prepared.cohort.table.targets
        predictor = build.mirrored(self.cfg, self.predictor) if final else self.predictor
        start = time.perf_counter()
        own: list[tuple[str, list[float | None] | str]] = []
        asked = 0
        with ema.swapped(self.learner.model) if ema else nullcontext():
            found = self.scores(predictor)
            try:
                own.extend(track(found, len(share(self.val_entries)), "evaluating") if final else found)
            except Interrupted as broken:
                (asked,) = broken.args
        parts = gather((asked, own))
        self.clock.add("evaluation", time.perf_counter() - start)
        for number, _ in parts:
            if number:
                raise Interrupted(number)
        scored = together([part for _, part in parts])
        cases = {case: dict(zip(names, dice, strict=True)) for case, dice in scored if not isinstance(dice, str)}
        self.failed = {case: why for case, why in scored if isinstance(why, str)}
        for case, why in self.failed.items():
            self.monitor.warn("evaluation", f"{case} was not scored: {why}")
        if not cases:
            raise DataError(
                f"none of the {len(scored)} validation cases could be scored ({next(iter(self.failed.values()))}). The weights "
                f"of step {self.progress.step} are saved; mend the cases, and the same command scores them"
            )
        summary = summarise(cases)
        self.record.write(
            "evaluation",
            step=self.progress.step,
            train_s=self.clock["train"],
            seconds=time.perf_counter() - start,
            weights="ema" if ema else "raw",
            mean_dice=summary.mean_dice,
            dice=dict(summary.dice),
            empty=dict(summary.empty),
            interval=summary.interval,
            empty_policy=EMPTY_POLICY,
            cases=cases,
            failed=self.failed,
            final=final,
        )
        for text in self.monitor.health.evaluated(summary.dice, summary.mean_dice, self.share_done(self.progress)):
            self.monitor.warn("health", text)
        return summary

    def remaining(self, progress: Progress) -> float:
        """Seconds left, from the share done so far."""
        if self.cfg.train.budget is not None:
            return max(0.0, self.cfg.train.budget - progress.elapsed)
        done = self.share_done(progress)
        return progress.elapsed * (1 - done) / done if done > 0 else float("inf")

    def share_done(self, progress: Progress) -> float:
        """How much of the run is over, 0 to 1."""
        if self.cfg.train.budget is not None:
            return min(1.0, progress.elapsed / self.cfg.train.budget)
        assert self.cfg.train.steps is not None
        return progress.step / self.cfg.train.steps


def score(predictor: Predictor, case: str, entry: CacheEntry, norm: np.ndarray) -> list[float | None] | str:
    """Dice a target of one case, or what is wrong with it: one case must not cost the scores of all others."""
    try:
        damage = shortened(entry, ("image", "label", "native_label"))
        if damage is not None:
            return damage
        return next(evaluate_cases(predictor, [entry], [norm]))[1]
    except RunStopped:
        raise
    except DataError as error:
        return str(error)
    except (RuntimeError, ValueError, OSError, MemoryError) as error:  # no memory for a large case, a disk that fails
        return f"case {case}: {type(error).__name__}: {first_line(error)}"


def stopped_before(broken: Interrupted, what: str) -> RunStopped:
    """What to raise where work that changes nothing was broken off."""
    (number,) = broken.args
    return RunStopped(f"{signal.Signals(number).name} before {what}", exit_code=128 + number)
