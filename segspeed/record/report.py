"""report.html of a run: one file, no network, drawn from run.jsonl, result.json and overlays.npz alone."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from segspeed.record import figures
from segspeed.record.overlays import Overlay, load_overlays
from segspeed.record.run_record import read_record

STYLE = """
:root{color-scheme:light dark;--ink:#1f2937;--soft:#6b7280;--paper:#fff;--card:#f6f7f9;--line:#e5e7eb;--mark:#2563eb}
@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--soft:#9ca3af;--paper:#111418;--card:#1a1f26;--line:#2b323c;
--mark:#7aa5ff}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:60rem;margin:0 auto;padding:2rem 1.2rem 4rem}h1{font-size:1.5rem;margin:0 0 .2rem}
h2{font-size:1.1rem;margin:2.4rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--line)}
p{margin:.4rem 0}.soft{color:var(--soft)}.cards{display:grid;gap:.7rem;margin:1.2rem 0;
grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr))}.card{background:var(--card);border-radius:.6rem;
padding:.7rem .9rem}.card b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.card span{color:var(--soft);font-size:.85rem}.first b{color:var(--mark)}
figure{margin:.6rem 0 1.4rem}figure svg,figure img{width:100%;height:auto;display:block}
figcaption{color:var(--soft);font-size:.88rem;margin-top:.3rem}.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.35rem .7rem .35rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right}details{margin:.6rem 0}summary{cursor:pointer}
pre{background:var(--card);padding:.8rem;border-radius:.6rem;overflow-x:auto;font-size:.82rem;line-height:1.45}
i.swatch{display:inline-block;width:.8em;height:.8em;border-radius:.2em;margin-right:.4em}
"""


def write_report(run_dir: Path) -> Path:
    """Draw the report of a finished, running or cut-off run. Returns its path."""
    events = read_record(run_dir / "run.jsonl")
    result_path = run_dir / "result.json"
    result = json.loads(result_path.read_text(encoding="utf-8")) if result_path.exists() else None
    path = run_dir / "report.html"
    temporary = path.with_name(".report.html.tmp")
    temporary.write_text(page(events, result, run_dir), encoding="utf-8")
    temporary.replace(path)
    return path


def page(events: Sequence[Mapping[str, Any]], result: Mapping[str, Any] | None, run_dir: Path) -> str:
    """The report as HTML text."""
    start = next((e for e in events if e["kind"] == "start"), {})
    evaluations = [e for e in events if e["kind"] == "evaluation"]
    last = evaluations[-1] if evaluations else None
    title = f"{start.get('cohort', 'run')}: Dice against time"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class='soft'>{escape(_subtitle(start, result, last))}</p>",
        _cards(result, last),
        picture(
            "Dice against wall clock",
            figures.dice_against_time(events),
            "Whole validation volumes on their original grid, each class apart, against minutes of training.",
        ),
    ]
    if last is not None:
        body += [
            _classes(last),
            _own_metrics(last),
            picture("Cases", figures.dice_per_case(last), "Dice of each validation case."),
        ]
    body += [
        overlay_figures(
            "Best, median and worst case",
            load_overlays(run_dir / "overlays.npz"),
            start.get("classes") or (list(last["dice"]) if last else []),
        ),
        picture("Training", figures.training_curves(events), "Loss, learning rate, throughput and memory over time."),
        _events(events),
        details("Configuration", start.get("config")),
        details("Plan, with the rule behind each value", start.get("plan")),
        details("Versions and hardware", start.get("versions")),
    ]
    return document(title, body)


def document(title: str, body: Sequence[str], style: str = "") -> str:
    """A whole page: one file, no network, light and dark."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _subtitle(start: Mapping[str, Any], result: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> str:
    parts = [f"{start.get('cases_train', '?')} cases trained on, {start.get('cases_val', '?')} judged by"]
    if start:
        parts.append(f"{start['device']}, {start['precision']}, seed {start['seed']}")
    if result is None:
        parts.append("this run is not finished" if last else "no evaluation yet")
    return "; ".join(parts)


