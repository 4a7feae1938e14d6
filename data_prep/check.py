"""Check a cohort: python -m data_prep.check data=msd data.root=FOLDER

Reads every file, voxels included, and prints what was found and what is wrong. The same stands, with a picture of every
case and histograms, in check.html (one file to open in a browser) and in check.json. Exit code 1 when training would be
wrong.
"""

from __future__ import annotations

import os
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.check_kinds import explain
from data_prep.check_outliers import RULE, Measure, glance, measures, outlier_problems, volume_ml
from segspeed.cli import door
from segspeed.config import Config
from segspeed.types import CaseFacts, Cohort, DataError, Problem

RANK = {"error": 0, "warning": 1, "info": 2}
LISTED = 10  # cases of a kind on the terminal; the files name all


def main(cfg: Config) -> int:
    """Check the cohort of ``cfg``; 1 if there is an error, else 0."""
    from data_prep.check_pictures import choose, draw_missing, encoded
    from segspeed.build import cohort_from
    from segspeed.data.inspect import picture_path
    from segspeed.jsonio import write_json
    from segspeed.preparation import inspect_cohort, preparation_workers
    from segspeed.record.live import say, track

    cohort = cohort_from(cfg.data)
    thumbnails = picture_folder(cfg, cohort)
    facts, problems = inspect_cohort(cfg, cohort, track, pictures=thumbnails)
    unseen = draw_missing(cohort, facts, thumbnails, preparation_workers(cfg), track)
    good = readable(cohort, facts)
    found = measures(cohort, good)
    problems = sorted(
        [*problems, *_split_problems(cfg, cohort, facts), *outlier_problems(found)],
        key=lambda p: (RANK[p.severity], p.kind, p.case),
    )
    folder = Path(cfg.run.root) / cohort.folder_name
    write_json(folder / "check.json", report(cohort, good, problems, found))
    by_case: dict[str, list[Problem]] = defaultdict(list)
    for p in problems:
        by_case[p.case].append(p)
    paths = {c.id: picture_path(thumbnails, facts[c.id].digest) for c in cohort.cases}
    drawn = [i for i, path in paths.items() if path.exists()]
    pictures = {i: encoded(paths[i]) for i in choose(drawn, by_case)}
    _write_page(
        folder / "check.html",
        cohort, good, problems, found, {i: p for i, p in pictures.items() if p is not None}, unseen, len(drawn),
    )  # fmt: skip
    show(cohort, good, problems)
    say(f"Report: {folder / 'check.html'} (open it in a browser); for programs: {folder / 'check.json'}")
    if any(p.severity == "error" for p in problems):
        wrong = list(dict.fromkeys(p.case for p in problems if p.severity == "error" and p.case))
        leave = (
            f", or leave cases out with 'data.exclude=[{','.join(wrong[:5])}{',...' if len(wrong) > 5 else ''}]'"
            if wrong
            else ""
        )
        say(f"Training would be wrong. Mend what is listed{leave}.")
        return 1
    say("Next: look through its pictures, then python -m segspeed.train with the same data settings")
    say("(python -m data_prep.prepare builds the cache first)")
    return 0


def readable(cohort: Cohort, facts: Mapping[str, CaseFacts]) -> list[CaseFacts]:
    """Facts of the cases without an error of their own, in the cohort's order, each id once."""
    return [facts[i] for i in dict.fromkeys(c.id for c in cohort.cases) if facts[i].shape != (0, 0, 0)]


def picture_folder(cfg: Config, cohort: Cohort) -> Path:
    """Where the thumbnails of a cohort lie: beside its cache, apart for every meaning of the label values."""
    from segspeed.build import cache_root
    from segspeed.data.digest import hash_text
    from segspeed.data.thumbnail import FORMAT

    drawn = hash_text(f"{FORMAT}|{cohort.table}|{cfg.data.resample_labels}")
    return cache_root(cfg) / "thumbnails" / f"{cohort.folder_name}-{drawn[:8]}"


