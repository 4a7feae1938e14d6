"""Trees of DICOM files into cohorts: which series, which label, under which id, again and again."""

import json
import os

import nibabel as nib
import numpy as np
import pytest

from data_prep.cohort_file import cohort
from data_prep.dicom import convert_tree, dicom
from segspeed.types import DataError, SettingError
from tests.data.dicom_writers import SHAPE, voxels, write_rtstruct, write_seg, write_series, write_slice

pytest.importorskip("pydicom")
PLACES = [(-10.0, 20.0, 2.5 * z) for z in range(6)]
SALT = "a salt of some length"


def box(z, y, x):
    mask = np.zeros(SHAPE, dtype=int)
    mask[z, y, x] = 1
    return mask


ORGAN, LESION = box(slice(1, 4), slice(1, 4), slice(1, 4)), box(2, 2, slice(2, 4))


def study(folder, n, *, names=("Liver", "Tumour"), masks=(ORGAN, LESION), seg=True, **tags):
    """Patient n: one CT series with a SEG."""
    own = {"PatientID": f"PAT{n}", "StudyInstanceUID": f"1.2.9.{n}", **tags}
    write_series(folder / f"ct{n}", uid=f"1.2.3.{n}", FrameOfReferenceUID=f"1.2.8.{n}", **own)
    if seg:
        write_seg(folder / f"ct{n}/seg", masks, PLACES, names=names, refers=f"1.2.3.{n}", reference=f"1.2.8.{n}", **own)
    return folder


def run(root, out, **more):
    return convert_tree(str(root), str(out), **{"workers": 1, "salt": SALT, **more})


def report(out):
    return json.loads((out / "report.json").read_text())


def test_overlapping_structures_become_classes_and_regions(tmp_path):
    root = study(study(tmp_path / "in", 1), 2, masks=(ORGAN, box(5, 4, 0)))
    c = dicom(str(root), str(tmp_path / "out"), workers=1, salt=SALT)
    regions = {name: set(parts) for name, parts in c.regions.items()}
    assert regions == {"Liver": {"Liver only", "Liver + Tumour"}, "Tumour": {"Liver + Tumour", "Tumour only"}}
    assert c.labels == {"Liver only": (1,), "Liver + Tumour": (3,), "Tumour only": (2,)}
    assert c.channels == ("CT",)
    values = {}
    for case in c.cases:
        image, label = nib.load(case.images[0]), nib.load(case.label)
        np.testing.assert_allclose(image.affine, label.affine)
        data = np.asarray(label.dataobj).transpose(2, 1, 0)
        assert np.array_equal(data & 1 > 0, ORGAN > 0)
        assert np.array_equal(np.asarray(image.dataobj).transpose(2, 1, 0), voxels() * 2 - 1024)
        values[case.id] = set(np.unique(data))
    assert sorted(map(sorted, values.values())) == [[0, 1, 2], [0, 1, 3]]
    assert {v for names in c.regions.values() for n in names for v in c.labels[n]} == {1, 2, 3}


def test_without_overlap_there_are_plain_classes_in_the_order_asked_for(tmp_path):
    root = study(tmp_path / "in", 1, masks=(ORGAN, box(5, 4, 0)))
    study(root, 2, names=("LIVER", "cyst"), masks=(ORGAN, box(5, 0, 0)))
    assert run(root, tmp_path / "out", structures=["tumour", "Liver"]) == 0
    c = cohort(str(tmp_path / "out"))
    assert (dict(c.labels), c.regions) == ({"tumour": (1,), "Liver": (2,)}, {})
    notes = [n for case in report(tmp_path / "out")["cases"] for n in case["notes"]]
    assert notes == ["no structure called tumour: background here"]
    with pytest.raises(SettingError, match=r"kidney.*there are: Liver \(2\)"):
        run(root, tmp_path / "other", structures=["kidney"])


