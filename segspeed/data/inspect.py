"""Read every case once and say all that is wrong with it, before it costs a day."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from segspeed.data.digest import Memo, hash_file, hash_text, stamp
from segspeed.data.geometry import Volume, VolumeError, corner_distance_mm, read_volume
from segspeed.data.labels import to_class_indices
from segspeed.data.pool import run_jobs
from segspeed.data.preprocess import content_box
from segspeed.jsonio import from_plain, to_plain
from segspeed.types import Case, CaseFacts, Cohort, Problem, Severity

FORMAT = 1  # of the memo; raise it when CaseFacts or a rule changes
ODD_RATIO = 10.0  # a spacing this many times off the cohort's median is odd
SAMPLES = 2000  # foreground intensities kept a case and channel

SEVERITY: dict[str, Severity] = {
    "squeezed": "info",
    "rounded-label": "info",
    "no-orientation": "warning",
    "two-orientations": "warning",
    "shear": "warning",
    "constant-image": "warning",
    "empty-label": "warning",
    "duplicate": "warning",
    "absent-class": "warning",
    "odd-spacing": "warning",
}  # every other kind is an error


def inspect_case(case: Case, labels: Mapping[str, tuple[int, ...]], tolerance_mm: float) -> CaseFacts:
    """Facts and problems of one case. Bad data never raises: it is what this function is for."""
    found: list[Problem] = []

    def report(path: Path | None, kind: str, message: str) -> None:
        name = f"{path.parent.name}/{path.name}" if path is not None else ""
        found.append(Problem(case.id, name, SEVERITY.get(kind, "error"), kind, message))

    images = [_try(path, report) for path in case.images]
    label, label_volume = _label(case, labels, report)
    first = next((v for v in images if v is not None), None)
    for path, volume in zip(case.images, images, strict=True):
        if volume is None:
            continue
        for kind, message in volume.notes:
            report(path, kind, message)
        bad = int((~np.isfinite(volume.array)).sum())
        if bad:
            report(path, "nan", f"{bad} voxels are NaN or infinite; replace them (0, or the air value of CT)")
        elif volume.array.min() == volume.array.max():
            report(path, "constant-image", f"every voxel is {volume.array.flat[0]:g}; it teaches nothing")
        if first is not None and volume is not first:
            _same_grid(report, path, volume, first, tolerance_mm, "the first channel")
    if label_volume is not None and first is not None:
        _same_grid(report, case.label, label_volume, first, tolerance_mm, "its image")
    if first is None or any(p.severity == "error" for p in found):
        return CaseFacts(id=case.id, digest=case_digest(case), problems=tuple(found))
    arrays = np.stack([v.array for v in images if v is not None])
    counts, foreground = _foreground(arrays, label, labels)
    if label is not None and not sum(counts.values()):
        report(case.label, "empty-label", "the label has no foreground (fine for a healthy control)")
    box = content_box(arrays, label)
    a, b, c = (stop - start for start, stop in box)
    return CaseFacts(
        id=case.id,
        digest=case_digest(case),
        shape=first.shape,
        spacing=first.spacing,
        orientation=first.orientation,
        crop_shape=(a, b, c),
        class_voxels=counts,
        foreground=foreground,
        problems=tuple(found),
    )


def case_digest(case: Case) -> str:
    """SHA-256 over the digests of the case's files; a missing file counts as such."""
    total = hashlib.sha256()
    for path in (*case.images, *([case.label] if case.label else [])):
        try:
            total.update((hash_file(path) if path.is_file() else "missing").encode())
        except OSError:
            total.update(b"unreadable")  # reported with its reason when the volume was read
    return total.hexdigest()


def _try(path: Path, report) -> Volume | None:  # type: ignore[no-untyped-def]
    try:
        return read_volume(path)
    except VolumeError as error:
        report(path, error.kind, str(error))
        return None


def _label(case: Case, labels, report) -> tuple[np.ndarray | None, Volume | None]:  # type: ignore[no-untyped-def]
    if case.label is None:
        report(None, "missing-label", "the case has no label; training needs one (data.exclude leaves a case out)")
        return None, None
    if not case.label.is_file():
        report(case.label, "missing-label", f"the label file does not exist: {case.label.name}")
        return None, None
    try:
        volume = read_volume(case.label, scaled=False)
        indices = to_class_indices(volume, labels)
    except VolumeError as error:
        report(case.label, error.kind, str(error))
        return None, None
    for kind, message in volume.notes:
        if kind == "squeezed":
            report(case.label, kind, message)
    if not np.array_equal(volume.array, np.rint(volume.array)):
        report(case.label, "rounded-label", "label values were stored as decimals and rounded to whole numbers")
    return indices, volume


def _same_grid(report, path, volume: Volume, other: Volume, tolerance_mm: float, whose: str) -> None:  # type: ignore[no-untyped-def]
    if volume.file_shape != other.file_shape:
        report(path, "shape-mismatch", f"shape {volume.file_shape}, but {whose} has {other.file_shape}")
        return
    apart = corner_distance_mm(volume.affine, volume.file_shape, other.affine, other.file_shape)
    if apart > tolerance_mm:
        report(
            path,
            "affine-mismatch",
            f"lies elsewhere than {whose}: corners up to {apart:.2f} mm apart (tolerance {tolerance_mm:g} mm; "
            f"spacing {_mm(volume)} against {_mm(other)} mm). Resample one onto the other, or raise data.tolerance_mm",
        )


def _mm(volume: Volume) -> str:
    return " x ".join(f"{s:.3g}" for s in volume.spacing)


def _foreground(
    arrays: np.ndarray, label: np.ndarray | None, labels: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, int], tuple[tuple[float, ...], ...]]:
    """Voxels a class, and evenly spaced samples of the foreground's intensities a channel."""
    if label is None:
        return dict.fromkeys(labels, 0), tuple(() for _ in arrays)
    counts = np.bincount(label.ravel(), minlength=len(labels) + 1)
    where = np.flatnonzero(label.ravel())
    if len(where) > SAMPLES:
        where = where[np.linspace(0, len(where) - 1, SAMPLES).astype(np.int64)]
    values = tuple(tuple(float(v) for v in channel.ravel()[where]) for channel in arrays)
    return {name: int(counts[i + 1]) for i, name in enumerate(labels)}, values


def inspect_cases(cohort: Cohort, *, tolerance_mm: float, memo: Path | None, workers: int) -> Iterator[CaseFacts]:
    """Facts of every case as they come in, remembered under ``memo`` so that unchanged files are not read again.

    Raises DataError when a worker process dies (most often for want of memory).
    """
    store = Memo(memo / "inspected.jsonl" if memo is not None else None)
    todo: list[tuple[Case, str | None]] = []
    for case in cohort.cases:
        key = _memo_key(case, cohort, tolerance_mm)
        known = store.get(key) if key is not None else None
        if known is not None:
            yield from_plain(known, CaseFacts)
        else:
            todo.append((case, key))
    for facts, key in _run(todo, cohort, tolerance_mm, workers):
        if key is not None:
            store.put(key, to_plain(facts))
        yield facts


def _memo_key(case: Case, cohort: Cohort, tolerance_mm: float) -> str | None:
    files = stamp((*case.images, *([case.label] if case.label else [])))
    if files is None:
        return None
    return hash_text(f"{FORMAT}|{case.id}|{files}|{sorted(cohort.labels.items())}|{list(cohort.labels)}|{tolerance_mm}")


def _run(
    todo: Sequence[tuple[Case, str | None]], cohort: Cohort, tolerance_mm: float, workers: int
) -> Iterator[tuple[CaseFacts, str | None]]:
    jobs = [(case, dict(cohort.labels), tolerance_mm) for case, _ in todo]
    few = len(todo) < 8  # read before processes have started
    for number, facts in run_jobs(inspect_case, jobs, 1 if few else workers, "reads cases"):
        yield facts, todo[number][1]


def cohort_problems(cohort: Cohort, facts: Sequence[CaseFacts]) -> list[Problem]:
    """What only shows over all cases: the same files under two ids, an id given twice, a class nobody has, a spacing
    far from everybody else's."""
    found = []
    same: dict[str, list[str]] = defaultdict(list)
    for f in facts:
        if f.shape != (0, 0, 0):
            same[f.digest].append(f.id)
    for ids in same.values():
        for other in ids[1:]:
            text = f"image and label are the same files, byte for byte, as those of {ids[0]}"
            found.append(Problem(other, "", SEVERITY["duplicate"], "duplicate", text))
    seen: set[str] = set()
    for case in cohort.cases:
        if case.id in seen:
            found.append(Problem(case.id, "", "error", "duplicate-id", "the id is given to two cases"))
        seen.add(case.id)
    return found + _absent_classes(cohort, facts) + _odd_spacings(facts)


def _absent_classes(cohort: Cohort, facts: Sequence[CaseFacts]) -> list[Problem]:
    good = [f for f in facts if f.shape != (0, 0, 0)]
    names = [n for n in cohort.class_names if good and not any(f.class_voxels.get(n) for f in good)]
    text = "no case has a voxel of the class {}, so it cannot be learnt; is its value right?"
    return [Problem("", "", SEVERITY["absent-class"], "absent-class", text.format(n)) for n in names]


def _odd_spacings(facts: Sequence[CaseFacts]) -> list[Problem]:
    good = [f for f in facts if f.shape != (0, 0, 0)]
    if not good:
        return []
    median = np.median([f.spacing for f in good], axis=0)
    found = []
    for f in good:
        ratio = np.array(f.spacing) / median
        if ratio.max() > ODD_RATIO or ratio.min() < 1 / ODD_RATIO:
            text = (
                f"spacing {' x '.join(f'{s:.4g}' for s in f.spacing)} mm, but the cohort's median is "
                f"{' x '.join(f'{s:.4g}' for s in median)}; are the header's units right?"
            )
            found.append(Problem(f.id, "", SEVERITY["odd-spacing"], "odd-spacing", text))
    return found
