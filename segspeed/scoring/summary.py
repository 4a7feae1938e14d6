"""From the scores of cases to figures one can quote: a class at a time, over classes, by site, the worst by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from segspeed.metric.compare import DRAWS_AT_ONCE, bootstrap_interval_by_patient
from segspeed.metric.scores import ClassScore
from segspeed.metric.summary import EMPTY_POLICY
from segspeed.scoring.score import CaseScore

POLICY = (
    f"{EMPTY_POLICY} The same holds for NSD. HD95 and mean surface distance of a class present in only one of them are "
    "the diagonal of the volume, in mm: truly they are infinite, and left out they would make a failure improve the "
    "mean. Sensitivity is left out where the reference is empty, precision where the prediction is. Volumes count in "
    "every case."
)
STATES = ("both", "absent in both", "missed", "invented")
MEAN = "mean of classes"  # the row beside those of the classes
WORST = 10  # cases listed
RESAMPLES = 2000

Values = dict[str, float]  # case -> value; cases without one are not there


@dataclass(frozen=True)
class Statistic:
    """One metric over cases; all None where ``n`` is 0. ``interval`` is the bootstrap 95 % interval of the mean over
    patients, None with fewer than two of them.

    Over classes, ``mean`` is the mean of the classes' means, as in a training run; median, min and max are those of
    the cases' means over their own classes.
    """

    n: int
    mean: float | None
    median: float | None
    min: float | None
    max: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class ClassSummary:
    """``metrics`` by name ("dice", "nsd_1mm", "hd95_mm" ...); ``states`` counts cases (over classes: all of them)."""

    metrics: Mapping[str, Statistic]
    states: Mapping[str, int]


@dataclass(frozen=True)
class GroupSummary:
    """Mean Dice of the cases of one site or one fold, by the rule of the whole."""

    cases: int
    mean_dice: float | None
    dice: Mapping[str, float | None]


@dataclass(frozen=True)
class WorstCase:
    """A case with its mean Dice over the classes that have one."""

    id: str
    patient: str
    site: str
    mean_dice: float
    dice: Mapping[str, float | None]


@dataclass(frozen=True)
class ScoreSummary:
    """``cases`` and ``patients`` were scored; ``failed`` maps the others to their problem, and they are in no mean.
    ``sites`` is empty where there is one, ``folds`` without a cross-validation; ``worst`` has the lowest first."""

    cases: int
    patients: int
    mean_dice: float | None
    interval: tuple[float, float] | None
    classes: Mapping[str, ClassSummary]
    mean: ClassSummary
    sites: Mapping[str, GroupSummary]
    folds: Mapping[str, GroupSummary]
    worst: tuple[WorstCase, ...]
    failed: Mapping[str, str]
    policy: str


def metrics_of(score: ClassScore) -> dict[str, float | None]:
    """The numbers of one class of one case by name, units in the names; None where there is none."""
    out: dict[str, float | None] = {"dice": score.dice}
    out |= {f"nsd_{tolerance:g}mm": value for tolerance, value in score.nsd.items()}
    out |= {
        "hd95_mm": score.hd95_mm,
        "msd_mm": score.msd_mm,
        "volume_ml": score.volume_ml,
        "reference_volume_ml": score.reference_volume_ml,
        "volume_error_ml": score.volume_error_ml,
        "sensitivity": score.sensitivity,
        "precision": score.precision,
    }
    if score.detection is not None:
        d = score.detection
        out |= {"lesions_found": d.found, "lesions_missed": d.missed, "lesions_false": d.false}
        out |= {"lesion_sensitivity": d.sensitivity, "lesion_precision": d.precision, "lesion_f1": d.f1}
    return out


def mean_over_classes(values: Iterable[float | None]) -> float | None:
    """Mean of those that are there; None where none is."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def summarise_scores(cases: Sequence[CaseScore], seed: int = 0) -> ScoreSummary:
    """Summary of scored cases, the same in whatever order they come; ``seed`` is that of the bootstrap."""
    ordered = sorted(cases, key=lambda case: case.id)
    scored = [case for case in ordered if case.scores is not None]
    names = list(dict.fromkeys(name for case in scored for name in case.scores or {}))
    patients = {case.id: case.patient for case in scored}
    # class -> metric -> case -> value
    table: dict[str, dict[str, Values]] = {name: {} for name in names}
    states = {name: dict.fromkeys(STATES, 0) for name in names}
    for case in scored:
        for name, score in (case.scores or {}).items():
            states[name][score.state] += 1
            for metric, value in metrics_of(score).items():
                column = table[name].setdefault(metric, {})
                if value is not None:
                    column[case.id] = value
    metrics = list(dict.fromkeys(m for columns in table.values() for m in columns))
    over = {m: _over_classes([table[n].get(m, {}) for n in names], patients, seed) for m in metrics}
    classes = {
        name: ClassSummary({m: _statistic(v, patients, seed) for m, v in table[name].items()}, states[name])
        for name in names
    }
    return ScoreSummary(
        cases=len(scored),
        patients=len(set(patients.values())),
        mean_dice=over["dice"].mean if over else None,
        interval=over["dice"].interval if over else None,
        classes=classes,
        mean=ClassSummary(over, {s: sum(counts[s] for counts in states.values()) for s in STATES}),
        sites=_groups([(case.site or "no site named", case) for case in scored], names),
        folds=_groups([(case.fold, case) for case in scored if case.fold], names, at_least=1),
        worst=_worst(scored),
        failed={case.id: case.problem or "not scored" for case in ordered if case.scores is None},
        policy=POLICY,
    )


