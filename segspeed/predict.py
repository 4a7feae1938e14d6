"""Label maps of new volumes: python -m segspeed.predict run=outputs/COHORT/NAME input=FOLDER output=FOLDER

Each map lies on its image's own grid, in the label values of the training data. Several runs are averaged: run=[A,B,C].
Cases that are there already are skipped (overwrite=true predicts them again), one that fails does not stop the others, and
summary.json tells each one's fate and volumes. Exit code 1 if any failed.
"""

from __future__ import annotations

from segspeed.cli import Frame, door
from segspeed.config_inference import PredictConfig


def main(cfg: PredictConfig) -> int:
    """Predict what ``cfg`` names; 0 when every case has its label map."""
    from pathlib import Path

    from segspeed import build
    from segspeed.jsonio import write_json
    from segspeed.prediction import find_cases, predict_cases
    from segspeed.record.live import say, track
    from segspeed.trained import load_runs

    runs = load_runs(cfg.run, cfg, build.device_from(cfg))
    cohort, output = runs[0].cohort, Path(cfg.output)
    cases = find_cases(Path(cfg.input), cohort.channels)
    say(f"{len(cases)} cases, {len(runs)} run(s) on {', '.join(cohort.channels)}: {', '.join(cohort.class_names)}")
    found = predict_cases(
        runs, cases, output, labels=cohort.labels, overwrite=cfg.overwrite, probabilities=cfg.probabilities
    )
    outcomes = list(track(found, len(cases), "predicting"))
    write_json(
        output / "summary.json",
        {
            "runs": [str(run.folder) for run in runs],
            "labels": {name: list(values) for name, values in cohort.labels.items()},
            "cases": sorted(outcomes, key=lambda o: o.case),
        },
    )
    failed = [o for o in outcomes if o.status == "failed"]
    for outcome in failed:
        say(f"failed: {outcome.problem}")
    there = sum(o.status == "there" for o in outcomes)
    say(
        f"{len(outcomes) - there - len(failed)} predicted, {there} were there already, {len(failed)} failed. "
        f"Label maps and summary.json: {output}"
    )
    say(f"Next: python -m segspeed.evaluate predictions={output} labels=FOLDER, where there are reference labels")
    return int(bool(failed))


if __name__ == "__main__":
    door(main, Frame(PredictConfig, "predict"))()