def test_rtstruct_and_seg_give_the_same_label(tmp_path):
    mask = box(slice(1, 4), slice(1, 4), slice(1, 3))
    study(tmp_path / "a", 1, names=("x",), masks=(mask,))
    study(tmp_path / "b", 1, seg=False)
    corners = [(0.5, 0.5), (2.5, 0.5), (2.5, 3.5), (0.5, 3.5)]
    rois = {"x": [[(-10 + 0.7 * x, 20 + 0.5 * y, 2.5 * z) for x, y in corners] for z in (1, 2, 3)]}
    own = {"PatientID": "PAT1", "StudyInstanceUID": "1.2.9.1"}
    write_rtstruct(tmp_path / "b/deep/er/rt", rois, refers="1.2.3.1", **own)
    labels = []
    for name in "ab":
        assert run(tmp_path / name, tmp_path / f"out_{name}") == 0
        (case,) = cohort(str(tmp_path / f"out_{name}")).cases
        labels.append(np.asarray(nib.load(case.label).dataobj).transpose(2, 1, 0))
    assert np.array_equal(labels[0], labels[1])
    assert np.array_equal(labels[0], mask)


def test_the_series_with_a_label_then_with_most_slices(tmp_path, capsys):
    root = study(tmp_path / "in", 1)
    more = np.concatenate([voxels(), voxels() + 500])
    own = {"PatientID": "PAT1", "StudyInstanceUID": "1.2.9.1"}
    places = [(-10.0, 20.0, 1.25 * z) for z in range(12)]
    write_series(root / "thin", places, array=more, uid="1.2.30", SeriesDescription="Abdomen PORTAL 1.25", **own)
    write_series(root / "thin3", places, array=more[::-1], uid="1.2.31", SeriesDescription="art", modality="MR", **own)
    assert run(root, tmp_path / "a") == 0
    said = capsys.readouterr().out
    assert "chosen of 3 series" in said
    assert "labelled" in said
    assert nib.load(cohort(str(tmp_path / "a")).cases[0].images[0]).shape == (4, 5, 6)
    for words in ({"series": "portal"}, {"series": r"port.l\s+1"}, {"modality": "CT", "series": "abdomen"}):
        out = tmp_path / f"b{len(os.listdir(tmp_path))}"
        assert run(root, out, unlabelled=True, **words) == 0
        (case,) = cohort(str(out)).cases
        assert (nib.load(case.images[0]).shape, case.label) == ((4, 5, 12), None)
        assert "belongs to another series" in report(out)["cases"][0]["notes"][0]
        assert not any(b"ortal" in p.read_bytes() or b"PORTAL" in p.read_bytes() for p in out.glob("*.json"))
    with pytest.raises(DataError, match="has a label"):
        run(root, tmp_path / "c", series="portal")
    with pytest.raises(DataError, match="has a label"):
        run(root, tmp_path / "d", series="nothing like it", unlabelled=True)


def test_a_label_that_names_no_series_here_is_matched_by_its_frame_of_reference(tmp_path):
    root = study(tmp_path / "in", 1, seg=False)
    own = {"PatientID": "PAT1", "StudyInstanceUID": "1.2.9.1"}
    write_seg(root / "seg", [ORGAN], PLACES, names=["x"], refers="9.9.9", reference="1.2.8.1", **own)
    assert run(root, tmp_path / "out") == 0
    assert "frame of reference" in report(tmp_path / "out")["cases"][0]["notes"][0]
    write_seg(root / "seg", [ORGAN], PLACES, names=["x"], refers="9.9.9", reference="1.2.8.55", **own)
    with pytest.raises(DataError, match="none of 1 study has a label"):
        run(root, tmp_path / "other")


