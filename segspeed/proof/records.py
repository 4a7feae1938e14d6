"""Records of speedruns as a table, and two of them against each other."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from scipy import stats

from segspeed.proof.ladder_table import duration, markdown_table
from segspeed.proof.speedruns import Record
from segspeed.record.versions import machine


def records_table(records: Sequence[Record]) -> str:
    """Markdown, a row a record, those on the same data together and the fastest first."""
    heads = (
        "record", "data", "target", "n", "mean Dice", "p", "preparation", "training", "training + evaluation", "first passage",
        "machine", "commit",
    )  # fmt: skip
    ranked = sorted(records, key=lambda r: (r.data, r.target, mean(a.seconds for a in r.runs)))
    lines = markdown_table(heads, map(_cells, ranked))
    rules = list(dict.fromkeys(rule for r in records for rule in r.rules))
    return "\n".join([*lines, "", *(f"- {rule}" for rule in rules)])


def _cells(r: Record) -> list[str]:
    git = r.versions.get("git") or {}
    commit = str(git.get("commit") or "")[:8] + (" (changed)" if git.get("changed") else "")
    dice = f"{mean(r.dices):.4f}" + (f" ± {stdev(r.dices):.4f}" if len(r.dices) > 1 else "") if r.dices else "none"
    passed = r.passages
    return [
        r.name,
        f"{r.data[:8]}, {r.cases} cases",
        f"{r.target:g}" + ("" if r.reached else ", not reached"),
        str(len(r.runs)),
        dice,
        "" if r.p is None else f"{r.p:.2g}",
        duration(r.preparation),
        duration(mean(a.seconds for a in r.runs)),
        duration(mean(a.seconds + a.evaluation for a in r.runs)),
        f"{duration(mean(passed))} ({len(passed)} of {len(r.runs)})" if passed else "never",
        _machine(r),
        commit or "none",
    ]


def _machine(r: Record) -> str:
    threads = "" if r.versions.get("gpu") else f"{(r.versions.get('cpu') or {}).get('threads')} threads of "
    return threads + machine(r.versions)


def compare_records(a: Record, b: Record) -> str:
    """Lines on b against a: training time, first passage and Dice, each with Welch's test over the seeds."""
    lines = [f"{b.name} (n = {len(b.runs)}) against {a.name} (n = {len(a.runs)})"]
    if a.data != b.data:
        lines.append("warning: they ran on different data, or on another split of it")
    if _machine(a) != _machine(b):
        lines.append(f"warning: they ran on different machines ({_machine(a)}; {_machine(b)})")
    rows = (
        ("training time", [r.seconds for r in a.runs], [r.seconds for r in b.runs], "s"),
        ("first passage", a.passages, b.passages, "s"),
        ("mean Dice", a.dices, b.dices, ""),
    )
    lines += [f"{name}: {welch(ours, theirs, unit)}" for name, ours, theirs, unit in rows]
    return "\n".join(lines)


def welch(a: Sequence[float], b: Sequence[float], unit: str) -> str:
    """b against a in words: means, ratio, and the p of Welch's two-sided test (Welch 1947) where both vary."""
    if not a or not b:
        return "not known of both"
    digits = 1 if unit else 4
    text = f"{mean(a):.{digits}f}{unit and ' ' + unit} to {mean(b):.{digits}f}{unit and ' ' + unit}, ratio {mean(b) / mean(a):.3f}"
    if min(len(a), len(b)) < 2 or (len(set(a)) == 1 and len(set(b)) == 1):
        return f"{text} (no test: too few runs, or no spread)"
    return f"{text}, p = {stats.ttest_ind(a, b, equal_var=False).pvalue:.2g}"
