"""The end of a run: scored once with its last weights, result.json, pictures, report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from segspeed.jsonio import write_json
from segspeed.metric.summary import Summary
from segspeed.model.networks import count_parameters
from segspeed.record.figures import overlay_picture
from segspeed.record.live import print_result, say
from segspeed.record.overlays import Overlay, make_overlay, save_overlays
from segspeed.record.report import write_report
from segspeed.run import Run, own_figures, stopped_before
from segspeed.speed.cpus import loader_workers
from segspeed.speed.memory import peak_memory_bytes
from segspeed.speed.meter import verdict
from segspeed.speed.ranks import is_main, ranks
from segspeed.speed.signals import Interrupted
from segspeed.types import DataError, RunStopped


def finish_run(run: Run) -> dict[str, Any]:
    """Evaluate the last weights once, write result.json and report.html, print the table. Returns the result. Of several ranks,
    which all evaluate, rank 0 does the rest.

    Raises RunStopped when a signal breaks the evaluation off or the disk takes no more (training is saved, and the same
    command goes on with the evaluation), and DataError, once all is written, when cases could not be scored.
    """
    try:
        summary = run.evaluate(final=True)
        overlays = draw_overlays(run, summary) if is_main() else []
    except Interrupted as broken:
        raise stopped_before(
            broken, "the last evaluation was done; training is complete and saved, and the same command scores it"
        ) from None
    result = result_of(run, summary)
    if is_main():
        with disk_faults(run.folder.path):
            save_overlays(run.folder.path / "overlays.npz", overlays)
            run.record.write("end", result=result)
            if run.record.logger is not None:
                for overlay in overlays:
                    run.record.picture(overlay.role, overlay_picture(overlay))
            write_json(run.folder.result, result)
            report = write_report(run.folder.path)
        print_result(result, report)
    if run.failed:
        listed = "\n  ".join([f"{case}: {why}" for case, why in run.failed.items()][:10])
        raise DataError(
            f"{len(run.failed)} of {len(run.val_entries)} validation cases could not be scored:\n  {listed}\nThe others are "
            f"scored in {run.folder.result}. Mend these; the same command then scores all of them, without training again"
        )
    if not is_main():
        return result
    if summary.mean_dice is None:
        say("No validation case has any foreground, so there is no Dice. Choose another fold or mend the labels.")
    return result


@contextmanager
def disk_faults(folder: Path) -> Iterator[None]:
    """Raises RunStopped for an error of the file system within the block."""
    try:
        yield
    except OSError as error:
        raise RunStopped(
            f"a file in {folder} could not be written ({error.strerror or error}); is the disk full? Training is saved; the same "
            "command writes what is missing"
        ) from error


def result_of(run: Run, summary: Summary) -> dict[str, Any]:
    """What the run came to. Times in seconds, memory in bytes; ``mean_dice`` is that of the last weights."""
    clock, tally = run.clock, run.monitor.tally
    setup, cache, trained, evaluated = (clock[part] for part in ("setup", "cache", "train", "evaluation"))
    return {
        "cohort": run.prepared.cohort.name,
        "mean_dice": summary.mean_dice,
        "dice": dict(summary.dice),
        "empty": dict(summary.empty),
        "interval": list(summary.interval) if summary.interval else None,
        "metrics": {name: own_figures(own) for name, own in run.own.items()},
        "cases": len(summary.cases),
        "failed": dict(run.failed),
        "train_s": trained,
        "total_s": setup + cache + trained + evaluated,
        "setup_s": setup,
        "cache_s": cache,
        "evaluation_s": evaluated,
        "peak_memory_bytes": peak_memory_bytes(run.learner.precision.device),
        "wait_share": tally.waited / tally.step_seconds if tally.step_seconds else 0.0,
        "split": run.learner.meter.shares(),
        "verdict": verdict(
            run.learner.meter.shares(),
            workers=loader_workers(run.cfg.loader.workers, run.learner.precision.device.type),
            device=str(run.learner.precision.device),
            precision=run.learner.precision.name,
            augmenting_loader=run.augmenting_loader,
        ),
        "ceiling_samples_per_s": run.ceiling,
        "samples_per_s": tally.samples / tally.step_seconds if tally.step_seconds else 0.0,
        "steps": run.progress.step,
        "precision": run.learner.precision.name,
        "skipped_steps": run.learner.precision.skipped,
        "parameters": count_parameters(run.learner.model),
        "device": str(run.learner.precision.device),
        "ranks": ranks(),
        "seed": run.cfg.seed,
        "weights": "ema" if run.learner.ema else "raw",
        "best_selected_on_validation": tally.best if tally.best >= 0 else None,
    }


def draw_overlays(run: Run, summary: Summary) -> list[Overlay]:
    """Best, median and worst case, predicted again on the cached grid and cut into three planes."""
    ranked = summary.ranked()
    if not ranked:
        return []
    chosen = {"best": ranked[0], "median": ranked[len(ranked) // 2], "worst": ranked[-1]}
    ema = run.learner.ema
    pictures = []
    with ema.swapped(run.learner.model) if ema else nullcontext():
        for role, (case, dice) in chosen.items():
            number = run.prepared.split.val.index(case)
            entry = run.val_entries[number]
            label = np.asarray(entry.label)
            ignored = run.prepared.cohort.table.ignore_index
            pictures.append(
                make_overlay(
                    role,
                    case,
                    dice,
                    np.asarray(entry.image[0], dtype=np.float32),
                    label if ignored is None else np.where(label == ignored, 0, label),
                    run.predictor.classes(entry.image, run.val_norms[number]),
                    run.prepared.plan.spacing,
                )
            )
    return pictures
