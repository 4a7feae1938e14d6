"""Cases whose numbers lie far from everybody else's: in spacing, shape, class volume, intensity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from segspeed.types import CaseFacts, Cohort, Problem

DEVIATIONS = 5.0  # robust standard deviations (1.4826 x MAD) from the median
NEAR = 1.2  # a value within this factor of the median is never an outlier
FEWEST = 8  # values from which a spread can be told
INTENSITY = "median foreground intensity"  # a measure for each channel, "INTENSITY, channel"
GROUP = 0.1  # more than this share outside are a group of their own, not outliers

RULE = (
    f"An outlier lies more than {DEVIATIONS:g} robust standard deviations (1.4826 times the median absolute deviation) from the "
    f"cohort's median of the logarithm, and differs from the median by more than a factor of {NEAR:g}. Intensities that may be "
    "zero or negative, as in CT, are compared without the logarithm, and must differ by more than the usual distance of the "
    f"quartiles within a case. Measured from {FEWEST} cases on; where more than {GROUP:.0%} of the cases lie outside they are a "
    "group of their own, and none is marked. Classes that a case lacks are left out."
)


@dataclass(frozen=True)
class Measure:
    """One number a case. ``low`` and ``high`` bound the usual range (None: too few values to tell); ``outliers`` are ids
    of cases outside, in the order of their distance."""

    group: str  # "spacing", "shape", "volume", "intensity"
    name: str
    unit: str
    values: Mapping[str, float]
    low: float | None = None
    high: float | None = None
    outliers: tuple[str, ...] = ()

    @property
    def median(self) -> float:
        """Median over the cases."""
        return float(np.median(list(self.values.values())))


def measures(cohort: Cohort, facts: Sequence[CaseFacts]) -> list[Measure]:
    """Every number that is compared over the readable cases, with its outliers. Measures without any value are left out."""
    found = []
    for axis, name in enumerate(("D", "H", "W")):
        found.append(_judge("spacing", f"spacing along {name}", "mm", {f.id: f.spacing[axis] for f in facts}))
    for axis, name in enumerate(("D", "H", "W")):
        found.append(_judge("shape", f"shape along {name}", "voxels", {f.id: float(f.shape[axis]) for f in facts}))
    for name in cohort.class_names:
        volumes = {f.id: volume_ml(f, name) for f in facts}
        found.append(_judge("volume", f"volume of {name}", "ml", {i: v for i, v in volumes.items() if v > 0}))
    for channel, name in enumerate(cohort.channels):
        samples = {f.id: f.foreground[channel] for f in facts if channel < len(f.foreground) and f.foreground[channel]}
        medians = {i: float(np.median(v)) for i, v in samples.items()}
        widths = [float(np.subtract(*np.percentile(v, (75, 25)))) for v in samples.values()]
        near = float(np.median(widths)) if widths else 0.0
        found.append(_judge("intensity", f"{INTENSITY}, {name}", "", medians, near))
    return [m for m in found if m.values]


def volume_ml(facts: CaseFacts, name: str) -> float:
    """Volume of a class in ml."""
    return facts.class_voxels.get(name, 0) * float(np.prod(facts.spacing)) / 1000


def usual_range(values: Sequence[float], near: float | None = None) -> tuple[float, float]:
    """(low, high) by `RULE`. ``near`` is the distance that is never far for values that may be zero or negative."""
    array = np.asarray(values, dtype=float)
    linear = bool((array <= 0).any())
    scaled = array if linear else np.log(array)
    middle = float(np.median(scaled))
    spread = 1.4826 * float(np.median(np.abs(scaled - middle)))
    half = max(DEVIATIONS * spread, (near or 0.0) if linear else float(np.log(NEAR)))
    low, high = middle - half, middle + half
    return (low, high) if linear else (float(np.exp(low)), float(np.exp(high)))


def _judge(group: str, name: str, unit: str, values: Mapping[str, float], near: float | None = None) -> Measure:
    if len(values) < FEWEST:
        return Measure(group, name, unit, values)
    low, high = usual_range(list(values.values()), near)
    # a value on the bound is inside, whatever the logarithm rounded away
    slack = 1e-9 * max(abs(low), abs(high))
    outside = {i: max(low - v, v - high) for i, v in values.items() if v < low - slack or v > high + slack}
    if len(outside) > GROUP * len(values):
        outside = {}
    return Measure(group, name, unit, values, low, high, tuple(sorted(outside, key=lambda i: (-outside[i], i))))


def outlier_problems(found: Sequence[Measure]) -> list[Problem]:
    """An info problem a case and measure."""
    problems = []
    for m in found:
        unit = f" {m.unit}" if m.unit else ""
        for case in m.outliers:
            text = (
                f"{m.name} is {m.values[case]:.4g}{unit}; the cohort's median is {m.median:.4g}{unit}, "
                f"usual are {m.low:.4g} to {m.high:.4g}{unit}"
            )
            problems.append(Problem(case, "", "info", "outlier", text))
    return problems


def glance(cohort: Cohort, good: Sequence[CaseFacts]) -> list[list[str]]:
    """Rows of what, smallest, median, largest over the readable cases."""
    if not good:
        return []
    rows = []
    for title, values in (
        ("shape (D x H x W)", [f.shape for f in good]),
        ("spacing, mm", [f.spacing for f in good]),
        ("content (D x H x W)", [f.crop_shape for f in good]),
    ):
        a = np.array(values, dtype=float)
        rows.append([title, *(" x ".join(f"{v:.4g}" for v in row) for row in (a.min(0), np.median(a, 0), a.max(0)))])
    for name in cohort.class_names:
        voxels = np.array([f.class_voxels.get(name, 0) for f in good])
        absent = f" (absent in {(voxels == 0).sum()})" if (voxels == 0).any() else ""
        numbers = (voxels.min(), np.median(voxels), voxels.max())
        rows.append([f"voxels of {name}{absent}", *(f"{v:.0f}" for v in numbers)])
    return rows
