"""From Dice a case and class to figures one can quote, with the empties counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

Scores = Mapping[str, Mapping[str, float | None]]  # case -> class -> Dice, None where both maps are empty

DRAWN_AT_ONCE = 250_000  # values of a bootstrap held in memory

EMPTY_POLICY = (
    "A class absent from reference and prediction of a case is left out of the mean and counted; "
    "one present in only one of them scores 0."
)


@dataclass(frozen=True)
class Summary:
    """Means over cases, each case once. ``dice`` is None for a class no case has; ``empty`` counts, a class, the
    cases left out; ``interval`` is the bootstrap 95 % interval of ``mean_dice`` over cases."""

    mean_dice: float | None
    dice: Mapping[str, float | None]
    empty: Mapping[str, int]
    interval: tuple[float, float] | None
    cases: Scores

    def ranked(self) -> list[tuple[str, float]]:
        """Cases by their mean Dice over classes, best first; cases without any Dice are left out."""
        means = {case: _mean(scores.values()) for case, scores in self.cases.items()}
        return sorted(((c, m) for c, m in means.items() if m is not None), key=lambda pair: -pair[1])


def summarise(cases: Scores, *, resamples: int = 2000, seed: int = 0) -> Summary:
    """Mean over cases of each class, then the mean of the classes."""
    names = list(dict.fromkeys(name for scores in cases.values() for name in scores))
    table = np.array([[_nan(scores.get(n)) for n in names] for scores in cases.values()]).reshape(len(cases), -1)
    dice = {n: _mean(_values(table[:, i])) for i, n in enumerate(names)}
    return Summary(
        mean_dice=_mean(dice.values()),
        dice=dice,
        empty={n: int(np.isnan(table[:, i]).sum()) for i, n in enumerate(names)},
        interval=_bootstrap(table, resamples, seed),
        cases=cases,
    )


def _bootstrap(table: np.ndarray, resamples: int, seed: int) -> tuple[float, float] | None:
    """Percentile interval of the mean of class means, cases drawn with replacement (Efron 1979). A few resamples at a time:
    memory does not grow with their number times that of the cases."""
    if len(table) < 2 or not (~np.isnan(table)).any():
        return None
    rng = np.random.default_rng(seed)
    means: list[np.ndarray] = []
    rows = max(1, DRAWN_AT_ONCE // table.size)
    for start in range(0, resamples, rows):
        drawn = table[rng.integers(0, len(table), (min(rows, resamples - start), len(table)))]
        known = ~np.isnan(drawn)
        count = known.sum(1)
        sums = np.where(known, drawn, 0.0).sum(1)
        per_class = np.divide(sums, count, out=np.full(sums.shape, np.nan), where=count > 0)
        has = ~np.isnan(per_class)
        means.append(np.where(has, per_class, 0.0).sum(1)[has.any(1)] / has.sum(1)[has.any(1)])
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _values(column: np.ndarray) -> list[float]:
    return [float(v) for v in column if not np.isnan(v)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
