"""Whole runs on a small cohort, in this process."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from segspeed.monitor import Monitor
from segspeed.record.checkpoints import load_checkpoint
from segspeed.record.run_record import read_record
from segspeed.training import train
from segspeed.types import DataError, RunStopped


def folder_of(cfg, name="balls"):
    (found,) = [p for p in Path(cfg.run.root, name).iterdir() if (p / "config.json").exists()]
    return found


def test_a_run_leaves_everything_it_promises(tiny):
    cfg = tiny("evaluation.share=0.5", "train.steps=6", "run.name=a")
    result = train(cfg)
    folder = folder_of(cfg)
    assert json.loads((folder / "result.json").read_text()) == result
    for key in ("mean_dice", "dice", "cases", "train_s", "total_s", "peak_memory_bytes", "wait_share", "samples_per_s",
                "steps", "precision"):  # fmt: skip
        assert result[key] is not None, key
    assert set(result["dice"]) == {"bright", "dark"}
    assert (result["cases"], result["steps"], result["precision"]) == (2, 6, "fp32")
    for name in ("last.pt", "plan.json", "fingerprint.json", "split.json", "run.jsonl", "report.html", "config.json"):
        assert (folder / name).exists(), name
    events = read_record(folder / "run.jsonl")
    kinds = [e["kind"] for e in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert {"step", "evaluation", "save"} <= set(kinds)
    assert [e["final"] for e in events if e["kind"] == "evaluation"][-1] is True
    assert all(a["t"] <= b["t"] for a, b in zip(events, events[1:], strict=False))
    page = (folder / "report.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", ""), "self-contained"


def test_it_learns(tiny):
    steps = ("train.steps=220", "train.ema=0.9")  # three seeds reach 0.97 with them
    cfg = tiny(*steps, "augment=none", "plan.features=[8,16,32]", "optimizer.lr=1e-2", cases=6)
    assert train(cfg)["mean_dice"] > 0.8


def test_the_dice_is_that_of_whole_volumes_on_the_original_grid(tiny, msd_folder, write):
    """Predict the validation cases again from the saved weights, through other code than the run's, and score them."""
    from monai.inferers import sliding_window_inference

    from segspeed import build
    from segspeed.data.geometry import read_volume
    from segspeed.jsonio import read_json
    from segspeed.speed.precision import Precision
    from segspeed.types import Plan, Split

    cfg = tiny("train.steps=30", "train.ema=null", "optimizer.lr=1e-2", "evaluation.overlap=0.5", cases=5)
    result = train(cfg)
    folder = folder_of(cfg)
    plan, split = read_json(folder / "plan.json", Plan), read_json(folder / "split.json", Split)
    cohort = build.cohort_from(cfg.data)
    model = build.network_from(cfg, plan, cohort, Precision("fp32", torch.device("cpu")))
    model.load_state_dict(load_checkpoint(folder / "last.pt")["model"])
    model.eval()
    scores = []
    for case_id in split.val:
        case = cohort.case(case_id)
        image = read_volume(case.images[0]).array
        image = torch.from_numpy((image - image.mean()) / image.std())[None, None]
        with torch.no_grad():
            logits = sliding_window_inference(image, plan.patch, 1, model, 0.5, "gaussian")
        label = read_volume(case.label, scaled=False).array
        for index, value in ((1, 1), (2, 3)):
            p, r = logits[0].argmax(0).numpy() == index, label == value
            scores.append(2 * (p & r).sum() / (p.sum() + r.sum()))
    assert result["mean_dice"] == pytest.approx(np.mean(scores), abs=1e-3)


def weights_of(folder):
    state = load_checkpoint(folder / "last.pt")
    return [*state["model"].values(), *(state["ema"]["shadow"] if state["ema"] else ())], state


def interrupt_at(monkeypatch, step):
    """Ask for the end of a run the way a person or a scheduler does, once, after a step."""
    note = Monitor.note
    sent = []

    def with_signal(self, finished, loss, norm):
        note(self, finished, loss, norm)
        if finished.number == step and not sent:
            sent.append(step)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Monitor, "note", with_signal)


