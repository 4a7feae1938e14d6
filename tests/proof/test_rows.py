"""Rows, tables and records against values worked out by hand."""

import json

import pytest
from scipy import stats

from segspeed.config import LadderConfig
from segspeed.proof.ladder_table import markdown, numbers, share_of_first, terminal_table
from segspeed.proof.records import compare_records, records_table, welch
from segspeed.proof.rows import Attempt, Row, attempt_of_run, attempt_of_throughput, compared, pooled
from segspeed.proof.speedruns import RULES, Record, load_records
from segspeed.types import DataError


def attempt(seed, cases, **more):
    dice = sum(cases.values()) / len(cases)
    values = {"seconds": 100.0, "samples_per_s": 5.0, "tree_bytes": 2 * 10**9, "precision": "fp32"} | more
    return Attempt(seed, cases=cases, mean_dice=dice, dice={"organ": dice}, **values)


FIRST = Row("baseline", "as ever", (attempt(0, {"a": 0.8, "b": 0.9}, samples_per_s=2.0, seconds=250.0),))


def test_seeds_are_pooled_by_case():
    assert pooled([attempt(0, {"a": 0.8, "b": 0.6}), attempt(1, {"a": 0.6})]) == pytest.approx({"a": 0.7, "b": 0.6})


def test_difference_is_paired_over_cases_with_the_patient_as_unit():
    row = Row("fast", "faster", (attempt(0, {"a": 0.81, "b": 0.91}), attempt(1, {"a": 0.83, "b": 0.93})))
    found = compared(row, FIRST, {"a": "p", "b": "q"}, 0.005)
    assert found.against.mean_difference == pytest.approx(0.02)
    assert found.against.verdict == "not inferior"
    together = compared(row, FIRST, {"a": "p", "b": "p"}, 0.005)
    assert (together.against.patients, together.against.verdict) == (1, "inconclusive")


def test_a_rung_that_scored_other_cases_has_no_verdict():
    assert compared(Row("x", "", (attempt(0, {"c": 0.5}),)), FIRST, {}, 0.005).against is None


def test_time_is_that_of_the_same_patches():
    assert share_of_first(Row("x", "", (attempt(0, {"a": 1.0}, samples_per_s=8.0),)), FIRST) == "25%"


def test_the_table_holds_every_rung():
    faster = compared(Row("fast", "faster", (attempt(0, {"a": 0.8, "b": 0.9}),)), FIRST, {}, 0.005)
    failed = Row("broken", "breaks", (Attempt(0, error="no compiler"),), kept=False, note="failed: no compiler")
    same = Row("same", "nothing", kept=False, note="changes nothing here: no bf16")
    text = markdown([FIRST, faster, failed, same], ("organ",), LadderConfig())
    assert "| fast | 100 s | 5.00 | 40% |".replace("100 s", "1.7 min") in text
    assert "not inferior" in text
    assert "| broken (left out) | failed: no compiler |" in text
    assert "| same (left out) | changes nothing here: no bf16 |" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_the_terminal_has_a_hundred_columns():
    from rich.console import Console

    failed = Row("checkpointing", "breaks", (Attempt(0, error="no compiler"),), kept=False, note="failed: no compiler")
    worse = compared(Row("accumulation", "", (attempt(0, {"a": 0.1, "b": 0.2}),)), FIRST, {}, 0.005)
    for quick in (False, True):
        out = Console(width=100, record=True)
        out.print(terminal_table([FIRST, worse, failed], LadderConfig(quick=quick)), soft_wrap=True)
        text = out.export_text()
        assert max(map(len, text.splitlines())) <= 100
        assert "failed" in text
        assert ("inferior" in text) != quick


def test_quick_mode_shows_no_dice():
    row = Row("x", "", (attempt_of_throughput(
        {"samples_per_s": 4.0, "wait_share": 0.5, "peak_memory_bytes": 1, "gpu_percent": None, "precision": "fp32"}, 0, 10**9,
    ),))  # fmt: skip
    assert numbers(row, row, ("organ",), quick=True) == ["4.00", "100%", "50%", "1.00 GB"]
    assert "Dice was not measured" in markdown([row], ("organ",), LadderConfig(quick=True))