def _statistic(values: Values, patients: Mapping[str, str], seed: int) -> Statistic:
    interval = None
    if len({patients[case] for case in values}) > 1:
        interval = bootstrap_interval_by_patient(values, patients, seed, RESAMPLES)
    return _spread(mean_over_classes(values.values()), list(values.values()), interval)


def _over_classes(columns: Sequence[Values], patients: Mapping[str, str], seed: int) -> Statistic:
    """One metric over several classes, ``columns`` one a class."""
    mean = mean_over_classes(mean_over_classes(column.values()) for column in columns)
    per_case = [mean_over_classes(column.get(case) for column in columns) for case in patients]
    return _spread(mean, [v for v in per_case if v is not None], _interval(columns, patients, seed))


def _spread(mean: float | None, values: Sequence[float], interval: tuple[float, float] | None) -> Statistic:
    if not values:
        return Statistic(0, None, None, None, None, None)
    return Statistic(len(values), mean, float(np.median(values)), float(min(values)), float(max(values)), interval)


def _interval(columns: Sequence[Values], patients: Mapping[str, str], seed: int) -> tuple[float, float] | None:
    """95 % percentile interval of the mean of class means, patients drawn with replacement (Efron 1979).

    As `bootstrap_interval_by_patient` does for one class: the cases of a patient are averaged first.
    """
    groups: dict[str, list[str]] = {}
    for case, patient in patients.items():
        if any(case in column for column in columns):
            groups.setdefault(patient, []).append(case)
    if len(groups) < 2:
        return None
    rows = [[mean_over_classes(column.get(case) for case in group) for column in columns] for group in groups.values()]
    table = np.array(rows, dtype=float)  # (patients, classes), NaN where a patient lacks the class in both maps
    known, values = ~np.isnan(table), np.nan_to_num(table)
    rng, size, means = np.random.default_rng(seed), len(table), []
    at_once = max(1, DRAWS_AT_ONCE // size)  # resamples at a time: they would not fit into memory for a large cohort
    for start in range(0, RESAMPLES, at_once):
        some = min(at_once, RESAMPLES - start)
        drawn = rng.integers(0, size, (some, size)) + size * np.arange(some)[:, None]
        times = np.bincount(drawn.ravel(), minlength=some * size).reshape(some, size).astype(float)
        counts, sums = times @ known, times @ values  # (resamples, classes)
        per_class = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        means.append(
            per_class.sum(1) / (counts > 0).sum(1)
        )  # every patient here has a class, so no resample is without one
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def _dice(case: CaseScore) -> dict[str, float | None]:
    return {name: score.dice for name, score in (case.scores or {}).items()}


def _groups(cases: Sequence[tuple[str, CaseScore]], names: Sequence[str], at_least: int = 2) -> dict[str, GroupSummary]:
    """Cases by the name of their group; nothing where there are fewer groups than ``at_least``."""
    groups: dict[str, list[dict[str, float | None]]] = {}
    for group, case in cases:
        groups.setdefault(group, []).append(_dice(case))
    if len(groups) < at_least:
        return {}
    out = {}
    for group in sorted(groups):
        dice = {name: mean_over_classes(scores.get(name) for scores in groups[group]) for name in names}
        out[group] = GroupSummary(len(groups[group]), mean_over_classes(dice.values()), dice)
    return out


def _worst(cases: Sequence[CaseScore]) -> tuple[WorstCase, ...]:
    found = []
    for case in cases:
        dice = _dice(case)
        mean = mean_over_classes(dice.values())
        if mean is not None:
            found.append(WorstCase(case.id, case.patient, case.site, mean, dice))
    return tuple(sorted(found, key=lambda w: w.mean_dice)[:WORST])
