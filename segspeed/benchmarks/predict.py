"""Prediction of a large volume: peak memory of a whole process and share of the network, for several numbers of classes."""

from __future__ import annotations

import multiprocessing as mp
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from torch import Tensor

from segspeed.evaluation import Predictor
from segspeed.infer.sliding import Window
from segspeed.model.networks import dynunet
from segspeed.prediction import predict_cases
from segspeed.speed.precision import Precision
from segspeed.trained import TrainedRun
from segspeed.types import Case, ChannelNorm, Cohort, LabelTable, Plan, RunStopped, Shape3, Split

OVERLAP = 0.25
FEATURES = (4, 4, 8, 8)  # narrow on purpose: what is not the network shows


@dataclass(frozen=True)
class Prediction:
    """What it took: seconds in all and in the network's forward passes, and the most memory the process ever had."""

    classes: int
    total_s: float
    network_s: float
    peak_bytes: int


def synthetic_volume(path: Path, shape: Shape3) -> Path:
    """A CT-like volume ``(D, H, W)``: a body of smooth blobs in air, as compressed NIfTI; made once."""
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    w, h, d = shape[::-1]
    coarse = rng.normal(size=(-(-w // 32), -(-h // 32), -(-d // 32))).astype(np.float32) * 150
    blobs = coarse.repeat(32, 0).repeat(32, 1).repeat(32, 2)[:w, :h, :d]
    x, y = np.meshgrid(np.linspace(-1, 1, w), np.linspace(-1, 1, h), indexing="ij")
    body = (x**2 + (1.3 * y) ** 2 < 0.8)[..., None]
    values = np.where(body, blobs + rng.normal(0, 15, blobs.shape).astype(np.float32), -1000).astype(np.int16)
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values, np.eye(4)), path)
    return path


def measure_prediction(volume: Path, patch: Shape3, classes: int, cases: int) -> Prediction:
    """Predict ``volume`` ``cases`` times over, in a process of its own."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_predict, args=(theirs, volume, patch, classes, cases))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError as error:
        raise RunStopped(f"the process that predicts {classes} classes died, most likely for want of memory") from error
    process.join()
    assert isinstance(found, Prediction)
    return found


def _predict(pipe: Connection, volume: Path, patch: Shape3, classes: int, cases: int) -> None:
    torch.manual_seed(0)
    levels = len(FEATURES)
    plan = Plan(
        spacing=(1.0, 1.0, 1.0), patch=patch, batch=1, accumulate=1, features=FEATURES,
        strides=((1, 1, 1), *((2, 2, 2),) * (levels - 1)), kernels=((3, 3, 3),) * levels, normalisation=("ct",),
        ct_norm=(ChannelNorm(-200.0, 300.0, 0.0, 100.0),),
    )  # fmt: skip
    model = dynunet(plan, 1, classes + 1).eval()
    spent = [0.0]
    forward = model.forward

    def timed(x: Tensor) -> Tensor:
        start = time.perf_counter()
        out: Tensor = forward(x)
        spent[0] += time.perf_counter() - start
        return out

    model.forward = timed
    labels = LabelTable.numbered(classes)
    predictor = Predictor(model, Window(patch, OVERLAP, 1), Precision("fp32", torch.device("cpu")), labels)
    run = TrainedRun(Path(), Cohort("bench", (), labels.classes, ("CT",)), Split((), ()), plan, predictor)
    with tempfile.TemporaryDirectory(dir=volume.parent) as folder:
        start = time.perf_counter()
        todo = [Case(f"case_{n}", (volume,)) for n in range(cases)]
        for outcome in predict_cases([run], todo, Path(folder), labels=labels):
            assert outcome.status == "done", outcome.problem
        total = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    pipe.send(Prediction(classes, total, spent[0], peak))


def table(found: list[Prediction], shape: Shape3, patch: Shape3, cases: int) -> str:
    """Markdown, a row a number of classes."""
    lines = [
        f"predict: {cases} volume(s) of {'x'.join(map(str, shape))}, patch {'x'.join(map(str, patch))}, "
        f"overlap {OVERLAP:g}, a U-Net of {', '.join(map(str, FEATURES))} channels, fp32, "
        f"{torch.get_num_threads()} threads, n = 1",
        "",
        "| classes | in all | network | everything else | peak memory of the process |",
        "|---|---|---|---|---|",
    ]
    for p in found:
        rest = 1 - p.network_s / p.total_s
        lines.append(
            f"| {p.classes} | {p.total_s:.0f} s | {p.network_s:.0f} s | {rest:.1%} | {p.peak_bytes / 1e9:.2f} GB |"
        )
    return "\n".join(lines)
