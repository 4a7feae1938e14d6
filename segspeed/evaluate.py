"""Scores on whole volumes: python -m segspeed.evaluate run=outputs/COHORT/NAME

run=R                             the run's own validation cases, with every metric
run=R data=pairs data.csv=...     another hospital's cases: predicts and scores them (classes are joined by name)
runs=[A,B,C]                      a cross-validation: each case by the run that held it out; a glob names them, too
predictions=P labels=L            anybody's label maps against references of the same names
compare=[A,B]                     two summary.json, case by case: the second against the first

Writes summary.json, cases.csv and report.html. Exit code 1 if a case failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segspeed.cli import Frame, door
from segspeed.config_inference import EvaluateConfig
from segspeed.types import Case, Cohort, DataError, LabelTable, SettingError

if TYPE_CHECKING:
    import torch

    from segspeed.scoring.pairs import ScorePair
    from segspeed.trained import TrainedRun


def main(cfg: EvaluateConfig) -> int:
    """Score or compare what ``cfg`` names; 0 when every case was scored. Under torchrun predictions are shared out."""
    if cfg.compare:
        return compare(cfg)
    if cfg.run is None and cfg.runs is None:
        return score(cfg, of_folders(cfg))
    from segspeed import build
    from segspeed.record.live import silence
    from segspeed.speed.ranks import is_main, joined

    device = build.device_from(cfg)
    failed: list[str] = []
    with joined(device.type == "cuda"):
        if not is_main():
            silence()
        task = (of_run if cfg.runs is None else of_folds)(cfg, device, failed)
        return max(score(cfg, task) if is_main() else 0, int(bool(failed)))


@dataclass(frozen=True)
class Task:
    """What is to be scored: pairs, what label values mean, the targets that count, the report's folder and title, the
    images behind the labels by case, and what the report tells about where the predictions come from."""

    pairs: list[ScorePair]
    labels: LabelTable
    wanted: tuple[str, ...]
    folder: Path
    title: str
    images: Mapping[str, Path]
    about: Mapping[str, Any]


def of_folders(cfg: EvaluateConfig) -> Task:
    """Anybody's predictions."""
    from segspeed.data.labels import regions_of
    from segspeed.data.wildcards import start_of
    from segspeed.scoring.pairs import find_pairs
    from segspeed.scoring.score import classes_of

    assert cfg.predictions is not None
    assert cfg.labels is not None
    predictions = Path(cfg.predictions)
    pairs = find_pairs(predictions, Path(cfg.labels))
    if cfg.class_names is None:
        found = classes_of([p.reference for p in pairs])
        labels = LabelTable({n: v for n, v in found.items() if v[0] not in cfg.ignore}, ignore=cfg.ignore)
    else:
        named = {n: (v if isinstance(v, tuple) else (v,)) for n, v in cfg.class_names.items()}
        classes, regions = regions_of(named)
        labels = LabelTable(classes, ignore=cfg.ignore, regions=regions)
    start = start_of(predictions)
    folder = Path(cfg.output) if cfg.output else start / "evaluation"
    title = f"{start.name} against {start_of(cfg.labels).name}"
    return Task(pairs, labels, labels.targets, folder, title, {}, {})


