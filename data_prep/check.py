"""Check a cohort: python -m data_prep.check data=msd data.root=FOLDER

Reads every file, voxels included, and prints one report of what was found and what is wrong. Exit code 1 when training
would be wrong. The same report stands in check.json.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from segspeed.cli import door
from segspeed.config import Config
from segspeed.types import CaseFacts, Cohort, DataError, Problem

RANK = {"error": 0, "warning": 1, "info": 2}


def main(cfg: Config) -> int:
    """Check the cohort of ``cfg``; 1 if there is an error, else 0."""
    from segspeed.build import cohort_from
    from segspeed.jsonio import write_json
    from segspeed.preparation import inspect_cohort
    from segspeed.record.live import say, track

    cohort = cohort_from(cfg.data)
    facts, problems = inspect_cohort(cfg, cohort, track)
    problems = sorted([*problems, *_split_problems(cfg, cohort)], key=lambda p: (RANK[p.severity], p.kind, p.case))
    path = Path(cfg.run.root) / cohort.folder_name / "check.json"
    write_json(path, report(cohort, facts, problems))
    show(cohort, facts, problems)
    errors = sum(p.severity == "error" for p in problems)
    say(f"Report: {path}")
    if errors:
        say("Training would be wrong. Mend the files, or leave cases out with 'data.exclude=[id,id]'.")
        return 1
    say(
        "Next: python -m segspeed.train with the same data settings (python -m data_prep.prepare builds the cache first)"
    )
    return 0


def _split_problems(cfg: Config, cohort: Cohort) -> list[Problem]:
    """What stands against the fold that training would use."""
    from segspeed.data.split import choose_split

    data = cfg.data
    try:
        choose_split(
            cohort, fold=data.fold, folds=data.folds, seed=data.split_seed, splits=data.splits, excluded=data.exclude
        )
    except DataError as error:
        return [Problem("", "", "error", "split", str(error))]
    return []


def report(cohort: Cohort, facts: Mapping[str, CaseFacts], problems: Sequence[Problem]) -> dict[str, Any]:
    """What check.json holds: the cohort, a line a case, all problems."""
    return {
        "cohort": cohort.name,
        "classes": {name: list(values) for name, values in cohort.labels.items()},
        "channels": list(cohort.channels),
        "cases": [
            {
                "case": f.id,
                "shape_dhw": f.shape,
                "spacing_mm": [round(s, 4) for s in f.spacing],
                "orientation": f.orientation,
                "content_dhw": f.crop_shape,
                "voxels": dict(f.class_voxels),
            }
            for f in facts.values()
            if f.shape != (0, 0, 0)
        ],
        "problems": list(problems),
    }


def show(cohort: Cohort, facts: Mapping[str, CaseFacts], problems: Sequence[Problem]) -> None:
    """Print the report: the cohort at a glance, then every kind of problem with its cases."""
    from rich.table import Table

    from segspeed.record.live import console

    out = console()
    good = [f for f in facts.values() if f.shape != (0, 0, 0)]
    out.print(
        f"{cohort.name}: {len(cohort.cases)} cases of {len({c.patient for c in cohort.cases})} patients, "
        f"{len(good)} readable; channels {', '.join(cohort.channels)}",
        markup=False,
    )
    if good:
        table = Table()
        for column in ("", "smallest", "median", "largest"):
            table.add_column(column, justify="left" if not column else "right")
        for title, values in (
            ("shape (D x H x W)", [f.shape for f in good]),
            ("spacing, mm", [f.spacing for f in good]),
            ("content (D x H x W)", [f.crop_shape for f in good]),
        ):
            a = np.array(values, dtype=float)
            table.add_row(
                title, *(" x ".join(f"{v:.4g}" for v in row) for row in (a.min(0), np.median(a, 0), a.max(0)))
            )
        for name in cohort.class_names:
            voxels = np.array([f.class_voxels.get(name, 0) for f in good])
            absent = f" (absent in {(voxels == 0).sum()})" if (voxels == 0).any() else ""
            table.add_row(
                f"voxels of {name}{absent}", *(f"{v:.0f}" for v in (voxels.min(), np.median(voxels), voxels.max()))
            )
        out.print(table)
        codes = Counter(f.orientation for f in good).most_common()
        out.print("orientation: " + ", ".join(f"{code} ({n})" for code, n in codes), markup=False)
    by_kind: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    for p in problems:
        by_kind[(p.severity, p.kind)].append(p)
    for (severity, kind), found in by_kind.items():
        out.print(f"\n{severity}: {kind}, {len(found)} case(s)", markup=False)
        for p in found[:10]:
            where = " ".join(part for part in (p.case, f"({p.file})" if p.file else "") if part)
            out.print(f"  {where + ': ' if where else ''}{p.message}", markup=False)
        if len(found) > 10:
            out.print(f"  and {len(found) - 10} more, see check.json", markup=False)
    counts = Counter(p.severity for p in problems)
    out.print(f"\n{counts['error']} errors, {counts['warning']} warnings, {counts['info']} notes", markup=False)


if __name__ == "__main__":
    door(main)()
