"""Several processes train as one, through torchrun and gloo."""

import json
import subprocess
import sys

import pytest
import torch

from segspeed.record.checkpoints import load_checkpoint
from segspeed.record.run_record import read_record
from tests.integration.test_doors import environment

STEPS = 5
LONG = pytest.mark.long
SETTINGS = (
    "debug=default", "data=msd", "data.folds=2", "plan.patch=[16,16,16]", "plan.features=[4,8,16]", f"train.steps={STEPS}",
    "train.ema=0.9", "optimizer.lr=1e-3", "augment=nnunet", "cache.workers=1", "loader.workers=0", "evaluation.share=0.5",
    "resume=auto", "precision=fp32",
)  # fmt: skip


def torchrun(ranks, module, *arguments, cwd, timeout=300):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    return subprocess.run(
        [*command, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment()
    )


def train(folder, ranks, batch, accumulate, *more):
    name = f"r{ranks}_{batch}x{accumulate}"
    found = torchrun(
        ranks, "segspeed.train", f"data.root={folder / 'balls'}", *SETTINGS, f"plan.batch={batch}",
        f"train.accumulate={accumulate}", "run.root=outputs", f"run.name={name}", *more, cwd=folder,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return folder / "outputs/balls" / name, found.stdout


def losses(run):
    return [e["loss"] for e in read_record(run / "run.jsonl") if e["kind"] == "step"]


@pytest.fixture(scope="module")
def one(tmp_path_factory, make_cohort):
    """A folder with the data, and the run of one process: batches of 4."""
    folder = tmp_path_factory.mktemp("ranks")
    make_cohort(folder / "balls", cases=7)
    return folder, train(folder, 1, 4, 1)[0]


@pytest.mark.parametrize(
    ("ranks", "batch", "accumulate"), [(2, 2, 1), pytest.param(2, 1, 2, marks=LONG), pytest.param(4, 1, 1, marks=LONG)]
)
def test_ranks_learn_what_one_process_learns(one, ranks, batch, accumulate):
    folder, alone = one
    together, said = train(folder, ranks, batch, accumulate)
    assert losses(together)[0] == pytest.approx(losses(alone)[0], rel=1e-5)
    expected, found = (load_checkpoint(run / "last.pt") for run in (alone, together))
    assert found["progress"]["sample"] == expected["progress"]["sample"] == 4 * STEPS
    for key, value in expected["model"].items():
        torch.testing.assert_close(found["model"][key], value, rtol=1e-3, atol=1e-5)
    results = [json.loads((run / "result.json").read_text()) for run in (alone, together)]
    assert results[1]["ranks"] == ranks
    final = [
        [e for e in read_record(run / "run.jsonl") if e["kind"] == "evaluation"][-1]["cases"]
        for run in (alone, together)
    ]
    assert list(final[0]) == list(final[1]), "each validation case once, in order, though they do not divide"
    assert results[0]["dice"] == pytest.approx(results[1]["dice"], abs=0.02)
    assert said.count("mean of classes") == 1, "one rank speaks"
    assert {p.name for p in together.iterdir()} >= {"last.pt", "report.html", "result.json", "run.jsonl"}


@LONG
def test_wrong_data_is_told_once_and_ends_all_ranks(one, make_cohort, tmp_path):
    make_cohort(tmp_path / "balls", cases=4, change={1: lambda i, m: (i * float("nan"), m)})
    done = torchrun(2, "segspeed.train", f"data.root={tmp_path / 'balls'}", *SETTINGS, "plan.batch=2", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("training would be wrong") == 1


@pytest.mark.slow
def test_predictions_and_scores_are_shared_out(one):
    folder, run = one
    maps = folder / "maps"
    done = torchrun(
        2, "segspeed.predict", f"run={run}", f"input={folder / 'balls/imagesTr'}", f"output={maps}", cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "7 predicted" in done.stdout
    assert len(list(maps.glob("*.nii.gz"))) == 7
    assert len(json.loads((maps / "summary.json").read_text())["cases"]) == 7
    done = torchrun(2, "segspeed.evaluate", f"run={run}", f"output={folder / 'scores'}", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    scored = json.loads((folder / "scores/summary.json").read_text())
    assert scored["mean_dice"] == pytest.approx(json.loads((run / "result.json").read_text())["mean_dice"], abs=1e-9)
