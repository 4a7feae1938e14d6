"""Loggers hear what run.jsonl holds, go on where a run goes on, and never cost a run."""

import importlib.util
import json
from pathlib import Path

import pytest

from segspeed.record import loggers
from segspeed.record.run_record import RunRecord, read_record
from segspeed.training import train
from segspeed.types import SettingError

OURS = "segspeed.record.loggers."


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    found.Reload()
    values = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    return values | {f"image {tag}": [] for tag in found.Tags()["images"]}


def test_tensorboard_holds_what_the_record_holds(tiny, tmp_path):
    cfg = tiny("logger=tensorboard", "train.steps=2", "run.name=one")
    result = train(cfg)
    (folder,) = tmp_path.glob("runs/*/one")
    found = scalars(folder / "tensorboard")
    events = read_record(folder / "run.jsonl")
    last = [e for e in events if e["kind"] == "evaluation"][-1]
    assert found["dice/mean"][-1] == (2, pytest.approx(last["mean_dice"]))
    assert found["result/mean_dice"][-1][1] == pytest.approx(result["mean_dice"])
    first = next(e for e in events if e["kind"] == "step")
    assert found["train/loss"][0] == (1, pytest.approx(first["loss"]))
    assert {"image overlay/best", "image overlay/worst"} <= set(found)
    kept = b"".join(p.read_bytes() for p in (folder / "tensorboard").iterdir())
    assert str(tmp_path).encode() not in kept  # no path, which may name somebody


def test_mlflow_goes_on_with_its_run(tmp_path):
    pytest.importorskip("mlflow")
    settings = {"optimizer.lr": "0.01"}
    for loss in (2.0, 1.0):
        logger = loggers.MLflow(tmp_path, "one", "cohort", settings)
        logger.event({"kind": "step", "step": 3 - int(loss), "loss": loss})
        logger.close()
    (run,) = logger.client.search_runs([logger.client.get_experiment_by_name("cohort").experiment_id])
    history = logger.client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(1, 2.0), (2, 1.0)]
    assert run.data.params == settings


@pytest.mark.slow
def test_wandb_stays_offline_and_tells_nothing_of_the_machine(tmp_path):
    pytest.importorskip("wandb")
    for step in (1, 2):
        logger = loggers.WandB(tmp_path, "one", {"optimizer.lr": "0.01"})
        logger.event({"kind": "step", "step": step, "loss": 2.0, "train_s": 1.0})
        logger.close()
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) >= 1
    assert len({p.name.rpartition("-")[2] for p in (tmp_path / "wandb").glob("offline-run-*")}) == 1  # one id
    import getpass
    import socket

    kept = b"".join(p.read_bytes() for p in (tmp_path / "wandb").rglob("*.wandb"))
    assert socket.gethostname().encode() not in kept or len(socket.gethostname()) < 4
    assert getpass.getuser() == "root" or getpass.getuser().encode() not in kept


def test_a_missing_package_is_told_before_anything_is_read(tiny, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(loggers, "find_spec", lambda name: None if name == "wandb" else found(name))
    monkeypatch.setattr("segspeed.build.cohort_from", lambda *a: pytest.fail("data was read"))
    with pytest.raises(SettingError, match="logger=wandb needs the package wandb: pip install wandb"):
        train(tiny("logger=wandb"))


class Breaks:
    """Fails at its second event."""

    heard = 0

    def event(self, event):
        self.heard += 1
        if self.heard == 2:
            raise ConnectionError("the server is away\nfor long")

    def picture(self, name, png):
        pytest.fail("asked after it failed")

    def close(self):
        pytest.fail("asked after it failed")


def test_a_logger_that_fails_is_told_once_and_left_out(tmp_path, capsys):
    record = RunRecord(tmp_path / "run.jsonl")
    record.logger = Breaks()
    for step in range(4):
        record.write("step", step=step)
    record.picture("best", b"")
    record.close()
    assert capsys.readouterr().out.count("the server is away") == 1
    kinds = [e["kind"] for e in read_record(tmp_path / "run.jsonl")]
    assert kinds == ["step", "step", "event", "step", "step"]


def test_no_settings_with_paths_are_told():
    found = loggers.plain_settings(
        {"data": {"root": "x"}, "optimizer": {"lr": 0.1}, "init": {"run": "/home/somebody/run"}, "seed": 1}
    )
    assert found == {"optimizer.lr": "0.1", "seed": "1"}


def test_figures_leave_out_what_is_not_known():
    event = {"kind": "evaluation", "mean_dice": None, "dice": {"liver": 0.5, "aorta": None}, "metrics": {}}
    assert dict(loggers.figures(event)) == {"dice/liver": 0.5}
    json.dumps(dict(loggers.figures({"kind": "step", "loss": None, "lr": 0.1})))
