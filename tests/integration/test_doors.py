"""The commands themselves, as a person types them: exit codes, one screen of text, files left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from segspeed.record.checkpoints import load_checkpoint
from segspeed.record.run_record import read_record

ROOT = Path(__file__).resolve().parents[2]
FAST = (
    "debug=default",
    "plan.patch=[16,16,16]",
    "plan.features=[4,8,16]",
    "data.folds=2",
    "resume=auto",
    "cache.workers=1",
)


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run(module, *arguments, cwd, timeout=120):
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment())


def test_train_check_and_prepare_a_folder(msd_folder, tmp_path):
    data = ("data=msd", f"data.root={msd_folder(name='balls')}")
    checked = run("data_prep.check", *data, "data.folds=2", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "0 errors" in checked.stdout
    found = json.loads((tmp_path / "outputs/balls/check.json").read_text())["problems"]
    assert [(p["severity"], p["kind"]) for p in found] == [("info", "mapped-values")]
    assert (tmp_path / "outputs/balls/check.html").exists()
    prepared = run("data_prep.prepare", *data, *FAST, "run.root=outputs", cwd=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    assert "4 of 4 cases built" in prepared.stdout
    assert (tmp_path / "outputs/balls/plan.json").exists()
    again = run("data_prep.prepare", *data, *FAST, "run.root=outputs", cwd=tmp_path)
    assert "0 of 4 cases built" in again.stdout
    trained = run("segspeed.train", *data, *FAST, "run.root=outputs", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr == ""
    assert "mean of classes" in trained.stdout
    (result,) = (tmp_path / "outputs/balls").glob("*/result.json")
    assert json.loads(result.read_text())["steps"] == 2
    assert {p.name for p in tmp_path.iterdir()} == {"balls", "outputs"}, "nothing else is left where it ran"


def test_check_reports_everything_and_fails(msd_folder, tmp_path):
    folder = msd_folder(
        cases=6,
        change={
            0: lambda i, m: (i * float("nan"), m),
            1: lambda i, m: (i, None),
            2: lambda i, m: (i, m[1:]),
            3: lambda i, m: (i, m * 0),
        },
    )
    bad = folder / "imagesTr/b_04.nii.gz"
    bad.write_bytes(bad.read_bytes()[:500])
    done = run("data_prep.check", "data=msd", f"data.root={folder}", "data.folds=2", cwd=tmp_path)
    assert done.returncode == 1
    found = json.loads((tmp_path / "outputs/balls/check.json").read_text())["problems"]
    found = [p for p in found if p["severity"] != "info"]
    assert {(p["case"], p["severity"], p["kind"]) for p in found} == {
        ("b_00", "error", "nan"), ("b_01", "error", "missing-label"), ("b_02", "error", "shape-mismatch"),
        ("b_03", "warning", "empty-label"), ("b_04", "error", "unreadable"),
    }  # fmt: skip
    assert all(p["message"] for p in found)
    assert {p["file"].split("/")[1] for p in found} == {f"b_{n:02d}.nii.gz" for n in range(5)}
    for p in found:
        assert p["case"] in done.stdout
    assert "4 errors, 1 warnings" in done.stdout


@pytest.mark.parametrize("module", ["segspeed.train", "data_prep.check", "data_prep.prepare"])
def test_wrong_settings_take_one_screen_and_end_with_2(module, tmp_path):
    start = time.perf_counter()
    done = run(module, "train.stepz=3", "+foo=1", cwd=tmp_path)
    assert time.perf_counter() - start < 5
    assert done.returncode == 2
    assert "did you mean train.steps?" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 20
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["data=mds"], 2, "did you mean data=msd?"),
        (["data=msd"], 2, "data.root is missing"),
        (["data=msd", "data.root=/no/such/folder"], 1, "does not exist: /no/such/folder"),
        (["data.root=/a (b)"], 2, "'data.root=\"/a (b)\"'"),
        (["seed=abc"], 2, "seed=abc"),
        (["run.name=${nope}"], 2, "nope"),
    ],
)
def test_every_kind_of_mistake_is_text(arguments, code, text, tmp_path):
    done = run("segspeed.train", *arguments, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert text in done.stderr


def test_help_lists_groups_and_examples_without_torch(tmp_path):
    start = time.perf_counter()
    done = run("segspeed.train", "--help", cwd=tmp_path)
    assert time.perf_counter() - start < 3
    assert done.returncode == 0
    for text in (
        "augment: light, nnunet, none",
        "data: bids, cohort, dicom, msd, nnunet, pairs, phantoms",
        "data=msd data.root=FOLDER",
        "Train a network",
    ):
        assert text in done.stdout
    assert done.stderr == ""


def test_a_path_with_everything_in_it(msd_folder, tmp_path):
    folder = msd_folder(root=tmp_path / "Größe [1] = (alt), x", name="balls")
    done = run("data_prep.check", "data=msd", f'data.root="{folder}"', "data.folds=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "data").mkdir()
    (tmp_path / "conf/data/mine.yaml").write_text(f"_target_: data_prep.msd.msd\nroot: '{folder}'\n")
    done = run("data_prep.check", "--config-dir", "conf", "data=mine", "data.folds=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def start(tmp_path, folder, name, steps):
    arguments = (
        "data=msd",
        f"data.root={folder}",
        *FAST,
        "run.root=outputs",
        f"run.name={name}",
        f"train.steps={steps}",
    )
    command = [sys.executable, "-m", "segspeed.train", *arguments, "save.every=0.2s", "augment=nnunet"]
    return subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def wait_for_a_save(process, record):
    end = time.perf_counter() + 90
    while not any(e["kind"] == "save" for e in read_record(record)):
        assert process.poll() is None, process.communicate()
        assert time.perf_counter() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, make_cohort):
    """A cohort, and a run over it that nobody interrupted."""
    place = tmp_path_factory.mktemp("whole")
    folder = make_cohort(place / "balls")
    process = start(place, folder, "whole", 40)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return folder, load_checkpoint(place / "outputs/balls/whole/last.pt")


@pytest.mark.parametrize(
    "sent",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_killed_run_goes_on_to_the_same_weights(whole, tmp_path, sent):
    folder, expected = whole
    cut = start(tmp_path, folder, "cut", 40)
    run_folder = tmp_path / "outputs/balls/cut"
    wait_for_a_save(cut, run_folder / "run.jsonl")
    cut.send_signal(sent)
    out, err = cut.communicate(timeout=60)
    assert cut.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[sent]
    if sent != signal.SIGKILL:
        assert "run.name=cut" in err
        assert "Traceback" not in err
    assert not (run_folder / "result.json").exists()
    again = start(tmp_path, folder, "cut", 40)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "Going on from step" in out
    found = load_checkpoint(run_folder / "last.pt")
    assert all(torch.equal(expected["model"][k], found["model"][k]) for k in expected["model"])
    assert all(torch.equal(x, y) for x, y in zip(expected["ema"]["shadow"], found["ema"]["shadow"], strict=True))


def test_a_sweep_over_folds(msd_folder, tmp_path):
    done = run(
        "segspeed.train", "--multirun", "data.fold=0,1", "data=msd", f"data.root={msd_folder()}", *FAST,
        "run.root=outputs", "run.name=fold${data.fold}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    splits = [json.loads((tmp_path / f"outputs/balls/fold{n}/split.json").read_text()) for n in (0, 1)]
    assert set(splits[0]["val"]) == set(splits[1]["train"])


def test_a_dead_loader_process_ends_the_run_with_what_to_do(msd_folder, tmp_path):
    import psutil

    folder = msd_folder()
    arguments = (
        "data=msd",
        f"data.root={folder}",
        *FAST,
        "run.root=outputs",
        "run.name=w",
        "train.steps=100000",
        "loader.workers=2",
    )
    command = [sys.executable, "-m", "segspeed.train", *arguments]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    record, end = tmp_path / "outputs/balls/w/run.jsonl", time.perf_counter() + 90
    while not any(e["kind"] == "step" for e in read_record(record)):
        assert process.poll() is None, process.communicate()
        assert time.perf_counter() < end
        time.sleep(0.05)
    psutil.Process(process.pid).children(recursive=True)[-1].kill()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "a loader process died" in err
    assert "Traceback" not in err


def test_an_output_that_cannot_be_written_is_one_line(msd_folder, tmp_path):
    (tmp_path / "file").touch()
    done = run("segspeed.train", "data=msd", f"data.root={msd_folder()}", *FAST, "run.root=file", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: Not a directory: file")
