"""From files to label maps on their own grid, with networks that are known by hand."""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform
from torch import nn

from segspeed.config_inference import PredictConfig
from segspeed.evaluation import Predictor
from segspeed.infer.sliding import Window
from segspeed.inputs import find_cases, label_notes
from segspeed.prediction import Outcome, file_names, output_path, predict_cases
from segspeed.speed.precision import Precision
from segspeed.trained import TrainedRun, load_run, load_runs
from segspeed.training import train
from segspeed.types import Case, Cohort, DataError, LabelTable, Plan, Split

CODES = ["".join(c) for p in itertools.permutations(("LR", "PA", "IS")) for c in itertools.product(*p)]
FP32 = Precision("fp32", torch.device("cpu"))
LABELS = {"left": (117,), "right": (300,)}


class LeftHalf(nn.Module):
    """Class 1 in the low half of W, the patient's left in RAS order; class 2 in the other, whatever it sees."""

    def forward(self, x):
        low = (torch.arange(x.shape[-1]) < x.shape[-1] / 2).float().expand_as(x[:, :1]) * 20
        return torch.cat([torch.zeros_like(low), low, 20 - low], 1)


class Bright(nn.Module):
    """Class 1 where the normalised value is above ``at``."""

    def __init__(self, at=0.0, gain=1.0):
        super().__init__()
        self.at, self.gain = at, gain

    def forward(self, x):
        return torch.cat([self.at - x[:, :1], x[:, :1] - self.at], 1) * self.gain


def trained(model, labels=LABELS, patch=(8, 8, 8), spacing=(1.0, 1.0, 1.0), channels=("MRI",), **window):
    plan = Plan(
        spacing, patch, 2, 1, (4,), ((1, 1, 1),), ((3, 3, 3),), ("zscore",) * len(channels), (None,) * len(channels)
    )
    cohort = Cohort("c", (), labels, channels)
    return TrainedRun(
        Path("run"), cohort, Split((), ()), plan, Predictor(model.eval(), Window(patch, **window), FP32, cohort.table)
    )


def oriented(array, codes, affine):
    change = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(codes))
    return nib.orientations.apply_orientation(array, change), affine @ inv_ornt_aff(change, array.shape)


def test_left_stays_left_from_all_48_orientations(tmp_path, write):
    shape = (8, 7, 6)  # (i, j, k) in RAS order
    cases = []
    for codes in CODES:
        image, affine = oriented(np.random.default_rng(0).normal(size=shape).astype(np.float32), codes, np.eye(4))
        cases.append(Case(codes, (write(tmp_path / f"{codes}.nii.gz", image, affine),)))
    run = trained(LeftHalf(), patch=(6, 7, 8))
    outcomes = list(predict_cases([run], cases, tmp_path / "out", labels=LabelTable(LABELS)))
    assert [o.status for o in outcomes] == ["done"] * 48
    for codes in CODES:
        written = nib.load(tmp_path / "out" / f"{codes}.nii.gz")
        np.testing.assert_array_equal(written.affine, nib.load(tmp_path / f"{codes}.nii.gz").affine)
        assert written.get_data_dtype() == np.uint16
        ras = np.asarray(nib.as_closest_canonical(written).dataobj)
        assert (ras[:4] == 117).all(), codes
        assert (ras[4:] == 300).all(), codes


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (2.0, 1.5, 0.8)])
def test_the_map_is_that_of_the_whole_volume_whatever_the_grid(tmp_path, write, spacing):
    from scipy import ndimage

    image = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=(20, 24, 30)), 3).astype(np.float32) * 100
    case = Case("a", (write(tmp_path / "a.nii.gz", image, np.diag([1.2, 1.0, 2.0, 1.0])),))
    run = trained(Bright(), {"bright": (1,)}, spacing=spacing)
    (outcome,) = predict_cases([run], [case], tmp_path / "out", labels=LabelTable({"bright": (1,)}))
    found = np.asarray(nib.load(tmp_path / "out/a.nii.gz").dataobj)
    assert found.shape == image.shape
    assert found.dtype == np.uint8
    expected = image > image.mean()
    agree = (found == expected)[np.abs(image - image.mean()) > 3]
    assert agree.mean() > 0.99
    assert outcome.volumes_ml == {"bright": pytest.approx(found.sum() * 2.4 / 1000, rel=1e-6)}