@pytest.mark.parametrize(
    "extra",
    [
        (),
        pytest.param(("train.accumulate=2", "optimizer=sgd", "model.dropout=0.1"), marks=pytest.mark.slow),
        ("loader=dali",),
        pytest.param(("loader=monai",), marks=pytest.mark.long),
    ],
    ids=["adamw", "sgd", "dali", "monai"],
)
def test_stopped_and_resumed_is_uninterrupted_to_the_bit(tiny, monkeypatch, extra):
    whole = tiny("train.steps=6", "run.name=whole", "train.ema=0.9", *extra)
    parts = tiny("train.steps=6", "run.name=parts", "train.ema=0.9", *extra, folder=whole.data.kwargs["root"])
    expected = train(whole)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        with pytest.raises(RunStopped, match=r"SIGTERM after step 3.*run\.name=parts") as stopped:
            train(parts)
    assert stopped.value.exit_code == 143
    result = train(parts)
    root = Path(whole.run.root) / "balls"
    (a, sa), (b, sb) = weights_of(root / "whole"), weights_of(root / "parts")
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert (sa["progress"]["step"], sa["progress"]["sample"]) == (sb["progress"]["step"], sb["progress"]["sample"])
    assert result["dice"] == expected["dice"]
    assert [e["name"] for e in read_record(root / "parts" / "run.jsonl") if e["kind"] == "event"] == ["resume"]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(tiny, workers):
    a = tiny("run.name=a", "loader.workers=0")
    b = tiny("run.name=b", f"loader.workers={workers}", folder=a.data.kwargs["root"])
    train(a), train(b)
    root = Path(a.run.root) / "balls"
    assert all(torch.equal(x, y) for x, y in zip(weights_of(root / "a")[0], weights_of(root / "b")[0], strict=True))


def test_another_seed_is_another_run(tiny):
    a = tiny("run.name=a")
    b = tiny("run.name=b", "seed=1", folder=a.data.kwargs["root"])
    train(a), train(b)
    root = Path(a.run.root) / "balls"
    assert not torch.equal(weights_of(root / "a")[0][0], weights_of(root / "b")[0][0])


def test_a_finished_run_is_left_alone(tiny, capsys):
    cfg = tiny("run.name=a")
    first = train(cfg)
    stamp = (folder_of(cfg) / "last.pt").stat().st_mtime_ns
    assert train(cfg) == first
    assert "already complete" in capsys.readouterr().out
    assert (folder_of(cfg) / "last.pt").stat().st_mtime_ns == stamp


def test_other_settings_do_not_resume(tiny):
    cfg = tiny("run.name=a")
    train(cfg)
    (folder_of(cfg) / "result.json").unlink()
    other = tiny("run.name=a", "optimizer.lr=0.5", "train.steps=9", folder=cfg.data.kwargs["root"])
    with pytest.raises(DataError, match=r"(?s)optimizer\.lr: 0\.003 -> 0\.5.*train\.steps: 4 -> 9.*run\.name"):
        train(other)
    with pytest.raises(DataError, match="resume=never"):
        train(tiny("run.name=a", "resume=never", folder=cfg.data.kwargs["root"]))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tiny, monkeypatch, capsys):
    cfg = tiny("run.name=a", "save.every=0.001s", "train.steps=5")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        with pytest.raises(RunStopped):
            train(cfg)
    last = folder_of(cfg) / "last.pt"
    last.write_bytes(last.read_bytes()[:1000])
    assert train(cfg)["steps"] == 5
    out = capsys.readouterr().out
    assert "last.pt cannot be read" in out
    assert "Going on from step" in out


