"""The user's own metrics of one case: any function of two masks and the spacing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from segspeed.types import DataError, LabelTable, Triple, first_line

Metric = Callable[[np.ndarray, np.ndarray, Triple], Any]
Values = dict[str, list[float | None]]  # metric -> a value a target, None where there is none


def own_values(
    reference: np.ndarray, prediction: np.ndarray, labels: LabelTable, spacing: Triple, metrics: Mapping[str, Metric]
) -> Values:
    """Each metric of each target of two maps of class indices ``(D, H, W)``: called with the boolean masks of the prediction
    and of the reference, and the spacing (D, H, W) in mm. Voxels that the reference ignores are in neither mask.

    Raises DataError that names the metric where it fails, or gives what is no number.
    """
    values: Values = {name: [] for name in metrics}
    if not metrics:
        return values
    counts = None if labels.ignore_index is None else reference != labels.ignore_index
    for target, members in zip(labels.targets, labels.members, strict=True):
        masks = [np.isin(m, members) for m in (prediction, reference)]
        if counts is not None:
            masks = [m & counts for m in masks]
        for mask in masks:
            mask.flags.writeable = False  # the next metric gets the same ones
        for name, metric in metrics.items():
            values[name].append(_value(name, metric, masks[0], masks[1], spacing, target))
    return values


def _value(
    name: str, metric: Metric, prediction: np.ndarray, reference: np.ndarray, spacing: Triple, target: str
) -> float | None:
    try:
        found = metric(prediction, reference, spacing)
        value = float("nan") if found is None else float(found)
    except MemoryError:
        raise
    except Exception as error:  # anybody's code may fail in any way; it is told by its name
        raise DataError(
            f"evaluation.metrics {name} failed on {target} ({type(error).__name__}: {first_line(error)}); it is called with two "
            "boolean masks (D, H, W), either of which may be empty, and a spacing in mm, and returns a float"
        ) from error
    if math.isinf(value):
        raise DataError(
            f"evaluation.metrics {name} gave {value} for {target}; a mean of cases would be lost. Return nan where a case has no "
            "value, or a large number that can be meant"
        )
    return None if math.isnan(value) else value