def test_runs_are_averaged_over_their_probabilities(tmp_path, write):
    image = np.random.default_rng(0).normal(size=(8, 9, 10)).astype(np.float32)
    case = Case("a", (write(tmp_path / "a.nii.gz", image),))
    one, two = Bright(-0.5, 3.0), Bright(0.5, 1.0)
    labels = {"bright": (7,)}
    runs = [trained(m, labels, patch=(10, 9, 8)) for m in (one, two)]
    list(predict_cases(runs, [case], tmp_path / "out", labels=LabelTable(labels), shares=True))
    x = torch.from_numpy((image - image.mean()) / image.std())[None, None]
    mean = torch.stack([m(x).softmax(1) for m in (one, two)]).mean(0)[0, 1].numpy()
    found = np.asarray(nib.load(tmp_path / "out/a.nii.gz").dataobj)
    np.testing.assert_array_equal(found == 7, mean > 0.5)
    share = nib.load(tmp_path / "out/a.bright.probability.nii.gz")
    np.testing.assert_allclose(share.get_fdata(), mean, atol=1 / 255)
    assert share.get_data_dtype() == np.uint8


def test_done_cases_are_skipped_and_a_bad_one_stops_no_other(tmp_path, write):
    cases = []
    for name in "abcd":
        path = write(tmp_path / f"{name}.nii.gz", np.random.default_rng(0).normal(size=(9, 9, 9)).astype(np.float32))
        cases.append(Case(name, (path,)))
    cases[1].images[0].write_bytes(b"\x1f\x8b nothing")
    run = trained(Bright(), {"x": (1,)})
    first = {o.case: o for o in predict_cases([run], cases, tmp_path / "out", labels=LabelTable({"x": (1,)}))}
    assert {c: o.status for c, o in first.items()} == {"a": "done", "b": "failed", "c": "done", "d": "done"}
    assert "case b" in first["b"].problem
    stamp = (tmp_path / "out/a.nii.gz").stat().st_mtime_ns
    again = {o.case: o.status for o in predict_cases([run], cases, tmp_path / "out", labels=LabelTable({"x": (1,)}))}
    assert again == {"a": "there", "b": "failed", "c": "there", "d": "there"}
    assert (tmp_path / "out/a.nii.gz").stat().st_mtime_ns == stamp
    list(predict_cases([run], cases[:1], tmp_path / "out", labels=LabelTable({"x": (1,)}), overwrite=True))
    assert (tmp_path / "out/a.nii.gz").stat().st_mtime_ns != stamp
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"a.nii.gz", "c.nii.gz", "d.nii.gz"}


def test_a_network_that_fails_on_a_case_is_told_with_it(tmp_path, write):
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    case = Case("a", (write(tmp_path / "a.nii.gz", np.random.default_rng(0).normal(size=(9, 9, 9))),))
    (outcome,) = predict_cases([trained(Broken())], [case], tmp_path / "out", labels=LabelTable(LABELS))
    assert outcome.status == "failed"
    assert "case a: out of memory" in outcome.problem


def test_finding_cases(tmp_path, write):
    v = np.zeros((3, 3, 3), np.uint8)
    for name in ("b 1.nii", "a.NII.GZ", "._a.nii.gz", "ü.x.nii.gz"):
        write(tmp_path / "plain" / name.replace("NII.GZ", "nii.gz"), v)
    (tmp_path / "plain/note.txt").write_text("no volume")
    assert [c.id for c in find_cases(tmp_path / "plain", ["CT"])] == ["a", "b 1", "ü.x"]
    assert [c.id for c in find_cases(tmp_path / "plain/a.nii.gz", ["CT"])] == ["a"]
    for name in ("x_0000", "x_0001", "y_0000", "y_0001"):
        write(tmp_path / f"two/{name}.nii.gz", v)
    cases = find_cases(tmp_path / "two", ["CT", "PET"])
    assert [(c.id, [p.name for p in c.images]) for c in cases] == [
        ("x", ["x_0000.nii.gz", "x_0001.nii.gz"]), ("y", ["y_0000.nii.gz", "y_0001.nii.gz"]),
    ]  # fmt: skip
    write(tmp_path / "one/x_0000.nii.gz", v)
    assert [c.id for c in find_cases(tmp_path / "one", ["CT"])] == ["x"], "nnU-Net's names for one channel"


