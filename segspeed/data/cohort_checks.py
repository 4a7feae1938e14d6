"""What only shows over all cases of a cohort: copies, ids given twice, classes nobody has, what may be meant otherwise."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from segspeed.data.inspect import SEVERITY
from segspeed.types import CaseFacts, Cohort, Problem

ODD_RATIO = 10.0  # a spacing this many times off the cohort's median is odd


def cohort_problems(cohort: Cohort, facts: Sequence[CaseFacts]) -> list[Problem]:
    """What only shows over all cases: the same voxels under two ids, an id given twice, a class nobody has, a spacing
    far from everybody else's."""
    found = list(cohort.problems)
    patient = {c.id: c.patient for c in cohort.cases}
    same: dict[str, list[str]] = defaultdict(list)
    for f in facts:
        if f.pixels:
            same[f.pixels].append(f.id)
    for ids in same.values():
        for other in ids[1:]:
            if patient[other] == patient[ids[0]]:
                continue  # a patient is on one side of the split, and so are the copies
            text = f"its image holds the same voxels as that of {ids[0]}"
            found.append(Problem(other, "", SEVERITY["duplicate"], "duplicate", text))
    seen: set[str] = set()
    for case in cohort.cases:
        if case.id in seen:
            found.append(Problem(case.id, "", "error", "duplicate-id", "the id is given to two cases"))
        seen.add(case.id)
    return found + _absent_classes(cohort, facts) + _odd_spacings(facts) + _mapped(cohort) + _guesses(cohort, facts)


def _absent_classes(cohort: Cohort, facts: Sequence[CaseFacts]) -> list[Problem]:
    good = [f for f in facts if f.shape != (0, 0, 0)]
    names = [n for n in cohort.class_names if good and not any(f.class_voxels.get(n) for f in good)]
    text = "no case has a voxel of the class {}, so it cannot be learnt; is its value right?"
    return [Problem("", "", SEVERITY["absent-class"], "absent-class", text.format(n)) for n in names]


def _mapped(cohort: Cohort) -> list[Problem]:
    values = [v for group in cohort.labels.values() for v in group]
    if values == list(range(1, len(values) + 1)):
        return []
    listed = ", ".join(f"{'/'.join(map(str, v))} = {name}" for name, v in list(cohort.labels.items())[:6])
    listed += " ..." if len(cohort.labels) > 6 else ""
    text = f"label values are trained as 1 to {len(cohort.labels)} and written back ({listed})"
    if len(values) > len(cohort.labels):
        text += ", the first value of those that were merged"
    return [Problem("", "", SEVERITY["mapped-values"], "mapped-values", text)]


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


def _guesses(cohort: Cohort, facts: Sequence[CaseFacts]) -> list[Problem]:
    """What may be meant otherwise: ids that speak of one patient, one structure under two values."""
    found = []
    if all(c.patient == c.id for c in cohort.cases):
        stems: dict[str, list[str]] = defaultdict(list)
        for case in cohort.cases:
            stems[re.sub(r"[ _.-][0-9A-Za-z]{1,3}$", "", case.id)].append(case.id)
        several = [ids for ids in stems.values() if len(ids) > 1]
        if several and len(stems) >= max(3, len(cohort.cases) / 2):  # not a common prefix before a running number
            text = (
                f"{', '.join(several[0][:4])}: one patient? Cases of a patient must lie on one side of the split; tell with a "
                "patient column or data.patient_pattern"
            )
            found.append(Problem("", "", SEVERITY["maybe-one-patient"], "maybe-one-patient", text))
    has = {name: {f.id for f in facts if f.class_voxels.get(name)} for name in cohort.labels}
    readable = sum(f.shape != (0, 0, 0) for f in facts)
    for a, b in itertools.combinations([n for n, ids in has.items() if ids], 2):
        # counted first: the sets of most pairs need not be looked at
        if len(has[a]) + len(has[b]) == readable >= 4 and has[a].isdisjoint(has[b]):
            text = (
                f"every case has either {a} or {b}, none both: one structure under two values? Merge them with "
                f"data.classes={{NAME: [{a}, {b}]}}"
            )
            found.append(Problem("", "", SEVERITY["maybe-one-class"], "maybe-one-class", text))
    return found[:10]
