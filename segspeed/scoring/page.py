"""report.html: scores of label files as one page, no network. Drawn from the cases and their summary alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from segspeed.record import figures
from segspeed.record.overlays import Overlay
from segspeed.record.report import details, document, overlay_figures
from segspeed.scoring.score import CaseScore
from segspeed.scoring.summary import MEAN, STATES, ClassSummary, GroupSummary, ScoreSummary, Statistic, metrics_of

DOTS = 4000  # points that are drawn each for itself; a page with more of them holds one picture instead

EXTRA_STYLE = """
caption{text-align:left;color:var(--soft);font-size:.88rem;padding-bottom:.3rem}td.n{white-space:nowrap}
td{overflow-wrap:anywhere;min-width:4rem}td:first-child{min-width:7rem}tr.mean td{font-weight:600}
.wide svg{min-width:30rem}.bad{border-left:.25rem solid #dc2626;padding-left:.8rem}
"""


def page(
    cases: Sequence[CaseScore],
    summary: ScoreSummary,
    title: str,
    about: Mapping[str, Any],
    overlays: Sequence[Overlay] = (),
) -> str:
    """The page as HTML text. Cases go by their ids; patients are counted, not named."""
    counted = f"{summary.cases} cases of {summary.patients} patients scored, {len(summary.failed)} not scored"
    body = [
        f"<h1>{escape(title)}</h1><p class='soft'>{counted}</p>",
        _cards(summary),
        _failed(summary),
        _classes(summary),
        _figure(
            "Dice of each case",
            strip(cases, "dice", "Dice"),
            "Dice of each case, a row a class; one point a case, the bar is the median, the worst case is named.",
        ),
        _figure(
            "HD95 of each case",
            strip(cases, "hd95_mm", "HD95 (mm)"),
            "HD95 in mm of each case, a row a class; one point a case, the bar is the median, the worst case is named.",
        ),
        _figure(
            "Volumes",
            bland_altman(cases),
            "Predicted minus reference volume over their mean, in ml, a plot a class (Bland and Altman 1986): one point a case; "
            "lines at the mean difference and 1.96 standard deviations to either side.",
        ),
        _states(summary),
        _folds(summary),
        _groups("Sites", "Mean Dice of each site's cases.", "site", summary.sites, summary),
        _worst(summary),
        overlay_figures("Worst cases in three planes", overlays, list(summary.classes)),
        _everything(summary),
        *(details(name, value) for name, value in about.items()),
        f"<h2>What a structure that is not there counts</h2><p>{escape(summary.policy)} Background is in no mean.</p>"
        "<p class='soft'>Intervals are 95 % bootstrap intervals over patients. Every case and class: cases.csv, "
        "summary.json.</p>",
    ]
    return document(title, body, EXTRA_STYLE)


def strip(cases: Sequence[CaseScore], metric: str, title: str) -> str | None:
    """SVG text: one point a case and class, the median as a bar, the worst case of each class named."""
    points: dict[str, list[tuple[str, float]]] = {}
    for case in sorted(cases, key=lambda c: c.id):
        for name, score in (case.scores or {}).items():
            value = metrics_of(score)[metric]
            row = points.setdefault(name, [])
            if value is not None:
                row.append((case.id, value))
    if not any(points.values()):
        return None
    figure, (axis,) = figures.blank(6.5, 0.7 * len(points) + 1.1)
    rng = np.random.default_rng(0)
    many = sum(map(len, points.values())) > DOTS
    worst = min if metric == "dice" else max
    for number, row in enumerate(points.values()):
        if not row:
            continue
        values = np.array([value for _, value in row])
        height = number + rng.uniform(-0.18, 0.18, len(values))
        axis.scatter(values, height, s=16, color=figures.colour(number), alpha=0.65, lw=0, rasterized=many)
        axis.plot([np.median(values)] * 2, [number - 0.3, number + 0.3], color=figures.INK, linewidth=2)
        case_id, value = worst(row, key=lambda p: p[1])
        left = value < (values.min() + values.max()) / 2
        axis.annotate(
            _plain(case_id), (value, number), xytext=(0, 12), textcoords="offset points", fontsize=8,
            color=figures.INK, ha="left" if left else "right",
        )  # fmt: skip
    axis.set_yticks(range(len(points)), [_plain(name) for name in points])
    axis.set(xlabel=f"{title}, one point a case; the bar is the median", ylim=(len(points) - 0.5, -0.7))
    axis.set_xlim(*((None, 1.01) if metric == "dice" else (0, None)))
    return figures.svg_text(figure)


def bland_altman(cases: Sequence[CaseScore]) -> str | None:
    """SVG text: volume differences over volume means in ml, a plot a class, with the limits of agreement."""
    points: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        for name, score in (case.scores or {}).items():
            if score.state != "absent in both":
                mean = (score.volume_ml + score.reference_volume_ml) / 2
                points.setdefault(name, []).append((mean, score.volume_error_ml))
    if not points:
        return None
    many = sum(map(len, points.values())) > DOTS
    columns = min(3, len(points))
    rows = -(-len(points) // columns)
    figure, axes = figures.blank(3.0 * columns, 2.6 * rows, columns, rows)
    for number, (axis, (name, values)) in enumerate(zip(axes, points.items(), strict=False)):
        means, differences = np.array(values).T
        middle, spread = differences.mean(), differences.std(ddof=1) if len(differences) > 1 else 0.0
        axis.scatter(means, differences, s=16, color=figures.colour(number), alpha=0.65, lw=0, rasterized=many)
        axis.axhline(middle, color=figures.INK, linewidth=1.5)
        for side in (-1.96, 1.96):
            axis.axhline(middle + side * spread, color=figures.INK, linewidth=1, linestyle="--")
        axis.set(title=_plain(name), xlabel="mean volume (ml)", ylabel="predicted - reference (ml)")
    for axis in axes[len(points) :]:
        axis.set_axis_off()
    return figures.svg_text(figure)


def _plain(name: str) -> str:
    """A name that matplotlib takes for no formula, short enough to leave room for the points."""
    return (name if len(name) <= 28 else f"{name[:27]}…").replace("$", r"\$")


def _cards(summary: ScoreSummary) -> str:
    cards = [("first", _number(summary.mean_dice), f"mean Dice{_interval_text(summary.interval)}")]
    for metric, statistic in summary.mean.metrics.items():
        if metric.startswith("nsd_") or metric == "hd95_mm":
            number = _number(statistic.mean, metric)
            cards.append(("", number, f"mean {_title(metric)}{_interval_text(statistic.interval, metric)}"))
    if summary.failed:
        cards.append(("", str(len(summary.failed)), "cases not scored: in no mean"))
    inner = "".join(f"<div class='card {k}'><b>{escape(b)}</b><span>{escape(t)}</span></div>" for k, b, t in cards)
    return f"<div class='cards'>{inner}</div>"


def _interval_text(interval: tuple[float, float] | None, metric: str = "dice") -> str:
    if interval is None:
        return ""
    return f"; 95 % interval {_number(interval[0], metric)} to {_number(interval[1], metric)}"


def _failed(summary: ScoreSummary) -> str:
    if not summary.failed:
        return ""
    rows = [[case, problem] for case, problem in summary.failed.items()]
    return f"<div class='bad'>{_table('Not scored', 'They are in no mean.', ('case', 'problem'), rows, words=2)}</div>"


def _rows(summary: ScoreSummary) -> list[tuple[str, ClassSummary]]:
    return [*summary.classes.items(), (MEAN, summary.mean)]


def _classes(summary: ScoreSummary) -> str:
    shown = [m for m in summary.mean.metrics if m.startswith("nsd_") or m in ("hd95_mm", "msd_mm", "volume_error_ml")]
    header = ["class", "cases", "mean Dice", "95 % interval", "median", "lowest", *(_title(m) for m in shown)]
    rows = []
    for name, found in _rows(summary):
        dice = found.metrics.get("dice")
        if dice is None:
            continue
        rows.append(
            [name, str(dice.n), _number(dice.mean), _range(dice), _number(dice.median), _number(dice.min)]
            + [_number(found.metrics[m].mean, m) if m in found.metrics else "none" for m in shown]
        )
    return _table("Classes", "Means over cases; the last row is the mean of the classes.", header, rows, last=True)


def _states(summary: ScoreSummary) -> str:
    caption = "Cases by where the class is: in both maps, in neither, in the label only, in the prediction only."
    rows = [[name, *(str(found.states[s]) for s in STATES)] for name, found in summary.classes.items()]
    header = ("class", "in both", "absent in both", "missed", "invented")
    return _table("Missed and invented structures", caption, header, rows)


def _folds(summary: ScoreSummary) -> str:
    means = [g.mean_dice for g in summary.folds.values() if g.mean_dice is not None]
    over = (
        f" Over the folds: mean {np.mean(means):.3f}, standard deviation {np.std(means, ddof=1):.3f}."
        if len(means) > 1
        else ""
    )
    caption = f"Mean Dice of each fold's cases, by the run that was not trained on them.{over}"
    return _groups("Folds", caption, "fold", summary.folds, summary)


def _groups(title: str, caption: str, kind: str, groups: Mapping[str, GroupSummary], summary: ScoreSummary) -> str:
    rows = [
        [name, str(g.cases), _number(g.mean_dice), *(_number(g.dice[n]) for n in summary.classes)]
        for name, g in groups.items()
    ]
    return _table(title, caption, (kind, "cases", "mean", *summary.classes), rows)


def _worst(summary: ScoreSummary) -> str:
    sites = any(w.site for w in summary.worst)
    rows = [
        [w.id, *([w.site] if sites else []), _number(w.mean_dice), *(_number(w.dice.get(n)) for n in summary.classes)]
        for w in summary.worst
    ]
    header = ("case", *(["site"] if sites else []), "mean", *summary.classes)
    caption = "By mean Dice over the classes of the case, lowest first."
    return _table("Worst cases", caption, header, rows, words=1 + sites)


def _everything(summary: ScoreSummary) -> str:
    rows = [
        [name, _title(metric), str(s.n), *(_number(v, metric) for v in (s.mean, s.median, s.min, s.max)), _range(s, metric)]
        for name, found in _rows(summary)
        for metric, s in found.metrics.items()
    ]  # fmt: skip
    header = ("class", "metric", "cases", "mean", "median", "min", "max", "95 % interval of the mean")
    table = _table("", "Each class and metric over the cases that have it.", header, rows, words=2)
    return f"<details><summary>All metrics</summary>{table}</details>"


def _table(
    title: str,
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: int = 1,
    last: bool = False,
) -> str:
    """A table, "" without rows; the first ``words`` columns are text, ``last`` marks the last row as the sum."""
    if not rows:
        return ""
    kind = ["" if i < words else " class='n'" for i in range(len(header))]
    head = "".join(f"<th scope='col'{k}>{escape(h)}</th>" for k, h in zip(kind, header, strict=True))
    lines = []
    for number, row in enumerate(rows, start=1):
        cells = "".join(f"<td{k}>{escape(c)}</td>" for k, c in zip(kind, row, strict=True))
        lines.append(f"<tr{' class=mean' if last and number == len(rows) else ''}>{cells}</tr>")
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return (
        f"{heading}<div class='wide'><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _figure(title: str, svg: str | None, caption: str) -> str:
    if svg is None:
        return ""
    labelled = svg.replace("<svg", f"<svg role='img' aria-label='{escape(caption, quote=True)}'", 1)
    return (
        f"<h2>{escape(title)}</h2><figure><div class='wide'>{labelled}</div>"
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _range(statistic: Statistic, metric: str = "dice") -> str:
    if statistic.interval is None:
        return "none"
    return " to ".join(_number(v, metric) for v in statistic.interval)


def _title(metric: str) -> str:
    """The name of a metric as people write it: "NSD at 1 mm", "HD95 (mm)"."""
    if metric.startswith("nsd_"):
        return f"NSD at {metric[4:-2]} mm"
    unit = metric.rsplit("_", 1)[-1]
    if unit not in ("mm", "ml"):
        return metric.replace("_", " ").capitalize()
    name = metric[:-3].replace("_", " ")
    name = {"hd95": "HD95", "msd": "Mean surface distance"}.get(name, name.capitalize())
    return f"{name} ({unit})"


def _number(value: float | None, metric: str = "dice") -> str:
    """Lengths in mm and counts with two decimals, ratios and volumes with three."""
    if value is None:
        return "none"
    two = metric in ("hd95_mm", "msd_mm") or metric.startswith("lesions_")
    return f"{value:.2f}" if two else f"{value:.3f}"
