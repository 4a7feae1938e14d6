"""What loggers are told, read back from what they wrote."""

import json

import numpy as np
import pytest

from segspeed import build
from segspeed.record.loggers import Listener, Silent, pixels_of
from segspeed.record.overlays import make_overlay
from segspeed.record.run_record import RunRecord, read_record
from segspeed.training import train
from segspeed.types import SettingError


class Heard(Silent):
    def __init__(self, fails_at=None):
        self.begun, self.values, self.closed, self.fails_at = [], [], 0, fails_at

    def begin(self, settings, step):
        self.begun.append((dict(settings), step))

    def scalars(self, values, step):
        if step == self.fails_at:
            raise OSError("the server is gone")
        self.values.append((step, dict(values)))

    def close(self):
        self.closed += 1


def test_a_logger_that_fails_is_told_once_and_the_record_goes_on(tmp_path, capsys):
    record = RunRecord(tmp_path / "run.jsonl")
    logger = Heard(fails_at=2)
    listener = Listener(logger, tmp_path, record)
    for step in (1, 2, 3):
        record.write("step", step=step, loss=1.0 / step, lr=0.1)
    listener.close()
    assert [s for s, _ in logger.values] == [1]
    events = read_record(tmp_path / "run.jsonl")
    assert [e["step"] for e in events if e["kind"] == "step"] == [1, 2, 3]
    assert sum(e.get("name") == "logger" for e in events) == 1
    assert capsys.readouterr().out.count("the logger failed (OSError: the server is gone)") == 1


def test_a_missing_package_is_one_sentence_before_training(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="pip install tensorboard"):
        train(tiny("logger=tensorboard"))
    assert not (tmp_path / "runs").exists()


def test_pictures_show_reference_above_prediction():
    image = np.zeros((6, 8, 10), np.float32)
    reference, prediction = np.zeros(image.shape, np.uint8), np.zeros(image.shape, np.uint8)
    reference[2:4, 2:4, 2:4] = 1
    pixels = pixels_of(make_overlay("best", "a", 0.5, image, reference, prediction, (1.0, 1.0, 1.0)), height=64)
    assert pixels.dtype == np.uint8
    assert pixels[:64].any()
    assert not pixels[64:].any()


def test_tensorboard_holds_the_run_and_its_second_session(tiny, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = tiny("logger=tensorboard", "run.name=r", "train.steps=2")
    train(cfg)
    folder = tmp_path / "runs/balls/r"
    (folder / "result.json").unlink()  # the same command scores it once more: a second session of the run
    train(cfg)
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0}).Reload()
    tags = found.Tags()
    assert {
        "train/loss",
        "train/lr",
        "train/samples_per_s",
        "wall_clock_s",
        "final/dice/bright",
        "final/dice/dark",
    } <= set(tags["scalars"])
    assert any(tag.startswith("best/b_") for tag in tags["images"])
    last = [e for e in read_record(folder / "run.jsonl") if e["kind"] == "evaluation"][-1]
    assert found.Scalars("final/mean_dice")[-1].value == pytest.approx(last["mean_dice"], abs=1e-6)
    assert len(list((folder / "tensorboard").iterdir())) == 2
    for path in (folder / "tensorboard").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.slow
def test_mlflow_goes_on_with_the_same_run(tiny, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    cfg = tiny("logger=mlflow", "run.name=r", "train.steps=2")
    train(cfg)
    folder = tmp_path / "runs/balls/r"
    (folder / "result.json").unlink()
    train(cfg)
    client = mlflow.tracking.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow/mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("segspeed").experiment_id])
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(run.info.run_id, "final/mean_dice")) == 2
    assert client.list_artifacts(run.info.run_id, "overlays")
    assert str(tmp_path / "balls") not in json.dumps(run.data.params)
    assert not [e for e in read_record(folder / "run.jsonl") if e.get("name") == "logger"]


@pytest.mark.slow
def test_wandb_stays_offline_in_the_run_folder(tiny, tmp_path):
    pytest.importorskip("wandb")
    train(tiny("logger=wandb", "run.name=r", "train.steps=2"))
    folder = tmp_path / "runs/balls/r"
    number = (folder / "wandb_id.txt").read_text()
    assert list((folder / "wandb").glob(f"offline-run-*-{number}/*.wandb"))
    assert not [e for e in read_record(folder / "run.jsonl") if e.get("name") == "logger"]