def test_channels_on_one_grid(tmp_path):
    root = study(tmp_path / "in", 1, SeriesDescription="CT portal")
    own = {"PatientID": "PAT1", "StudyInstanceUID": "1.2.9.1", "modality": "PT", "FrameOfReferenceUID": "1.2.8.1"}
    write_series(root / "pet", uid="1.2.30", SeriesDescription="PET AC", slope=1.0, intercept=0.0, **own)
    channels = {"CT": "portal", "PET": "ac$"}
    assert run(root, tmp_path / "out", channels=channels) == 0
    c = cohort(str(tmp_path / "out"))
    assert c.channels == ("CT", "PET")
    ct, pet = (np.asarray(nib.load(p).dataobj, dtype=float) for p in c.cases[0].images)
    assert np.array_equal(ct, pet * 2 - 1024)

    # A coarser PET with a linear ramp: what linear resampling gives is known
    x, y = np.meshgrid(np.arange(6.0), np.arange(6.0))
    for n in range(5):
        plane = np.rint(100 * x + 10 * y + n * 3).astype(int)
        write_slice(root / f"pet/{n}.dcm", plane, (-12, 18, 4.0 * n - 1), uid="1.2.30", SeriesDescription="PET AC",
                    spacing=(1, 1), slope=1.0, intercept=0.0, **own)  # fmt: skip
    (root / "pet/5.dcm").unlink()
    with pytest.raises(DataError, match="no case could be converted"):
        run(root, tmp_path / "other", channels=channels)
    assert "corners up to" in report(tmp_path / "other")["problems"][0]
    assert run(root, tmp_path / "third", channels=channels, resample=True) == 0
    c = cohort(str(tmp_path / "third"))
    ct, pet = (nib.load(p) for p in c.cases[0].images)
    np.testing.assert_allclose(ct.affine, pet.affine)
    # CT voxel (column 2, row 3, slice 4) lies at x -8.6, y 21.5, z 10 mm
    assert pet.get_fdata()[2, 3, 4] == pytest.approx(100 * 3.4 + 10 * 3.5 + 3 * 11 / 4, abs=1e-2)


def test_nifti_labels_by_folder_or_own_id(tmp_path, write):
    root = study(study(tmp_path / "in", 1, seg=False), 2, seg=False)
    (tmp_path / "ids.csv").write_text("patient_id;id\nPAT1;case-a\nPAT2;case-b\n")
    affine = np.diag([0.7, -0.5, 2.5, 1.0])  # columns run the other way, rows as in the files
    affine[:3, 3] = 10 - 3 * 0.7, -20, 0
    label = ORGAN.transpose(2, 1, 0)[::-1] * 4
    write(tmp_path / "labels/case-a.nii.gz", label.astype(np.uint8), affine)
    write(tmp_path / "labels/ct2.nii.gz", label.astype(np.uint8), affine)
    write(tmp_path / "labels/nobody.nii.gz", label.astype(np.uint8), affine)
    more = {"labels": str(tmp_path / "labels"), "ids": str(tmp_path / "ids.csv"), "class_names": {"liver": 4}}
    assert run(root, tmp_path / "out", **more) == 0
    c = cohort(str(tmp_path / "out"))
    assert [case.id for case in c.cases] == ["case-a", "case-b"]
    assert c.labels == {"liver": (4,)}
    for case in c.cases:
        assert np.array_equal(np.asarray(nib.load(case.label).dataobj).transpose(2, 1, 0), ORGAN * 4)
        np.testing.assert_allclose(nib.load(case.label).affine, nib.load(case.images[0]).affine)
    assert "1 files of labels=FOLDER belong to no case" in report(tmp_path / "out")["notes"][-1]
    affine[0, 3] += 1
    write(tmp_path / "labels/ct2.nii.gz", label.astype(np.uint8), affine)
    assert run(root, tmp_path / "out", **more) == 1
    assert "case-b: its label map lies elsewhere" in report(tmp_path / "out")["problems"][0]
    assert [case.id for case in cohort(str(tmp_path / "out")).cases] == ["case-a"]


