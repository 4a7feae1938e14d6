"""Is model b as good as model a? Paired over cases, with the patient as the unit that varies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Verdict = Literal["not inferior", "inferior", "inconclusive"]

DRAWS_AT_ONCE = 1_000_000  # indices of a bootstrap held in memory: 8 MB, and a few times that beside them


@dataclass(frozen=True)
class Comparison:
    """``mean_difference`` is b - a over patients, above 0 where b scores higher; ``interval`` its 95 % interval, None
    with one patient; ``p`` of Wilcoxon's signed-rank test, None where no patient differs.

    ``better``, ``worse`` and ``equal`` count patients. ``losses`` are the cases, five at most, where b falls furthest
    below a, worst first; ``unpaired`` the cases that only one of the two has.
    """

    cases: int
    patients: int
    mean_difference: float
    interval: tuple[float, float] | None
    p: float | None
    margin: float
    verdict: Verdict
    better: int
    worse: int
    equal: int
    losses: tuple[str, ...]
    unpaired: tuple[str, ...]


def compare(
    a: Mapping[str, float],
    b: Mapping[str, float],
    *,
    patients: Mapping[str, str] | None = None,
    margin: float = 0.005,
    seed: int = 0,
    samples: int = 10000,
) -> Comparison:
    """Compare a score of two models, case id -> score, where a higher score is better (negate a distance).

    ``patients`` maps case id to patient; without it each case is a patient of its own. The verdict on b: "not
    inferior" when the interval lies above ``-margin``, "inferior" when it lies below, else "inconclusive". The lower
    end of a two-sided 95 % interval is the one-sided 2.5 % test that is usual for non-inferiority (Piaggio et al.
    2012).
    """
    if not margin >= 0:
        raise ValueError(f"a margin is 0 or more, not {margin}")
    common = [case for case in a if case in b]
    if not common:
        raise ValueError("the two models have no case in common")
    # Rounded, since 0.81 - 0.80 and 0.51 - 0.50 differ in the last bits and must rank as the equals they are.
    per_case = {case: round(b[case] - a[case], 12) for case in common}
    units = _per_patient(per_case, patients)
    interval = _percentile_interval(units, seed, samples) if len(units) > 1 else None
    worst = sorted((case for case in common if per_case[case] < 0), key=lambda case: per_case[case])
    return Comparison(
        cases=len(common),
        patients=len(units),
        mean_difference=float(units.mean()),
        interval=interval,
        p=float(stats.wilcoxon(units).pvalue) if units.any() else None,
        margin=margin,
        verdict=_verdict(interval, margin),
        better=int((units > 0).sum()),
        worse=int((units < 0).sum()),
        equal=int((units == 0).sum()),
        losses=tuple(worst[:5]),
        unpaired=tuple(sorted(a.keys() ^ b.keys())),
    )


def bootstrap_interval_by_patient(
    values: Mapping[str, float], patients: Mapping[str, str] | None, seed: int = 0, samples: int = 10000
) -> tuple[float, float]:
    """95 % percentile interval of the mean over patients (Efron 1979), patients drawn with replacement.

    The cases of a patient are averaged first: they resemble each other, and as cases of their own they would make
    the interval narrower than what is known. ValueError with fewer than two patients, who show no spread.
    """
    units = _per_patient(values, patients)
    if len(units) < 2:
        raise ValueError(f"an interval over patients needs two or more, not {len(units)}")
    return _percentile_interval(units, seed, samples)


def _per_patient(values: Mapping[str, float], patients: Mapping[str, str] | None) -> np.ndarray:
    """Mean of each patient's cases, ``(patients,)`` float64, in the order they first appear."""
    groups: dict[str, list[float]] = {}
    for case, value in values.items():
        if not np.isfinite(value):
            raise ValueError(f"case {case!r} scores {value}: leave out cases without a score")
        if patients is not None and case not in patients:
            raise ValueError(f"case {case!r} has no patient")
        groups.setdefault(case if patients is None else patients[case], []).append(value)
    return np.array([round(float(np.mean(group)), 12) for group in groups.values()])


def _percentile_interval(units: np.ndarray, seed: int, samples: int) -> tuple[float, float]:
    if samples < 1:
        raise ValueError(f"a bootstrap needs one sample or more, not {samples}")
    rng = np.random.default_rng(seed)
    means = np.empty(samples)
    rows = max(1, DRAWS_AT_ONCE // len(units))
    for start in range(0, samples, rows):
        stop = min(start + rows, samples)
        means[start:stop] = units[rng.integers(0, len(units), (stop - start, len(units)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _verdict(interval: tuple[float, float] | None, margin: float) -> Verdict:
    if interval is None:
        return "inconclusive"
    if interval[0] > -margin:
        return "not inferior"
    return "inferior" if interval[1] < -margin else "inconclusive"
