"""One run from its configuration to its result: data, plan, cache, training, evaluation, report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from segspeed import build
from segspeed.config import Config
from segspeed.data.jsonio import read_json, write_json
from segspeed.engine import Learner, Progress, fit
from segspeed.evaluation import Predictor, evaluate_cases
from segspeed.metric.summary import Summary, summarise
from segspeed.model.networks import count_parameters
from segspeed.monitor import Monitor
from segspeed.outcome import finish_run
from segspeed.preparation import Prepared, prepare
from segspeed.record.checkpoints import load_last
from segspeed.record.live import LiveBar, say, track
from segspeed.record.run_folder import RunFolder, choose_folder, differing_keys, write_json_atomic
from segspeed.record.run_record import RunRecord
from segspeed.record.versions import environment
from segspeed.speed.cadence import Cadence
from segspeed.speed.clock import Clock
from segspeed.speed.memory import reset_peak
from segspeed.speed.precision import Precision, choose_precision
from segspeed.speed.signals import StopRequest, catch_stop_signals
from segspeed.types import DataError, Plan


def train(cfg: Config) -> dict[str, Any]:
    """Run, or go on with, the training that ``cfg`` describes; returns what stands in ``result.json``.

    Raises DataError when data or settings are wrong and RunStopped when the run ended early (it can be resumed).
    """
    clock = Clock()
    with clock.measure("setup"):
        device = build.device_from(cfg)
        cohort = build.cohort_from(cfg)
        folder = choose_folder(cfg.run.root, cohort.name, cfg.run.name)
        frozen = reopen(folder, cfg)
        if folder.finished:
            say(f"This run is already complete: {folder.result}. For a longer one choose another run.name.")
            return json.loads(folder.result.read_text(encoding="utf-8"))
    with clock.measure("cache"):
        prepared = prepare(cfg, cohort, device.type, track, frozen[1] if frozen else None)
    with clock.measure("setup"):
        name, reason = (frozen[0], "as the run began") if frozen else choose_precision(cfg.precision, device)
        precision = Precision(name, device)
        folder.path.mkdir(parents=True, exist_ok=True)
        write_start(folder, cfg, prepared, name)
        record = RunRecord(folder.record)
        model = build.network_from(cfg, prepared.plan, cohort, precision)
        learner = build.learner_from(cfg, model, precision)
    announce(prepared, precision, reason, learner, folder)
    with catch_stop_signals() as stop:
        run = Run(cfg, prepared, learner, folder, record, clock, stop)
        run.go()
    return finish_run(run)


def reopen(folder: RunFolder, cfg: Config) -> tuple[str, Plan] | None:
    """Precision and Plan as a run began with them, if ``folder`` holds one; refuses settings that differ."""
    if not folder.config.exists():
        return None
    if cfg.resume == "never":
        raise DataError(f"{folder.path} holds a run already and resume=never; choose another run.name")
    began = json.loads(folder.config.read_text(encoding="utf-8"))
    changed = differing_keys(began["config"], cfg.model_dump(mode="json", by_alias=True))
    if changed:
        raise DataError(
            f"{folder.path} holds a run with other settings:\n  "
            + "\n  ".join(changed)
            + "\nGive the old settings to go on with it, or choose another run.name."
        )
    return began["precision"], read_json(folder.plan, Plan)


def write_start(folder: RunFolder, cfg: Config, prepared: Prepared, precision: str) -> None:
    """Freeze what a resumed run must find again: settings, precision, Plan, fingerprint and split."""
    if folder.config.exists():
        return
    write_json(folder.plan, prepared.plan)
    write_json(folder.path / "fingerprint.json", prepared.fingerprint)
    write_json(folder.path / "split.json", prepared.split)
    settings = {"config": cfg.model_dump(mode="json", by_alias=True), "precision": precision}
    write_json_atomic(folder.config, settings)


def announce(prepared: Prepared, precision: Precision, reason: str, learner: Learner, folder: RunFolder) -> None:
    """A few lines on what is about to run."""
    plan, cohort = prepared.plan, prepared.cohort
    for problem in prepared.warnings[:5]:
        say(f"warning: {problem.case}: {problem.message}")
    if len(prepared.warnings) > 5:
        say(f"warning: {len(prepared.warnings) - 5} more; see python -m data_prep.check")
    say(
        f"{cohort.name}: {len(prepared.split.train)} cases to train on, {len(prepared.split.val)} to judge by; "
        f"classes {', '.join(cohort.class_names)}"
    )
    say(
        f"Plan: patch {'x'.join(map(str, plan.patch))}, batch {plan.batch} x {plan.accumulate}, "
        f"spacing {' x '.join(f'{s:.2f}' for s in plan.spacing)} mm, "
        f"{count_parameters(learner.model) / 1e6:.1f} M parameters"
    )
    say(f"Device {precision.device}, precision {precision.name}: {reason}")
    say(f"Run folder: {folder.path}")


class Run:
    """The parts of a run in one place, joined for `segspeed.engine.fit`."""

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
        loader = build.loader_from(self.cfg, plan, entries, norms, device, first=self.progress.sample)
        stage = build.stage_from(self.cfg, plan, self.prepared.cohort, self.learner.precision)
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
            cases_train=len(self.prepared.split.train),
            cases_val=len(self.prepared.split.val),
            seed=self.cfg.seed,
        )
        for problem in self.prepared.warnings:
            self.record.write("event", name=problem.kind, message=f"{problem.case}: {problem.message}")
        start = time.perf_counter()
        with self.clock.measure("evaluation"):
            next(self.scores(self.predictor, limit=1))
        self.monitor.cadence.cost = (time.perf_counter() - start) * len(self.val_entries)

    def scores(self, predictor: Predictor, limit: int | None = None) -> Iterator[tuple[str, list[float | None]]]:
        classes = len(self.prepared.cohort.class_names)
        return evaluate_cases(predictor, self.val_entries[:limit], self.val_norms[:limit], classes)

    def evaluate(self, *, final: bool) -> Summary:
        """Score all validation cases with the averaged weights (the last ones where there is no average)."""
        ema, names = self.learner.ema, self.prepared.cohort.class_names
        predictor = build.mirrored(self.cfg, self.predictor) if final else self.predictor
        start = time.perf_counter()
        with ema.swapped(self.learner.model) if ema else nullcontext():
            found = self.scores(predictor)
            shown = track(found, len(self.val_entries), "evaluating") if final else found
            cases = {case: dict(zip(names, dice, strict=True)) for case, dice in shown}
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
            cases=cases,
            final=final,
        )
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