def test_a_loss_that_is_not_finite_stops_with_the_cases_and_the_batch(tiny, monkeypatch):
    from segspeed.engine import Learner

    update = Learner.update

    def broken(self, batches, samples):
        loss, norm = update(self, batches, samples)
        return loss * float("nan"), norm

    cfg = tiny("run.name=a")
    monkeypatch.setattr(Learner, "update", broken)
    with pytest.raises(RunStopped, match=r"step 1: the loss is nan.*b_0\d") as stopped:
        train(cfg)
    assert stopped.value.exit_code == 1
    saved = torch.load(folder_of(cfg) / "fault_step_000001.pt", weights_only=True)
    assert saved["batches"][0]["image"].shape[2:] == (16, 16, 16)
    assert all(c.startswith("b_0") for c in saved["batches"][0]["cases"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_trains(tiny, precision):
    result = train(tiny(f"precision={precision}", "train.steps=3"))
    assert result["precision"] == precision
    assert result["mean_dice"] is not None


@pytest.mark.parametrize(
    "overrides",
    [
        ("memory.checkpointing=all",),
        ("train.accumulate=3", "train.clip=1.0", "train.ema=null"),
        ("model=segresnet_ds", "model.init_filters=4", "model.blocks_down=[1,1,1]"),
        ("optimizer=sgd", "schedule.name=poly"),
        ("channels_last=true", "precision=bf16"),
        ("evaluation.mirror=true", "evaluation.overlap=0.5"),
        ("augment=nnunet", "augment.margin=1.25", "data.swap_on_flip=[[bright,dark]]"),
        ("train.deterministic=true",),
        ("plan.spacing=[2,1,1]", "plan.features=auto"),
    ],
    ids=lambda o: o[0],
)
def test_every_switch_runs(tiny, overrides):
    assert train(tiny(*overrides, "train.steps=2"))["steps"] == 2


def test_a_budget_is_kept_and_ends_with_the_learning_rate_down(tiny):
    cfg = tiny("train.budget=3s", "evaluation.share=0.2", "run.name=a")
    result = train(cfg)
    rates = [e["lr"] for e in read_record(folder_of(cfg) / "run.jsonl") if e["kind"] == "step"]
    assert result["train_s"] <= 30, "a busy machine may stretch the last step, no more"
    state = load_checkpoint(folder_of(cfg) / "last.pt")
    assert 2.5 <= state["progress"]["elapsed"] <= 30
    assert state["optimizer"]["param_groups"][0]["lr"] < 0.3 * max(rates)


BAD = {
    "missing label": (lambda i, m: (i, None), "missing-label"),
    "shape": (lambda i, m: (i, m[:, :, :-1]), "shape-mismatch"),
    "unknown value": (lambda i, m: (i, m + (m == 3).astype(np.uint8) * 4), r"7 \(\d+ voxels\)"),
    "NaN": (lambda i, m: (np.where(m == 1, np.nan, i).astype(np.float32), m), "NaN"),
    "fractions": (lambda i, m: (i, m * 0.4), "non-integer-label"),
    "4D": (lambda i, m: (np.stack([i, i], -1), m), "four-dimensional"),
}


@pytest.mark.parametrize("name", BAD)
def test_training_refuses_bad_cases_by_name(tiny, name):
    change, text = BAD[name]
    cfg = tiny(change={1: change, 2: change})
    with pytest.raises(DataError, match=rf"(?s)2 errors in 2 cases.*b_01.*{text}.*b_02.*data\.exclude"):
        train(cfg)
    excluded = tiny("data.exclude=[b_01,b_02]", "train.steps=1", folder=cfg.data.kwargs["root"])
    assert train(excluded)["cases"] == 1


FINE = {
    "trailing axis": lambda i, m: (i[..., None], m[..., None]),
    "float labels": lambda i, m: (i, m.astype(np.float32)),
    "constant image": lambda i, m: (np.full_like(i, 7), m),
    "empty label": lambda i, m: (i, m * 0),
    "smaller than the patch": lambda i, m: (i[4:14, :, 5:16], m[4:14, :, 5:16]),
}


@pytest.mark.parametrize("name", FINE)
def test_odd_but_sound_cases_train(tiny, name):
    result = train(tiny(change=dict.fromkeys((1, 2), FINE[name])))
    assert result["steps"] == 4
    assert result["mean_dice"] is not None


def test_an_affine_beyond_tolerance_is_refused_with_its_distance(tiny, msd_folder, write):
    folder = msd_folder()
    import nibabel as nib

    label = nib.load(folder / "labelsTr/b_02.nii.gz")
    moved = np.eye(4)
    moved[0, 3] = 2.5
    write(folder / "labelsTr/b_02.nii.gz", np.asarray(label.dataobj), moved)
    with pytest.raises(DataError, match=r"b_02.*2\.50 mm apart"):
        train(tiny(folder=folder))
    assert train(tiny("data.tolerance_mm=3", "train.steps=1", folder=folder))["steps"] == 1


def test_a_cohort_of_one_case_and_a_root_that_is_not_there(tiny, tmp_path):
    with pytest.raises(DataError, match="at least 2"):
        train(tiny(cases=1))
    with pytest.raises(DataError, match="does not exist"):
        train(tiny(folder=tmp_path / "nowhere"))


def test_nothing_of_a_header_reaches_a_file(tiny, msd_folder):
    """A name planted in the headers must not be found in anything that a run writes."""
    import nibabel as nib

    folder = msd_folder()
    for path in folder.rglob("*.nii.gz"):
        image = nib.load(path)
        image = nib.Nifti1Image(np.asarray(image.dataobj), image.affine)
        image.header["descrip"] = b"Mustermann^Erika 1962"
        image.header["db_name"] = b"Mustermann"
        nib.save(image, path)
    cfg = tiny("run.name=a", folder=folder)
    train(cfg)
    for path in Path(cfg.run.root).rglob("*"):
        if path.is_file():
            assert b"Mustermann" not in path.read_bytes(), path


def stopped_run(cfg, monkeypatch, step=2):
    with monkeypatch.context() as patch:
        interrupt_at(patch, step)
        with pytest.raises(RunStopped):
            train(cfg)


CHANGES = {
    "a case removed": lambda root: edit_json(root, lambda d: d["training"].pop(1)),
    "a label replaced": lambda root: (root / "labelsTr/b_01.nii.gz").write_bytes(
        (root / "labelsTr/b_02.nii.gz").read_bytes()
    ),
    "classes renamed": lambda root: edit_json(root, lambda d: d["labels"].update({"1": "dark", "3": "bright"})),
}


def edit_json(root, change):
    path = root / "dataset.json"
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_does_not_go_on_with_other_data(tiny, monkeypatch, name):
    cfg = tiny("run.name=a", "train.steps=4", cases=6)
    stopped_run(cfg, monkeypatch)
    CHANGES[name](Path(cfg.data.kwargs["root"]))
    with pytest.raises(DataError, match=r"not what .* began with .*(b_01|classes)"):
        train(cfg)


def test_two_damaged_checkpoints_stop_instead_of_beginning_anew(tiny, monkeypatch):
    cfg = tiny("run.name=a", "save.every=0.001s", "train.steps=5")
    stopped_run(cfg, monkeypatch, step=3)
    for name in ("last.pt", "previous.pt"):
        (folder_of(cfg) / name).write_bytes(b"nothing")
    with pytest.raises(RunStopped, match=r"no checkpoint .* can be read.*last\.pt.*previous\.pt"):
        train(cfg)


def test_fp16_that_never_recovers_stops_with_advice(tiny, monkeypatch):
    from segspeed.speed.precision import Precision

    backward = Precision.backward
    monkeypatch.setattr(Precision, "backward", lambda self, loss: backward(self, loss * float("1e36")))
    cfg = tiny("precision=fp16", "train.steps=60", "run.name=a")
    with pytest.raises(RunStopped, match=r"fp16 skipped 30 updates in a row.*precision=bf16"):
        train(cfg)


def test_running_out_of_memory_is_recorded_and_survived(tiny, monkeypatch, capsys):
    from segspeed.engine import Learner

    gradient = Learner._gradient

    def tight(self, batch, samples, last, sums):
        if len(batch.cases) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 999 bytes")
        return gradient(self, batch, samples, last, sums)

    cfg = tiny("train.steps=3", "plan.batch=2", "run.name=a")
    monkeypatch.setattr(Learner, "_gradient", tight)
    assert train(cfg)["steps"] == 3
    events = [e for e in read_record(folder_of(cfg) / "run.jsonl") if e["kind"] == "event"]
    assert [e["name"] for e in events] == ["memory"]
    assert "each batch of 2 now goes in 2 micro-batches" in events[0]["message"]
    assert "out of memory" in capsys.readouterr().out
