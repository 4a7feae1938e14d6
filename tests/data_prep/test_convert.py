"""The door: DICOM and other layouts into a folder that training reads, with nobody's name in it."""

import dataclasses
import gzip
import json
import shutil
import subprocess
import sys

import nibabel as nib
import numpy as np
import pytest

from data_prep.anonymous import convert_cohort
from data_prep.cohort_file import cohort, write_cohort
from data_prep.convert import ConvertConfig, main
from data_prep.msd import msd
from segspeed.types import Case, Cohort, DataError, SettingError
from tests.data.dicom_writers import IDENTITY, SHAPE, voxels, write_rtstruct, write_seg, write_series, write_slice

pytest.importorskip("pydicom")
SALT = "a salt of some length"


def run(module, *arguments, cwd):
    return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, cwd=cwd)


def secrets():
    """Everything planted that must not come out, piece by piece."""
    texts = [part for value in IDENTITY.values() for part in value.split("^") if part not in ("F", "061Y")]
    return [
        *texts,
        "PrivatTag",
        "Beschreibung",
        "Kontrast8",
        "Ordner",
        "1.2.9.4",
        "1.2.3.4",
        "1.2.8.4",
        "9.8.7.6.5",
        "Pol-ist",
    ]


def test_no_identity_comes_out(tmp_path):
    root = tmp_path / "in"
    own = {"StudyInstanceUID": "1.2.9.4", "FrameOfReferenceUID": "1.2.8.4"}
    folder = root / "Ordner_Mustermann" / "Ordner_19620101"
    places = [(-10.0, 20.0, 2.5 * z) for z in range(6)]
    write_series(folder, uid="1.2.3.4", SeriesDescription="Beschreibung portal", ContrastBolusAgent="Kontrast8", **own)
    mask = np.zeros(SHAPE, int)
    mask[2, 2, 2] = 1
    write_seg(folder / "seg", [mask], places, names=["Liver"], refers="1.2.3.4", reference="1.2.8.4",
              SeriesDescription="Beschreibung", **own)  # fmt: skip
    # What goes wrong must not talk either: a gap, a scout, a damaged file, a bad number, a contour between slices
    more = {**own, "StudyInstanceUID": "9.8.7.6.5", "SeriesDescription": "Beschreibung"}
    write_series(root / "Ordner_b", [(0, 0, float(z)) for z in (0, 1, 2, 6, 7, 8)], uid="9.8.7.6.5.1", **more)
    write_seg(root / "Ordner_b/seg", [mask], places, names=["Liver"], refers="9.8.7.6.5.1", **more)
    write_slice(root / "Ordner_b/scout.dcm", voxels()[0], (0, 0, 0), uid="9.8.7.6.5.1", orientation=(0, 1, 0, 0, 0, 1))
    (folder / "Ordner.dcm").write_bytes((folder / "0.dcm").read_bytes()[:700])
    odd = (root / "Ordner_b/1.dcm").read_bytes().replace(b"0.5\\0.7", b"Pol-ist")
    assert b"Pol-ist" in odd
    (root / "Ordner_b/odd.dcm").write_bytes(odd)
    third = {**own, "StudyInstanceUID": "9.8.7.6.5.9", "PatientID": "ZweiteNr77"}
    write_series(root / "Ordner_c", uid="9.8.7.6.5.2", **third)
    corners = [(-9.0, 21.0, 4.0), (-8.0, 21.0, 4.0), (-8.0, 22.0, 4.0)]
    write_rtstruct(root / "Ordner_c/rt", {"Liver": [corners]}, refers="9.8.7.6.5.2", **third)

    done = run("data_prep.convert", f"root={root}", f"out={tmp_path / 'out'}", 'series="beschreib|^$"', cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "1 converted" in done.stdout
    assert "slices are missing" in done.stdout
    assert "between slices" in done.stdout
    assert "damaged" in done.stdout
    said = (done.stdout + done.stderr).replace(str(tmp_path), "")
    written = [p for p in tmp_path.rglob("*") if p.is_file() and root not in p.parents]
    assert len([p for p in written if p.name.endswith(".nii.gz")]) == 2
    for secret in secrets():
        assert secret.lower() not in said.lower()
        for path in written:
            assert secret.lower() not in str(path.relative_to(tmp_path)).lower()
            content = path.read_bytes()
            content = gzip.decompress(content) if path.suffix == ".gz" else content
            assert secret.lower().encode() not in content.lower(), (secret, path.name)


def test_the_settings_of_the_door(tmp_path):
    done = run("data_prep.convert", "root=x", f"out={tmp_path / 'y'}", "serie=portal", cwd=tmp_path)
    assert (done.returncode, "did you mean series?" in done.stderr) == (2, True)
    for words, text in (
        ({}, "root is missing"),
        ({"source": "msd", "root": "x", "structures": ("a",)}, "source=msd takes no structures"),
        ({"source": "nnunet", "root": "x", "images": "*"}, "source=nnunet takes no images"),
        ({"root": "x", "csv": "y"}, "source=dicom takes no csv"),
    ):
        with pytest.raises(SettingError, match=text):
            main(ConvertConfig(out=str(tmp_path / "y"), **words))
    assert not any(tmp_path.iterdir())


def test_every_key_stands_in_the_yaml_with_the_default_of_the_schema():
    from omegaconf import OmegaConf

    from segspeed.cli import config_folder

    written = OmegaConf.to_container(OmegaConf.load(config_folder() / "convert.yaml"))
    fields = ConvertConfig.model_fields
    assert set(written) - {"defaults", "hydra"} == set(fields)
    assert {k: written[k] for k in fields if k != "out"} == {k: f.default for k, f in fields.items() if k != "out"}


def test_the_source_takes_the_keys_of_its_yaml():
    import inspect

    from omegaconf import OmegaConf

    from data_prep.dicom import dicom
    from segspeed.cli import config_folder

    written = OmegaConf.to_container(OmegaConf.load(config_folder() / "data/dicom.yaml"))
    parameters = inspect.signature(dicom).parameters
    assert set(written) - {"_target_"} == set(parameters)
    assert {k: v for k, v in written.items() if v != "???" and k != "_target_"} == {
        k: p.default for k, p in parameters.items() if p.default is not p.empty
    }


def test_a_cohort_file_is_read_back_as_it_was_written(tmp_path):
    made = Cohort(
        "c", (Case("a", ("images/a.nii.gz",), "labels/a.nii.gz", "p1"),), {"x only": (1,), "x + y": (3,)}, ("CT",),
        regions={"x": ("x only", "x + y"), "y": ("x + y",)},
    )  # fmt: skip
    write_cohort(tmp_path, made)
    back = cohort(str(tmp_path))
    assert back.cases[0].images == (tmp_path / "images/a.nii.gz",)
    assert (back.cases[0].label, back.cases[0].patient) == (tmp_path / "labels/a.nii.gz", "p1")
    assert (back.labels, back.regions, back.channels) == (made.labels, made.regions, made.channels)
    assert back.table.outputs == 2


@pytest.mark.parametrize("path", ["/etc/passwd", "../b.nii.gz", "images/../../b.nii.gz", "link/b.nii.gz"])
def test_a_cohort_file_cannot_lead_out_of_its_folder(tmp_path, path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c/link").symlink_to(tmp_path)
    for case in (Case("a", (path,)), Case("a", ("i.nii.gz",), path)):
        write_cohort(tmp_path / "c", Cohort("c", (case,), {"x": (1,)}, ("CT",)))
        with pytest.raises(DataError, match="inside the folder|leads out"):
            cohort(str(tmp_path / "c"))


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "holds no cohort"), ('{"name": 3}', "holds no cohort"),
     ('{"name": "c", "cases": [], "labels": {}, "channels": ["CT"]}', "no cases"),
     ('{"name": "c", "cases": [{"id": "a", "images": ["a"]}], "labels": {}, "channels": ["A", "B"]}', "2 channels")],
)  # fmt: skip
def test_a_cohort_file_of_another_form(tmp_path, text, told):
    with pytest.raises(DataError, match=r"has no cohort\.json"):
        cohort(str(tmp_path))
    (tmp_path / "cohort.json").write_text(text)
    with pytest.raises(DataError, match=told):
        cohort(str(tmp_path))


