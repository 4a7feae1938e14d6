"""How the work on a cohort grows with its cases, with the voxels of a case and with the classes: the commands themselves, over
generated cohorts, each in a process of its own.

All reading, building, training and scoring happens in that process with one thread, so that its memory is that of whatever is kept
of a case. Its time is CPU time, which another process on the machine does not lengthen; waiting for the disk is not in it. What a
growth counts as is the exponent between the two largest sizes: constants (a first picture, say) weigh least there.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import multiprocessing as mp
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch

from segspeed.config import BenchConfig, Config, DataConfig, PlanConfig
from segspeed.config_inference import EvaluateConfig
from segspeed.data.plan import make_plan
from segspeed.jsonio import write_json
from segspeed.record.run_record import read_record
from segspeed.scoring.output import read_scores, write_scores
from segspeed.scoring.summary import summarise_scores
from segspeed.speed.memory import peak_memory_bytes
from segspeed.types import Fingerprint, RunStopped

LINEAR = 1.1  # an exponent up to here counts as linear: a measurement repeats to a few percent
MANIFEST = 20_000  # bytes of the main process a case: its paths, facts and scores as Python holds them
FEATURES = (4, 8, 16, 32, 32, 32)  # from the finest level down
DOORS = {  # named, not imported: data_prep stands above this package
    "check": "data_prep.check",
    "preparation": "data_prep.prepare",
    "training": "segspeed.train",
    "scoring": "segspeed.evaluate",
}


@dataclass(frozen=True)
class Size:
    """One cohort. ``axis`` is what grows: "cases", "voxels" (of a case) or "classes"."""

    axis: str
    cases: int
    side: int
    classes: int

    @property
    def amount(self) -> int:
        """What grows: cases, voxels of a case, or classes."""
        return {"cases": self.cases, "voxels": self.side**3, "classes": self.classes}[self.axis]

    @property
    def name(self) -> str:
        """Name of the cohort's folder."""
        return f"{self.cases}_of_{self.side}_with_{self.classes}"


@dataclass(frozen=True)
class Measure:
    """CPU seconds of one kind of work at one size (of a training step: wall clock), and bytes at the peak of its process (0: not
    apart from another's)."""

    what: str
    size: Size
    seconds: float
    peak: int