def test_ids_are_salted_and_of_one_patient_the_same(tmp_path):
    root = study(study(tmp_path / "in", 1), 2, PatientID="PAT1")
    study(root, 3)
    assert run(root, tmp_path / "a") == 0
    assert run(root, tmp_path / "b", salt="another salt") == 0
    a, b = (cohort(str(tmp_path / name)) for name in "ab")
    patients = [c.patient for c in a.cases]
    assert len(set(patients)) == 2, "two studies are of one patient"
    assert len({c.id for c in a.cases}) == 3
    assert not {c.id for c in a.cases} & {c.id for c in b.cases}
    assert run(root, tmp_path / "c", salt=None) == 0
    salt = tmp_path / "c.salt"
    assert salt.stat().st_mode & 0o777 == 0o600
    text = salt.read_text().strip()
    assert not any(text.encode() in p.read_bytes() for p in (tmp_path / "c").rglob("*") if p.is_file())
    again = cohort(str(tmp_path / "c"))
    assert run(root, tmp_path / "c", salt=None) == 0
    assert cohort(str(tmp_path / "c")) == again
    with pytest.raises(SettingError, match="fewer than 8"):
        run(root, tmp_path / "d", salt="short")


@pytest.mark.parametrize(
    ("rows", "text"),
    [("PAT1,a\nPAT1,b", "line 3: patient_id is given twice"), ("PAT1,a/b", "line 2: an id is"),
     ("PAT1,x\nPAT2,x", "line 3: the id is given to two"), ("PAT1,my-pat1", "line 2: the id holds the patient_id")],
)  # fmt: skip
def test_a_table_of_ids_that_cannot_be_used(tmp_path, rows, text):
    (tmp_path / "ids.csv").write_text("patient_id,id\n" + rows)
    with pytest.raises(SettingError, match=text) as told:
        run(study(tmp_path / "in", 1), tmp_path / "out", ids=str(tmp_path / "ids.csv"))
    assert "PAT" not in str(told.value)


def test_patients_that_a_table_lacks_are_left_out_and_counted(tmp_path):
    root = study(study(tmp_path / "in", 1), 2)
    (tmp_path / "ids.csv").write_text("patient_id,id\nPAT2,b\n")
    assert run(root, tmp_path / "out", ids=str(tmp_path / "ids.csv")) == 1
    assert [c.id for c in cohort(str(tmp_path / "out")).cases] == ["b"]
    assert "1 studies are of patients" in report(tmp_path / "out")["problems"][0]


def test_one_bad_case_does_not_stop_the_others_and_comes_in_when_mended(tmp_path, capsys):
    root = study(study(study(tmp_path / "in", 1), 2), 3)
    gap = sorted((root / "ct2").glob("?.dcm"))
    kept = {p: p.read_bytes() for p in gap}
    (root / "ct2" / "0.dcm").unlink()
    (root / "ct3" / "seg").write_bytes((root / "ct3" / "seg").read_bytes()[:400])
    assert run(root, tmp_path / "out") == 2
    said = capsys.readouterr().out
    assert "1 converted, 0 were there already, 1 left out, 2 failed" in said
    assert "1 slices are missing" in said
    assert "1 DICOM files are damaged" in said
    first = cohort(str(tmp_path / "out")).cases
    assert len(first) == 1
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.nii.gz")}
    for path, content in kept.items():
        path.write_bytes(content)
    (root / "ct3/seg").unlink()
    assert run(root, tmp_path / "out") == 0
    assert "1 converted, 1 were there already, 1 left out, 0 failed" in capsys.readouterr().out
    assert len(cohort(str(tmp_path / "out")).cases) == 2
    assert all(p.stat().st_mtime_ns == t for p, t in times.items()), "done cases are not touched"


def test_changed_sources_are_converted_again_and_changed_settings_refused(tmp_path):
    root = study(tmp_path / "in", 1)
    assert run(root, tmp_path / "out") == 0
    (case,) = cohort(str(tmp_path / "out")).cases
    study(root, 1, masks=(ORGAN, box(0, 0, 0)))
    assert run(root, tmp_path / "out") == 0
    assert set(np.unique(np.asarray(nib.load(case.label).dataobj))) == {0, 1, 2}
    with pytest.raises(SettingError, match=r"other settings \(structures\)"):
        run(root, tmp_path / "out", structures=["liver"])
    with pytest.raises(SettingError, match="salt"):
        run(root, tmp_path / "out", salt="yet another salt")
    assert run(root, tmp_path / "out", structures=["tumour"], overwrite=True) == 0
    assert set(np.unique(np.asarray(nib.load(case.label).dataobj))) == {0, 1}
    assert cohort(str(tmp_path / "out")).labels == {"tumour": (1,)}