def test_a_decathlon_folder_without_names(tmp_path, make_cohort):
    root = make_cohort(tmp_path / "Mustermann", cases=3)
    path = root / "imagesTr/b_00.nii.gz"
    image = nib.load(path)
    named = nib.Nifti1Image(np.asarray(image.dataobj), image.affine)
    named.header["descrip"], named.header["aux_file"] = b"Mustermann 19620101", b"Mustermann"
    named.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"Mustermann"))
    nib.save(named, path)
    (root / "imagesTr/b_02.nii.gz").write_bytes(b"no volume")
    (root / "splits.json").write_text(json.dumps([{"train": ["b_00", "b_02"], "val": ["b_01"]}]))
    assert convert_cohort(msd(str(root)), str(tmp_path / "out"), salt=SALT, overwrite=False, workers=1) == 1
    c = cohort(str(tmp_path / "out"))
    assert (len(c.cases), dict(c.labels), c.channels) == (2, {"bright": (1,), "dark": (3,)}, ("MRI",))
    assert [len(part) for part in (c.splits[0].train, c.splits[0].val)] == [1, 1]
    assert set(c.splits[0].train + c.splits[0].val) == {case.id for case in c.cases}
    pixels = sorted(float(nib.load(case.images[0]).get_fdata().sum()) for case in c.cases)
    wanted = sorted(float(nib.load(root / f"imagesTr/b_{n:02d}.nii.gz").get_fdata().sum()) for n in (0, 1))
    assert pixels == wanted
    for path in (tmp_path / "out").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        assert b"Muster" not in content
        assert b"b_00" not in content
        assert "b_0" not in path.name
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.nii.gz")}
    make_cohort(tmp_path / "other", cases=3)
    shutil.copy(tmp_path / "other/imagesTr/b_02.nii.gz", root / "imagesTr/b_02.nii.gz")
    assert convert_cohort(msd(str(root)), str(tmp_path / "out"), salt=SALT, overwrite=False, workers=1) == 0
    assert len(cohort(str(tmp_path / "out")).cases) == 3
    assert all(p.stat().st_mtime_ns == t for p, t in times.items())
    with pytest.raises(SettingError, match=r"other settings \(salt\)"):
        convert_cohort(msd(str(root)), str(tmp_path / "out"), salt="yet another salt", overwrite=False, workers=1)


