"""The same seed gives the same bits, and what a run began with stands in its folder."""

import hashlib
import json
import os
from pathlib import Path

import torch

from segspeed import build, training
from segspeed.record.checkpoints import load_checkpoint
from segspeed.record.run_record import read_record


def test_a_seed_gives_the_same_bits_twice_and_the_code_stands_beside_them(tiny, monkeypatch):
    monkeypatch.setattr(training, "git_changes", lambda folder: b"-a\n+b\n")
    first = tiny("run.name=a", "precision=fp32")
    folder = first.data.kwargs["root"]
    for cfg in (
        first,
        tiny("run.name=b", "precision=fp32", folder=folder),
        tiny("run.name=c", "seed=1", folder=folder),
    ):
        training.train(cfg)
    runs = [Path(first.run.root, "balls", name) for name in "abc"]
    a, b, c = (load_checkpoint(run / "last.pt") for run in runs)
    for part in ("model", "ema"):
        assert list(a[part]) == list(b[part])
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])
    assert not all(torch.equal(a["model"][k], c["model"][k]) for k in a["model"])
    assert (runs[0] / "changes.diff").read_bytes() == b"-a\n+b\n"
    (start,) = (e for e in read_record(runs[0] / "run.jsonl") if e["kind"] == "start")
    assert {"python", "packages", "cpu", "git"} <= set(start["versions"])
    assert start["config"]["seed"] == 0
    digests = json.loads((runs[0] / "data.json").read_text())
    case = next(iter(digests["val"]))
    files = [Path(folder, part, f"{case}.nii.gz") for part in ("imagesTr", "labelsTr")]
    both = "".join(hashlib.sha256(f.read_bytes()).hexdigest() for f in files)
    assert digests["val"][case] == hashlib.sha256(both.encode()).hexdigest()


def test_deterministic_asks_for_kernels_that_repeat(tiny):
    build.device_from(tiny("train.deterministic=true"))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark is False
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
    build.device_from(tiny(folder=tiny().data.kwargs["root"]))
    assert not torch.are_deterministic_algorithms_enabled()