def sizes_of(b: BenchConfig) -> list[Size]:
    """What is measured: cohorts of ``b.counts`` smallest cubes with the fewest classes; ``b.cases`` cubes of each of ``b.sides``;
    ``b.cases`` cubes of the middle side with each of ``b.classes``."""
    small, middle = b.sides[0], b.sides[len(b.sides) // 2]
    return [
        *(Size("cases", n, small, b.classes[0]) for n in b.counts),
        *(Size("voxels", b.cases, side, b.classes[0]) for side in b.sides),
        *(Size("classes", b.cases, middle, classes) for classes in b.classes),
    ]


def measure_scale(cfg: Config, b: BenchConfig, root: Path) -> Iterator[list[Measure]]:
    """All measurements of one size after the other. The cohort of each is made in ``root`` and taken away."""
    for size in sizes_of(b):
        folder = root / size.name
        shutil.rmtree(folder, ignore_errors=True)
        try:
            make_cohort(folder / "data", size)
            yield _measure(cfg, b, size, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def make_cohort(folder: Path, size: Size) -> None:
    """A cohort in Decathlon layout: noise with a block a class, every case another; beside it label maps to score, the blocks
    one voxel off."""
    for part in ("imagesTr", "labelsTr", "predictions"):
        (folder / part).mkdir(parents=True)
    heads = {kind: _header(size.side, kind) for kind in (np.int16, np.uint8)}
    label = _blocks(size)
    off = np.roll(label, 1, axis=0)
    ids = [f"case_{n:06d}" for n in range(size.cases)]
    for n, name in enumerate(ids):
        noise = np.random.default_rng(n).integers(-100, 100, label.shape, dtype=np.int16)
        for part, array in (("imagesTr", noise + 50 * (label > 0)), ("labelsTr", label), ("predictions", off)):
            data = array.astype(np.int16 if part == "imagesTr" else np.uint8)
            (folder / part / f"{name}.nii").write_bytes(heads[data.dtype.type] + data.tobytes())
    write_json(
        folder / "dataset.json",
        {
            "name": "scale",
            "modality": {"0": "MR"},
            "labels": {"0": "background", **{str(n): f"class_{n}" for n in range(1, size.classes + 1)}},
            "training": [{"image": f"./imagesTr/{i}.nii", "label": f"./labelsTr/{i}.nii"} for i in ids],
        },
    )


def _header(side: int, kind: Any) -> bytes:
    image = nib.Nifti1Image(np.zeros((side,) * 3, kind), np.eye(4))
    return bytes(image.to_bytes()[: -(side**3) * np.dtype(kind).itemsize])


def _blocks(size: Size) -> np.ndarray:
    """``(side, side, side)`` uint8: class 1, 2 ... in the cells of a lattice."""
    cells = math.ceil(size.classes ** (1 / 3))
    cell = size.side // cells
    assert size.classes < 256
    assert cell >= 3, f"{size.classes} classes do not fit into a cube of {size.side}"
    label = np.zeros((size.side,) * 3, np.uint8)
    for n in range(size.classes):
        at = [cell * (n // cells**axis % cells) for axis in range(3)]
        label[tuple(slice(a + 1, a + cell - 1) for a in at)] = n + 1
    return label


def _measure(cfg: Config, b: BenchConfig, size: Size, folder: Path) -> list[Measure]:
    run = _settings(cfg, b, size, folder)
    names = {f"class_{n}": n for n in range(1, size.classes + 1)}
    scoring = EvaluateConfig(
        predictions=str(folder / "data/predictions"), labels=str(folder / "data/labelsTr"), class_names=names,
        output=str(folder / "scores"), workers=1,
    )  # fmt: skip
    found = []
    for what in DOORS:
        seconds, peak = _alone(what, scoring if what == "scoring" else run)
        if what == "training":
            found.append(Measure("training step", size, _step_seconds(folder / "runs/scale/scale", b.steps), 0))
            what = f"training of {b.steps} steps"
        found.append(Measure(what, size, seconds, peak))
    found.append(Measure("report", size, *_alone("report", folder / "scores")))
    return found


def _settings(cfg: Config, b: BenchConfig, size: Size, folder: Path) -> Config:
    """A tiny network over the generated cohort: what is not the network shows."""
    data = DataConfig.model_validate({"_target_": "data_prep.msd.msd", "root": str(folder / "data")})
    changed: Mapping[str, Any] = {
        "run": {"name": "scale", "root": str(folder / "runs")},
        "plan": {"patch": (size.side,) * 3, "features": FEATURES[: _levels(size.side)], "batch": 1},
        "cache": {"workers": 1, "resident": "disk", "root": None},
        "loader": {"workers": 0},
        "train": {"steps": b.steps, "budget": None, "accumulate": 1},
        "evaluation": {"share": 0.0},
        "memory": {"limit": None},
    }
    parts = {key: getattr(cfg, key).model_copy(update=values) for key, values in changed.items()}
    return cfg.model_copy(update={**parts, "data": data, "bench": None, "precision": "fp32", "threads": 1})


def _levels(side: int) -> int:
    """Levels of the network that the planning rules give a cube."""
    one = Fingerprint(1, ((1.0, 1.0, 1.0),), ((side,) * 3,), {"any": 1}, ({},))
    plan = make_plan(one, channels=("MR",), classes=1, device="cpu", overrides=PlanConfig(patch=(side,) * 3))
    return len(plan.features)


def _step_seconds(run: Path, steps: int) -> float:
    """Seconds of a step after the first, which compiles and fills caches."""
    trained = json.loads((run / "result.json").read_text(encoding="utf-8"))["train_s"]
    first = next(e for e in read_record(run / "run.jsonl") if e["kind"] == "step")
    return float(trained - first["train_s"]) / (steps - 1)


def _alone(what: str, given: Any) -> tuple[float, int]:
    """CPU seconds and peak bytes of one kind of work in a process of its own. It comes from a server that has imported everything,
    so that imports are neither waited for every time nor counted."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["segspeed.benchmarks.scale", "segspeed.training", *DOORS.values()])
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, what, given))
    process.start()
    theirs.close()
    try:
        seconds, peak, problem = ours.recv()
    except EOFError as error:
        raise RunStopped(f"the process that measures {what} died, most likely for want of memory") from error
    finally:
        process.join()
    if problem:
        raise RunStopped(f"{what} failed: {problem}")
    return float(seconds), int(peak)


def _work(pipe: Connection, what: str, given: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    work = _report if what == "report" else importlib.import_module(DOORS[what]).main
    gc.collect()
    start = time.process_time()
    try:
        code = work(given)
        problem = f"exit code {code}" if code else ""
    except Exception as error:  # told in the parent, in whose terminal it belongs
        problem = f"{type(error).__name__}: {error}"
    pipe.send((time.process_time() - start, _peak(), problem))


def _peak() -> int:
    """Most resident bytes of this process since it began; what Linux tells by getrusage holds its parent's as well."""
    status = Path("/proc/self/status")
    for line in status.read_text(encoding="utf-8").splitlines() if status.exists() else []:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return peak_memory_bytes(torch.device("cpu"))


def _report(scores: Path) -> int:
    """The figures and the page of scores that are there."""
    cases = read_scores(scores / "summary.json")
    write_scores(scores, cases, summarise_scores(cases), "scale")
    return 0


def exponent(a: Measure, b: Measure) -> float:
    """How the seconds grow from ``a`` to ``b``: 1 is in proportion, 2 is with the square."""
    return math.log(b.seconds / a.seconds) / math.log(b.size.amount / a.size.amount)


def bytes_a_case(a: Measure, b: Measure) -> float:
    """What the peak of the process gains with a case."""
    return (b.peak - a.peak) / (b.size.amount - a.size.amount)


def grows_too_fast(found: Sequence[Measure]) -> list[str]:
    """What grows faster than linearly, or keeps more of a case in memory than a manifest of it."""
    bad = []
    for axis, what, row in _rows(found):
        if len(row) > 1 and exponent(*row[-2:]) > LINEAR:
            bad.append(f"{what} with {axis}: exponent {exponent(*row[-2:]):.2f}")
        if len(row) > 1 and axis == "cases" and row[-1].peak and bytes_a_case(*row[-2:]) > MANIFEST:
            bad.append(f"memory of {what}: {bytes_a_case(*row[-2:]) / 1000:.1f} kB a case")
    return bad


def _rows(found: Sequence[Measure]) -> Iterator[tuple[str, str, list[Measure]]]:
    kinds = dict.fromkeys((m.size.axis, m.what) for m in found)
    for axis, what in kinds:
        yield axis, what, [m for m in found if (m.size.axis, m.what) == (axis, what)]


def table(found: Sequence[Measure]) -> str:
    """Markdown, a table an axis, and the verdict."""
    first = found[0].size
    lines = [
        f"scale: CPU seconds of one process with one thread, fp32, a U-Net that starts with {FEATURES[0]} channels, n = 1"
    ]
    heads = {
        "cases": f"cases (cubes of {first.side}, {first.classes} classes)",
        "voxels": "voxels of a case ({cases} cases, {classes} classes)",
        "classes": "classes ({cases} cases, cubes of {side})",
    }
    for axis in dict.fromkeys(m.size.axis for m in found):
        rows = [(what, row) for a, what, row in _rows(found) if a == axis]
        size = rows[0][1][0].size
        title = heads[axis].format(cases=size.cases, side=size.side, classes=size.classes)
        amounts = [f"{m.size.side} cubed" if axis == "voxels" else f"{m.size.amount}" for m in rows[0][1]]
        memory = "memory a case" if axis == "cases" else "peak"
        lines += ["", f"| {title} | {' | '.join(amounts)} | exponent | {memory} |", "|---" * (len(amounts) + 3) + "|"]
        for what, row in rows:
            seconds = " | ".join(_seconds(m.seconds) for m in row)
            slope = f"{exponent(*row[-2:]):.2f}" if len(row) > 1 else "-"
            lines.append(f"| {what} | {seconds} | {slope} | {_memory(axis, row)} |")
    bad = grows_too_fast(found)
    verdict = "; ".join(bad) if bad else f"nothing faster than linear (exponent up to {LINEAR:g}), memory a case under "
    verdict += "" if bad else f"{MANIFEST / 1000:.0f} kB"
    return "\n".join([*lines, "", f"Exponents and memory between the two largest sizes. Verdict: {verdict}."])


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value * 1000:.3g} ms" if value < 0.1 else f"{value:.2f} s"


def _memory(axis: str, row: Sequence[Measure]) -> str:
    if not row[-1].peak:
        return "-"
    if axis != "cases" or len(row) < 2:
        return f"{row[-1].peak / 1e9:.2f} GB"
    return f"{bytes_a_case(*row[-2:]) / 1000:.1f} kB, peak {row[-1].peak / 1e9:.2f} GB"
