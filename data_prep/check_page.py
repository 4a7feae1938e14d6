"""check.html: a cohort as one page without network. Drawn from its facts, problems and thumbnails alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from data_prep import check_figures
from data_prep.check_kinds import explain
from data_prep.check_outliers import Measure, glance, volume_ml
from data_prep.check_pictures import FINE, OUTLIER, rank
from segspeed.record import figures
from segspeed.record.report import STYLE
from segspeed.scoring.page import EXTRA_STYLE, _table
from segspeed.types import CaseFacts, Cohort, Problem

VISIBLE = 8  # cases of a kind that are seen at once; the others unfold
GLANCE = "Over the cases that were read without an error."
SEVERITIES = {
    "error": ("Errors", "Training is refused while one stands."),
    "warning": ("Warnings", "Training goes on; each is worth a look."),
    "info": ("Notes", "For your information."),
}
CHECK_STYLE = """
h3{font-size:1rem;margin:1.4rem 0 .2rem}.flag{display:inline-block;border-radius:.3rem;padding:0 .4em;margin:0 .3em .1em 0;
font-size:.8rem;color:#fff;background:#4b5563}.flag.error{background:#b91c1c}.flag.warning{background:#a84300}
.flag.outlier{background:#6d28d9}.sheet{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(min(17rem,100%),1fr))}
.sheet figure{margin:0;background:var(--card);border-radius:.4rem;overflow:hidden;content-visibility:auto;
contain-intrinsic-size:auto 9rem}.sheet img{width:100%;background:#000}.sheet figcaption{margin:.25rem .5rem .4rem;
overflow-wrap:anywhere}.sheet figcaption b{color:var(--ink)}.sheet figure.error{box-shadow:0 0 0 2px #dc2626}
.sheet figure.warning{box-shadow:0 0 0 2px #d97706}.sheet figure.outlier{box-shadow:0 0 0 2px #7c3aed}
.sheet figure:target{box-shadow:0 0 0 4px var(--mark)}a{color:var(--mark)}.card.error b{color:#dc2626}
.kind table{margin-top:.3rem}.kind td:first-child{width:30%}nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.8rem 0}
code{background:var(--card);padding:.1em .3em;border-radius:.3em;
overflow-wrap:anywhere}figure svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif!important}
"""


def page(
    cohort: Cohort,
    facts: Sequence[CaseFacts],
    problems: Sequence[Problem],
    found: Sequence[Measure],
    pictures: Mapping[str, str],
    unseen: Mapping[str, str],
    drawn: int,
) -> str:
    """The page as HTML text.

    ``facts`` of the readable cases; ``problems`` of all, most severe first; ``pictures`` base64 PNGs by case id in the order
    of the sheet, out of ``drawn`` that exist; ``unseen`` says why a case has none.
    """
    by_case: dict[str, list[Problem]] = defaultdict(list)
    for p in problems:
        by_case[p.case].append(p)
    anchors = {case: f"case-{n}" for n, case in enumerate(pictures)}
    title = f"{cohort.name}: data check"
    body = [
        f"<h1>{escape(title)}</h1><p class='soft'>{escape(_subtitle(cohort, facts))}</p>",
        _cards(cohort, facts, problems),
        _verdict(problems),
        _links(problems, bool(pictures or unseen), bool(facts)),
        *(_severity(s, [p for p in problems if p.severity == s], anchors) for s in ("error", "warning")),
        _sheet(cohort, by_case, pictures, anchors, drawn, unseen),
        "<span id='histograms'></span>",
        _table("At a glance", GLANCE, ("", "smallest", "median", "largest"), glance(cohort, facts)),
        check_figures.sections(cohort, facts, found),
        _severity("info", [p for p in problems if p.severity == "info"], anchors),
        _cases(cohort, facts, by_case, anchors),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}{EXTRA_STYLE}{CHECK_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _subtitle(cohort: Cohort, facts: Sequence[CaseFacts]) -> str:
    patients = len({c.patient for c in cohort.cases})
    return (
        f"{len(cohort.cases)} cases of {patients} patients, {len(facts)} read without an error; "
        f"channels {', '.join(cohort.channels)}; classes {', '.join(cohort.class_names)}"
    )


def _cards(cohort: Cohort, facts: Sequence[CaseFacts], problems: Sequence[Problem]) -> str:
    cards = []
    outliers = any(p.kind == "outlier" for p in problems)
    for severity, word, effect in (
        ("error", "error", ": training is refused"),
        ("warning", "warning", ": training goes on"),
        ("info", "note", ", outliers among them" if outliers else ""),
    ):
        of = [p for p in problems if p.severity == severity]
        cases = len({p.case for p in of if p.case})
        words = f"{word}{'' if len(of) == 1 else 's'}{f' in {_cases_of(cases)}' if cases else ''}{effect if of else ''}"
        cards.append((severity if of else "", str(len(of)), words))
    cards.append(("", f"{len(facts)} of {len(cohort.cases)}", "cases read without an error"))
    inner = "".join(f"<div class='card {k}'><b>{escape(b)}</b><span>{escape(t)}</span></div>" for k, b, t in cards)
    return f"<div class='cards'>{inner}</div>"


def _verdict(problems: Sequence[Problem]) -> str:
    wrong = sorted({p.case for p in problems if p.severity == "error" and p.case})
    if not any(p.severity == "error" for p in problems):
        return (
            "<p>Nothing stands against training: <code>python -m segspeed.train</code> with the same data settings. Look "
            "through the pictures first: a program does not see a label on the wrong side.</p>"
        )
    text = "<p class='bad'>Training is refused until the errors are mended or their cases left out"
    if wrong and all(re.fullmatch(r"[\w.-]+", case) for case in wrong) and len(wrong) <= 50:
        text += f": <code>data.exclude=[{escape(','.join(wrong))}]</code>"
    return text + ".</p>"


def _links(problems: Sequence[Problem], sheet: bool, histograms: bool) -> str:
    """The sections of the page, for pages on which the pictures stand far below."""
    severities: set[str] = {p.severity for p in problems}
    parts: dict[str, str] = {s: SEVERITIES[s][0] for s in ("error", "warning") if s in severities}
    parts |= ({"sheet": "Pictures"} if sheet else {}) | ({"histograms": "Histograms"} if histograms else {})
    parts |= {"info": SEVERITIES["info"][0]} if "info" in severities else {}
    return "<nav>" + "".join(f"<a href='#{anchor}'>{name}</a>" for anchor, name in parts.items()) + "</nav>"


def _severity(severity: str, problems: Sequence[Problem], anchors: Mapping[str, str]) -> str:
    """Problems of one severity by kind, the kind with most cases first."""
    if not problems:
        return ""
    heading, effect = SEVERITIES[severity]
    kinds: dict[str, list[Problem]] = defaultdict(list)
    for p in problems:
        kinds[p.kind].append(p)
    parts = [f"<h2 id='{severity}'>{heading}: {len(problems)}</h2><p class='soft'>{effect}</p>"]
    for kind, group in sorted(kinds.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        about = explain(kind)
        cases = len({p.case for p in group if p.case})
        count = _cases_of(cases) if cases else "the cohort"
        rows = [_problem_row(p, anchors) for p in group]
        table = _problem_table(rows[:VISIBLE])
        if len(rows) > VISIBLE:
            table += f"<details><summary>{len(rows) - VISIBLE} more</summary>{_problem_table(rows[VISIBLE:])}</details>"
        what = f" <b>What to do:</b> {escape(about.action)}" if about.action else ""
        parts.append(
            f"<section class='kind'><h3>{escape(about.title)} <span class='soft'>({escape(kind)}, {count})</span></h3>"
            f"<p>{escape(about.meaning)}{what}</p>{table}</section>"
        )
    return "".join(parts)


def _problem_row(p: Problem, anchors: Mapping[str, str]) -> str:
    case = _link(p.case, anchors) if p.case else "the cohort"
    file = f"<br><span class='soft'>{escape(p.file)}</span>" if p.file else ""
    return f"<tr><td>{case}{file}</td><td>{escape(p.message)}</td></tr>"


def _problem_table(rows: Sequence[str]) -> str:
    head = "<th scope='col'>case and file</th><th scope='col'>what</th>"
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _cases_of(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"


def _link(case: str, anchors: Mapping[str, str]) -> str:
    return f"<a href='#{anchors[case]}'>{escape(case)}</a>" if case in anchors else escape(case)


def _sheet(
    cohort: Cohort,
    by_case: Mapping[str, Sequence[Problem]],
    pictures: Mapping[str, str],
    anchors: Mapping[str, str],
    drawn: int,
    unseen: Mapping[str, str],
) -> str:
    """The contact sheet: a picture a case, flagged cases first."""
    if not pictures and not unseen:
        return ""
    names = [*cohort.class_names, *(["ignored"] if cohort.ignore else [])]
    legend = " ".join(
        f"<i class='swatch' style='background:{figures.colour(i)}'></i>{escape(name)}" for i, name in enumerate(names)
    )
    some = (
        f" {len(pictures)} of {drawn} cases are shown: the flagged ones and an even sample of the others."
        if len(pictures) < drawn
        else ""
    )
    text = (
        "Axial, coronal and sagittal slice through the labels' centre of mass (the nearest slice with a label, or the middle "
        "of a case without one), first channel, true to scale in mm. The patient's right is on the right, front and head are up; "
        "sagittal slices look to the right. Grey values between robust percentiles, narrowed to those around the labels. "
        f"Flagged cases come first.{some}"
    )
    carried = Counter(kind for p in by_case.values() for kind in {x.kind for x in p if x.severity == "info"})
    common = {kind for kind, n in carried.items() if 2 * n > len(cohort.cases)}  # a note on most cases sets none apart
    tiles = []
    for case, data in pictures.items():
        mine = [p for p in by_case.get(case, ()) if p.kind not in common]
        level = rank(mine)
        frame = {0: "error", 1: "warning", OUTLIER: "outlier"}.get(level, "")
        kinds = {p.kind: "outlier" if p.kind == "outlier" else p.severity for p in mine}
        flags = "".join(f"<span class='flag {s}'>{escape(k)}</span>" for k, s in kinds.items())
        words = f"{case}: axial, coronal and sagittal slice" + (f"; {', '.join(kinds)}" if level < FINE else "")
        tiles.append(
            f"<figure id='{anchors[case]}' class='{frame}'><img src='data:image/png;base64,{data}' width='288' height='104' "
            f"loading='lazy' decoding='async' alt='{escape(words)}'>"
            f"<figcaption><b>{escape(case)}</b> {flags}</figcaption></figure>"
        )
    missing = ""
    if unseen:
        rows = [[case, why] for case, why in unseen.items()]
        table = _table("", "Why.", ("case", "why"), rows, words=2)
        missing = f"<details><summary>{_cases_of(len(rows))} without a picture</summary>{table}</details>"
    head = f"<h2 id='sheet'>Every case</h2><p class='soft'>{text}</p><p>{legend}</p>"
    return f"{head}<div class='sheet'>{''.join(tiles)}</div>{missing}"


def _cases(
    cohort: Cohort, facts: Sequence[CaseFacts], by_case: Mapping[str, Sequence[Problem]], anchors: Mapping[str, str]
) -> str:
    """Every case of the cohort in one table, in the cohort's order."""
    known = {f.id: f for f in facts}
    head = "".join(
        f"<th scope='col'{k}>{escape(h)}</th>"
        for h, k in (
            ("case", ""), ("shape D x H x W", ""), ("spacing, mm", ""), ("axes", ""),
            *((f"{name}, ml", " class='n'") for name in cohort.class_names), ("problems", ""),
        )
    )  # fmt: skip
    rows = []
    for case in cohort.cases:
        f = known.get(case.id)
        cells = (
            f"<td>{' x '.join(map(str, f.shape))}</td><td>{' x '.join(f'{s:.4g}' for s in f.spacing)}</td>"
            f"<td>{escape(f.orientation)}</td>"
            + "".join(f"<td class='n'>{volume_ml(f, name):.4g}</td>" for name in cohort.class_names)
            if f is not None
            else "<td></td><td></td><td></td>" + "<td></td>" * len(cohort.class_names)
        )
        kinds = ", ".join(dict.fromkeys(p.kind for p in by_case.get(case.id, ())))
        rows.append(f"<tr><td>{_link(case.id, anchors)}</td>{cells}<td>{escape(kinds)}</td></tr>")
    return (
        f"<details><summary>All {len(rows)} cases in a table</summary><div class='wide'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )
