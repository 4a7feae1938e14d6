"""Training that begins from another run's weights."""

import json

import pytest
import torch

from segspeed import build
from segspeed.data.digest import hash_file
from segspeed.finetune import begin_from
from segspeed.jsonio import read_json
from segspeed.record.checkpoints import load_checkpoint
from segspeed.record.run_record import read_record
from segspeed.speed.ema import WeightAverage
from segspeed.speed.precision import Precision
from segspeed.training import train
from segspeed.types import DataError, Plan, RunStopped, SettingError


@pytest.fixture(scope="module")
def work(tmp_path_factory, make_cohort):
    folder = tmp_path_factory.mktemp("finetune")
    make_cohort(folder / "balls")
    return folder


@pytest.fixture(scope="module")
def make(settings, work):
    """make(name, ...): settings of a run of a step or two on the balls."""

    def made(name, *more):
        network = [] if any(m.startswith(("plan.", "init.")) for m in more) else ["plan.features=[4,8,16]"]
        if not any(m.startswith(("plan.patch", "init.")) for m in more):
            network.append("plan.patch=[16,16,16]")
        return settings(
            "debug=default", "plan.patch=auto", "data=msd", f'data.root="{work / "balls"}"', "data.folds=2", *network,
            f'run.root="{work / "runs"}"', "cache.workers=1", "resume=auto", "train.steps=2", f"run.name={name}", *more,
        )  # fmt: skip

    return made


@pytest.fixture(scope="module")
def source(make, work):
    """Folder of a finished run, whose averaged weights are not its raw ones."""
    train(make("source", "plan.spacing=[1,1,1.25]", "plan.features=[4,8,16]", "plan.patch=[16,16,16]", "train.steps=3"))
    return work / "runs/balls/source"


def averaged(folder, model):
    """The averaged weights of a run, by name."""
    state = load_checkpoint(folder / "last.pt")
    model.load_state_dict(state["model"])
    average = WeightAverage(model, 0.0)
    average.load_state_dict(state["ema"])
    average.put_into(model)
    return {k: v.clone() for k, v in model.state_dict().items()}


def network(cfg, folder, cohort=None):
    plan = read_json(folder / "plan.json", Plan)
    cohort = cohort or build.cohort_from(cfg.data)
    return build.network_from(cfg, plan, cohort, Precision("fp32", torch.device("cpu"))), plan, cohort


def test_a_run_begins_from_the_averaged_weights_of_another(make, source, work, capsys):
    cfg = make("same", f'init.run="{source}"', "optimizer.lr=0", "train.steps=1", "train.ema=null", "data.fold=1")
    train(cfg)
    text = capsys.readouterr().out
    folder = work / "runs/balls/same"
    theirs = averaged(source, network(cfg, source)[0])
    ours = load_checkpoint(folder / "last.pt")["model"]
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[k], ours[k]) for k in theirs), "at a learning rate of 0 nothing moves"
    raw = load_checkpoint(source / "last.pt")["model"]
    assert any(not torch.equal(raw[k], ours[k]) for k in raw), "not the raw ones"
    start = read_record(folder / "run.jsonl")[0]
    assert start["init"]["run"] == str(source)
    assert start["init"]["sha256"] == hash_file(source / "last.pt")
    assert (start["init"]["taken"], start["init"]["new"], start["init"]["step"]) == (len(ours), [], 3)
    assert f"{len(ours)} tensors taken, none is new" in text
    assert "trained on 2 of the 2 validation cases" in text, "the other fold's cases were seen"
    plan, before = (json.loads((f / "plan.json").read_text()) for f in (folder, source))
    for key in ("spacing", "patch", "strides", "kernels", "features"):
        assert plan[key] == before[key], key
    assert "init.run" in plan["reasons"]["spacing"]


def test_other_classes_get_a_new_head_on_the_old_body(make, source, capsys):
    cfg = make("merged", f'init.run="{source}"', "data.classes={ball: [bright, dark]}")
    model, plan, cohort = network(cfg, source)
    fresh = {k: v.clone() for k, v in model.state_dict().items()}
    origin = begin_from(cfg, plan, cohort, model)
    theirs = averaged(source, network(cfg, source, read_cohort(source))[0])
    for name, value in model.state_dict().items():
        if "output_block" in name or "super" in name:
            assert name in origin.new
            assert torch.equal(value, fresh[name])
        else:
            assert name not in origin.new
            assert torch.equal(value, theirs[name])
    assert 0 < len(origin.new) < origin.taken
    assert "new for other classes" in origin.told


def test_as_many_classes_of_other_names_get_a_new_head(make, source):
    cfg = make("renamed", f'init.run="{source}"', "data.classes={light: bright, shade: dark}")
    model, plan, cohort = network(cfg, source)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    origin = begin_from(cfg, plan, cohort, model)
    assert origin.new
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in origin.new)


def read_cohort(folder):
    from segspeed.types import Cohort

    return read_json(folder / "cohort.json", Cohort)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["model=segresnet_ds"], "choose the same model"),
        (["model.residual=true"], "residual: False there, True here"),
        (["plan.features=[4,8,32]"], r"has \[4, 8, 16\] channels a level"),
        (["plan.patch=[18,16,16]"], "nearest: "),
    ],
)
def test_another_network_is_refused(make, source, work, more, text):
    name = "wrong_" + "".join(c for c in more[0] if c.isalpha())
    with pytest.raises(SettingError, match=text):
        train(make(name, f'init.run="{source}"', *more))
    assert not (work / "runs/balls" / name / "last.pt").exists()


def test_other_channels_and_no_run_are_refused_before_any_case_is_read(make, source, work, monkeypatch):
    import segspeed.training as training

    monkeypatch.setattr(training, "prepare_once", lambda *a: pytest.fail("too late"))
    with pytest.raises(DataError, match="holds no run"):
        train(make("none", f'init.run="{work / "nothing"}"'))
    cohort = read_cohort(source)
    monkeypatch.setattr(
        build, "cohort_from", lambda data: type(cohort)(**{**cohort.__dict__, "channels": ("CT", "PET")})
    )
    with pytest.raises(SettingError, match=r"1 channels \(MRI\), and balls has 2 \(CT, PET\)"):
        train(make("channels", f'init.run="{source}"'))


def test_a_memory_limit_does_not_go_with_it(make, source):
    from segspeed.validate import SettingsError

    with pytest.raises(SettingsError, match="memory.limit chooses another patch and network"):
        make("limit", f'init.run="{source}"', "memory.limit=2GB")


def test_a_resumed_run_goes_on_from_its_own_state(make, source, work, monkeypatch):
    import segspeed.training as training
    from segspeed.monitor import Monitor

    cfg = make("resumed", f'init.run="{source}"', "train.steps=4")
    called = Monitor.__call__

    def stop(self, step):
        called(self, step)
        if step.number == 2:
            self.save()
            raise RunStopped("enough")

    monkeypatch.setattr(Monitor, "__call__", stop)
    with pytest.raises(RunStopped):
        train(cfg)
    monkeypatch.setattr(Monitor, "__call__", called)
    moved = source.with_name("gone")
    source.rename(moved)  # neither its weights nor its Plan are asked for again
    try:
        monkeypatch.setattr(training, "begin_from", lambda *a: pytest.fail("loaded again"))
        assert train(cfg)["steps"] == 4
    finally:
        moved.rename(source)
    events = read_record(work / "runs/balls/resumed/run.jsonl")
    assert [e["kind"] for e in events].count("start") == 1