def test_a_copy_drops_no_case_of_an_earlier_one_unsaid(tmp_path, make_cohort):
    first, second = msd(str(make_cohort(tmp_path / "a", cases=3))), msd(str(make_cohort(tmp_path / "b", cases=3)))
    out, more = str(tmp_path / "out"), {"salt": SALT, "workers": 1}
    assert convert_cohort(first, out, overwrite=False, **more) == 0
    fewer = dataclasses.replace(first, cases=first.cases[:2], splits=())
    with pytest.raises(SettingError, match="1 of its 3 cases are not among those of this call"):
        convert_cohort(fewer, out, overwrite=False, **more)
    with pytest.raises(SettingError, match=r"other settings \(source\)"):
        convert_cohort(dataclasses.replace(second, name="other"), out, overwrite=False, **more)
    assert len(cohort(out).cases) == 3
    assert convert_cohort(fewer, out, overwrite=True, **more) == 0
    assert len(cohort(out).cases) == 2


def test_scaled_values_and_coded_axes_survive(tmp_path, write):
    affine = np.diag([2.0, 3, 4, 1])
    folder = tmp_path / "in"
    write(folder / "imagesTr/a.nii.gz", (np.arange(60, dtype=float).reshape(3, 4, 5) - 7) / 4, affine)
    scaled = nib.Nifti1Image(np.arange(60, dtype=np.int16).reshape(3, 4, 5), affine)
    scaled.header.set_slope_inter(0.25, -3)
    scaled.header.set_sform(affine, 4)
    nib.save(scaled, folder / "imagesTr/b.nii.gz")
    cases = tuple(Case(n, (folder / f"imagesTr/{n}.nii.gz",)) for n in "ab")
    assert (
        convert_cohort(
            Cohort("c", cases, {"x": (1,)}, ("CT",)), str(tmp_path / "o"), salt=SALT, overwrite=False, workers=1
        )
        == 0
    )
    by_sum = {}
    for case in cohort(str(tmp_path / "o")).cases:
        image = nib.load(case.images[0])
        by_sum[round(float(image.get_fdata().sum()), 3)] = image
    for n in "ab":
        before = nib.load(folder / f"imagesTr/{n}.nii.gz")
        after = by_sum[round(float(before.get_fdata().sum()), 3)]
        np.testing.assert_array_equal(after.get_fdata(), before.get_fdata())
        np.testing.assert_allclose(after.affine, before.affine)
        assert after.get_data_dtype() == before.get_data_dtype()
        assert after.get_sform(coded=True)[1] == before.get_sform(coded=True)[1]