def test_finding_cases_by_a_glob(tmp_path, write):
    v = np.zeros((3, 3, 3), np.uint8)
    for name in ("p1/a_ct.nii.gz", "p1/a_seg.nii.gz", "p2/a_ct.nii"):
        write(tmp_path / name, v)
    assert [c.id for c in find_cases(tmp_path / "**/*_ct.nii*", ["CT"])] == ["p1_a", "p2_a"]
    write(tmp_path / "two/x/b_0000.nii.gz", v)
    write(tmp_path / "two/x/b_0001.nii.gz", v)
    (case,) = find_cases(tmp_path / "two/**/*.nii.gz", ["CT", "PET"])
    assert (case.id, [p.name for p in case.images]) == ("x_b", ["b_0000.nii.gz", "b_0001.nii.gz"])
    with pytest.raises(DataError, match=r"a_ct\.nii\.gz lies below: 'input=.*/\*\*/\*\.nii\.gz\"'"):
        find_cases(tmp_path, ["CT"])
    with pytest.raises(DataError, match=r"there is no folder .*/none"):
        find_cases(tmp_path / "none/*.nii", ["CT"])
    os.mkfifo(tmp_path / "pipe.nii")
    with pytest.raises(DataError, match="not a regular file"):
        find_cases(tmp_path / "pipe.nii", ["CT"])


def test_label_maps_among_the_images_are_named(tmp_path, write):
    rng = np.random.default_rng(0)
    labels = np.zeros((12, 12, 12), np.uint8)
    labels[3:6, 2:9, 4:] = 3
    write(tmp_path / "a_seg.nii.gz", labels)
    write(tmp_path / "a_ct.nii.gz", rng.normal(0, 300, (12, 12, 12)).astype(np.int16))
    write(tmp_path / "b_ct.nii.gz", rng.integers(0, 255, (12, 12, 12)).astype(np.uint8))
    write(tmp_path / "mask.nii", (labels > 0).astype(np.float32))
    write(tmp_path / "share.nii", (labels / 6).astype(np.float32))
    (tmp_path / "broken.nii.gz").write_bytes(b"none")
    (note,) = label_notes(find_cases(tmp_path, ["CT"]))
    assert note.startswith("note: a_seg.nii.gz, mask.nii look like label maps")
    assert label_notes(find_cases(tmp_path / "*_ct.nii.gz", ["CT"])) == []


