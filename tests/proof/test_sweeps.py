"""A search over settings, with a process of its own in place of each training."""

import json
import sys

import pytest

from segspeed import sweep as sweep_door
from segspeed.proof import sweeps
from segspeed.proof.processes import Ended
from segspeed.types import DataError, RunStopped, SettingError
from segspeed.validate import SettingsError

pytest.importorskip("optuna")
SPACE = (
    "sweep.space={optimizer.lr:{low:1e-4,high:1e-1,log:true},train.accumulate:{low:1,high:4},"
    "plan.patch:{choices:[auto,[16,16,32]]}}"
)


@pytest.fixture
def children(monkeypatch):
    """The settings of every child; ``fate`` maps a trial's name to how it ends (its Dice is 0.9 minus what lr is off 0.01)."""
    ran, fate = [], {}

    def child(cfg, job, *, quick=False):
        from pathlib import Path

        ran.append(cfg)
        code = fate.pop(cfg.run.name, 0)
        if not code:
            folder = Path(cfg.run.root) / "cohort" / cfg.run.name
            folder.mkdir(parents=True)
            dice = 0.9 - abs(cfg.optimizer.kwargs["lr"] - 0.01)
            (folder / "result.json").write_text(json.dumps({"mean_dice": dice}))
        return Ended(code, 1.0, 0, "it broke\nmore" if code else "")

    monkeypatch.setattr(sweeps, "run_child", child)
    child.ran, child.fate = ran, fate
    return child


@pytest.fixture
def made(settings, tmp_path):
    def make(*more):
        space = [] if any(m.startswith("sweep.space") for m in more) else [SPACE]
        return settings("data=phantoms", f'run.root="{tmp_path}"', "sweep.trials=4", *space, *more)

    return make


def test_every_trial_is_a_run_with_values_of_the_space(made, children, tmp_path, capsys):
    assert sweep_door.main(made()) == 0
    assert len(children.ran) == 4
    for n, cfg in enumerate(children.ran):
        assert cfg.run.name == f"trial{n:04d}"
        assert 1e-4 <= cfg.optimizer.kwargs["lr"] <= 1e-1
        assert cfg.train.accumulate in (1, 2, 3, 4)
        assert cfg.plan.patch in ("auto", (16, 16, 32))
        assert cfg.optimizer.kwargs["weight_decay"] == 0.01, "what is not searched stays"
    assert len({cfg.optimizer.kwargs["lr"] for cfg in children.ran}) == 4
    text = (tmp_path / "sweeps/first/sweep.md").read_text()
    best = min(children.ran, key=lambda c: abs(c.optimizer.kwargs["lr"] - 0.01))
    assert f"Best: optimizer.lr={best.optimizer.kwargs['lr']}" in text
    assert "score it on others" in capsys.readouterr().out


def test_a_search_goes_on_where_it_was_stopped_as_if_nothing_had_been(made, children, tmp_path):
    sweep_door.main(made("sweep.name=whole"))
    whole = [c.optimizer.kwargs["lr"] for c in children.ran]
    children.ran.clear()
    children.fate["trial0002"] = 143
    with pytest.raises(RunStopped):
        sweep_door.main(made("sweep.name=parts"))
    assert sweep_door.main(made("sweep.name=parts")) == 0
    lrs = [c.optimizer.kwargs["lr"] for c in children.ran]
    assert [c.run.name[-1] for c in children.ran] == ["0", "1", "2", "2", "3"]
    assert lrs[:3] + lrs[4:] == whole, "the broken trial again, with its values, and the next as it would have been"
    assert lrs[2] == lrs[3]
    sweep_door.main(made("sweep.name=parts", "sweep.trials=5"))
    assert children.ran[-1].run.name == "trial0004"


def test_a_failed_trial_is_told_and_stops_no_other(made, children, capsys):
    children.fate["trial0001"] = 1
    assert sweep_door.main(made()) == 1
    told = capsys.readouterr().out
    assert "trial 1 failed: it broke" in told
    assert "| 1 | failed |" in told
    assert len(children.ran) == 4


def test_another_search_of_that_name_is_refused(made, children):
    sweep_door.main(made())
    with pytest.raises(DataError, match=r"(?s)sweep\.space: .*another sweep\.name"):
        sweep_door.main(made("sweep.space={optimizer.lr:{low:0.1,high:0.2}}"))
    with pytest.raises(DataError, match="seed: 0 -> 1"):
        sweep_door.main(made("seed=1"))


@pytest.mark.parametrize(
    ("space", "text"),
    [
        ("null", "say what to search"),
        ("{optimiser.lr:{low:0.1,high:0.2}}", "did you mean optimizer"),
        ("{optimizer.lrr:{low:0.1,high:0.2}}", "no such argument; did you mean optimizer.lr"),
        ("{loader.foreground:{low:0.5,high:1.5}}", "loader.foreground"),
    ],
)
def test_a_space_that_cannot_work_is_told_before_any_run(made, children, space, text):
    with pytest.raises((SettingError, SettingsError), match=text):
        sweep_door.main(made(f"sweep.space={space}"))
    assert not children.ran


@pytest.mark.parametrize(
    "one", ["{low:1}", "{low:2,high:1}", "{low:0,high:1,log:true}", "{choices:[]}", "{low:1,high:2,choices:[1]}"]
)
def test_a_dimension_has_bounds_or_choices(made, one):
    with pytest.raises(SettingsError, match="low|log=true"):
        made(f"sweep.space={{optimizer.lr:{one}}}")


def test_without_optuna_it_says_what_to_install(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SettingError, match="pip install optuna"):
        sweep_door.main(made())


@pytest.mark.slow
def test_a_search_with_real_trainings(tiny, tmp_path):
    cfg = tiny("sweep.space={optimizer.lr:{low:1e-3,high:1e-2,log:true}}", "sweep.trials=2", "train.steps=1")
    assert sweep_door.main(cfg) == 0
    results = list(tmp_path.glob("runs/sweeps/first/runs/balls/trial000?/result.json"))
    assert len(results) == 2
