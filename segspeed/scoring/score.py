"""Scores of label files against label files, a case at a time; a case that cannot be scored stops no other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from nibabel.orientations import inv_ornt_aff

from segspeed.data.geometry import VolumeError, corner_distance_mm, read_volume
from segspeed.data.labels import to_class_indices
from segspeed.data.pool import run_jobs
from segspeed.metric.scores import ClassScore, score_case
from segspeed.scoring.pairs import ScorePair
from segspeed.types import DataError, LabelTable, SettingError, Shape3, Triple

MAX_GUESSED_CLASSES = 200  # more distinct values than this are no label map
FEW = 4  # cases that are scored before processes have started


@dataclass(frozen=True)
class CaseScore:
    """What became of one case: its scores by target, or the problem that kept it from being scored. ``fold`` names the part
    of a cross-validation that it was held out in, "" where there is none."""

    id: str
    patient: str
    site: str
    scores: Mapping[str, ClassScore] | None
    problem: str | None
    fold: str = ""


@dataclass(frozen=True)
class _Map:
    """Class indices ``(D, H, W)`` with their grid: ``affine`` of the canonical (i, j, k) axes to world mm, ``spacing``
    (D, H, W) in mm."""

    indices: np.ndarray
    affine: np.ndarray
    spacing: Triple

    @property
    def shape(self) -> Shape3:
        """(i, j, k) of the canonical grid."""
        d, h, w = self.indices.shape
        return (w, h, d)


def score_pairs(
    pairs: Sequence[ScorePair],
    labels: LabelTable,
    *,
    tolerances: Sequence[float] = (1.0, 2.0),
    lesions: bool = False,
    tolerance_mm: float = 0.1,
    workers: int = 1,
) -> Iterator[CaseScore]:
    """Score each pair, in completion order, in ``workers`` processes.

    ``labels`` says what values mean and what is scored: its classes, or its regions, which may overlap. ``tolerances``
    (mm) are those of the normalised surface Dice; ``lesions`` adds counts of connected components; ``tolerance_mm`` is
    how far the corners of the two grids may lie apart. Raises SettingError or DataError at once when these cannot be
    meant.
    """
    _check(pairs, labels, tolerances, tolerance_mm)
    jobs = [(pair, labels, tuple(tolerances), lesions, tolerance_mm) for pair in pairs]
    done = run_jobs(score_pair, jobs, 1 if len(jobs) < FEW else workers, "scores cases")
    return (case for _, case in done)


def score_pair(
    pair: ScorePair, labels: LabelTable, tolerances: Sequence[float], lesions: bool, tolerance_mm: float
) -> CaseScore:
    """Score one pair, tolerances in mm; what is wrong with its files is in ``problem``, both files' together."""
    problems: list[str] = []
    scores = None
    try:
        prediction = _read(pair.prediction, "prediction", labels, problems)
        reference = _read(pair.reference, "label", labels, problems)
        if prediction is not None and reference is not None:
            problems += _other_grid(prediction, reference, pair, tolerance_mm)
        if not problems and prediction is not None and reference is not None:
            scores = _scores(prediction.indices, reference.indices, reference.spacing, labels, tolerances, lesions)
    except MemoryError:
        problems.append(f"scoring {pair.prediction.name} takes more memory than there is; use fewer workers")
    return CaseScore(pair.id, pair.patient, pair.site, scores, "; ".join(problems) or None, pair.fold)


def _scores(
    prediction: np.ndarray,
    reference: np.ndarray,
    spacing: Triple,
    labels: LabelTable,
    tolerances: Sequence[float],
    lesions: bool,
) -> dict[str, ClassScore]:
    """Scores by target; what the reference ignores is taken out of both maps."""
    if labels.ignore_index is not None:
        counts = reference != labels.ignore_index
        prediction, reference = prediction * counts, reference * counts
    if not labels.regions:
        numbers = range(1, len(labels.classes) + 1)
        found = score_case(prediction, reference, numbers, spacing, tolerances, lesions)
        return {name: found[n] for n, name in zip(numbers, labels.classes, strict=True)}
    out = {}
    for name, members in zip(labels.targets, labels.members, strict=True):
        p, r = (np.isin(m, members).astype(np.uint8) for m in (prediction, reference))
        out[name] = score_case(p, r, [1], spacing, tolerances, lesions)[1]
    return out


