"""All scores of one case, a class at a time, with an explicit policy for structures that are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy import ndimage

from segspeed.metric.lesions import Detection, detect
from segspeed.metric.surface import (
    check_spacing,
    hausdorff,
    mean_surface_distance,
    normalised_surface_dice,
    surface_distances,
)

State = Literal["both", "absent in both", "missed", "invented"]
Box = tuple[slice, slice, slice]

POLICY = (
    "A class absent from reference and prediction has no score and is counted apart. One missed (in the reference "
    "only) or invented (in the prediction only) scores Dice 0 and NSD 0, and its distances are the diagonal of the "
    "volume: truly they are infinite, and left out they would make a failure improve the mean."
)


@dataclass(frozen=True)
class ClassScore:
    """Scores of one class of one case; None where there is none (see ``POLICY``).

    ``nsd`` maps a tolerance in mm to the normalised surface Dice (surface elements on the half-voxel grid);
    ``hd95_mm`` is the larger of the two directed 95th percentiles; ``sensitivity`` and ``precision`` count voxels,
    ``detection`` lesions, where asked for. Volumes are measured whatever the state; the error is predicted minus
    reference volume.
    """

    state: State
    dice: float | None
    nsd: Mapping[float, float | None]
    hd95_mm: float | None
    msd_mm: float | None
    volume_ml: float
    reference_volume_ml: float
    volume_error_ml: float
    sensitivity: float | None
    precision: float | None
    detection: Detection | None


def score_case(
    prediction: np.ndarray,
    reference: np.ndarray,
    classes: Sequence[int],
    spacing: Sequence[float],
    tolerances: Sequence[float] = (1.0, 2.0),
    lesions: bool = False,
) -> dict[int, ClassScore]:
    """Score each of ``classes`` of two label maps ``(D, H, W)``; ``spacing`` (D, H, W) and ``tolerances`` in mm.

    Each class is cut out of the box that holds it in both maps; nothing of the volume's size is made.
    """
    if prediction.shape != reference.shape or prediction.ndim != 3:
        raise ValueError(f"prediction {prediction.shape} and reference {reference.shape} are not on one 3D grid")
    if min(classes, default=1) < 1:
        raise ValueError("classes are labels from 1 up: the background is no structure and has no score")
    steps = check_spacing(spacing)
    diagonal = float(np.linalg.norm(np.array(reference.shape) * steps))
    boxes_p, boxes_r = _boxes(prediction, classes), _boxes(reference, classes)
    out = {}
    for c in classes:
        box = _union(boxes_p[c], boxes_r[c])
        p, r = prediction[box] == c, reference[box] == c
        out[c] = _score(p, r, steps, tolerances, lesions, diagonal)
    return out


def to_plain(score: ClassScore) -> dict[str, Any]:
    """The score as JSON takes it: tolerances become text ("1", "2.5"), a detection its counts and ratios."""
    plain = asdict(score)
    plain["nsd"] = {f"{tolerance:g}": value for tolerance, value in score.nsd.items()}
    if score.detection is not None:
        d = score.detection
        plain["detection"] |= {"sensitivity": d.sensitivity, "precision": d.precision, "f1": d.f1}
    return plain


def _score(
    p: np.ndarray, r: np.ndarray, spacing: np.ndarray, tolerances: Sequence[float], lesions: bool, diagonal: float
) -> ClassScore:
    """One class from two masks ``(d, h, w)`` of the same box."""
    predicted, real, common = (int(np.count_nonzero(m)) for m in (p, r, p & r))
    state = _state(predicted, real)
    dice: float | None = None
    nsd: dict[float, float | None] = dict.fromkeys(tolerances)
    hd95: float | None = None
    msd: float | None = None
    if state == "both":
        d = surface_distances(p, r, spacing.tolist())
        dice = 2 * common / (predicted + real)
        nsd = {t: normalised_surface_dice(d, t) for t in tolerances}
        hd95, msd = hausdorff(d), mean_surface_distance(d)
    elif state != "absent in both":
        dice, nsd, hd95, msd = 0.0, dict.fromkeys(tolerances, 0.0), diagonal, diagonal
    ml = float(spacing.prod()) / 1000
    return ClassScore(
        state=state,
        dice=dice,
        nsd=nsd,
        hd95_mm=hd95,
        msd_mm=msd,
        volume_ml=predicted * ml,
        reference_volume_ml=real * ml,
        volume_error_ml=(predicted - real) * ml,
        sensitivity=common / real if real else None,
        precision=common / predicted if predicted else None,
        detection=detect(p, r) if lesions else None,
    )


def _state(predicted: int, real: int) -> State:
    if predicted and real:
        return "both"
    if real:
        return "missed"
    return "invented" if predicted else "absent in both"


def _boxes(labels: np.ndarray, classes: Sequence[int]) -> dict[int, Box | None]:
    """Smallest box around each class of ``(D, H, W)``; None where it is absent. One pass over the volume."""
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"a label map holds whole numbers, not {labels.dtype}")
    found = ndimage.find_objects(labels, max(classes, default=1))
    return {c: found[c - 1] for c in classes}


def _union(a: Box | None, b: Box | None) -> Box:
    """The box around both; an empty one where there is neither."""
    if a is None or b is None:
        return a or b or (slice(0), slice(0), slice(0))
    d, h, w = (slice(min(i.start, j.start), max(i.stop, j.stop)) for i, j in zip(a, b, strict=True))
    return d, h, w