def _cards(result: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> str:
    cards = []
    if last is not None:
        which = "last" if last.get("final") else f"at step {last['step']}"
        note = f"mean Dice, {which} weights ({last['weights']}), n = {len(last['cases'])}"
        if last.get("interval"):
            note += "; 95 % interval {:.3f} to {:.3f}".format(*last["interval"])
        cards.append(("first", _number(last["mean_dice"]), note))
    if result is not None and result.get("failed"):
        cards.append(("", str(len(result["failed"])), "validation cases that could not be scored; see the notes"))
    if result is not None:
        cards += [
            ("", _time(result["train_s"]), "of training"),
            ("", _time(result["total_s"]), "in all: setup, cache, training, evaluation"),
            ("", f"{result['samples_per_s']:.1f}", "patches a second"),
            ("", f"{result['wait_share']:.1%}", "of the time waiting for data"),
            ("", f"{result['peak_memory_bytes'] / 1e9:.2f} GB", "peak memory"),
        ]
    inner = "".join(f"<div class='card {k}'><b>{escape(b)}</b><span>{escape(t)}</span></div>" for k, b, t in cards)
    return f"<div class='cards'>{inner}</div>"


def picture(title: str, svg: str | None, caption: str) -> str:
    """A picture under its heading, with its caption as alternative text; "" without one."""
    if svg is None:
        return ""
    labelled = svg.replace("<svg", f"<svg role='img' aria-label='{escape(caption, quote=True)}'", 1)
    head = f"<h2>{escape(title)}</h2>" if title else ""
    return f"{head}<figure>{labelled}<figcaption>{escape(caption)}</figcaption></figure>"


def _classes(last: Mapping[str, Any]) -> str:
    rows = []
    for number, (name, dice) in enumerate(last["dice"].items()):
        swatch = f"<i class='swatch' style='background:{figures.colour(number)}'></i>"
        values = [s[name] for s in last["cases"].values() if s.get(name) is not None]
        zeros = sum(v == 0 for v in values)
        lowest = min(values) if values else None
        rows.append(
            f"<tr><td>{swatch}{escape(name)}</td><td class='n'>{_number(dice)}</td><td class='n'>{_number(lowest)}</td>"
            f"<td class='n'>{len(values)}</td><td class='n'>{zeros}</td><td class='n'>{last['empty'][name]}</td></tr>"
        )
    return (
        "<h2>Classes</h2><div class='wide'><table><tr><th>class</th><th class='n'>mean Dice</th><th class='n'>lowest</th>"
        "<th class='n'>cases</th><th class='n'>of them 0</th><th class='n'>absent in both</th></tr>"
        f"{''.join(rows)}</table></div><p class='soft'>{escape(last['empty_policy'])} Background is in no mean.</p>"
    )


def _own_metrics(last: Mapping[str, Any]) -> str:
    """The user's own metrics, a column each; "" without any."""
    own = last.get("metrics") or {}
    if not own:
        return ""
    head = "".join(f"<th class='n'>{escape(metric)}</th>" for metric in own)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(_own_cell(found, name) for found in own.values())}</tr>"
        for name in last["dice"]
    )
    means = "".join(f"<td class='n'>{_number(found['mean'])}</td>" for found in own.values())
    return (
        f"<h2>Own metrics</h2><div class='wide'><table><tr><th>class</th>{head}</tr>{rows}"
        f"<tr><td>mean of classes</td>{means}</tr></table></div>"
        "<p class='soft'>Means over cases; in brackets how many cases have no value.</p>"
    )


def _own_cell(found: Mapping[str, Any], name: str) -> str:
    without = found["without"].get(name, 0)
    return f"<td class='n'>{_number(found['classes'].get(name))}{f' ({without})' if without else ''}</td>"


def overlay_figures(title: str, found: Sequence[Overlay], names: Sequence[str]) -> str:
    """Pictures of single cases under a heading; "" without any. ``names`` are the foreground classes, for the legend."""
    if not found:
        return ""
    legend = " ".join(
        f"<i class='swatch' style='background:{figures.colour(i)}'></i>{escape(name)}" for i, name in enumerate(names)
    )
    out = [
        f"<h2>{escape(title)}</h2>"
        f"<p class='soft'>Reference filled, prediction outlined; the patient's right is on the right. {legend}</p>"
    ]
    for o in found:
        text = f"{o.role} case {o.case}, mean Dice {o.dice:.3f}"
        png = base64.b64encode(figures.overlay_picture(o)).decode()
        out.append(
            f"<figure><img src='data:image/png;base64,{png}' alt='{escape(text, quote=True)}: "
            f"axial, coronal and sagittal slice'><figcaption>{escape(text)}</figcaption></figure>"
        )
    return "".join(out)


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td class='n'>{_time(e['t'])}</td><td>{escape(str(e.get('name')))}</td>"
        f"<td>{escape(str(e.get('message')))}</td></tr>"
        for e in events
        if e["kind"] == "event"
    ]
    if not rows:
        return ""
    return (
        "<h2>Notes and warnings</h2><div class='wide'><table><tr><th class='n'>at</th><th>what</th><th></th></tr>"
        f"{''.join(rows)}</table></div>"
    )


def details(title: str, value: Any) -> str:
    """Plain values as JSON, folded away under ``title``; "" without any."""
    if not value:
        return ""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