def classes_of(labels: Sequence[Path], workers: int = 1) -> dict[str, tuple[int, ...]]:
    """The classes of label files that nobody has named: each value but 0 is one, "class_3" the value 3.

    Raises DataError that lists the files that cannot be read as label maps.
    """
    found: set[int] = set()
    problems = []
    jobs = [(path,) for path in labels]
    for number, values in sorted(run_jobs(_values, jobs, 1 if len(jobs) < FEW else workers, "reads labels")):
        if isinstance(values, str):
            problems.append(f"{labels[number].name}: {values}")
        else:
            found |= values
    if problems:
        raise DataError("classes cannot be read from the labels:\n" + "\n".join(f"- {p}" for p in problems))
    if not found:
        raise DataError(f"none of the {len(labels)} label files holds a value other than 0; name the classes to score")
    if len(found) > MAX_GUESSED_CLASSES:
        raise DataError(
            f"the labels hold {len(found)} different values, more than label maps do; are these images? "
            "Name the classes to score if they are not"
        )
    return {f"class_{v}": (v,) for v in sorted(found)}


def _values(path: Path) -> set[int] | str:
    """The values of a label map but 0, or what is wrong with it."""
    try:
        volume = read_volume(path, scaled=False)
        finite = volume.array[np.isfinite(volume.array)]
        found = {int(v) for v in np.unique(np.rint(finite))} - {0}
        if len(found) <= MAX_GUESSED_CLASSES:
            to_class_indices(
                volume, LabelTable({str(v): (v,) for v in found})
            )  # refuses NaN and what lies between whole numbers
    except VolumeError as error:
        return str(error)
    return found


def _read(path: Path, role: str, labels: LabelTable, problems: list[str]) -> _Map | None:
    try:
        volume = read_volume(path, scaled=False)
        indices = to_class_indices(volume, labels)
    except VolumeError as error:
        problems.append(f"{role} {path.name}: {error}")
        return None
    # Both maps are compared in canonical order, so a prediction stored with other axes on the same grid is welcome.
    return _Map(indices, volume.affine @ inv_ornt_aff(volume.ornt, volume.file_shape), volume.spacing)


def _other_grid(prediction: _Map, reference: _Map, pair: ScorePair, tolerance_mm: float) -> list[str]:
    name = f"prediction {pair.prediction.name}"
    if prediction.shape != reference.shape:
        return [
            f"{name}: shape {prediction.shape}, but the label has {reference.shape} (axes towards right, anterior, "
            "superior); export the prediction on the grid of its image"
        ]
    apart = corner_distance_mm(prediction.affine, prediction.shape, reference.affine, reference.shape)
    if apart <= tolerance_mm:
        return []
    return [
        f"{name}: lies elsewhere than the label, corners up to {apart:.2f} mm apart (tolerance {tolerance_mm:g} mm); "
        "export the prediction with the affine of its image, or raise the tolerance"
    ]


def _check(pairs: Sequence[ScorePair], labels: LabelTable, tolerances: Sequence[float], tolerance_mm: float) -> None:
    problems = []
    if not pairs:
        problems.append("there is no case to score")
    twice = [case for case, n in Counter(pair.id for pair in pairs).items() if n > 1]
    if twice:
        problems.append(f"case ids given twice: {', '.join(twice)}")
    classes = labels.classes
    if not classes:
        problems.append("there is no class to score")
    counted = Counter(value for values in (*classes.values(), labels.ignore) for value in values)
    problems += [f"the value {v} is given to two classes" for v, n in counted.items() if n > 1]
    problems += [f"class {name!r} has no value" for name, values in classes.items() if not values]
    if 0 in counted:
        problems.append("the value 0 is the background, which has no score")
    if problems:
        raise DataError("cannot score:\n" + "\n".join(f"- {p}" for p in problems))
    if any(not (math.isfinite(t) and t >= 0) for t in (*tolerances, tolerance_mm)):
        raise SettingError(f"tolerances are 0 mm or more: {', '.join(f'{t:g}' for t in (*tolerances, tolerance_mm))}")
    if len({f"{t:g}" for t in tolerances}) < len(tolerances):
        raise SettingError(f"a surface tolerance is given twice: {', '.join(f'{t:g}' for t in tolerances)} mm")
