"""BIDS trees, good and bad. The images are empty files where nobody reads them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.bids import bids
from data_prep.bids_names import parse, which_key
from segspeed.build import cohort_from
from segspeed.data.split import draw_splits
from segspeed.types import DataError, SettingError
from segspeed.validate import SettingsError, check_targets

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path):
    """tree("sub-01/anat/sub-01_T1w", ...): empty .nii.gz files, unless a name has an ending; gives the root."""

    def make(*names, root="study"):
        for name in names:
            path = tmp_path / root / (name if Path(name).suffix else f"{name}.nii.gz")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return tmp_path / root

    return make


def image(subject, what="T1w", ses=None, place="", **entities):
    """image("01", "dseg", place="derivatives/manual", acq="a"): the path of a file."""
    head = f"sub-{subject}" + (f"_ses-{ses}" if ses else "")
    rest = "".join(f"_{k}-{v}" for k, v in entities.items())
    folder = f"{place + '/' if place else ''}sub-{subject}/" + (f"ses-{ses}/" if ses else "")
    return f"{folder}anat/{head}{rest}_{what}"


def mask(subject, what="mask", place="derivatives/manual", **more):
    return image(subject, what, place=place, **more)


def found(cohort):
    return {c.id: (tuple(p.name for p in c.images), c.label.name) for c in cohort.cases}


def listing(root, **keys):
    """The text of the error that a tree gives."""
    with pytest.raises(DataError) as error:
        bids(str(root), **keys)
    return str(error.value)


def test_subjects_and_sessions_with_labels_in_derivatives(tree):
    root = tree(
        *(image(s, ses=v) for s in ("01", "02") for v in ("a", "b")), image("03"),
        *(mask(s, ses=v, label="lesion") for s in ("01", "02") for v in ("a", "b")), mask("03", label="lesion"),
    )  # fmt: skip
    c = bids(str(root))
    assert list(found(c)) == ["sub-01_ses-a", "sub-01_ses-b", "sub-02_ses-a", "sub-02_ses-b", "sub-03"]
    assert found(c)["sub-01_ses-b"] == (
        ("sub-01_ses-b_T1w.nii.gz",),
        "sub-01_ses-b_label-lesion_mask.nii.gz",
    )
    assert [x.patient for x in c.cases] == ["sub-01", "sub-01", "sub-02", "sub-02", "sub-03"]
    assert (c.labels, c.channels, c.name) == ({"lesion": (1,)}, ("T1w",), "study")
    for split in draw_splits(c.cases, 3, 0):
        assert not {i[:6] for i in split.train} & {i[:6] for i in split.val}


def test_sessions_are_chosen_with_and_without_the_zero(tree):
    root = tree(*(f(s, ses=v) for f in (image, mask) for s in "12" for v in ("01", "02")))
    for session in ("01", 1, "ses-01", ["01"]):
        assert list(found(bids(str(root), session=session))) == ["sub-1_ses-01", "sub-2_ses-01"]
    assert len(bids(str(root), session=[1, 2]).cases) == 4
    with pytest.raises(SettingError, match=r"data\.session=3.*there are: 01, 02"):
        bids(str(root), session=3)


def test_labels_beside_the_images(tree):
    root = tree(image("01"), image("01", "dseg"), "sub-01/anat/.hidden_T1w", "sub-01/.git/sub-01_T1w")
    (root / "dseg.tsv").write_text("index\tname\n1\tliver\n")
    assert found(bids(str(root))) == {"sub-01": (("sub-01_T1w.nii.gz",), "sub-01_dseg.nii.gz")}


@pytest.mark.parametrize("spelling", ["manual", "derivatives/manual", "absolute", "raw"])
def test_the_place_of_the_labels(spelling, tree):
    root = tree(image("01"), mask("01"), mask("01", place="derivatives/other"), mask("01", place=""))
    text = listing(root)
    assert "sub-01 has labels in raw and in manual and in other: choose with data.derivative=" in text
    given = str(root / "derivatives/manual") if spelling == "absolute" else spelling
    (case,) = bids(str(root), derivative=given).cases
    assert case.label == root / ("" if spelling == "raw" else "derivatives/manual") / "sub-01/anat/sub-01_mask.nii.gz"
    assert "there are: manual, other" in listing(root, derivative="manul")


def test_labels_in_derivatives_without_a_pipeline_and_in_another_dataset(tree):
    root = tree(image("01"), mask("01", place="derivatives"))
    assert len(bids(str(root)).cases) == 1
    raw = tree(image("01"), root="both/rawdata")
    tree(mask("01", place="derivatives/manual"), root="both")
    assert len(bids(str(raw), derivative="../derivatives/manual").cases) == 1
    assert f"Did you mean data.root={raw}?" in listing(raw.parent)


def test_dseg_goes_before_mask_in_one_place_but_not_across_places(tree):
    root = tree(image("01"), mask("01", "dseg"), mask("01", desc="brain"))
    (root / "derivatives/manual/dseg.tsv").write_text("index\tname\n1\tliver\n")
    assert found(bids(str(root)))["sub-01"][1] == "sub-01_dseg.nii.gz"
    assert found(bids(str(root), label="mask"))["sub-01"][1] == "sub-01_desc-brain_mask.nii.gz"
    tree(mask("01", place="derivatives/expert"))
    with pytest.raises(SettingError, match=r"_dseg\) in manual and masks \(_mask\) in expert.*data\.derivative=expert"):
        bids(str(root))


def test_other_suffixes_of_labels(tree):
    root = tree(image("01", "T2w"), mask("01", "T2w_lesion-manual"), mask("01", "T1w_lesion-manual"))
    c = bids(str(root), suffix="T2w", label="lesion-manual", class_names={"lesion": 1})
    assert found(c)["sub-01"][1] == "sub-01_T2w_lesion-manual.nii.gz", "drawn on that image, by its name"
    text = listing(root, suffix="T2w")
    assert "no label file ..._dseg or _mask.nii.gz" in text
    assert "end in: lesion-manual" in text
    with pytest.raises(SettingError, match="suffix of the images"):
        bids(str(root), suffix="T2w", label="T2w")


def test_runs_are_cases_and_zeros_do_not_matter(tree):
    root = tree(image("01", run="01"), image("01", run="02"), mask("01", run=1), mask("01", run=2))
    assert found(bids(str(root))) == {
        "sub-01_run-01": (("sub-01_run-01_T1w.nii.gz",), "sub-01_run-1_mask.nii.gz"),
        "sub-01_run-02": (("sub-01_run-02_T1w.nii.gz",), "sub-01_run-2_mask.nii.gz"),
    }
    c = bids(str(root), entities={"run": 2})
    assert found(c) == {"sub-01": (("sub-01_run-02_T1w.nii.gz",), "sub-01_run-2_mask.nii.gz")}


def test_a_label_that_names_no_run_or_session(tree):
    root = tree(image("01", run=1), mask("01"))
    assert len(bids(str(root)).cases) == 1, "there is one image only"
    tree(image("01", run=2))
    assert "sub-01_mask.nii.gz names no session or run and fits sub-01_run-1, sub-01_run-2" in listing(root)
    other = tree(image("01", ses="a"), image("01", ses="b"), mask("01"), root="sessions")
    assert "fits sub-01_ses-a, sub-01_ses-b" in listing(other)


def test_channels(tree):
    root = tree(
        *(image(s, c) for s in ("01", "02") for c in ("T1w", "FLAIR", "T2w")), mask("01"), mask("02"),
        image("03"), mask("03"),
    )  # fmt: skip
    text = listing(root, channels=["FLAIR", "T1w"])
    assert "sub-03 has T1w, but no FLAIR (data.incomplete=skip" in text
    c = bids(str(root), channels=["FLAIR", "T1w"], incomplete="skip")
    assert c.channels == ("FLAIR", "T1w")
    assert found(c)["sub-02"][0] == ("sub-02_FLAIR.nii.gz", "sub-02_T1w.nii.gz")
    assert len(c.cases) == 2
    with pytest.raises(SettingError, match="once"):
        bids(str(root), channels=["T1w", "T1w"])
    assert "end in: FLAIR, T1w, T2w (or)" not in listing(root, suffix="T3w")
    assert "no image ..._T3w.nii.gz (data.suffix); its files end in: FLAIR, T1w, T2w" in listing(root, suffix="T3w")


def test_two_acquisitions_are_refused_with_the_key_that_decides(tree):
    root = tree(
        image("01", acq="highres"), image("01", acq="lowres"), mask("01", acq="highres"), mask("01", acq="lowres"),
        image("02", acq="highres"), mask("02", acq="highres"),
    )  # fmt: skip
    text = listing(root)
    assert "sub-01 has 2 images for T1w: sub-01_acq-highres_T1w.nii.gz, sub-01_acq-lowres_T1w.nii.gz" in text
    assert "'data.entities={acq: highres}' chooses one" in text
    assert found(bids(str(root), entities={"acq": "highres"})) == {
        f"sub-{s}": ((f"sub-{s}_acq-highres_T1w.nii.gz",), f"sub-{s}_acq-highres_mask.nii.gz") for s in ("01", "02")
    }
    assert list(found(bids(str(root), entities={"acq": ["lowres"]}))) == ["sub-01"]
    for entities, pattern in (
        ({"acq": "hires"}, "acq=hires.*there are: highres, lowres"),
        ({"dir": "AP"}, "no file name has dir-.*they have: acq"),
        ({"acq": {"a": 1}}, "maps the keys"),
        ({"ses": "1"}, "no file name has ses-"),
    ):
        with pytest.raises(SettingError, match=pattern):
            bids(str(root), entities=entities)


def test_with_and_without_an_entity(tree):
    root = tree(image("01"), image("01", acq="fast"), mask("01"), mask("01", acq="fast"))
    assert "(or {acq: null} for the one without)" in listing(root)
    plain = bids(str(root), entities={"acq": None})
    assert found(plain) == {"sub-01": (("sub-01_T1w.nii.gz",), "sub-01_mask.nii.gz")}
    fast = bids(str(root), entities={"acq": "fast"})
    assert found(fast) == {"sub-01": (("sub-01_acq-fast_T1w.nii.gz",), "sub-01_acq-fast_mask.nii.gz")}
    (root / "derivatives/manual/sub-01/anat/sub-01_acq-fast_mask.nii.gz").unlink()
    text = listing(root, entities={"acq": "fast"})
    assert "sub-01_mask.nii.gz names no acq, as sub-01_T1w.nii.gz does, so it seems to be of that image" in text


def test_a_label_of_another_acquisition_is_not_taken(tree):
    root = tree(image("01", acq="highres"), mask("01", acq="lowres"))
    text = listing(root)
    assert "1 labels without an image: sub-01_acq-lowres_mask.nii.gz" in text
    assert "1 images without a label: sub-01" in text


def test_labels_of_another_space_are_not_taken(tree):
    root = tree(image("01"), mask("01", "dseg", space="MNI152"), mask("01", "dseg"))
    (root / "dseg.tsv").write_text("index\tname\n1\tliver\n")
    assert found(bids(str(root)))["sub-01"][1] == "sub-01_dseg.nii.gz"
    for space in ("orig", "T1w"):
        other = tree(image("01"), mask("01", space="MNI152"), mask("01", space=space), root=space)
        assert f"space-{space}" in found(bids(str(other)))["sub-01"][1]
    only = tree(image("01"), mask("01", space="MNI152"), root="only")
    assert "sub-01 (its labels: space-MNI152)" in listing(only)
    both = tree(image("01", space="MNI152"), mask("01", space="MNI152"), mask("01", desc="native"), root="both")
    assert "space-MNI152" in found(bids(str(both)))["sub-01"][1]


def test_two_labels_are_refused_with_the_key_that_decides(tree):
    root = tree(image("01"), mask("01", label="edema"), mask("01", label="core"))
    assert "sub-01 has 2 labels" in listing(root)
    assert "'data.entities={label: core}' chooses one" in listing(root)
    assert bids(str(root), entities={"label": "core"}).labels == {"core": (1,)}
    twice = tree(image("01"), mask("01"), mask("01") + ".nii", root="twice")
    assert "their names say the same: keep one of them" in listing(twice)
    mixed = tree(image("01"), mask("01", label="edema"), image("02"), mask("02", label="core"), root="mixed")
    assert "different structures (core, edema)" in listing(mixed)


def test_masks_are_called_what_they_show(tree):
    root = tree(image("01"), mask("01", desc="lesion"), image("02"), mask("02", desc="lesion"))
    assert bids(str(root)).labels == {"lesion": (1,)}
    tree(image("03"), mask("03", desc="brain"))
    text = listing(root)
    assert "different structures (brain, lesion)" in text
    assert "'data.entities={desc: brain}' chooses one" in text
    assert bids(str(root), exclude=["sub-03"]).labels == {"lesion": (1,)}, "an excluded case has no say"
    assert bids(str(root), class_names={"any": 1}).labels == {"any": (1,)}
    one = bids(str(root), entities={"desc": "brain"}, unlabelled="skip")
    assert (list(found(one)), one.labels) == (["sub-03"], {"brain": (1,)})


def test_label_maps_without_a_table_of_different_atlases(tree, write):
    root = tree(image("01"), image("02"))
    for subject, atlas in (("01", "DKT"), ("02", "AAL")):
        write(root / f"{mask(subject, 'dseg', atlas=atlas)}.nii.gz", np.ones((2, 2, 2), np.uint8))
    assert "the labels are of different structures (AAL, DKT)" in listing(root)
    assert "'data.entities={atlas: AAL}'" in listing(root)


def test_labels_of_different_pipelines_over_subjects(tree):
    root = tree(image("01"), mask("01"), image("02"), mask("02", place="derivatives/auto"))
    text = listing(root)
    assert "different places: manual (sub-01), auto (sub-02)" in text
    assert "choose with data.derivative=manual" in text
    assert list(found(bids(str(root), derivative="auto", unlabelled="skip"))) == ["sub-02"]


def test_linked_folders_are_read(tree, tmp_path):
    tree("store/anat/sub-01_ses-b_T1w", "whole/anat/sub-02_T1w", root="elsewhere")
    root = tree(image("01", ses="a"), mask("01", ses="a"), mask("01", ses="b"), mask("02"))
    (root / "sub-01/ses-b").symlink_to(tmp_path / "elsewhere/store")
    (root / "sub-02").symlink_to(tmp_path / "elsewhere/whole")
    (root / "sub-01/ses-a/back").symlink_to(root / "sub-01")
    (root / "sub-01/ses-a/up").symlink_to(root)
    assert list(found(bids(str(root)))) == ["sub-01_ses-a", "sub-01_ses-b", "sub-02"]


def test_everything_that_does_not_fit_stands_in_one_error(tree, capsys):
    root = tree(
        image("01"), mask("01"), image("02"), image("03"), mask("04"),
        "sub-05/anat/sub-06_T1w", "sub-07/ses-1/anat/sub-07_ses-2_T1w", "sub-08/anat/sub-HC_08_x-y-z_T1w",
    )  # fmt: skip
    text = listing(root)
    for part in (
        "2 images without a label: sub-02, sub-03 (data.unlabelled=skip leaves them out)",
        "1 labels without an image: sub-04_mask.nii.gz",
        "sub-06_T1w.nii.gz lies in sub-05, but its name says otherwise",
        "sub-07_ses-2_T1w.nii.gz lies in ses-1",
        "sub-HC_08_x-y-z_T1w.nii.gz is no BIDS name",
    ):
        assert part in text
    good = tree(image("01"), mask("01"), image("02"), root="good")
    assert list(found(bids(str(good), unlabelled="skip"))) == ["sub-01"]
    assert "1 cases left out: sub-02 (no label)" in capsys.readouterr().out
    with pytest.raises(SettingError, match="error or skip"):
        bids(str(good), unlabelled="ignore")


def test_links_without_content_are_named(tree):
    root = tree(image("01"), mask("01"), image("02"), mask("02"))
    path = root / f"{image('02')}.nii.gz"
    path.unlink()
    path.symlink_to("../../.git/annex/objects/none")
    assert "sub-02_T1w.nii.gz is a link whose content is not here (datalad get" in listing(root)
    path.unlink()
    target = root / "annex.nii.gz"
    target.touch()
    path.symlink_to(target)
    assert len(bids(str(root)).cases) == 2


def test_folders_that_are_no_bids(tree, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no folder sub-..." in listing(tmp_path / "empty")
    assert "does not exist" in listing(tmp_path / "none")
    assert "no label file" in listing(tree(image("01")))


@pytest.mark.parametrize(
    "place",
    [
        "dseg.tsv", "derivatives/manual/dseg.tsv", "derivatives/manual/desc-x_dseg.tsv", "derivatives/manual/sub-01/dseg.tsv",
        "derivatives/manual/sub-01/anat/sub-01_desc-x_dseg.tsv", "derivatives/dseg.tsv",
    ],
)  # fmt: skip
def test_the_table_is_inherited(place, tree):
    root = tree(image("01"), mask("01", "dseg", desc="x"))
    (root / place).write_text("index\tname\tabbreviation\n0\tBackground\tBG\n100\tGray Matter\tGM\n7\tn/a\tL\n")
    (root / "derivatives/manual/desc-y_dseg.tsv").write_text("index\tname\n1\tof another segmentation\n")
    assert bids(str(root)).labels == {"L": (7,), "Gray Matter": (100,)}
    assert bids(str(root), class_names={"mine": [7, 100]}).labels == {"mine": (7, 100)}


def test_the_nearest_and_most_specific_table_counts(tree):
    root = tree(image("01"), mask("01", "dseg", desc="x"))
    for place, name in (
        ("dseg.tsv", "far"),
        ("derivatives/manual/dseg.tsv", "general"),
        ("derivatives/manual/desc-x_dseg.tsv", "specific"),
    ):
        (root / place).write_text(f"index\tname\n1\t{name}\n")
        assert bids(str(root)).labels == {name: (1,)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index,name\n1,a\n", "separated by tabs"),
        ("index\tlabel\n1\ta\n", "index and name"),
        ("index\tname\n", "index and name"),
        ("index\tname\nx\ta\n", "whole number"),
        ("index\tname\n" + "9" * 400 + "\ta\n", "whole number"),
        ("index\tname\n1\n", "index and name"),
        ("index\tname\n1\ta\n1\tb\n", "names 1 twice"),
        ("index\tname\n" + "".join(f"{n}\ts{n}\n" for n in range(1, 300)), "names 299 structures"),
    ],
)
def test_tables_that_are_none(text, message, tree):
    root = tree(image("01"), mask("01", "dseg"))
    (root / "dseg.tsv").write_text(text)
    assert message in listing(root)


def test_tables_that_contradict_each_other(tree):
    root = tree(image("01"), mask("01", "dseg"), image("02"), mask("02", "dseg"))
    for subject, name in (("01", "liver"), ("02", "spleen")):
        (root / f"derivatives/manual/sub-{subject}/dseg.tsv").write_text(f"index\tname\n1\t{name}\n")
    assert "1 is liver in" in listing(root)
    assert "but spleen in" in listing(root)


def test_without_a_table_every_value_is_a_class(tree, write):
    root = tree(image("01"))
    write(root / f"{mask('01', 'dseg')}.nii.gz", np.array([0, 3, 7, 7], np.uint8).reshape(1, 2, 2))
    assert bids(str(root)).labels == {"class_3": (3,), "class_7": (7,)}
    assert bids(str(root), class_names={"a": 3, "b": 7}).labels == {"a": (3,), "b": (7,)}


@pytest.mark.parametrize(
    "table",
    [
        "participant_id\tage\tsite\nsub-01\t7\tnorth\nsub-02\t8\tsouth\n",
        "\ufeffSite\tparticipant_id\nnorth\t01\nsouth\t02\n",
        "participant_id\tsite_id\n1\tnorth\n2\tsouth\n" + "9" * 5000 + "\teast\n",
    ],
)
def test_site_of_the_participants(table, tree):
    root = tree(image("01"), mask("01"), image("02"), mask("02"), image("03"), mask("03"))
    (root / "participants.tsv").write_text(table, encoding="utf-8")
    assert [c.site for c in bids(str(root)).cases] == ["north", "south", ""]
    (root / "participants.tsv").write_text("participant_id\tage\nsub-01\t7\n")
    assert [c.site for c in bids(str(root)).cases] == ["", "", ""]


def test_name_and_own_folds(tree):
    root = tree(image("01"), mask("01"), image("02"), mask("02"))
    (root / "dataset_description.json").write_text(json.dumps({"Name": "Livers of the north"}))
    (root / "splits.json").write_text(json.dumps([{"train": ["sub-01"], "val": ["sub-02"]}]))
    c = bids(str(root))
    assert (c.name, c.splits[0].val) == ("Livers of the north", ("sub-02",))
    (root / "dataset_description.json").write_text("{broken")
    assert bids(str(root)).name == "study"


def test_names():
    file = parse(Path("sub-01_ses-a_acq-x+y_run-007_T1w.nii.gz"))
    assert file.entities == {"sub": "01", "ses": "a", "acq": "x+y", "run": "007"}
    assert (file.suffix, file.number) == ("T1w", "7")
    for name in ("sub-01_acq-a_acq-b_T1w", "sub-01_acq-_T1w", "sub-01__T1w", "sub-1.2_T1w", "sub-ü_T1w"):
        assert parse(Path(f"{name}.nii.gz")) is None
    assert which_key([parse(Path("sub-1_dseg.nii")), parse(Path("sub-1_mask.nii"))]) == "data.label=dseg chooses one"


def test_as_the_command_line_gives_it(tree, settings):
    """Hydra may make a number of 01, and lists and mappings are its own kinds until they are plain."""
    root = tree(*(f(s, acq=a, ses=v) for f in (image, mask) for s in "12" for a in "ab" for v in ("01", "02")))
    words = ("data=bids", f"data.root={root}", "data.session=01", "data.entities={acq: a}")
    cfg = settings(*words, "data.channels=[T1w]", "data.class_names={lesion: 1}")
    check_targets(cfg)
    c = cohort_from(cfg.data)
    assert list(found(c)) == ["sub-1_ses-01", "sub-2_ses-01"]
    assert c.cases[0].images[0].name == "sub-1_ses-01_acq-a_T1w.nii.gz"
    listed = settings(*words[:2], "data.session=[01,02]", "data.entities={acq: [a], space: null}")
    assert len(cohort_from(listed.data).cases) == 4
    with pytest.raises(SettingsError, match=r"did you mean data\.session"):
        check_targets(settings(*words[:2], "data.sesion=01"))


@pytest.mark.slow
def test_the_check_of_a_tree(tmp_path, write):
    rng = np.random.default_rng(0)
    for subject in ("01", "02"):
        for acq in "ab":
            label = rng.integers(0, 2, (8, 8, 8)).astype(np.uint8)
            write(tmp_path / f"b/{image(subject, acq=acq)}.nii.gz", rng.normal(size=(8, 8, 8)))
            write(tmp_path / f"b/{mask(subject, acq=acq)}.nii.gz", label)
    command = [sys.executable, "-m", "data_prep.check", "data=bids", "data.root=b", "data.folds=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "data.entities={acq: a}" in done.stderr
    command.append("data.entities={acq: a}")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 cases" in done.stdout
