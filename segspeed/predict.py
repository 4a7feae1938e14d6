"""Label maps of new volumes: python -m segspeed.predict run=outputs/COHORT/NAME input=FOLDER output=FOLDER

Each map lies on its image's own grid, in the label values of the training data. Several runs are averaged: run=[A,B,C].
A folder of DICOM files is converted to NIfTI without its identity first; dicom_seg=true writes the result as DICOM SEG, too.
Cases that are there already are skipped (overwrite=true predicts them again), one that fails does not stop the others, and
summary.json tells each one's fate and volumes. Exit code 1 if any failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from segspeed.cli import Frame, door
from segspeed.config_inference import PredictConfig
from segspeed.types import DataError

if TYPE_CHECKING:
    import torch


def main(cfg: PredictConfig) -> int:
    """Predict what ``cfg`` names; 0 when every case has its label map. Under torchrun the cases are shared out."""
    from segspeed import build
    from segspeed.record.live import silence
    from segspeed.speed.ranks import is_main, joined

    device = build.device_from(cfg)
    with joined(device.type == "cuda"):
        if not is_main():
            silence()
        return predict(cfg, device)


def predict(cfg: PredictConfig, device: torch.device) -> int:
    """`main` of one rank."""
    import dataclasses
    from pathlib import Path

    from segspeed.data.dicom import Series, save_segmentation
    from segspeed.inputs import cases_from_dicom, find_cases, holds_dicom, label_notes
    from segspeed.jsonio import write_json
    from segspeed.prediction import output_path, predict_cases
    from segspeed.record.live import say, track
    from segspeed.speed.ranks import first, gather, is_main, share
    from segspeed.stamp import claim, earlier_volumes, stamp_of
    from segspeed.trained import load_runs

    runs = load_runs(cfg.run, cfg, device)
    cohort, output = runs[0].cohort, Path(cfg.output)
    source = Path(cfg.input)
    series: list[Series] = []
    problems: list[str] = []
    if holds_dicom(source):
        cases, series, problems, notes = first(lambda: cases_from_dicom(source, output / "converted", cohort.channels))
    else:
        cases = find_cases(source, cohort.channels)
        notes = first(lambda: label_notes(cases))
    for note in notes:
        say(note)
    say(f"{len(cases)} cases, {len(runs)} run(s) on {', '.join(cohort.channels)}: {', '.join(cohort.table.targets)}")
    known = earlier_volumes(output)
    first(lambda: claim(output, stamp_of(runs, cfg, cohort.table), cases, overwrite=cfg.overwrite))
    mine = share(cases)
    found = predict_cases(runs, mine, output, labels=cohort.table, overwrite=cfg.overwrite, shares=cfg.probabilities)
    outcomes = [
        dataclasses.replace(o, volumes_ml=known.get(o.case)) if o.status == "there" else o
        for part in gather(list(track(found, len(mine), "predicting")))
        for o in part
    ]
    failed = [o for o in outcomes if o.status == "failed"]
    if not is_main():
        return int(bool(failed or problems))
    done = {o.case for o in outcomes if o.status != "failed"}
    for one in series if cfg.dicom_seg else ():
        if one.id in done:
            try:
                save_segmentation(output_path(output, one.id), one, output / f"{one.id}.seg.dcm", cohort.labels)
            except DataError as error:
                problems.append(str(error))
    write_json(
        output / "summary.json",
        {
            "runs": [str(run.folder) for run in runs],
            "labels": {name: list(values) for name, values in cohort.labels.items()},
            "problems": problems,
            "cases": sorted(outcomes, key=lambda o: o.case),
        },
    )
    for text in [*problems, *(str(o.problem) for o in failed)]:
        say(f"failed: {text}")
    there = sum(o.status == "there" for o in outcomes)
    say(
        f"{len(outcomes) - there - len(failed)} predicted, {there} were there already, {len(failed) + len(problems)} failed. "
        f"Label maps and summary.json: {output}"
    )
    say(f"Next: python -m segspeed.evaluate predictions={output} labels=FOLDER, where there are reference labels")
    return int(bool(failed or problems))


if __name__ == "__main__":
    door(main, Frame(PredictConfig, "predict"))()
