"""A cross-validation from its runs to its table: each case once, by the run that held it out."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from segspeed import evaluate
from segspeed.config_inference import EvaluateConfig
from segspeed.folds import find_runs, read_folds
from segspeed.training import train
from segspeed.types import DataError

FOLDS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory, make_cohort, settings):
    """Three folds of six cases, two steps each; the folder of the runs."""
    root = tmp_path_factory.mktemp("folds")
    data = make_cohort(root / "balls", cases=6)
    for fold in range(FOLDS):
        train(
            settings(
                "debug=default", "data=msd", f'data.root="{data}"', f"data.folds={FOLDS}", "plan.patch=[16,16,16]",
                "plan.features=[4,8,16]", f'run.root="{root / "runs"}"', "cache.workers=1", "resume=auto", "train.steps=2",
                f"data.fold={fold}", f"run.name=cv_fold{fold}",
            )
        )  # fmt: skip
    return root / "runs/balls"


@pytest.fixture
def runs(trained, tmp_path):
    """Copies of the runs that a test may change."""
    return [Path(shutil.copytree(trained / f"cv_fold{n}", tmp_path / f"cv_fold{n}")) for n in range(FOLDS)]


def scored(*runs, **more):
    return evaluate.main(EvaluateConfig(runs=tuple(map(str, runs)), workers=1, **more))


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_each_case_once_by_the_run_that_held_it_out(trained, capsys):
    assert evaluate.main(EvaluateConfig(runs=f"{trained}/cv_fold*", workers=1)) == 0
    folder = trained / "cross_validation_cv_fold"
    found = json.loads((folder / "summary.json").read_text())
    assert found["cases"] == 6
    assert found["title"] == "balls: cross-validation over 3 folds"
    fold_of = {
        case: str(n)
        for n in range(FOLDS)
        for case in json.loads((trained / f"cv_fold{n}/split.json").read_text())["val"]
    }
    assert {c["id"]: c["fold"] for c in found["each"]} == fold_of
    # the same figures as each run gave of itself: Dice by class and case stand in the run's last evaluation
    for n in range(FOLDS):
        last = [json.loads(line) for line in (trained / f"cv_fold{n}/run.jsonl").read_text().splitlines()]
        cases = [e for e in last if e.get("kind") == "evaluation" and e.get("final")][-1]["cases"]
        for case, dice in cases.items():
            (each,) = (c for c in found["each"] if c["id"] == case)
            assert {k: v["dice"] for k, v in each["scores"].items()} == pytest.approx(dice, abs=1e-9)
        result = json.loads((trained / f"cv_fold{n}/result.json").read_text())
        assert found["folds"][str(n)]["mean_dice"] == pytest.approx(result["mean_dice"], abs=1e-9)
        assert found["folds"][str(n)]["cases"] == 2
    rows = list(csv.DictReader((folder / "cases.csv").read_text().splitlines()))
    assert list(rows[0])[:5] == ["case", "patient", "site", "fold", "class"]
    assert {r["case"]: r["fold"] for r in rows} == fold_of
    assert "<h2>Folds</h2>" in (folder / "report.html").read_text()
    said = capsys.readouterr().out
    assert "Fold 2: mean Dice" in said
    assert "warning" not in said
    assert (trained / "cv_fold0/evaluation_balls/predictions/.made_by.json").exists(), "as run=cv_fold0 leaves them"


def test_a_missing_fold_is_told(runs, capsys):
    assert scored(*runs[:2], output=str(runs[0].parent / "out")) == 0
    said = " ".join(capsys.readouterr().out.split())
    lost = json.loads((runs[2] / "split.json").read_text())["val"]
    assert f"no run of fold 2 (of 3); 2 cases that no run holds out: {', '.join(lost)}" in said
    found = json.loads((runs[0].parent / "out/summary.json").read_text())
    assert (found["cases"], found["title"]) == (4, "balls: cross-validation over 2 of 3 folds")
    assert "no run of fold 2" in found["about"]["Not in the figures"][0]
    assert (runs[0].parent / "out/fold_1/predictions").is_dir()


def held_out_twice(runs):
    shutil.rmtree(runs[1])
    shutil.copytree(runs[0], runs[1])


def trained_on_its_own(runs):
    split = json.loads((runs[0] / "split.json").read_text())
    change(runs[0] / "split.json", train=split["train"] + split["val"][:1])


def trained_on_a_copy(runs):
    digests = json.loads((runs[0] / "data.json").read_text())
    other, held = next(iter(digests["train"])), next(iter(digests["val"]))
    change(runs[0] / "data.json", train={**digests["train"], other: digests["val"][held]})


def other_classes(runs):
    change(runs[1] / "cohort.json", labels={"bright": [3], "dark": [1]})


def other_channels(runs):
    change(runs[1] / "cohort.json", channels=["CT"])


def other_cases(runs):
    split = json.loads((runs[1] / "split.json").read_text())
    change(runs[1] / "split.json", train=split["train"][:-1])


def other_files(runs):
    digests = json.loads((runs[2] / "data.json").read_text())
    change(runs[2] / "data.json", train={**digests["train"], next(iter(digests["train"])): "0" * 64})


def other_folds(runs):
    config = json.loads((runs[2] / "config.json").read_text())
    config["config"]["data"]["split_seed"] = 7
    change(runs[2] / "config.json", **config)


def no_run(runs):
    (runs[1] / "config.json").unlink()


def no_digests(runs):
    (runs[1] / "data.json").write_text("[")


@pytest.mark.parametrize(
    ("damage", "texts"),
    [
        (held_out_twice, ("cv_fold0 and ", "cv_fold1 both hold out b_0")),
        (trained_on_its_own, ("cv_fold0 was trained on b_0", "would have to score")),
        (trained_on_a_copy, ("cv_fold0 was trained on b_0", "would have to score")),
        (other_classes, ("cv_fold1 has other classes than", "cv_fold0")),
        (other_channels, ("cv_fold1 has other channels than",)),
        (other_cases, ("cv_fold1 has other cases (b_0", "in one of them only) than")),
        (other_files, ("cv_fold2 was trained on other files than", "cases b_0")),
        (other_folds, ("cv_fold2 has other data.split_seed than",)),
        (no_run, ("cv_fold1 holds no run: config.json is missing",)),
        (no_digests, ("data.json cannot be read", "train this fold again")),
    ],
)
def test_what_does_not_belong_together_is_refused_by_name(runs, damage, texts):
    damage(runs)
    with pytest.raises(DataError) as error:
        read_folds(find_runs([str(r) for r in runs]))
    for text in texts:
        assert text in str(error.value)


def test_other_settings_and_unfinished_runs_are_told(runs):
    assert read_folds(runs).notes == ()
    config = json.loads((runs[1] / "config.json").read_text())
    config["config"]["train"]["steps"] = 200
    change(runs[1] / "config.json", **config)
    (runs[2] / "result.json").unlink()
    notes = read_folds(runs).notes
    assert len(notes) == 2
    assert "cv_fold2" in notes[0]
    assert "train.steps: 2 -> 200" in notes[1]


def test_folders_are_found_by_glob_and_once(runs):
    (runs[0].parent / "cv_fold.txt").write_text("no folder")
    assert find_runs(f"{runs[0].parent}/cv_fold*") == runs
    with pytest.raises(DataError, match="matches no folder"):
        find_runs(f"{runs[0].parent}/nothing*")
    with pytest.raises(DataError, match="names a folder twice"):
        find_runs([str(runs[0]), f"{runs[0].parent}/./cv_fold0"])


def test_runs_take_no_data_and_no_run():
    with pytest.raises(ValueError, match="give one of run"):
        EvaluateConfig(run="a", runs=("a", "b"))
    with pytest.raises(ValueError, match="runs=... takes none"):
        EvaluateConfig(runs=("a", "b"), data={"_target_": "x"})
