"""New volumes through trained networks, to label maps on their own grid: read, predict and write side by side."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from segspeed import build
from segspeed.data.plan import grid_of
from segspeed.data.preprocess import Grid, PreparedImage, preprocess_image
from segspeed.infer.decode import as_scores, probabilities
from segspeed.infer.export import Planes, label_map, native_planes, save_label_map, save_probability
from segspeed.trained import TrainedRun
from segspeed.types import Case, DataError, Geometry, LabelTable


@dataclass(frozen=True)
class Outcome:
    """What became of one case; ``volumes_ml`` is each predicted class's volume, ``problem`` what went wrong."""

    case: str
    status: str  # "done", "there" (skipped) or "failed"
    seconds: float = 0.0
    network_s: float = 0.0
    volumes_ml: Mapping[str, float] | None = None
    problem: str | None = None


def output_path(output: Path, case: str) -> Path:
    """The label map of a case."""
    return output / f"{re.sub(r'[/:]', '_', case)}.nii.gz"


def file_names(targets: Sequence[str]) -> list[str]:
    """Names of targets as parts of file names, each another."""
    found: list[str] = []
    for name in targets:
        plain = re.sub(r"[/:]", "_", name)
        number = sum(re.sub(r"[/:]", "_", t) == plain for t in targets[: len(found)])
        found.append(f"{plain}_{number + 1}" if number else plain)
    return found


def predict_cases(
    runs: Sequence[TrainedRun],
    cases: Sequence[Case],
    output: Path,
    *,
    labels: LabelTable,
    overwrite: bool = False,
    shares: bool = False,
) -> Iterator[Outcome]:
    """Write one label map a case into ``output``, values those of ``labels``, and with ``shares`` a map of each target's
    probability; yields what became of each.

    While the network works on one case, the next is read and the last one written. A case that fails is told and the others
    go on. Several runs are averaged over their probabilities.
    """
    output.mkdir(parents=True, exist_ok=True)
    there = {c.id for c in cases if not overwrite and output_path(output, c.id).exists()}
    todo = [c for c in cases if c.id not in there]
    yield from (Outcome(c.id, "there") for c in cases if c.id in there)
    grids = [grid_of(run.plan) for run in runs]
    with ThreadPoolExecutor(1, "read") as reader, ThreadPoolExecutor(1, "write") as writer:
        reading: Future[list[PreparedImage]] | None = None
        writing: list[tuple[Outcome, Future[None]]] = []
        for number, case in enumerate(todo):
            current = reading or reader.submit(_read, case, grids)
            following = todo[number + 1] if number + 1 < len(todo) else None
            start = time.perf_counter()
            try:
                images = current.result()
                reading = reader.submit(_read, following, grids) if following else None
                maps = _predict(runs, images, labels, shares)
            except Exception as error:  # whatever is wrong with one case is told with its name, and the others go on
                reading = reading if reading is not current else None
                reading = reading or (reader.submit(_read, following, grids) if following else None)
                yield Outcome(case.id, "failed", time.perf_counter() - start, problem=_told(case, error))
                continue
            del images
            outcome = Outcome(case.id, "done", time.perf_counter() - start, maps.network_s, maps.volumes_ml(labels))
            writing.append((outcome, writer.submit(_write, maps, output, case.id, labels)))
            while len(writing) > 1:
                yield _written(*writing.pop(0))
        yield from (_written(*w) for w in writing)


@dataclass(frozen=True)
class _Maps:
    """A predicted case: class indices ``(D, H, W)`` and, if wanted, 255 times each target's probability."""

    classes: np.ndarray
    geometry: Geometry
    shares: np.ndarray | None
    network_s: float

    def volumes_ml(self, labels: LabelTable) -> dict[str, float]:
        voxel = abs(float(np.linalg.det(np.array(self.geometry.affine)[:3, :3]))) / 1000
        size = len(labels.classes) + 1  # a plane at a time: counting takes 8 bytes a voxel
        counts = np.sum([np.bincount(plane.ravel(), minlength=size) for plane in self.classes], axis=0)
        return {
            name: round(float(counts[list(members)].sum()) * voxel, 4)
            for name, members in zip(labels.targets, labels.members, strict=True)
        }


def _read(case: Case, grids: Sequence[Grid]) -> list[PreparedImage]:
    """The case on each run's grid; runs on the same grid share it."""
    made = {grid: preprocess_image(case, grid) for grid in dict.fromkeys(grids)}
    return [made[grid] for grid in grids]


def _predict(runs: Sequence[TrainedRun], images: Sequence[PreparedImage], labels: LabelTable, shares: bool) -> _Maps:
    geometry = images[0].geometry
    axis = runs[0].predictor.slow_axis(geometry.crop_shape)
    alone = len(runs) == 1  # runs on one grid share the volume
    streams = [
        native_planes(
            run.predictor.planes(image.image, build.norm_of(image.norm, run.plan), axis, own=alone),
            image.geometry,
            axis,
        )
        for run, image in zip(runs, images, strict=True)
    ]
    native: Planes = streams[0] if len(streams) == 1 else _averaged(streams, labels)
    kept = np.zeros((len(labels.targets), *geometry.shape), np.uint8) if shares else None
    if kept is not None:
        native = _kept(native, kept, geometry, axis, labels)
    start = time.perf_counter()
    found = label_map(native, geometry, labels, axis)
    return _Maps(found, geometry, kept, time.perf_counter() - start)


def _averaged(streams: Sequence[Planes], labels: LabelTable) -> Planes:
    """Mean probability of the runs, plane by plane: no run's scores of the whole volume exist at any time."""
    singles = [((part[n : n + 1]) for _, part in stream for n in range(len(part))) for stream in streams]
    for place, planes in enumerate(zip(*singles, strict=True)):
        total: Tensor = torch.stack([probabilities(p, labels) for p in planes]).mean(0)
        yield place, as_scores(total, labels)


def _kept(native: Planes, out: np.ndarray, geometry: Geometry, axis: int, labels: LabelTable) -> Planes:
    """Pass logits on and keep 255 times the probability of each target in ``out (targets, D, H, W)``."""
    inside = out[(slice(None),) + tuple(slice(a, b) for a, b in geometry.crop)]
    along = np.moveaxis(inside, axis + 1, 1)
    for first, part in native:
        share = probabilities(part, labels)[:, 0 if labels.regions else 1 :]
        along[:, first : first + len(part)] = (share * 255).round().to(torch.uint8).cpu().numpy().swapaxes(0, 1)
        yield first, part


def _write(maps: _Maps, output: Path, case: str, labels: LabelTable) -> None:
    path = output_path(output, case)
    if maps.shares is not None:
        for name, share in zip(file_names(labels.targets), maps.shares, strict=True):
            save_probability(path.with_name(f"{path.name[:-7]}.{name}.probability.nii.gz"), share, maps.geometry)
    save_label_map(path, maps.classes, maps.geometry, labels.classes)  # last: a case whose label map is there is done


def _written(outcome: Outcome, future: Future[None]) -> Outcome:
    try:
        future.result()
    except OSError as error:
        return Outcome(outcome.case, "failed", outcome.seconds, problem=f"{outcome.case} could not be written: {error}")
    return outcome


def _told(case: Case, error: BaseException) -> str:
    if isinstance(error, DataError):
        return str(error)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if isinstance(error, MemoryError) or "memory" in first.lower():
        return f"case {case.id}: out of memory ({first}); is its spacing right? Else try a device with more memory"
    return f"case {case.id} ({', '.join(p.name for p in case.images)}): {type(error).__name__}: {first}"
