"""The ladder and the speedrun whole, with their runs in this process; one test (long) has the real processes."""

import json
import subprocess
import sys

import pytest

from segspeed.ladder import main as ladder
from segspeed.proof import child, climb, speedruns
from segspeed.proof.processes import Ended, run_child
from segspeed.speedrun import main as speedrun
from segspeed.types import DataError, RunStopped, SettingError

RUNGS = "ladder.rungs=[baseline,cache,augmentation,precision]"


@pytest.fixture
def here(monkeypatch):
    """Runs happen in this process; the list holds the names of their jobs, and ``here.fail`` those that shall not work."""

    class Here(list):
        fail = {}

        def __call__(self, cfg, job, quick=False):
            self.append(job.stem)
            if job.stem in self.fail:
                return Ended(1, 0.1, 0, self.fail[job.stem])
            from segspeed.jsonio import write_json

            write_json(job, {"config": cfg.model_dump(mode="json", by_alias=True), "quick": quick})
            code = child.main(job)
            told = job.with_suffix(".error.txt")
            return Ended(code, 1.0, 10**9, told.read_text() if code else "")

    runs = Here()
    monkeypatch.setattr(climb, "run_child", runs)
    monkeypatch.setattr(speedruns, "run_child", runs)
    return runs


def rows(folder):
    return json.loads((next(folder.glob("runs/*/ladder/first")) / "ladder.json").read_text())["rows"]


def test_a_ladder(tiny, here, tmp_path, capsys):
    cfg = tiny(
        RUNGS, "ladder.samples=4", "ladder.keep=all", "precision=fp32", "channels_last=false", "loader.workers=0"
    )
    assert ladder(cfg) == 0
    assert here == ["baseline_seed0", "cache_seed0", "augmentation_seed0"]  # fp32 stays fp32 on a CPU without bf16 ...
    found = {r["name"]: r for r in rows(tmp_path)}
    assert all(found[n]["attempts"][0]["mean_dice"] is not None for n in ("baseline", "cache", "augmentation"))
    assert found["cache"]["against"]["cases"] == 2
    folder = next(tmp_path.glob("runs/*/ladder/first"))
    assert {"ladder.md", "ladder.html", "ladder.png", "ladder.json"} <= {p.name for p in folder.iterdir()}
    text = (folder / "ladder.md").read_text()
    assert "against first" in text
    assert "| cache" in text
    assert "<img" not in (folder / "ladder.html").read_text()  # drawn in place: no file beside it, no network
    before = list(here)
    assert ladder(cfg) == 0
    assert here == before  # nothing is measured twice
    assert "measured before" in capsys.readouterr().out
    with pytest.raises(DataError, match="samples: 4 -> 8"):
        ladder(
            tiny(
                RUNGS,
                "ladder.samples=8",
                "ladder.keep=all",
                "precision=fp32",
                "channels_last=false",
                "loader.workers=0",
            )
        )


@pytest.fixture(autouse=True)
def _no_bf16(monkeypatch):
    monkeypatch.setattr("segspeed.speed.precision.bf16_speedup_cpu", lambda: 0.5)
    climb._precision.cache_clear()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ladder.rungs=[baseline,foo]"], "names foo; there are baseline"),
        (["ladder.own={wide:{plan:{widht:32}}}"], "ladder.own.wide: unknown key plan.widht; did you mean plan.width"),
        (["ladder.own={wide:{plna:{width:32}}}"], "no setting plna"),
        (["ladder.equal=time", "train.budget=null", "train.steps=4"], "needs train.budget"),
    ],
)
def test_a_ladder_that_cannot_be_is_refused_before_data_is_read(tiny, here, monkeypatch, overrides, message):
    monkeypatch.setattr("segspeed.build.cohort_from", lambda *a: pytest.fail("data was read"))
    with pytest.raises(SettingError, match=message):
        ladder(tiny(*overrides))


def test_a_ladder_stopped_on_its_first_rung_knows_its_settings(tiny, here, tmp_path):
    here.fail = {"baseline_seed0": "no"}
    with pytest.raises(RunStopped):
        ladder(tiny("ladder.rungs=[baseline]", "ladder.samples=2"))
    with pytest.raises(DataError, match="samples: 2 -> 4"):
        ladder(tiny("ladder.rungs=[baseline]", "ladder.samples=4"))


def test_a_ladder_begun_on_another_machine_is_not_gone_on_with(tiny, here, tmp_path):
    cfg = tiny("ladder.rungs=[baseline]", "ladder.samples=2", "loader.workers=0")
    assert ladder(cfg) == 0
    path = next(tmp_path.glob("runs/*/ladder/first")) / "ladder.json"
    found = json.loads(path.read_text())
    found["versions"]["cpu"]["model"] = found["versions"]["gpu"] = "An older one"
    path.write_text(json.dumps(found))
    with pytest.raises(DataError, match="begun on An older one"):
        ladder(cfg)


def test_a_rung_that_fails_is_a_row_and_is_tried_again(tiny, here, tmp_path, capsys):
    cfg = tiny("ladder.rungs=[baseline,cache]", "ladder.samples=2", "loader.workers=0")
    here.fail = {"cache_seed0": "no room\nat all"}
    assert ladder(cfg) == 1
    assert rows(tmp_path)[1]["note"] == "failed: no room"
    assert "tries them again" in capsys.readouterr().out
    here.fail = {}
    assert ladder(cfg) == 0
    assert here == ["baseline_seed0", "cache_seed0", "cache_seed0"]


