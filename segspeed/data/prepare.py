"""Build the cache of a cohort: in parallel, only what is missing, one bad case not stopping the rest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from segspeed.data.cache import Storage, entry_bytes, entry_key, entry_path, write_entry
from segspeed.data.pool import run_jobs
from segspeed.data.preprocess import Grid, preprocess, target_shape
from segspeed.jsonio import to_plain
from segspeed.types import Case, CaseFacts, Cohort, DataError, LabelTable, Problem, Triple


@dataclass(frozen=True)
class PreparedCase:
    """What became of one case: its entry, or the problem; ``built`` is False for one that was there."""

    case_id: str
    path: Path | None
    problem: Problem | None
    bytes: int
    built: bool


def prepare_cases(
    cohort: Cohort,
    facts: Mapping[str, CaseFacts],
    grid: Grid,
    root: Path,
    workers: int,
    storage: Storage = Storage(),
    resample_over_mm: float | None = None,
) -> Iterator[PreparedCase]:
    """Preprocess the cohort's cases to ``grid``, in completion order.

    Raises DataError before anything is built when the disk is too small for what is missing, and when a
    worker process is killed.
    """
    todo: list[tuple[Case, Path]] = []
    for case in cohort.cases:
        path = _place(case, cohort, facts[case.id], grid, root, storage, resample_over_mm)
        if path.is_dir():
            yield PreparedCase(case.id, path, None, entry_bytes(path), built=False)
        else:
            todo.append((case, path))
    _room_for([facts[case.id] for case, _ in todo], len(cohort.channels), grid.spacing, root, storage)
    labels = cohort.table
    jobs = [(case, labels, grid, path, storage, resample_over_mm) for case, path in todo]
    few = len(todo) < 4  # built before processes have started
    for _, prepared in run_jobs(_build, jobs, 1 if few else workers, "prepares cases"):
        yield prepared


def _place(
    case: Case,
    cohort: Cohort,
    facts: CaseFacts,
    grid: Grid,
    root: Path,
    storage: Storage,
    resample_over_mm: float | None,
) -> Path:
    settings = {
        **to_plain(grid),
        "resample_over_mm": resample_over_mm,
        "stacked": case.stacked,
        "labels": [list(v) for v in cohort.labels.values()],
        "background": cohort.background,
        "ignore": cohort.ignore,
        **storage.key(),
    }
    return entry_path(root, cohort.folder_name, case.id, entry_key(facts.digest, settings))


def _build(
    case: Case,
    labels: LabelTable,
    grid: Grid,
    path: Path,
    storage: Storage,
    resample_over_mm: float | None,
) -> PreparedCase:
    try:
        size = write_entry(path, case.id, preprocess(case, labels, grid, resample_over_mm), storage)
    except DataError as error:
        problem = Problem(case.id, "", "error", "preprocessing", str(error))
        return PreparedCase(case.id, None, problem, 0, built=False)
    except MemoryError:
        problem = Problem(case.id, "", "error", "memory", "not enough memory; set cache.workers=1 or a larger spacing")
        return PreparedCase(case.id, None, problem, 0, built=False)
    return PreparedCase(case.id, path, None, size, built=True)


def forecast_bytes(facts: Sequence[CaseFacts], spacing: Triple, channels: int = 1, storage: Storage = Storage()) -> int:
    """Bytes the entries of these cases will take at ``spacing`` (D, H, W) in mm; with blosc2 at most: how far it compresses is
    not known before."""
    size = 2 if storage.dtype == "float16" else 4
    total = 0
    for f in facts:
        voxels = int(np.prod(target_shape(f.crop_shape, f.spacing, spacing)))
        total += voxels * (size * channels + 1) + int(np.prod(f.shape)) + 12 * 10_000
    return total


def _room_for(facts: Sequence[CaseFacts], channels: int, spacing: Triple, root: Path, storage: Storage) -> None:
    if not facts:
        return
    needed = forecast_bytes(facts, spacing, channels, storage)
    place = root
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > 0.95 * free:
        raise DataError(
            f"the cache needs {needed / 1e9:.1f} GB and {place} has {free / 1e9:.1f} GB free; "
            "set cache.root to a larger disk, or a larger plan.spacing"
        )
