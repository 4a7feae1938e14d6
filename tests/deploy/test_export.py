"""Exported networks against the run they come from."""

import json
import os
import subprocess
import sys

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, CropForegroundd, EnsureTyped, LoadImaged, Orientationd

from segspeed.config_inference import ExportConfig, InferenceConfig
from segspeed.data.labels import to_file_values
from segspeed.data.preprocess import Grid, preprocess_image
from segspeed.deploy import network
from segspeed.deploy.bundle import outcomes
from segspeed.deploy.bundle_transforms import LabelValues, OntoPlan, above_minimum, volumes
from segspeed.deploy.folder import export_run
from segspeed.infer.decode import class_indices
from segspeed.prediction import predict_cases
from segspeed.trained import load_run
from segspeed.training import train
from segspeed.types import Case, DataError, LabelTable, SettingError
from tests.integration.test_doors import environment


@pytest.fixture
def trained(tiny, tmp_path):
    train(tiny("run.name=r", "train.steps=2", "plan.spacing=[1.2,0.9,1.1]", "precision=fp32"))
    return tmp_path / "runs/balls/r"


def test_networks_do_what_the_run_does_and_name_no_path(trained, tmp_path):
    target = export_run(ExportConfig(run=str(trained), format="torchscript", target=str(tmp_path / "ts")))
    about = json.loads((target / "model.json").read_text())
    assert about["output"]["classes"] == {"bright": [1], "dark": [3]}
    assert about["input"]["spacing_mm"] == [1.2, 0.9, 1.1]
    assert about["score"]["mean_dice"] == json.loads((trained / "result.json").read_text())["mean_dice"]
    text = (target / "model.json").read_text()
    assert str(tmp_path) not in text
    assert "b_00" not in text
    run = load_run(trained, InferenceConfig(precision="fp32", device="cpu"), torch.device("cpu"))
    image = torch.randn(3, 1, 16, 16, 16)
    with torch.no_grad():
        found = torch.jit.load(str(target / "model.ts"))(image)
        torch.testing.assert_close(found, run.predictor.model(image), atol=1e-5, rtol=1e-5)
    with pytest.raises(SettingError, match="replaces nothing"):
        export_run(ExportConfig(run=str(trained), format="torchscript", target=str(tmp_path / "ts")))


def test_a_network_that_differs_is_not_written(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(network, "_largest_difference", lambda *_: float("nan"))
    with pytest.raises(DataError, match="nothing was written"):
        export_run(ExportConfig(run=str(trained), format="torchscript", target=str(tmp_path / "ts")))
    assert not [p for p in tmp_path.iterdir() if "ts" in p.name]


def test_onnx_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(network.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="pip install onnx onnxruntime onnxscript"):
        export_run(ExportConfig(run=str(tmp_path), format="onnx"))


def test_ensembles_and_meaningless_batches_are_refused():
    with pytest.raises(ValueError, match="holds one network"):
        ExportConfig(run=("a", "b"), format="onnx")
    with pytest.raises(ValueError, match="is for format=onnx"):
        ExportConfig(run="a", format="bundle", batch=2)


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["dynamic", 2])
def test_onnx_runs_in_onnxruntime(trained, tmp_path, batch):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    target = export_run(ExportConfig(run=str(trained), format="onnx", batch=batch, target=str(tmp_path / "onnx")))
    session = runtime.InferenceSession(str(target / "model.onnx"), providers=["CPUExecutionProvider"])
    many = 4 if batch == "dynamic" else 2
    assert session.run(None, {"image": np.zeros((many, 1, 16, 16, 16), np.float32)})[0].shape == (many, 3, 16, 16, 16)
    assert json.loads((target / "model.json").read_text())["largest_difference_of_logits"] < 1e-3