def of_run(cfg: EvaluateConfig, device: torch.device, failed: list[str]) -> Task:
    """A run's predictions, made first where they are not there. Cases that could not be predicted go to ``failed``."""
    from segspeed import build
    from segspeed.record.live import say
    from segspeed.trained import load_runs, seen_before, with_values_of

    assert cfg.run is not None
    runs = load_runs(cfg.run, cfg, device)
    run = runs[0]
    if cfg.data is None:
        cohort, cases = run.cohort, [run.cohort.case(i) for i in run.split.val]
        refuse_gone(cases, "give data=... instead")
        if len(runs) > 1:
            say("warning: other runs of the ensemble may have been trained on these cases; give data=... for others")
    else:
        cohort = build.cohort_from(cfg.data)
        cases = list(cohort.cases)
        known = sorted({i for r in runs for i in seen_before(r, cases)})
        if known:
            say(
                f"warning: {len(known)} of these cases were trained on, so their Dice says little: {', '.join(known[:10])}"
            )
    bare = [c.id for c in cases if c.label is None]
    if bare:
        raise DataError(
            f"cases without a label cannot be scored: {', '.join(bare[:10])}; python -m segspeed.predict needs none"
        )
    if any(len(c.images) != len(run.cohort.channels) for c in cases):
        raise DataError(f"the run takes {len(run.cohort.channels)} channels ({', '.join(run.cohort.channels)}) a case")
    labels = with_values_of(run.cohort, cohort).table
    folder = Path(cfg.output) if cfg.output else run.folder / f"evaluation_{cohort.folder_name}"
    pairs = predicted(cfg, runs, cases, labels, folder / "predictions", failed)
    title = f"{' + '.join(r.folder.name for r in runs)} on {cohort.name}"
    return task_of(pairs, cohort, labels, folder, title, {"Plan of the run": run.plan}, failed, cases)


def of_folds(cfg: EvaluateConfig, device: torch.device, failed: list[str]) -> Task:
    """The runs of a cross-validation: each one's validation cases, predicted by it where they are not there yet, pooled."""
    from segspeed.folds import find_runs, read_folds
    from segspeed.record.live import say
    from segspeed.trained import load_runs

    assert cfg.runs is not None
    found = read_folds(find_runs(cfg.runs))
    for text in (*found.notes, *([found.told] if found.told else [])):
        say(f"warning: {text}")
    refuse_gone([case for fold in found.each for case in fold.cases], "bring them back")
    cohort, first = found.each[0].run.cohort, found.each[0].run.folder
    pairs = []
    for fold in found.each:
        where = fold.run.folder / f"evaluation_{cohort.folder_name}"  # where run=... puts them: none is made twice
        where = Path(cfg.output) / f"fold_{fold.name}" if cfg.output else where
        say(f"Fold {fold.name}: {fold.run.folder}, {len(fold.cases)} cases")
        runs = load_runs(str(fold.run.folder), cfg, device)
        pairs += predicted(cfg, runs, fold.cases, cohort.table, where / "predictions", failed, fold.name)
    about = {
        "Folds": {
            fold.name: {"run": fold.run.folder.name, "held out": len(fold.cases), "plan": fold.run.plan}
            for fold in found.each
        },
        **({"Not in the figures": [found.told]} if found.told else {}),
        **({"To know": list(found.notes)} if found.notes else {}),
    }
    folder = Path(cfg.output) if cfg.output else first.parent / found.folder_name
    cases = [case for fold in found.each for case in fold.cases]
    return task_of(pairs, cohort, cohort.table, folder, found.title, about, failed, cases)


def refuse_gone(cases: Sequence[Case], remedy: str) -> None:
    """Raise DataError where files of validation cases are not there."""
    gone = [str(p) for c in cases for p in (*c.images, c.label) if p is not None and not p.exists()]
    if gone:
        raise DataError(f"files of the run's validation cases are gone: {', '.join(gone[:5])}; {remedy}")


def predicted(
    cfg: EvaluateConfig,
    runs: Sequence[TrainedRun],
    cases: Sequence[Case],
    labels: LabelTable,
    predictions: Path,
    failed: list[str],
    fold: str = "",
) -> list[ScorePair]:
    """Label maps of ``cases`` in the folder ``predictions``, made where they are not there, beside their references. Ranks share
    the work; cases that could not be predicted go to ``failed``."""
    from segspeed.prediction import output_path, predict_cases
    from segspeed.record.live import say, track
    from segspeed.scoring.pairs import ScorePair
    from segspeed.speed.ranks import first, gather, same, share
    from segspeed.stamp import claim, stamp_of

    # the folder is this command's own: maps of other weights or settings are made anew
    ours = first(lambda: claim(predictions, stamp_of(runs, cfg, labels), cases, overwrite=True))
    anew = cfg.overwrite or not same(ours)  # the others find what rank 0 has claimed
    mine = share(cases)
    found = predict_cases(runs, mine, predictions, labels=labels, overwrite=anew)
    for outcome in (o for part in gather(list(track(found, len(mine), "predicting"))) for o in part):
        if outcome.status == "failed":
            failed.append(outcome.case)
            say(f"failed: {outcome.problem}")
    lost = set(failed)
    return [
        ScorePair(c.id, output_path(predictions, c.id), c.label, c.patient, c.site, fold)
        for c in cases
        if c.label is not None and c.id not in lost
    ]


