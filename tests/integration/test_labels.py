"""Runs whose labels are merged, ignored or overlap; channels along a fourth axis; labels on another grid."""

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from segspeed.config_inference import EvaluateConfig, PredictConfig
from segspeed.evaluate import main as evaluate
from segspeed.predict import main as predict
from segspeed.training import train
from segspeed.types import DataError, SettingError

REGIONS = "data.regions={both: [bright, dark], dark: dark}"
FAST = ("train.steps=20", "train.ema=null", "optimizer.lr=1e-2", "augment=none", "evaluation.share=0", "threads=1")


def folder_of(cfg, name="balls"):
    (found,) = [p for p in Path(cfg.run.root, name).iterdir() if (p / "config.json").exists()]
    return found


def test_overlapping_regions_from_training_to_the_scores_of_their_maps(tiny, tmp_path):
    cfg = tiny(*FAST, REGIONS, cases=6)
    result = train(cfg)
    assert set(result["dice"]) == {"both", "dark"}
    assert result["dice"]["both"] > 0.1, "sigmoid channels learn"
    run = folder_of(cfg)
    assert evaluate(EvaluateConfig(run=str(run), output=str(tmp_path / "e"))) == 0
    scores = json.loads((tmp_path / "e/summary.json").read_text())
    for name, dice in result["dice"].items():
        assert scores["classes"][name]["metrics"]["dice"]["mean"] == pytest.approx(dice, abs=1e-9)
    source = Path(cfg.data.kwargs["root"])
    maps = tmp_path / "maps"
    assert (
        predict(PredictConfig(run=str(run), input=str(source / "imagesTr"), output=str(maps), probabilities=True)) == 0
    )
    values = np.unique(np.concatenate([np.unique(nib.load(p).dataobj) for p in maps.glob("b_0?.nii.gz")]))
    assert set(values) <= {0, 1, 3}, "the values of the files"
    assert {p.name.split(".")[1] for p in maps.glob("*.probability.nii.gz")} == {"both", "dark"}
    # anybody's maps, scored as structures that share values
    names = {"both": (1, 3), "dark": 3}
    again = EvaluateConfig(predictions=str(tmp_path / "e/predictions"), labels=str(source / "labelsTr"), class_names=names,
                           output=str(tmp_path / "f"))  # fmt: skip
    kept = [p.name for p in (tmp_path / "e/predictions").glob("*.nii.gz")]
    for path in (source / "labelsTr").iterdir():
        if path.name not in kept:
            path.unlink()
    assert evaluate(again) == 0
    other = json.loads((tmp_path / "f/summary.json").read_text())["classes"]
    for name, dice in result["dice"].items():
        assert other[name]["metrics"]["dice"]["mean"] == pytest.approx(dice, abs=1e-9)


def test_merged_and_ignored_classes(tiny, msd_folder):
    def unsure(image, label):
        label = label.copy()
        label[:4] = 200
        return image, label

    folder = msd_folder(cases=6, change=dict.fromkeys(range(6), unsure))
    with pytest.raises(DataError, match=r"200 .*data\.ignore"):
        train(tiny(*FAST, folder=folder))
    cfg = tiny(*FAST, "data.classes={ball: [bright, dark]}", "data.ignore=[200]", folder=folder)
    result = train(cfg)
    assert set(result["dice"]) == {"ball"}
    assert json.loads((folder_of(cfg) / "data.json").read_text())["ignore"] == [200]


def test_a_loss_that_cannot_ignore_is_refused_and_one_without_regions_gets_binary_targets(tiny):
    monai = (
        "loss._target_=monai.losses.GeneralizedDiceLoss",
        "~loss.dice_weight",
        "~loss.ce_weight",
        "~loss.smooth",
        "~loss.batch_dice",
    )
    for more in ((), (REGIONS,)):
        with pytest.raises(SettingError, match="cannot ignore voxels"):
            train(tiny(*monai, "data.ignore=[200]", *more))
    assert set(train(tiny(*monai, "+loss.sigmoid=true", REGIONS))["dice"]) == {"both", "dark"}


