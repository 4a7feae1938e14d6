"""Which cases stand on the contact sheet, and the pictures that are not there yet."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from segspeed.types import Case, CaseFacts, Cohort, DataError, LabelTable, Problem, first_line

SHEET = 1000  # pictures on one page: some 10 MB, which a browser still opens at once
FLAGGED_SHARE = 0.7  # of them at most for flagged cases where there are more, so that others can be compared with
RANK = {"error": 0, "warning": 1, "info": 3}
OUTLIER, FINE = 2, 4


def draw_missing(
    cohort: Cohort, facts: Mapping[str, CaseFacts], folder: Path, workers: int, track: Any
) -> dict[str, str]:
    """Draw the cases that have no picture in ``folder`` yet: those with an error, whose images can often be seen all the
    same. Returns why for those that cannot be drawn; never raises for
    bad data, since what is wrong with it stands in the facts."""
    from segspeed.data.inspect import picture_path
    from segspeed.data.pool import run_jobs

    todo = [(c, picture_path(folder, facts[c.id].digest)) for c in cohort.cases if c.id in facts]
    todo = [(c, path) for c, path in todo if c.images and not path.exists()]
    failed: dict[str, str] = {}
    if not todo:
        return failed
    jobs = [(case, cohort.table, path) for case, path in todo]
    done = run_jobs(draw_case, jobs, 1 if len(todo) < 8 else workers, "draws cases")
    try:
        for number, why in track(done, len(todo), "drawing cases"):
            if why:
                failed[todo[number][0].id] = why
    except DataError as error:  # a process was killed: the report is worth more than its pictures
        failed.update(
            {case.id: first_line(error) for case, path in todo if not path.exists() and case.id not in failed}
        )
    return failed


def draw_case(case: Case, table: LabelTable, path: Path) -> str:
    """Draw the first channel of one case with its label, if that can be read. Returns "" or why there is no picture."""
    from segspeed.data.geometry import VolumeError, read_channels, read_volume
    from segspeed.data.labels import to_class_indices
    from segspeed.data.thumbnail import save_thumbnail

    try:
        volume = read_channels(case)[0] if case.stacked else read_volume(case.images[0])
        label = None
        if case.label is not None:
            try:
                label = to_class_indices(read_volume(case.label, scaled=False), table)
            except VolumeError:
                label = None  # reported as a problem of the case; its image is still worth seeing
        save_thumbnail(path, volume.array, label, volume.spacing)
    except Exception as error:  # whatever it is, the page says so, and the case itself is not touched by it
        return first_line(error, 300)
    return ""


def rank(problems: Sequence[Problem]) -> int:
    """How soon a case is looked at: 0 with an error, then warnings, outliers, notes; FINE without any problem."""
    return min((OUTLIER if p.kind == "outlier" else RANK[p.severity] for p in problems), default=FINE)


def choose(ids: Sequence[str], problems: Mapping[str, Sequence[Problem]], most: int = SHEET) -> list[str]:
    """The cases of the sheet, flagged ones first, else in the order of ``ids``. More than ``most`` cases leave the flagged
    ones and an even sample of the others."""
    ranks = {i: rank(problems.get(i, ())) for i in ids}
    ordered = sorted(ids, key=lambda i: ranks[i])
    if len(ordered) <= most:
        return ordered
    flagged = [i for i in ordered if ranks[i] <= OUTLIER]
    others = [i for i in ids if ranks[i] > OUTLIER]
    room = most - min(len(others), most - min(len(flagged), int(most * FLAGGED_SHARE)))
    kept = set(_even(flagged, room)) | set(_even(others, most - min(len(flagged), room)))
    return [i for i in ordered if i in kept]


def _even(items: Sequence[str], count: int) -> list[str]:
    """``count`` of ``items``, evenly spaced; all where there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[n * len(items) // count] for n in range(count)]


def encoded(path: Path) -> str | None:
    """A picture as base64 text, None where there is none."""
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except FileNotFoundError:
        return None
