"""Are the scores of run b as good as those of run a? The same cases, scored against the same labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from segspeed.metric.compare import Comparison, compare
from segspeed.metric.scores import ClassScore
from segspeed.scoring.score import CaseScore
from segspeed.scoring.summary import MEAN, mean_over_classes
from segspeed.types import DataError

SAME_VOLUME = 1e-6  # share by which one reference volume may differ from itself

Scored = Mapping[str, Mapping[str, ClassScore]]  # case -> class -> scores
Dice = dict[str, dict[str, float | None]]  # case -> class -> Dice


def compare_scores(a: Sequence[CaseScore], b: Sequence[CaseScore], margin: float = 0.005) -> dict[str, Comparison]:
    """Paired comparison of Dice a class, and of each case's mean over its classes under `MEAN`.

    Where the reference has no such structure and one run invents it (Dice 0), the run that rightly found nothing
    counts 1: left out, the case would hide an invention. Classes that no case of both runs has are left out. Cases
    that only one run scored are in ``unpaired``. Raises DataError where the runs cannot be compared.
    """
    of_a, of_b = ({case.id: case.scores for case in run if case.scores is not None} for run in (a, b))
    _check(of_a, of_b)
    patients = {case.id: case.patient for run in (b, a) for case in run}
    dice_a, dice_b = _paired(of_a, of_b), _paired(of_b, of_a)
    names = next(iter(of_a.values()))
    out = {name: _compare(_column(dice_a, [name]), _column(dice_b, [name]), patients, margin) for name in names}
    out[MEAN] = _compare(_column(dice_a, names), _column(dice_b, names), patients, margin)
    found = {name: comparison for name, comparison in out.items() if comparison is not None}
    if not found:
        raise DataError(
            "no class is in the label or a prediction of any case that both runs scored: nothing to compare"
        )
    return found


def _column(run: Dice, names: Iterable[str]) -> dict[str, float]:
    """Case -> mean Dice over the named classes; cases that have none of them are left out."""
    means = {case: mean_over_classes(scores[name] for name in names) for case, scores in run.items()}
    return {case: mean for case, mean in means.items() if mean is not None}


def _compare(
    a: Mapping[str, float], b: Mapping[str, float], patients: Mapping[str, str], margin: float
) -> Comparison | None:
    """None where no case of both runs has a Dice."""
    return compare(a, b, patients=patients, margin=margin) if a.keys() & b.keys() else None


def _paired(run: Scored, other: Scored) -> Dice:
    """Dice of ``run``, with 1 where it rightly found nothing and ``other`` invented something."""
    out: Dice = {}
    for case, scores in run.items():
        theirs = other.get(case, {})
        out[case] = {
            name: 1.0 if score.dice is None and name in theirs and theirs[name].state == "invented" else score.dice
            for name, score in scores.items()
        }
    return out


def _check(a: Scored, b: Scored) -> None:
    common = [case for case in a if case in b]
    if not common:
        raise DataError(
            f"the two runs have no scored case in common ({len(a)} and {len(b)} cases); are these the files?"
        )
    names = [{name for scores in run.values() for name in scores} for run in (a, b)]
    if names[0] != names[1]:
        only = [", ".join(sorted(one - other)) or "none" for one, other in (names, names[::-1])]
        raise DataError(
            f"the two runs were scored with different classes (only in the first: {only[0]}; only in the second: "
            f"{only[1]}); score both with the same"
        )
    other = [
        case
        for case in common
        if any(_differ(a[case][n].reference_volume_ml, b[case][n].reference_volume_ml) for n in a[case])
    ]
    if other:
        raise DataError(
            f"the labels have other volumes in the second run than in the first ({len(other)} cases: "
            f"{', '.join(other)}); score both runs against the same labels"
        )


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > SAME_VOLUME * max(a, b)