def _split_problems(cfg: Config, cohort: Cohort, facts: Mapping[str, CaseFacts]) -> list[Problem]:
    """What stands against the fold that training would use."""
    from segspeed.preparation import split_for

    try:
        split_for(cfg, cohort, facts)
    except DataError as error:
        return [Problem("", "", "error", "split", str(error))]
    return []


def report(
    cohort: Cohort, good: Sequence[CaseFacts], problems: Sequence[Problem], found: Sequence[Measure]
) -> dict[str, Any]:
    """What check.json holds: the cohort, a line a readable case, what is compared over cases, all problems, and what their
    kinds mean."""
    counts: Counter[str] = Counter(p.severity for p in problems)
    return {
        "cohort": cohort.name,
        "classes": {name: list(values) for name, values in cohort.labels.items()},
        "channels": list(cohort.channels),
        "counts": {"cases": len(cohort.cases), "readable": len(good), **{s: counts[s] for s in RANK}},
        "cases": [
            {
                "case": f.id,
                "shape_dhw": f.shape,
                "spacing_mm": [round(s, 4) for s in f.spacing],
                "orientation": f.orientation,
                "content_dhw": f.crop_shape,
                "voxels": dict(f.class_voxels),
                "volume_ml": {name: round(volume_ml(f, name), 4) for name in f.class_voxels},
                "intensity_median": [float(np.median(v)) if v else None for v in f.foreground],
            }
            for f in good
        ],
        "problems": list(problems),
        "kinds": {kind: explain(kind)._asdict() for kind in sorted({p.kind for p in problems})},
        "measures": [
            {
                "name": m.name, "unit": m.unit, "median": m.median, "low": m.low, "high": m.high,
                "outliers": list(m.outliers),
            }
            for m in found
        ],
        "outlier_rule": RULE,
    }  # fmt: skip


def show(cohort: Cohort, good: Sequence[CaseFacts], problems: Sequence[Problem]) -> None:
    """Print the report: the cohort at a glance, then every kind of problem with its cases."""
    from rich.table import Table
    from rich.text import Text

    from segspeed.record.live import console

    out = console()
    out.print(
        f"{cohort.name}: {len(cohort.cases)} cases of {len({c.patient for c in cohort.cases})} patients, "
        f"{len(good)} readable; channels {', '.join(cohort.channels)}",
        markup=False,
    )
    if good:
        table = Table()
        for column in ("", "smallest", "median", "largest"):
            table.add_column(column, justify="left" if not column else "right")
        for row in glance(cohort, good):
            table.add_row(*map(Text, row))
        out.print(table, soft_wrap=False)
        codes = Counter(f.orientation for f in good).most_common()
        out.print("orientation: " + ", ".join(f"{code} ({n})" for code, n in codes), markup=False)
    by_kind: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    for p in problems:
        by_kind[(p.severity, p.kind)].append(p)
    for (severity, kind), group in by_kind.items():
        cases = len({p.case for p in group})
        out.print(f"\n{severity}: {kind}, {cases} {'case' if cases == 1 else 'cases'}", markup=False)
        for p in group[:LISTED]:
            where = " ".join(part for part in (p.case, f"({p.file})" if p.file else "") if part)
            text = f"  {where + ': ' if where else ''}{p.message}"
            out.print(
                textwrap.fill(
                    text, out.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
                ),
                markup=False,
            )
        if len(group) > LISTED:
            out.print(f"  and {len(group) - LISTED} more, see check.html", markup=False)
    counts = Counter(p.severity for p in problems)
    out.print(f"\n{counts['error']} errors, {counts['warning']} warnings, {counts['info']} notes", markup=False)


def _write_page(path: Path, *parts: Any) -> None:
    """Whole or not at all. A file name that is no text is shown by its bytes."""
    from data_prep.check_page import page

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(page(*parts), encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, path)


if __name__ == "__main__":
    door(main)()
