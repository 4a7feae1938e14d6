"""Sweeps: a job that fails is not hidden and stops no other; jobs in processes of their own, through submitit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from segspeed.cli import config_folder
from segspeed.record.run_record import read_record
from tests.integration.test_doors import FAST, ROOT, environment, run

LOUD = """
import os, signal
import segspeed.training
from segspeed.cli import door
from segspeed.types import RunStopped, DataError

WAYS = {1: RunStopped("the loss is not finite"), 2: RuntimeError("a fault of ours"), 3: DataError("a bad file")}

def main(cfg):
    print("job", cfg.seed, flush=True)
    if cfg.seed in WAYS:
        raise WAYS[cfg.seed]
    if cfg.seed == 9:
        raise RunStopped("SIGTERM after step 3", 143)
    return 0

if __name__ == "__main__":
    door(main)()
"""


@pytest.mark.parametrize(
    ("seeds", "jobs", "code", "texts"),
    [
        ("0,4", 2, 0, ()),
        ("1,2,3,0", 4, 1, ("not finite", "a fault of ours", "a bad file")),
        ("9,4", 1, 143, ("SIGTERM after step 3",)),
    ],
)
def test_a_failing_job_shows_and_stops_no_other(tmp_path, seeds, jobs, code, texts):
    (tmp_path / "loud.py").write_text(LOUD.replace("import segspeed.training\n", ""))
    done = run("loud", "-m", f"seed={seeds}", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("job ") == jobs
    for text in texts:
        assert text in done.stderr


def local(*words, cwd):
    command = [sys.executable, "-m", "segspeed.train", "-m", "hydra/launcher=local_jobs", *words]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    env = {**environment(), "PYTHONPATH": path}  # the plugin may lie where this test found it
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def words(folder):
    return "data=msd", f"data.root={folder}", *FAST, "run.root=outputs", "run.name=cv_fold${data.fold}", "threads=1"


@pytest.mark.slow
def test_folds_side_by_side_through_submitit(msd_folder, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    started = local(*words(msd_folder()), "data.fold=0,1", cwd=tmp_path)
    _, err = started.communicate(timeout=300)
    assert started.returncode == 0, err
    for fold in (0, 1):
        assert json.loads((tmp_path / f"outputs/balls/cv_fold{fold}/result.json").read_text())["steps"] == 2
    done = run("segspeed.evaluate", 'runs="outputs/balls/cv_fold*"', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cross-validation" in (tmp_path / "outputs/balls/cross_validation_cv_fold/report.html").read_text()


@pytest.mark.long
def test_a_job_that_fails_in_its_own_process_shows(msd_folder, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    started = local(*words(msd_folder()), "data.fold=0,7", cwd=tmp_path)
    _, err = started.communicate(timeout=300)
    assert started.returncode == 2, err
    assert "job 1" in err
    assert (tmp_path / "outputs/balls/cv_fold0/result.json").exists(), "the other job went on"


@pytest.mark.long
def test_a_job_that_is_terminated_saves_and_goes_on(msd_folder, tmp_path):
    """SIGTERM, which submitit's own handler only logs, ends the run after its step; the same command finishes it."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    more = (*words(msd_folder()), "data.fold=0,1", "train.steps=400", "save.every=1h", "evaluation.share=0")
    started = local(*more, cwd=tmp_path)
    record = tmp_path / "outputs/balls/cv_fold1/run.jsonl"
    end = time.monotonic() + 200
    while time.monotonic() < end and started.poll() is None:
        if record.exists() and any(e["kind"] == "step" for e in read_record(record)):
            break
        time.sleep(0.1)
    for name in os.listdir("/proc"):  # the jobs of this very test: submitit's runners know its folder
        try:
            text = Path(f"/proc/{name}/cmdline").read_text() if name.isdigit() else ""
        except OSError:
            continue
        if "submitit.core._submit" in text and str(tmp_path) in text:
            os.kill(int(name), signal.SIGTERM)
    _, err = started.communicate(timeout=200)
    assert started.returncode == 143, err
    assert (tmp_path / "outputs/balls/cv_fold1/last.pt").exists()
    assert not (tmp_path / "outputs/balls/cv_fold1/result.json").exists()
    again = local(*more, cwd=tmp_path)
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    events = read_record(record)
    assert [e["kind"] for e in events].count("start") == 1
    assert [e["name"] for e in events if e["kind"] == "event"].count("resume") == 1


@pytest.mark.parametrize("name", ["slurm", "local_jobs"])
def test_the_launchers_hold_only_keys_that_the_plugin_knows(name):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = compose("train", overrides=[f"hydra/launcher={name}"], return_hydra_config=True)
    assert cfg.hydra.launcher.timeout_min > 60
    assert str(cfg.hydra.launcher._target_).endswith("Launcher")


def test_a_launcher_without_its_plugin_says_what_to_install(tmp_path):
    try:
        import hydra_plugins.hydra_submitit_launcher  # noqa: F401
    except ImportError:
        done = run("segspeed.train", "-m", "hydra/launcher=slurm", "seed=0,1", cwd=tmp_path)
        assert done.returncode == 2
        assert "pip install hydra-submitit-launcher" in done.stderr
        assert "Traceback" not in done.stderr
    else:
        pytest.skip("the plugin is installed")