def test_mirroring_exchanges_regions_that_have_a_partner(tiny):
    sides = ("data.swap_on_flip=[[bright,dark]]", "augment.flip.probability=[0,0,0.5]", "evaluation.mirror=true")
    with pytest.raises(SettingError, match="turns the region dark into one that data.regions does not have"):
        train(tiny(*sides, REGIONS))
    assert train(tiny(*sides, "data.regions={b: bright, d: dark, all: [bright, dark]}"))["steps"] == 4


def test_channels_along_a_fourth_axis_train_and_predict(tiny, msd_folder, tmp_path, write):
    folder = msd_folder(cases=4)
    for path in (folder / "imagesTr").iterdir():
        image = np.asarray(nib.load(path).dataobj)
        write(path, np.stack([image, -image], axis=-1))
    about = json.loads((folder / "dataset.json").read_text()) | {"modality": {"0": "T1", "1": "T2"}}
    (folder / "dataset.json").write_text(json.dumps(about))
    cfg = tiny(folder=folder)
    assert train(cfg)["cases"] == 2
    found = predict(
        PredictConfig(run=str(folder_of(cfg)), input=str(folder / "imagesTr"), output=str(tmp_path / "maps"))
    )
    assert found == 0
    assert len(list((tmp_path / "maps").glob("*.nii.gz"))) == 4
    assert train(tiny("loader=monai", "run.name=m", folder=folder))["steps"] == 4


def test_what_is_wrong_with_a_grid_can_be_resampled_or_accepted(tiny, msd_folder, write):
    folder = msd_folder(cases=4)
    moved, sheared = np.eye(4), np.eye(4)
    moved[0, 3], sheared[0, 1] = 1.0, 0.05
    label = folder / "labelsTr/b_00.nii.gz"
    write(label, np.asarray(nib.load(label).dataobj), moved)
    for kind in ("imagesTr", "labelsTr"):
        path = folder / kind / "b_01.nii.gz"
        write(path, np.asarray(nib.load(path).dataobj), sheared)
    with pytest.raises(DataError, match=r"(?s)2 errors.*affine-mismatch.*shear"):
        train(tiny(folder=folder))
    with pytest.raises(DataError, match="what can be accepted: shear"):
        train(tiny("data.accept=[nan]", folder=folder))
    assert train(tiny("data.resample_labels=true", "data.accept=[shear]", folder=folder))["steps"] == 4


def test_sides_are_not_learnt_from_images_that_do_not_tell_them(tiny, msd_folder):
    folder = msd_folder(cases=4)
    path = folder / "imagesTr/b_02.nii.gz"
    image = nib.load(path)
    image.set_sform(None, code=0)
    image.set_qform(None, code=0)
    nib.save(image, path)
    label = nib.load(folder / "labelsTr/b_02.nii.gz")
    label.set_sform(None, code=0)
    label.set_qform(None, code=0)
    nib.save(label, folder / "labelsTr/b_02.nii.gz")
    assert train(tiny(folder=folder))["steps"] == 4, "a warning alone where no class has a side"
    sides = "data.swap_on_flip=[[bright,dark]]"
    with pytest.raises(DataError, match="b_02.*classes of data.swap_on_flip need it"):
        train(tiny(sides, "run.name=s", folder=folder))
    assert train(tiny(sides, "data.accept=[no-orientation]", "run.name=t", folder=folder))["steps"] == 4


def test_patients_and_sites_from_case_ids(tiny, settings):
    from segspeed import build

    cfg = tiny("data.patient_pattern='b_0([0-9])'", "data.site_pattern='^(.)'", cases=4)
    assert [(c.patient, c.site) for c in build.cohort_from(cfg.data).cases] == [(str(n), "b") for n in range(4)]
    with pytest.raises(SettingError, match="finds nothing in the case id b_00"):
        build.cohort_from(tiny("data.patient_pattern='x(.)'").data)
    with pytest.raises(SettingError, match="is no regular expression"):
        build.cohort_from(tiny("data.patient_pattern='('").data)