@pytest.mark.slow
def test_monai_runs_the_bundle_to_the_same_label_maps(trained, msd_folder, tmp_path):
    pytest.importorskip("ignite")
    pytest.importorskip("fire")
    bundle = export_run(ExportConfig(run=str(trained), format="bundle", target=str(tmp_path / "bundle")))
    assert {p.name for p in bundle.iterdir()} == {"LICENSE", "configs", "docs", "models", "scripts"}
    source = tmp_path / "new"
    source.mkdir()
    for n in range(2):
        image = nib.load(tmp_path / f"balls/imagesTr/b_{n:02d}.nii.gz")
        flipped = nib.Nifti1Image(np.asarray(image.dataobj)[::-1].transpose(1, 0, 2), np.diag([1.4, 1.1, 0.8, 1]))
        nib.save(flipped, source / f"n{n}.nii.gz")
    alone = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    command = [sys.executable, "-m", "monai.bundle", "run", "--config_file", "configs/inference.json"]
    words = ["--dataset_dir", str(source), "--output_dir", str(tmp_path / "theirs"), "--device", "$torch.device('cpu')"]
    done = subprocess.run([*command, *words], cwd=bundle, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    run = load_run(trained, InferenceConfig(device="cpu"), torch.device("cpu"))
    cases = [Case(f"n{n}", (source / f"n{n}.nii.gz",)) for n in range(2)]
    list(predict_cases([run], cases, tmp_path / "ours", labels=run.cohort.table))
    for name in ("n0.nii.gz", "n1.nii.gz"):
        one, two = nib.load(tmp_path / "ours" / name), nib.load(tmp_path / "theirs" / name)
        a, b = np.asarray(one.dataobj), np.asarray(two.dataobj)
        assert len(np.unique(a)) > 1, "a map of one value would agree with anything"
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(one.affine, two.affine, atol=1e-6)
        for value in np.unique(a):
            assert 2 * ((a == value) & (b == value)).sum() / ((a == value).sum() + (b == value).sum()) >= 0.98


@pytest.mark.parametrize("coarse", [None, 0])
@pytest.mark.parametrize("ct", [True, False])
def test_the_bundle_prepares_a_volume_as_prediction_does(tmp_path, write, coarse, ct):
    rng, spacing = np.random.default_rng(0), (1.7, 0.9, 1.3)
    affine = np.array([[0, 0, -1.2, 5], [-0.7, 0, 0, 3], [0, 2.5, 0, -9], [0, 0, 0, 1.0]])
    paths = []
    for n in range(2):
        array = rng.normal(40, 300, (18, 12, 15)).astype(np.float32)
        array[:3] = array[:, :, 12:] = -2000
        paths.append(write(tmp_path / f"a_{n:04d}.nii.gz", array, affine))
    constants = {"low": -80.0, "high": 200.0, "mean": 50.0, "std": 70.0} if ct else None
    found = preprocess_image(Case("a", tuple(paths)), Grid(spacing, coarse, (ct, False)))
    norm = found.norm.copy()
    if ct:
        norm[0] = list(constants.values())
    low, high, mean, std = norm[..., None, None, None].swapaxes(0, 1)
    (case,) = volumes(str(tmp_path), 2)
    steps = Compose(
        [
            LoadImaged("image", ensure_channel_first=True),
            EnsureTyped("image", dtype=torch.float32),
            Orientationd("image", axcodes="SAR", labels=(("L", "R"), ("P", "A"), ("I", "S"))),
            CropForegroundd("image", source_key="image", select_fn=above_minimum),
            OntoPlan("image", spacing, [constants, None], coarse),
        ]
    )
    made = steps(case)
    np.testing.assert_allclose(made["image"].numpy(), (np.clip(found.image, low, high) - mean) / std, atol=2e-4)
    back = steps.inverse(made)["image"]
    assert tuple(back.shape) == (2, 18, 12, 15)
    np.testing.assert_allclose(back.affine, affine, atol=1e-6)


def test_a_constant_volume_is_kept_whole():
    assert bool(above_minimum(torch.full((1, 3, 3, 3), 7.0)).all())


@pytest.mark.parametrize(
    "table",
    [
        LabelTable({"a": (7,), "b": (300,)}),
        LabelTable({"edema": (2,), "core": (1,)}, regions={"whole": ("edema", "core"), "core": ("core",)}),
    ],
)
def test_label_values_are_those_of_prediction(table):
    logits = torch.randn((table.outputs, 4, 4, 4), generator=torch.Generator().manual_seed(1))
    values, dtype = outcomes(table)
    made = LabelValues("pred", values, bool(table.regions))({"pred": MetaTensor(logits)})["pred"]
    expected = to_file_values(class_indices(logits[None], table)[0].numpy(), table.classes)
    np.testing.assert_array_equal(made[0].numpy(), expected)
    assert expected.dtype == np.dtype(dtype)
    assert len(np.unique(expected)) > 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("run=x",), "format is missing"),
        (("run=x", "format=onxx"), "format=onxx"),
        (("run=x", "format=onnx", "wieghts=best"), "did you mean weights?"),
        (("run=[a,b]", "format=onnx"), "holds one network"),
    ],
)
def test_the_door_answers_wrong_words(words, text, tmp_path):
    command = [sys.executable, "-m", "segspeed.export", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **environment()})
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
