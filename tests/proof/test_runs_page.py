"""Several runs on one page: what is shown, what is said, what is refused."""

import json
import sys

import pytest

from segspeed import report
from segspeed.config_inference import ReportConfig
from segspeed.proof.runs_table import differences, read_entries
from segspeed.record.run_record import RunRecord
from segspeed.types import DataError


@pytest.fixture
def run(tmp_path):
    """run("a", val={"x": "1"}): the folder of a run, finished unless told otherwise."""

    def make(name, val=None, finished=True, lr=0.01, device="cpu"):
        folder = tmp_path / "cohort" / name
        folder.mkdir(parents=True)
        config = {
            "run": {"name": name, "experiment": "fast" if name == "a" else None}, "optimizer": {"lr": lr}, "seed": 0,
            "model": {"_target_": "my.nets.<Net>"},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps({"config": config, "precision": "fp32"}))
        data = {"val": val or {"x": "1", "y": "2"}, "classes": {"liver": [1]}, "regions": {}}
        (folder / "data.json").write_text(json.dumps(data))
        record = RunRecord(folder / "run.jsonl")
        record.write(
            "start", cohort="c", device=device, precision="fp32", versions={"cpu": {"model": "M", "threads": 2}}
        )
        record.write("step", step=1, samples_per_s=4.0, train_s=30.0, memory_bytes=10**9)
        for seconds, dice in ((60.0, 0.5), (120.0, 0.8)):
            record.write("evaluation", train_s=seconds, mean_dice=dice, dice={"liver": dice})
        if finished:
            result = {
                "train_s": 120.0, "samples_per_s": 5.0, "peak_memory_bytes": 2 * 10**9, "mean_dice": 0.8,
                "dice": {"liver": 0.8}, "parameters": 2_500_000,
            }  # fmt: skip
            (folder / "result.json").write_text(json.dumps(result))
        return folder

    return make


def made(*folders, **more):
    return report.main(ReportConfig(runs=tuple(map(str, folders)), **more))


def test_one_page_and_one_picture_of_two_runs(run, tmp_path, capsys):
    a, b = run("a"), run("b", lr=0.1, finished=False)
    assert made(a, b) == 0
    page = (tmp_path / "cohort/comparison.html").read_text()
    assert (tmp_path / "cohort/comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert page.count("<svg") == 1
    assert "http" not in page.replace("http://www.w3.org", ""), "self-contained"
    for text in ("fast", "&lt;Net&gt;, 2.5 M", "cpu, 2 threads, M", "fp32", "2.0 min", "5.0", "2.00 GB", "0.800", "liver",
                 "A: 2 cases", "b (not finished)", "optimizer.lr", "0.01", "0.1"):  # fmt: skip
        assert text in page, text
    assert "run.name" not in page
    assert "do not compare" not in page
    told = capsys.readouterr().out
    assert "b is not finished" in told
    assert "| a | fast |" in told


def test_runs_on_other_cases_are_shown_and_it_is_said(run, capsys):
    a, b = run("a"), run("b", val={"x": "1", "z": "3"}, device="cuda:0")
    made(a, b)
    told = capsys.readouterr().out
    assert "their Dice do not compare: a; b" in told
    assert "B: 2 cases" in told
    assert "different machines" in told


def test_all_that_cannot_be_read_comes_at_once(run, tmp_path):
    a, b, c = run("a"), run("b"), run("c")
    (b / "config.json").write_text("{")
    (c / "run.jsonl").write_text("")
    with pytest.raises(DataError) as error:
        made(a, b, c, tmp_path)
    for text in (
        f"{b} holds a damaged run",
        f"{c} holds a damaged run",
        "not trained a step",
        f"{tmp_path} holds no run",
    ):
        assert text in str(error.value)
    assert not list(tmp_path.rglob("comparison*"))


def test_nothing_is_replaced_by_accident(run, tmp_path):
    a, target = run("a"), tmp_path / "mine.html"
    target.write_text("somebody's")
    with pytest.raises(DataError, match="another file"):
        made(a, target=str(target), overwrite=True)
    assert target.read_text() == "somebody's"
    target.unlink()
    made(a, target=str(target))
    with pytest.raises(DataError, match="overwrite=true"):
        made(a, target=str(target))
    made(a, target=str(target), overwrite=True)
    with pytest.raises(DataError, match="must end with"):
        made(a, target=str(tmp_path / "page.pdf"))


def test_names_are_as_long_as_they_must_be(run, tmp_path):
    a = run("a")
    other = tmp_path / "other"
    other.mkdir()
    a.rename(other / "a")
    again = run("a", lr=0.3)
    entries = read_entries([other / "a", again])
    assert [e.name for e in entries] == ["other/a", "cohort/a"]
    assert differences(entries) == {"optimizer.lr": ["0.01", "0.3"]}


def test_the_door_reads_its_settings(run, monkeypatch, capsys):
    from segspeed.cli import Frame, door

    a = run("a")
    monkeypatch.setattr(sys, "argv", ["report", f'runs="{a}"'])
    with pytest.raises(SystemExit) as left:
        door(report.main, Frame(ReportConfig, "report"))()
    assert left.value.code == 0
    assert (a.parent / "comparison.html").exists()