def test_a_seed_that_fails_is_told_beside_those_that_pass(tiny, here, tmp_path, capsys):
    cfg = tiny("ladder.rungs=[baseline,cache]", "ladder.seeds=[0,1]", "ladder.samples=2", "loader.workers=0")
    here.fail = {"cache_seed1": "no room\nat all"}
    assert ladder(cfg) == 1
    assert "Failed: cache (seed 1)" in capsys.readouterr().out
    text = (next(tmp_path.glob("runs/*/ladder/first")) / "ladder.md").read_text()
    assert "cache: seed 1 failed (no room); its figures are of 1 of 2 seeds" in text
    here.fail = {}
    assert ladder(cfg) == 0
    assert here[-1] == "cache_seed1"


def test_without_the_first_rung_there_is_no_ladder(tiny, here):
    here.fail = {"baseline_seed0": "no"}
    with pytest.raises(RunStopped, match="measured by it: no"):
        ladder(tiny("ladder.rungs=[baseline,cache]"))


def test_a_rung_that_does_not_pay_is_not_built_upon(tiny, here, tmp_path, monkeypatch):
    rates = iter([2.0, 1.0, 4.0])
    read = climb._read

    def slowed(*arguments):
        import dataclasses

        return dataclasses.replace(read(*arguments), samples_per_s=next(rates))

    monkeypatch.setattr(climb, "_read", slowed)
    cfg = tiny(
        "ladder.rungs=[baseline]", "ladder.own={wide:{optimizer:{lr:0.5}},seeded:{train:{ema:0.5}}}", "ladder.samples=2",
        "loader.workers=0",
    )  # fmt: skip
    assert ladder(cfg) == 0
    found = rows(tmp_path)
    assert [r["kept"] for r in found] == [True, False, True]
    assert "0.50 times as fast as baseline" in found[1]["note"]
    job = json.loads(next(tmp_path.glob("runs/*/ladder/first/jobs/seeded_seed0.json")).read_text())["config"]
    assert job["train"]["ema"] == 0.5
    assert job["optimizer"]["lr"] != 0.5  # the slow one is not under it


def test_quick(tiny, here, tmp_path):
    cfg = tiny("ladder.rungs=[baseline,cache]", "ladder.quick=true", "ladder.quick_time=0.2s", "loader.workers=0")
    assert ladder(cfg) == 0
    found = rows(tmp_path)
    assert all(r["attempts"][0]["samples_per_s"] > 0 for r in found)
    assert not list(tmp_path.glob("runs/*/ladder/first/runs/*"))


def test_equal_time_needs_a_time(tiny, here):
    with pytest.raises(SettingError, match=r"train\.budget"):
        ladder(tiny("ladder.equal=time", "train.steps=3"))


def test_a_speedrun(tiny, here, tmp_path, capsys):
    cfg = tiny("speedrun.target=0.01", "speedrun.seeds=[3,4]", "speedrun.name=fast", "train.steps=2")
    code = speedrun(cfg)
    folder = tmp_path / "runs/speedruns/fast"
    record = json.loads((folder / "record.json").read_text())
    assert here == ["seed3", "seed4"]
    assert [r["seed"] for r in record["runs"]] == [3, 4]
    assert code == int(sum(r["mean_dice"] for r in record["runs"]) / 2 < 0.01)
    assert not (folder / "cache").exists()
    speedrun(cfg)
    assert here == ["seed3", "seed4"]
    assert speedrun(tiny("speedrun.report=true")) == 0
    assert "| fast |" in (tmp_path / "runs/speedruns/records.md").read_text()
    assert speedrun(tiny(f"speedrun.compare=[{folder},{folder}]")) == 0
    assert "ratio 1.000" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"target: 0\.01 -> 0\.9"):
        speedrun(tiny("speedrun.target=0.9", "speedrun.seeds=[3,4]", "speedrun.name=fast", "train.steps=2"))


def test_no_seed_is_left_out(tiny, here):
    here.fail = {"seed1": "diverged"}
    with pytest.raises(DataError, match="seed 1 failed, and none may be left out: diverged"):
        speedrun(tiny("speedrun.target=0.5", "speedrun.seeds=[0,1]", "speedrun.name=x", "train.steps=1"))
    assert speedrun.__doc__
    with pytest.raises(SettingError, match="target="):
        speedrun(tiny("train.steps=1"))
    with pytest.raises(DataError, match="no records"):
        speedrun(tiny("speedrun.report=true"))


def test_a_child_tells_why_it_failed(tiny, tmp_path):
    cfg = tiny("data.exclude=[nobody]")
    ended = run_child(cfg, tmp_path / "job.json")
    assert ended.code == 1
    assert "nobody" in ended.error
    assert ended.tree_bytes > 10**7


@pytest.mark.long
def test_the_command(msd_folder, tmp_path):
    """Real processes, bare keys, and the files at the end."""
    command = [
        sys.executable, "-m", "segspeed.ladder", "debug=default", "data=msd", f'data.root="{msd_folder()}"', "data.folds=2",
        "plan.patch=[16,16,16]", "plan.features=[4,8,16]", f'run.root="{tmp_path / "runs"}"', "rungs=[baseline,cache]", "samples=2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Report: " in done.stdout
    table = done.stdout[done.stdout.rindex("\nrung ") :].splitlines()[1:4]
    assert [line.split()[0].strip("()") for line in table] == ["rung", "baseline", "cache"]
    assert max(map(len, table)) <= 100