@pytest.mark.parametrize(
    ("names", "channels", "text"),
    [
        ((), ["CT"], "no NIfTI"),
        (("a.nii", "a.nii.gz"), ["CT"], "same name"),
        (
            ("a_0000.nii.gz", "b_0000.nii.gz", "b_0001.nii.gz", "c.nii.gz"), ["CT", "PET"],
            r"c\.nii\.gz has no.*a has channel files \[0\]",
        ),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit(tmp_path, write, names, channels, text):
    (tmp_path / "in").mkdir()
    for name in names:
        write(tmp_path / "in" / name, np.zeros((3, 3, 3), np.uint8))
    with pytest.raises(DataError, match=text):
        find_cases(tmp_path / "in", channels)
    with pytest.raises(DataError, match="does not exist"):
        find_cases(tmp_path / "gone", channels)


def test_names_are_one_file_each(tmp_path):
    assert output_path(tmp_path, "p1/scan:2").name == "p1_scan_2.nii.gz"
    assert Outcome("a", "there").volumes_ml is None


def how(folder, **more):
    return PredictConfig.model_validate({"run": str(folder), "input": "x", "output": "y", **more})


@pytest.fixture
def run_folder(tiny):
    cfg = tiny("run.name=r", "train.steps=2")
    train(cfg)
    return Path(cfg.run.root) / "balls/r"


def test_a_run_loads_with_its_averaged_weights(run_folder):
    run = load_run(run_folder, how(run_folder, mirror=True), torch.device("cpu"))
    state = torch.load(run_folder / "last.pt", weights_only=True)
    for mine, averaged in zip(run.predictor.model.parameters(), state["ema"]["shadow"], strict=True):
        assert torch.equal(mine.detach(), averaged)
    assert run.predictor.mirror == (0, 1, 2)
    assert not run.predictor.model.training
    assert run.cohort.class_names == ("bright", "dark")


def test_what_is_no_run_or_a_damaged_one_is_told(run_folder, tmp_path):
    cpu = torch.device("cpu")
    with pytest.raises(DataError, match=r"holds no run: config\.json"):
        load_run(tmp_path, how(tmp_path), cpu)
    with pytest.raises(DataError, match=r"no best\.pt"):
        load_run(run_folder, how(run_folder, weights="best"), cpu)
    (run_folder / "last.pt").write_bytes(b"half a file")
    with pytest.raises(DataError, match=r"last\.pt cannot be loaded"):
        load_run(run_folder, how(run_folder), cpu)
    (run_folder / "plan.json").write_text("{")
    with pytest.raises(DataError, match="damaged run"):
        load_run(run_folder, how(run_folder), cpu)


def test_a_run_names_no_code_that_nobody_trusts(run_folder):
    stored = json.loads((run_folder / "config.json").read_text())
    stored["config"]["model"]["_target_"] = "os.system"
    (run_folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(DataError, match=r"takes its network from os\.system.*trust=\[os\]"):
        load_run(run_folder, how(run_folder), torch.device("cpu"))


def test_only_runs_on_the_same_classes_are_averaged(run_folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in run_folder.iterdir():
        if path.is_file():
            (other / path.name).write_bytes(path.read_bytes())
    cohort = json.loads((other / "cohort.json").read_text())
    cohort["labels"] = {"dark": [3], "bright": [1]}
    (other / "cohort.json").write_text(json.dumps(cohort))
    with pytest.raises(DataError, match="only runs on the same classes"):
        load_runs((str(run_folder), str(other)), how(run_folder), torch.device("cpu"))
    two = load_runs((str(run_folder), str(run_folder)), how(run_folder), torch.device("cpu"))
    assert len(two) == 2
    assert dataclasses.is_dataclass(two[0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_voxels_that_are_no_numbers_fail_the_case_with_their_count(tmp_path, write, value):
    image = np.random.default_rng(0).normal(size=(9, 9, 9)).astype(np.float32)
    image[0, 0, :2] = value
    case = Case("a", (write(tmp_path / "a.nii.gz", image),))
    (outcome,) = predict_cases(
        [trained(Bright(), {"x": (1,)})], [case], tmp_path / "out", labels=LabelTable({"x": (1,)})
    )
    assert outcome.status == "failed"
    assert "a.nii.gz has 2 voxels that are NaN or infinite" in outcome.problem
    assert not list((tmp_path / "out").iterdir())


def test_any_fault_of_a_case_leaves_the_others_alone(tmp_path, write):
    class Odd(nn.Module):
        def forward(self, x):
            if x.max() > 5:
                raise ZeroDivisionError("nothing known")
            return torch.cat([-x, x], 1)

    cases = []
    for name, peak in (("a", 0.0), ("b", 1e4), ("c", 0.0)):
        image = np.random.default_rng(0).normal(size=(9, 9, 9)).astype(np.float32)
        image[4, 4, 4] = peak
        cases.append(Case(name, (write(tmp_path / f"{name}.nii.gz", image),)))
    found = {o.case: o for o in predict_cases([trained(Odd())], cases, tmp_path / "out", labels=LabelTable(LABELS))}
    assert {c: o.status for c, o in found.items()} == {"a": "done", "b": "failed", "c": "done"}
    assert "case b (b.nii.gz): ZeroDivisionError: nothing known" in found["b"].problem


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("last.pt", b"", r"last\.pt cannot be loaded"),
        ("config.json", b"[]", "damaged run"),
        ("config.json", b'{"config": {}}', "damaged run"),
    ],
)
def test_odd_contents_of_a_run_folder_are_told(run_folder, name, content, text):
    (run_folder / name).write_bytes(content)
    with pytest.raises(DataError, match=text):
        load_run(run_folder, how(run_folder), torch.device("cpu"))
    with pytest.raises(DataError, match="is a file"):
        load_run(run_folder / name, how(run_folder), torch.device("cpu"))


def test_every_target_has_a_file_of_its_own():
    assert file_names(["a/b", "a:b", "a_b", "c"]) == ["a_b", "a_b_2", "a_b_3", "c"]
