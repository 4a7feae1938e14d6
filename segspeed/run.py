"""The parts of a run in one place, joined for `segspeed.engine.fit`."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import nullcontext

from segspeed import build
from segspeed.ceiling import ceiling_samples_per_s
from segspeed.config import Config
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
from segspeed.speed.signals import StopRequest
from segspeed.types import DataError


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
        self.record, self.clock = record, clock
        self.progress = Progress()
        self.horizon = build.horizon_from(cfg)
        self.predictor: Predictor = build.predictor_from(
            cfg, learner.model, prepared.plan, prepared.cohort, learner.precision
        )
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
            evaluate=lambda: self.evaluate(final=False).mean_dice or 0.0,
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
                loader,
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
            self.record.write("event", name="resume", message=f"from step {self.progress.step}")
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
                next(self.scores(self.predictor, limit=1), None)
            except DataError:
                raise
            except ValueError as error:
                raise DataError(
                    f"{self.cfg.model.target} does not work on patches of {list(self.prepared.plan.patch)}: {error}. "
                    "Choose another plan.patch"
                ) from error
        self.monitor.cadence.cost = (time.perf_counter() - start) * len(share(self.val_entries))

    def scores(self, predictor: Predictor, limit: int | None = None) -> Iterator[tuple[str, list[float | None]]]:
        """Dice of this rank's part of the validation cases, at most ``limit``, as they are scored."""
        return evaluate_cases(predictor, share(self.val_entries)[:limit], share(self.val_norms)[:limit])

    def evaluate(self, *, final: bool) -> Summary:
        """Score all validation cases, each by one rank, with the averaged weights (the last ones where there is no average)."""
        ema, names = self.learner.ema, self.prepared.cohort.table.targets
        predictor = build.mirrored(self.cfg, self.predictor) if final else self.predictor
        start = time.perf_counter()
        with ema.swapped(self.learner.model) if ema else nullcontext():
            found = self.scores(predictor)
            shown = track(found, len(share(self.val_entries)), "evaluating") if final else found
            scored = together(gather(list(shown)))
        cases = {case: dict(zip(names, dice, strict=True)) for case, dice in scored}
        seconds = time.perf_counter() - start
        self.clock.add("evaluation", seconds)
        summary = summarise(cases)
        self.record.write(
            "evaluation",
            step=self.progress.step,
            train_s=self.clock["train"],
            seconds=seconds,
            weights="ema" if ema else "raw",
            mean_dice=summary.mean_dice,
            dice=dict(summary.dice),
            empty=dict(summary.empty),
            interval=summary.interval,
            empty_policy=EMPTY_POLICY,
            cases=cases,
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
