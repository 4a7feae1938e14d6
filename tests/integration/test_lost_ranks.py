"""One of several processes fails or dies: the others end with a text, torchrun tells, and the run goes on from its checkpoint."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from segspeed.record.checkpoints import load_checkpoint
from segspeed.record.run_record import read_record
from tests.integration.test_doors import environment

STEPS = 6
SETTINGS = (
    "debug=default", "data=msd", "data.folds=2", "plan.patch=[16,16,16]", "plan.features=[4,8,16]", f"train.steps={STEPS}",
    "train.ema=0.9", "augment=nnunet", "cache.workers=1", "resume=auto", "threads=1", "save.every=0.001s", "run.root=outputs",
)  # fmt: skip
FAULTS = {
    "none": "pass",
    "out of memory": 'raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 9 bytes")',
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}
SCRIPT = """
import os, pathlib, signal
import segspeed.train
from segspeed.cli import door
from segspeed.engine import Learner

gradient, calls = Learner._gradient, []

def faulty(self, *given):
    calls.append(1)
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(calls) == 4:
        pathlib.Path("faulty").touch()
        {fault}
    return gradient(self, *given)

Learner._gradient = faulty
door(segspeed.train.main)()
"""


def launch(folder, name, fault, *options):
    """With a store of its own for each start of the processes: the shared one still knows the addresses of the dead."""
    script = folder / f"{fault.replace(' ', '_')}.py"
    script.write_text(SCRIPT.format(fault=FAULTS[fault]))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options, str(script),
        f"data.root={folder / 'balls'}", *SETTINGS, f"run.name={name}",
    ]  # fmt: skip
    own_store = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=own_store,
        start_new_session=True,
    )


def ended(process, timeout=240):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def place(tmp_path_factory, make_cohort):
    """A folder with the data and the run of two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("ranks")
    make_cohort(folder / "balls", cases=6)
    code, _, err = ended(launch(folder, "calm", "none"))
    assert code == 0, err[-3000:]
    return folder


def like_the_calm_one(folder, name):
    found, expected = (load_checkpoint(folder / "outputs/balls" / n / "last.pt") for n in (name, "calm"))
    assert found["progress"]["sample"] == expected["progress"]["sample"]
    assert all(torch.equal(found["model"][k], v) for k, v in expected["model"].items())
    assert all(map(torch.equal, found["ema"]["shadow"], expected["ema"]["shadow"]))


@pytest.mark.long
def test_out_of_memory_on_one_rank_ends_all_and_is_resumed(place):
    code, _, err = ended(launch(place, "memory", "out of memory"))
    assert time.time() - (place / "faulty").stat().st_mtime < 60, "the other rank does not wait for ever"
    assert code != 0
    assert "Stopped: out of memory on one of 2 ranks (DefaultCPUAllocator" in err
    assert "Stopped: rank 0 ends, since another rank did" in err
    assert not (place / "outputs/balls/memory/result.json").exists()
    code, out, err = ended(launch(place, "memory", "none"))
    assert code == 0, err[-3000:]
    assert "Going on from step 3" in out
    like_the_calm_one(place, "memory")


@pytest.mark.long
def test_a_killed_rank_is_started_again_and_goes_on(place):
    code, out, err = ended(launch(place, "killed", "killed", "--max-restarts=1"))
    assert code == 0, err[-3000:]
    assert "Going on from step 3" in out
    assert (place / "outputs/balls/killed/report.html").exists()
    like_the_calm_one(place, "killed")


@pytest.mark.long
def test_a_signal_to_all_processes_ends_all_after_the_same_step(place):
    process = launch(place, "signal", "none")
    record = place / "outputs/balls/signal/run.jsonl"
    while not any(e["kind"] == "save" for e in read_record(record)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to those that got it already
    asked = time.monotonic()
    code, _, err = ended(process)
    assert time.monotonic() - asked < 30, "what SLURM gives"
    assert code != 0
    assert "SIGTERM after step" in err
    code, out, err = ended(launch(place, "signal", "none"))
    assert code == 0, err[-3000:]
    assert "Going on from step" in out
    like_the_calm_one(place, "signal")