def dicom_balls(folder, cases=4):
    """Studies with the balls of the Decathlon fixture, RLE-compressed, with a SEG each; and the same images as NIfTI."""
    from tests.conftest import balls

    for n in range(cases):
        image, label = balls((20, 18, 16), seed=n)
        array = np.rint(image).astype(np.int16).transpose(2, 1, 0)
        own = {"PatientID": f"P{n}", "StudyInstanceUID": f"1.2.9.{n}", "FrameOfReferenceUID": f"1.2.8.{n}"}
        places = [(5.0, -6.0, 1.0 * z) for z in range(16)]
        grid = {"spacing": (1, 1), "slope": 1.0, "intercept": 0.0, "modality": "MR", "rle": True}
        write_series(folder / f"s{n}", places, array=array, uid=f"1.2.3.{n}", **grid, **own)
        masks = [(label == v).transpose(2, 1, 0) for v in (1, 3)]
        write_seg(
            folder / f"s{n}/seg", masks, places, names=["bright", "dark"], refers=f"1.2.3.{n}", spacing=(1, 1), **own
        )
        affine = np.diag([-1.0, -1, 1, 1])
        affine[:3, 3] = -5, 6, 0
        flipped = nib.Nifti1Image(array.transpose(2, 1, 0), affine).as_reoriented([[0, -1], [1, 1], [2, -1]])
        (folder.parent / "nifti").mkdir(exist_ok=True)
        nib.save(flipped, folder.parent / f"nifti/n{n}.nii.gz")


@pytest.mark.long
def test_train_on_dicom_and_predict_the_same_from_dicom_and_nifti(tmp_path):
    from tests.integration.test_doors import FAST

    dicom_balls(tmp_path / "in")
    data = (
        "data=dicom",
        f"data.root={tmp_path / 'in'}",
        f"data.out={tmp_path / 'out'}",
        "data.structures=[dark,bright]",
    )
    done = run("segspeed.train", *data, *FAST, "run.root=runs", "run.name=r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = run("data_prep.check", "data=cohort", f"data.root={tmp_path / 'out'}", "data.folds=2",
                "run.root=runs", cwd=tmp_path)  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    folder = next((tmp_path / "runs").glob("*/r"))
    for source in ("in", "nifti"):
        done = run(
            "segspeed.predict", f"run={folder}", f"input={tmp_path / source}", f"output=maps_{source}", cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
    maps = {}
    for source in ("in", "nifti"):
        found = [nib.as_closest_canonical(nib.load(p)) for p in (tmp_path / f"maps_{source}").glob("*.nii.gz")]
        maps[source] = sorted(((np.asarray(m.dataobj), m.affine) for m in found), key=lambda m: m[0].tobytes())
    assert len(maps["in"]) == 4
    for (a, affine_a), (b, affine_b) in zip(maps["in"], maps["nifti"], strict=True):
        assert np.array_equal(a, b)
        np.testing.assert_allclose(affine_a, affine_b)