def test_a_run_is_read_from_its_files(tmp_path):
    result = {
        "train_s": 10.0, "setup_s": 1.0, "cache_s": 2.0, "evaluation_s": 3.0, "samples_per_s": 4.0, "wait_share": 0.1,
        "peak_memory_bytes": 5, "precision": "fp32", "dice": {"one": 0.5, "two": None}, "interval": [0.4, 0.6], "mean_dice": 0.5,
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(result))
    events = [
        {"t": 1, "kind": "evaluation", "train_s": 5.0, "mean_dice": 0.3, "cases": {"a": {"one": 0.3, "two": None}}},
        {"t": 2, "kind": "step", "gpu_percent": 80},
        {"t": 3, "kind": "evaluation", "train_s": 10.0, "mean_dice": 0.5,
         "cases": {"a": {"one": 0.4, "two": 0.8}, "b": {"one": None, "two": None}}},
    ]  # fmt: skip
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, events)))
    found = attempt_of_run(tmp_path, 7, 9)
    assert found.cases == pytest.approx({"a": 0.6})  # b has no structure at all
    assert found.curve == ((5.0, 0.3), (10.0, 0.5))
    assert (found.preparation, found.evaluation, found.gpu_percent, found.tree_bytes, found.seed) == (
        3.0,
        3.0,
        80,
        9,
        7,
    )


def record(name, dices, target=0.85, seconds=60.0, data="d", passed=True):
    runs = tuple(
        Attempt(n, seconds=seconds + n, preparation=5.0, evaluation=2.0, mean_dice=d,
                curve=((20.0, 0.5), (40.0 + n, 0.86 if passed else 0.6)))
        for n, d in enumerate(dices)
    )  # fmt: skip
    return Record(name, target, tuple(range(len(dices))), {}, {"git": {"commit": "abcdef1234", "changed": True},
                  "cpu": {"model": "cpu", "threads": 2}, "gpu": None}, data, 4, RULES, runs)  # fmt: skip


def test_a_record_tests_its_mean_against_the_target():
    found = record("a", [0.86, 0.87, 0.88])
    assert found.reached
    assert found.p == pytest.approx(stats.ttest_1samp([0.86, 0.87, 0.88], 0.85, alternative="greater").pvalue)
    assert found.passages == [40.0, 41.0, 42.0]
    assert record("b", [0.86]).p is None
    assert not record("c", [0.84, 0.85]).reached
    assert record("d", [0.86], passed=False).passages == []


def test_the_table_of_records():
    text = records_table([record("slow", [0.86, 0.88], seconds=90.0), record("fast", [0.86, 0.88])])
    rows = [line for line in text.splitlines() if line.startswith("| ") and "record" not in line]
    assert [r.split(" | ")[0] for r in rows] == ["| fast", "| slow"]
    assert "0.8700 ± 0.0141" in rows[0]
    assert "abcdef12 (changed)" in rows[0]
    assert "41 s (2 of 2)" in rows[0].replace("40 s", "41 s")
    assert all(f"- {rule}" in text for rule in RULES)


def test_welch():
    text = welch([1.0, 2.0, 3.0], [2.0, 3.0, 5.0], "s")
    assert "2.0 s to 3.3 s, ratio 1.667" in text
    assert f"p = {stats.ttest_ind([1, 2, 3], [2, 3, 5], equal_var=False).pvalue:.2g}" in text
    assert "no test" in welch([1.0], [2.0, 3.0], "s")
    assert "no test" in welch([1.0, 1.0], [2.0, 2.0], "s")
    assert welch([], [1.0], "s") == "not known of both"
    told = compare_records(record("a", [0.86, 0.87]), record("b", [0.86, 0.88], data="other"))
    assert "different data" in told


def test_a_folder_without_a_record(tmp_path):
    with pytest.raises(DataError, match="no record"):
        load_records([tmp_path])
