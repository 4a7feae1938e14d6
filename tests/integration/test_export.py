"""A run's network as a file: compared with the network itself, with what belongs to it beside it, and nothing about people."""

import json

import pytest
import torch

from segspeed.config_inference import ExportConfig
from segspeed.export import main as export
from segspeed.trained import load_run
from segspeed.training import train
from segspeed.types import SettingError


@pytest.fixture
def run(tiny, tmp_path):
    train(tiny("train.steps=2", "run.name=one"))
    (folder,) = tmp_path.glob("runs/*/one")
    return folder


def settings(run, form, **more):
    return ExportConfig.model_validate({"run": str(run), "format": form, **more})


def test_torchscript_computes_what_the_network_computes(run, tmp_path, capsys):
    target = tmp_path / "out"
    cfg = settings(run, "torchscript", target=str(target))
    assert export(cfg) == 0
    (script,) = target.rglob("*.ts")
    (about,) = target.rglob("*.json")
    text = about.read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["mean_dice"] == json.loads((run / "result.json").read_text())["mean_dice"]
    windows = torch.rand(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    model = load_run(run, cfg.inference, torch.device("cpu")).predictor.model.eval()
    with torch.no_grad():
        ours, theirs = model(windows), torch.jit.load(script)(windows)
    ours = ours[0] if isinstance(ours, (list, tuple)) else ours
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    with pytest.raises(SettingError, match="is there already and is not touched"):
        export(cfg)


def test_onnx_computes_what_the_network_computes(run, tmp_path, capsys):
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    assert export(settings(run, "onnx")) == 0
    assert "largest difference" in capsys.readouterr().out
    kept = b"".join(p.read_bytes() for p in (run / "onnx").rglob("*") if p.is_file())
    assert str(tmp_path).encode() not in kept


def test_a_bundle_holds_what_monai_asks_of_one(run, tmp_path, capsys):
    assert export(settings(run, "bundle")) == 0
    folder = run / "bundle"
    assert {"configs/metadata.json", "configs/inference.json", "docs/README.md", "LICENSE"} <= {
        p.relative_to(folder).as_posix() for p in folder.rglob("*")
    }
    metadata = json.loads((folder / "configs/metadata.json").read_text())
    assert {"version", "monai_version", "task", "network_data_format"} <= set(metadata)
    assert "monai.bundle run" in capsys.readouterr().out