def task_of(
    pairs: list[ScorePair],
    cohort: Cohort,
    labels: LabelTable,
    folder: Path,
    title: str,
    about: Mapping[str, Any],
    failed: Sequence[str],
    cases: Sequence[Case],
) -> Task:
    """What is to be scored of the ``cases`` of a cohort. Raises DataError when nothing could be predicted."""
    from segspeed.jsonio import to_plain

    if not pairs:
        raise DataError("no case could be predicted")
    images = {c.id: c.images[0] for c in cases}
    told = {**about, **({"Not predicted": list(failed)} if failed else {})}
    theirs = labels if labels.regions else cohort.table
    return Task(pairs, theirs, labels.targets, folder, title, images, {k: to_plain(v) for k, v in told.items()})


def score(cfg: EvaluateConfig, task: Task) -> int:
    """Score the pairs, write the report, print the table; 1 if a case failed."""
    try:
        task.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"the output folder {task.folder} cannot be made: {error.strerror}; name another") from error
    import dataclasses

    from segspeed.record.live import say, track
    from segspeed.record.versions import environment
    from segspeed.scoring.output import print_scores, write_scores
    from segspeed.scoring.pictures import worst_overlays
    from segspeed.scoring.score import score_pairs
    from segspeed.scoring.summary import summarise_scores
    from segspeed.speed.cpus import available_cpus

    workers = available_cpus() if cfg.workers == "auto" else max(1, int(cfg.workers))
    scored = score_pairs(
        task.pairs,
        task.labels,
        tolerances=cfg.tolerances,
        lesions=cfg.lesions,
        tolerance_mm=cfg.tolerance_mm,
        workers=workers,
    )
    cases = [
        # classes of the data that the run does not know are read, so that their values are no error, and left out
        dataclasses.replace(c, scores={n: s for n, s in c.scores.items() if n in task.wanted}) if c.scores else c
        for c in track(scored, len(task.pairs), "scoring")
    ]
    summary = summarise_scores(sorted(cases, key=lambda c: c.id))
    about = {
        **task.about,
        "Settings": cfg.model_dump(
            mode="json", exclude_none=True, exclude={"data", "run", "runs", "predictions", "labels", "output"}
        ),
        "Versions and hardware": environment(),
    }
    overlays = worst_overlays(summary, task.pairs, task.labels, task.images)
    report = write_scores(task.folder, cases, summary, task.title, about=about, overlays=overlays)
    print_scores(summary)
    say(f"Report: {report}; summary.json and cases.csv lie beside it")
    say(
        f"Next: compare with another: python -m segspeed.evaluate compare=[OTHER/summary.json,{task.folder}/summary.json]"
    )
    return int(bool(summary.failed))


def compare(cfg: EvaluateConfig) -> int:
    """Print, and write as comparison.json if ``output`` is given, the second file's scores against the first's."""
    from segspeed.jsonio import write_json
    from segspeed.record.live import say
    from segspeed.scoring.output import compare_scores, print_comparison, read_scores

    first, second = (Path(p) for p in cfg.compare)
    found = compare_scores(read_scores(first), read_scores(second), margin=cfg.margin)
    print_comparison(found, name_a=first.parent.name, name_b=second.parent.name)
    if cfg.output:
        path = Path(cfg.output) / "comparison.json"
        write_json(path, found)
        say(f"Written: {path}")
    return 0


if __name__ == "__main__":
    door(main, Frame(EvaluateConfig, "evaluate"))()
