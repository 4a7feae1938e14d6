"""The contract of a metric of ``evaluation.metrics``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from segspeed.testing.contract import ContractError, name_of, require
from segspeed.types import Triple, first_line


def check_metric(
    metric: Callable[[np.ndarray, np.ndarray, Triple], Any],
    *,
    perfect: float | None = None,
    worst: float | None = None,
    spacing: Triple = (2.0, 1.0, 0.5),
) -> None:
    """Whether ``metric(prediction, label, spacing)`` gives a float for two boolean masks ``(D, H, W)`` and a spacing in mm, the
    same each time, and nan (not infinity, not an error) at most where a mask is empty.

    ``perfect`` is its value for equal masks, ``worst`` that for masks without a common voxel, where you know them (1 and 0 of a
    Dice). Raises ContractError.
    """
    name = name_of(metric)
    a, b, none = (np.zeros((6, 7, 8), bool) for _ in range(3))
    a[1:4, 1:4, 1:4] = True
    b[4:6, 4:7, 5:8] = True
    half = a.copy()
    half[1:4, 1:4, 1] = False
    values = {
        what: _value(name, metric, p, r, spacing, what)
        for what, p, r in (
            ("equal masks", a, a), ("masks that overlap", half, a), ("masks without a common voxel", b, a),
            ("an empty prediction", none, a), ("an empty reference", a, none), ("two empty masks", none, none),
        )
    }  # fmt: skip
    for what in ("equal masks", "masks that overlap", "masks without a common voxel"):
        require(
            not math.isnan(values[what]),
            f"{name} is nan for {what}; nan means that a case has no value, and is for empty masks only",
        )
    for what, expected in (("equal masks", perfect), ("masks without a common voxel", worst)):
        require(
            expected is None or math.isclose(values[what], expected, rel_tol=1e-6, abs_tol=1e-9),
            f"{name} is {values[what]:g} for {what}, where {expected} is due; the order is (prediction, label, spacing in mm)",
        )


def _value(
    name: str, metric: Callable[..., Any], prediction: np.ndarray, label: np.ndarray, spacing: Triple, what: str
) -> float:
    """The metric of copies that may not be written to, twice."""
    found = []
    for _ in range(2):
        masks = [prediction.copy(), label.copy()]
        for mask in masks:
            mask.flags.writeable = False
        try:
            value = metric(*masks, spacing)
        except Exception as error:
            raise ContractError(
                f"{name} fails for {what} ({type(error).__name__}: {first_line(error)}); return nan where a case has no value, and "
                "do not write into the masks, which the next metric gets, too"
            ) from error
        require(
            isinstance(value, (float, int, np.floating, np.integer)) and not isinstance(value, bool),
            f"{name} returns {type(value).__name__} for {what}; a metric returns a float: float(value), or nan without a value",
        )
        require(not math.isinf(value), f"{name} is {value} for {what}; return nan, or a large number that can be meant")
        found.append(float(value))
    require(
        found[0] == found[1] or all(map(math.isnan, found)),
        f"{name} gives {found[0]:g}, then {found[1]:g} for the same masks; a metric has no random part",
    )
    return found[0]
