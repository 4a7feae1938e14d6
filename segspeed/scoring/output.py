"""Scores on disk and on the terminal: summary.json, cases.csv, report.html, and tables."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from segspeed.jsonio import from_plain, write_json
from segspeed.jsonio import to_plain as to_plain_json
from segspeed.metric.compare import Comparison
from segspeed.metric.scores import to_plain
from segspeed.record.live import console
from segspeed.record.overlays import Overlay
from segspeed.scoring.comparison import compare_scores
from segspeed.scoring.page import page
from segspeed.scoring.score import CaseScore
from segspeed.scoring.summary import MEAN, ScoreSummary, Statistic, metrics_of
from segspeed.types import DataError

__all__ = ["compare_scores", "print_comparison", "print_scores", "read_scores", "write_scores"]

FORMAT = "segspeed scores 1"
LISTED = 10  # cases named on the terminal; the files name all


def write_scores(
    folder: Path,
    cases: Sequence[CaseScore],
    summary: ScoreSummary,
    title: str,
    *,
    about: Mapping[str, Any] | None = None,
    overlays: Sequence[Overlay] = (),
) -> Path:
    """Write summary.json, cases.csv and report.html, each whole or not at all. Returns the path of the page.

    ``about`` says what was scored and on what (settings, versions); ``overlays`` are pictures of single cases.
    """
    ordered = sorted(cases, key=lambda case: case.id)
    write_json(
        folder / "summary.json",
        {
            "format": FORMAT,
            "title": title,
            **to_plain_json(summary),
            "about": about or {},
            "each": [_plain_case(case) for case in ordered],
        },
    )
    _replace(folder / "cases.csv", _table_text(ordered))
    _replace(folder / "report.html", page(ordered, summary, title, about or {}, overlays))
    return folder / "report.html"


def read_scores(path: Path) -> list[CaseScore]:
    """The cases of a summary.json. Raises DataError where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"the scores {path} cannot be read: {error.strerror}; name the summary.json of a run"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}); score the predictions again") from error
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        raise DataError(f"{path} holds no scores in the format {FORMAT!r}; name the summary.json of a scored folder")
    try:
        return list(from_plain(found.get("each"), tuple[CaseScore, ...]))
    except ValueError as error:
        raise DataError(
            f"{path} has been changed and is no longer whole; score the predictions again ({error})"
        ) from error


def print_scores(summary: ScoreSummary) -> None:
    """The table at the end of scoring, and what is in no mean."""
    out = console()
    table = Table(title=f"{summary.cases} cases of {summary.patients} patients")
    table.add_column("class", overflow="fold")
    surface = [m for m in summary.mean.metrics if m.startswith("nsd_")][:2]
    for column in (
        "cases",
        "Dice",
        "lowest",
        *(f"NSD\n{m[4:-2]} mm" for m in surface),
        "HD95\nmm",
        "missed",
        "invented",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in [*summary.classes.items(), (MEAN, summary.mean)]:
        if name == MEAN:
            table.add_section()
        values = found.metrics
        table.add_row(
            Text(name),
            str(values["dice"].n) if "dice" in values else "0",
            _mean(values.get("dice"), 4),
            "none" if "dice" not in values or values["dice"].min is None else f"{values['dice'].min:.4f}",
            *(_mean(values.get(m), 3) for m in surface),
            _mean(values.get("hd95_mm"), 2),
            str(found.states["missed"]),
            str(found.states["invented"]),
        )
    out.print(table, soft_wrap=False)
    if summary.interval is not None:
        low, high = summary.interval
        out.print(f"95 % interval of the mean Dice over patients (bootstrap): {low:.4f} to {high:.4f}")
    for kind, groups in (("Fold", summary.folds), ("Site", summary.sites)):
        for name, group in groups.items():
            dice = "none" if group.mean_dice is None else f"{group.mean_dice:.4f}"
            out.print(f"{kind} {name}: mean Dice {dice}, {group.cases} cases", markup=False)
    if summary.worst:
        worst = ", ".join(f"{w.id} ({w.mean_dice:.3f})" for w in summary.worst[:3])
        out.print(f"Worst cases: {worst}", markup=False)
    out.print(summary.policy, markup=False, soft_wrap=False)
    if summary.failed:
        out.print(f"Not scored, and in no mean: {len(summary.failed)} cases", markup=False)
        for case, problem in list(summary.failed.items())[:LISTED]:
            out.print(f"  {case}: {problem}", markup=False)
        if len(summary.failed) > LISTED:
            out.print(f"  and {len(summary.failed) - LISTED} more, named in summary.json")


def print_comparison(comparisons: Mapping[str, Comparison], name_a: str = "a", name_b: str = "b") -> None:
    """A table of `compare_scores`: what b gains or loses against a."""
    out = console()
    table = Table(title=Text(f"Dice of {name_b} minus {name_a}"))
    table.add_column("class", overflow="fold")
    for column in ("cases", "difference", "95 % interval", "p", "better/worse/\nequal"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, c in comparisons.items():
        if name == MEAN:
            table.add_section()
        table.add_row(
            Text(name),
            str(c.cases),
            f"{c.mean_difference:+.4f}",
            "none" if c.interval is None else f"{c.interval[0]:+.4f} to {c.interval[1]:+.4f}",
            "none" if c.p is None else f"{c.p:.2g}",
            f"{c.better}/{c.worse}/{c.equal}",
            c.verdict,
        )
    out.print(table, soft_wrap=False)
    last = list(comparisons.values())[-1]
    out.print(
        f"{name_b} is not inferior where the interval lies above -{last.margin:g}. Counts and intervals are over "
        f"{last.patients} patients; p is Wilcoxon's signed-rank test, not corrected for the number of classes.",
        markup=False,
        soft_wrap=False,
    )
    if last.losses:
        out.print(f"Largest losses of {name_b}: {', '.join(last.losses)}", markup=False)
    if last.unpaired:
        more = f" and {len(last.unpaired) - LISTED} more" if len(last.unpaired) > LISTED else ""
        out.print(f"Scored in one run only, left out: {', '.join(last.unpaired[:LISTED])}{more}", markup=False)


def _plain_case(case: CaseScore) -> dict[str, Any]:
    scores = None if case.scores is None else {name: to_plain(score) for name, score in case.scores.items()}
    return {**_named(case), "scores": scores, "problem": case.problem}


def _named(case: CaseScore) -> dict[str, str]:
    """What tells a case apart; its fold only in a cross-validation."""
    return {"id": case.id, "patient": case.patient, "site": case.site, **({"fold": case.fold} if case.fold else {})}


def _table_text(cases: Sequence[CaseScore]) -> str:
    """CSV: a row a case and class, an empty field for no value; a case with a problem has one row without a class."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        about: dict[str, Any] = {"case" if key == "id" else key: value for key, value in _named(case).items()}
        if case.scores is None:
            rows.append({**about, "problem": case.problem})
        for name, score in (case.scores or {}).items():
            rows.append({**about, "class": name, "state": score.state, **metrics_of(score)})
    first = ["case", "patient", "site", *(["fold"] if any(c.fold for c in cases) else []), "class", "state"]
    metrics = dict.fromkeys(key for row in rows for key in row if key not in (*first, "problem"))
    out = io.StringIO()
    writer = csv.DictWriter(out, [*first, *metrics, "problem"], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _replace(path: Path, text: str) -> None:
    """Write whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)


def _mean(statistic: Statistic | None, digits: int) -> str:
    return "none" if statistic is None or statistic.mean is None else f"{statistic.mean:.{digits}f}"