def test_a_structure_that_comes_later_leaves_earlier_values_alone(tmp_path):
    root = study(tmp_path / "in", 1, names=("Liver", "Tumour"))
    assert run(root, tmp_path / "out") == 0
    study(root, 2, names=("Aorta", "Liver"), masks=(box(5, 4, 3), ORGAN))
    assert run(root, tmp_path / "out") == 0
    c = cohort(str(tmp_path / "out"))
    assert c.table.values("Aorta") == (4,)
    assert set(c.table.values("Liver")) == {1, 3}


def test_folders_that_are_no_place_to_write_to(tmp_path):
    root = study(tmp_path / "in", 1)
    with pytest.raises(SettingError, match="folder that is read"):
        run(root, root)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.docx").write_text("mine")
    with pytest.raises(SettingError, match="other files in it"):
        run(root, tmp_path / "full")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no DICOM series"):
        run(tmp_path / "none", tmp_path / "out")


def test_mixed_modalities_are_asked_about(tmp_path):
    root = study(study(tmp_path / "in", 1), 2)
    for path in (root / "ct2").glob("*.dcm"):
        path.unlink()
    write_series(root / "ct2", uid="1.2.3.2", modality="MR", PatientID="PAT2", StudyInstanceUID="1.2.9.2")
    with pytest.raises(SettingError, match=r"several modalities: (CT|MR) \(1\), (CT|MR) \(1\)"):
        run(root, tmp_path / "out")
    assert run(root, tmp_path / "out", modality="MR") == 0
    assert cohort(str(tmp_path / "out")).channels == ("MR",)


def test_more_structures_than_a_label_map_holds(tmp_path):
    names = [f"s{n:02d}" for n in range(17)]
    root = study(tmp_path / "in", 1, names=names, masks=[ORGAN] * 17)
    with pytest.raises(SettingError, match=r"17 structures; at most 16.*structures=\["):
        run(root, tmp_path / "out")
    assert run(root, tmp_path / "out", structures=names[1:]) == 0
    c = cohort(str(tmp_path / "out"))
    assert len(c.regions) == 16
    assert set(np.unique(np.asarray(nib.load(c.cases[0].label).dataobj))) == {0, 2**16 - 1}


def test_a_structure_named_as_the_patient_is_not_written(tmp_path):
    root = study(tmp_path / "in", 1, names=("Liver", "Mustermann GTV"))
    with pytest.raises(SettingError, match="structure number 2 of label object 1 holds a word") as told:
        run(root, tmp_path / "out")
    assert "muster" not in str(told.value).lower()
    assert run(root, tmp_path / "out", structures=["liver"]) == 0


def test_a_real_study(real_data, tmp_path):
    with pytest.raises(DataError, match="unlabelled=true"):
        run(real_data / "dicom_study", tmp_path / "out")
    assert run(real_data / "dicom_study", tmp_path / "out", unlabelled=True) == 0
    c = cohort(str(tmp_path / "out"))
    assert c.channels == ("MR",)
    assert nib.load(c.cases[0].images[0]).shape == (35, 51, 32)


def test_a_study_without_any_of_the_structures_asked_for_counts_as_unlabelled(tmp_path):
    root = study(study(tmp_path / "in", 1), 2, names=("Aorta", "Vein"))
    assert run(root, tmp_path / "out", structures=["liver"]) == 0
    assert len(cohort(str(tmp_path / "out")).cases) == 1
    assert "no label" in report(tmp_path / "out")["left_out"][0]["why"]
