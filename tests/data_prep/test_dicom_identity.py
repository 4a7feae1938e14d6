"""Whose data it is: no word of a patient in what is written, and no two patients in one case."""

import csv
import json

import nibabel as nib
import numpy as np
import pytest

from data_prep.cohort_file import cohort
from data_prep.identity import telling, words_of
from segspeed.types import DataError, SettingError
from tests.data.dicom_writers import voxels, write_rtstruct, write_seg, write_series
from tests.data_prep.test_dicom_convert import LESION, ORGAN, PLACES, report, run, study

pytest.importorskip("pydicom")


@pytest.mark.parametrize(
    ("person", "text"),
    [
        ("Mustermann^Erika", "Mustermann_liver"), ("Mustermann^Erika", "MustermannLiver"), ("4711-Geheim", "liver_4711"),
        ("Mustermann^Erika", "GTV M.u.s.t.e.r.m.a.n.n"), ("Kim^Li", "Kim liver"), ("Lee^Ann", "lee_spleen"),
        ("Müller^Jo", "MUELLER ctv"), ("Mueller", "Müller ctv"), ("Nuñez", "nunez1"), ("山田^太郎", "山田 liver"),
        ("Stern^A", "stern sternum"), ("Miller1962", "liver miller"), ("19620101", "liver 19620101"), ("Wall^E", "wall liver"),
        ("Ribbeck^H", "ribbeck_liver"), ("Yamada^Tarou=山田^太郎", "tarou 1"),
    ],
)  # fmt: skip
def test_a_word_of_a_person_is_found(person, text):
    assert telling(text, words_of([person]))


@pytest.mark.parametrize(
    ("person", "text"),
    [
        ("Lee^Ann", "Spleen, annulus"), ("Kim^Li", "liver"), ("Stern^A", "Sternum"), ("LIVER_001", "Liver"),
        ("PAT_7", "hepatic artery"), ("Anonymous", "anonymous 2"), ("7", "roi 7"), ("Eva^Ida", "vena cava"), ("", "x"),
    ],
)  # fmt: skip
def test_words_of_anatomy_are_nobody(person, text):
    assert not telling(text, words_of([person]))


def refused(out, root, **more):
    """The text of a refusal, after which nothing lies beside or in ``out``."""
    with pytest.raises(SettingError) as told:
        run(root, out, **{"salt": None, **more})
    assert not out.exists()
    assert not out.with_name(f"{out.name}.salt").exists(), "a call that made nothing leaves no salt"
    return str(told.value)


def test_a_name_in_a_structure_is_refused_by_its_place(tmp_path, capsys):
    root = study(tmp_path / "in", 1, names=("Liver", "MustermannTumour"))
    study(root, 2, PatientName="Sorge^Ada")
    for more in ({}, {"structures": ["mustermanntumour"]}, {"structures": ["nobody", "Mustermann 2"]}):
        text = refused(tmp_path / "out", root, **more)
        assert "holds a word of a patient's name or id; rename it or choose others" in text
        assert "there are: Liver (2), Tumour (1)" in text
        place = "number 2 of those named" if "nobody" in more.get("structures", ()) else "number 2 of label object 1 "
        assert place in text
        assert "muster" not in (text + capsys.readouterr().out).casefold()
    assert run(root, tmp_path / "out", structures=["liver"]) == 0


def test_a_name_that_only_the_images_or_another_patient_have(tmp_path):
    root = study(tmp_path / "in", 1, seg=False)
    own = {"PatientID": "", "PatientName": "ANON", "StudyInstanceUID": "1.2.9.1"}
    square = [(-9.0, 20.6, 2.5), (-8.0, 20.6, 2.5), (-8.0, 22.0, 2.5), (-9.0, 22.0, 2.5)]
    write_rtstruct(root / "rt", {"Mustermann_1": [square]}, refers="1.2.3.1", reference="1.2.8.1", **own)
    assert "muster" not in refused(tmp_path / "out", root).casefold()
    write_rtstruct(
        root / "rt", {f"Sorge_{n}": [square] for n in range(17)}, refers="1.2.3.1", reference="1.2.8.1", **own
    )
    study(root, 2, PatientName="Sorge^Ada")
    text = refused(tmp_path / "out", root)
    assert "and 7 more hold a word" in text
    assert "sorge" not in text.casefold()


def test_an_own_id_that_holds_a_name(tmp_path):
    root = study(tmp_path / "in", 1)
    (tmp_path / "ids.csv").write_text("patient_id,id\nPAT2,case1\nPAT1,muster-mann7\n")
    text = refused(tmp_path / "out", root, ids=str(tmp_path / "ids.csv"))
    assert "row 2" in text
    assert "muster" not in text
    (tmp_path / "ids.csv").write_text("patient_id,id\nPAT2,Case\nPAT1,case\n")
    assert "line 3: the id is given to two" in refused(tmp_path / "out", root, ids=str(tmp_path / "ids.csv"))


def test_a_modality_that_is_none_is_not_written(tmp_path):
    root = write_series(tmp_path / "in", Modality="MUSTERMANN")
    assert run(root, tmp_path / "out", unlabelled=True) == 0
    assert cohort(str(tmp_path / "out")).channels == ("image",)


@pytest.mark.parametrize("uids", [True, False])
def test_two_patients_with_equal_uids_are_two_cases(tmp_path, uids):
    more = {} if uids else {"StudyInstanceUID": ""}
    for n, name in enumerate("ab"):
        places = [(-10.0, 20.0, 2.5 * (z + 6 * n)) for z in range(6)]
        write_series(tmp_path / "in" / name, places, array=voxels() + 500 * n, uid="1.2.3" if uids else "",
                     PatientID=f"P{n}", **more)  # fmt: skip
    assert run(tmp_path / "in", tmp_path / "out", unlabelled=True) == 0
    c = cohort(str(tmp_path / "out"))
    assert len({case.patient for case in c.cases}) == 2
    lowest = sorted(int(nib.load(case.images[0]).get_fdata().min()) for case in c.cases)
    assert lowest == [10 * 2 - 1024, 510 * 2 - 1024]
    assert {nib.load(case.images[0]).shape for case in c.cases} == {(4, 5, 6)}


def test_files_without_any_uid_go_by_folder(tmp_path):
    for name in "ab":
        write_series(tmp_path / "in" / name, uid="", StudyInstanceUID="", PatientID="", PatientName="")
    assert run(tmp_path / "in", tmp_path / "out", unlabelled=True) == 0
    assert len(cohort(str(tmp_path / "out")).cases) == 2


def test_one_study_uid_of_two_patients_is_two_studies(tmp_path):
    root = study(study(tmp_path / "in", 1, StudyInstanceUID="1.2.9"), 2, StudyInstanceUID="1.2.9")
    assert run(root, tmp_path / "out") == 0
    assert len({case.patient for case in cohort(str(tmp_path / "out")).cases}) == 2


def test_a_label_of_another_patient_is_not_used(tmp_path):
    root = study(study(tmp_path / "in", 1, seg=False), 2)
    own = {"StudyInstanceUID": "1.2.9.1", "refers": "1.2.3.1", "reference": "1.2.8.1"}
    write_seg(root / "ct1/seg", [ORGAN], PLACES, names=["Liver"], PatientID="OTHER", **own)
    assert run(root, tmp_path / "out") == 1
    assert len(cohort(str(tmp_path / "out")).cases) == 1
    (text,) = report(tmp_path / "out")["problems"]
    assert text.startswith("label object 1 of the tree (SEG) has another PatientID than the series it names (series 1")
    with pytest.raises(DataError, match="another PatientID"):
        run(root / "ct1", tmp_path / "alone")
    write_seg(root / "ct1/seg", [ORGAN], PLACES, names=["Liver"], PatientID="PAT1", **{**own, "reference": "9.9"})
    assert run(root, tmp_path / "out") == 0
    notes = [n for case in report(tmp_path / "out")["cases"] for n in case["notes"] if "frame of reference" in n]
    assert len(notes) == 1, "it names the series by its UID; whoever converts is told to look"


def test_no_case_of_an_earlier_call_is_dropped_unsaid(tmp_path):
    root, other = study(tmp_path / "in", 1), study(tmp_path / "other", 2)
    assert run(root, tmp_path / "out") == 0
    before = (tmp_path / "out/cohort.json").read_bytes()
    with pytest.raises(SettingError, match="1 of its 1 cases are not among those of this call.*overwrite=true"):
        run(other, tmp_path / "out")
    assert (tmp_path / "out/cohort.json").read_bytes() == before
    study(root, 2)
    assert run(root, tmp_path / "out") == 0, "a tree that has grown goes on"
    with pytest.raises(SettingError, match="1 of its 2 cases"):
        run(other, tmp_path / "out")
    assert run(other, tmp_path / "out", overwrite=True) == 0
    assert len(cohort(str(tmp_path / "out")).cases) == 1
    assert "1 of its 2 cases" in report(tmp_path / "out")["notes"][-1]
    assert run(other, tmp_path / "out") == 0


def test_an_id_cannot_become_another_patients(tmp_path):
    root, table = study(study(tmp_path / "in", 1), 2), tmp_path / "ids.csv"
    table.write_text("patient_id,id\nPAT1,one\nPAT2,two\n")
    assert run(root, tmp_path / "out", ids=str(table)) == 0
    table.write_text("patient_id,id\nPAT1,two\nPAT2,one\n")
    with pytest.raises(SettingError, match="2 ids are those of other patients"):
        run(root, tmp_path / "out", ids=str(table))


def test_sources_are_found_by_number_and_by_the_table_of_paths(tmp_path, capsys):
    root = study(study(tmp_path / "Mustermann", 1), 2)
    (root / "ct2/2.dcm").unlink()  # a gap, or the end is gone
    (root / "ct1/torn.dcm").write_bytes((root / "ct1/0.dcm").read_bytes()[:700])
    assert run(root, tmp_path / "out", paths=True) >= 1
    found = report(tmp_path / "out")
    assert "1 DICOM files are damaged" in found["problems"][0]
    assert "series 1 of the tree, 6 files" in found["problems"][0]
    notes = {n for case in found["cases"] for n in case["notes"]}
    assert any("1 file in the folder of its series cannot be read" in n for n in notes)
    table = tmp_path / "out.paths.csv"
    assert table.stat().st_mode & 0o777 == 0o600
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [(r["kind"], r["number"], r["files"], r["path"]) for r in rows] == [
        ("series", "1", "6", str(root / "ct1")),
        ("series", "2", "5", str(root / "ct2")),
        ("label object", "1", "1", str(root / "ct1/seg")),
        ("label object", "2", "1", str(root / "ct2/seg")),
        ("damaged file", "1", "1", str(root / "ct1/torn.dcm")),
    ]
    assert rows[0]["case"] in {case["id"] for case in found["cases"]}
    said = capsys.readouterr().out + json.dumps(found)
    assert "Mustermann/" not in said


def test_without_being_asked_no_path_is_written(tmp_path, capsys):
    root = study(tmp_path / "in", 1)
    (root / "ct1/torn.dcm").write_bytes((root / "ct1/0.dcm").read_bytes()[:700])
    assert run(root, tmp_path / "out") == 1
    assert "paths=true writes where" in capsys.readouterr().out
    assert not (tmp_path / "out.paths.csv").exists()


def test_linked_folders_are_read_once_and_circles_end(tmp_path):
    study(tmp_path / "far/patient", 1)
    root = study(tmp_path / "in", 2)
    (root / "link").symlink_to(tmp_path / "far/patient")
    (root / "again").symlink_to(tmp_path / "far/patient")
    (root / "circle").symlink_to(root)
    (root / "ct2/up").symlink_to(tmp_path)
    assert run(root, tmp_path / "out") == 0
    cases = report(tmp_path / "out")["cases"]
    assert (len(cases), [n for case in cases for n in case["notes"]]) == (2, [])


def test_a_folder_that_may_not_be_read_is_told(tmp_path, monkeypatch):
    import os

    root = study(study(tmp_path / "in", 1), 2)
    listed = os.scandir

    def closed(path):
        if str(path).endswith("ct2"):
            raise PermissionError(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert run(root, tmp_path / "out") == 0
    assert report(tmp_path / "out")["notes"] == ["1 folders may not be read; what they hold is not used"]


def test_a_label_file_fits_by_whole_names_below_root_only(tmp_path, write):
    root = study(tmp_path / "liver/in", 1, seg=False)
    affine = np.diag([-0.7, -0.5, 2.5, 1.0])
    affine[:3, 3] = 10, -20, 0
    (tmp_path / "ids.csv").write_text("patient_id,id\nPAT1,hosp_s1\nPAT2,hosp\n")
    for name in ("hosp", "liver", "in"):
        write(tmp_path / f"labels/{name}.nii.gz", ORGAN.transpose(2, 1, 0).astype(np.uint8), affine)
    more = {"labels": str(tmp_path / "labels"), "ids": str(tmp_path / "ids.csv")}
    with pytest.raises(DataError, match="none of 1 study has a label"):
        run(root, tmp_path / "out", **more)
    write(tmp_path / "labels/hosp_s1.nii.gz", LESION.transpose(2, 1, 0).astype(np.uint8), affine)
    assert run(root, tmp_path / "out", **more) == 0
    (case,) = cohort(str(tmp_path / "out")).cases
    assert np.array_equal(np.asarray(nib.load(case.label).dataobj).transpose(2, 1, 0), LESION)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00salt-of-another-kind", b""])
def test_a_salt_file_that_holds_none_is_one_clear_error(tmp_path, content):
    (tmp_path / "out.salt").write_bytes(content)
    with pytest.raises(DataError, match=r"out\.salt (cannot be read as the salt|holds no salt)"):
        run(study(tmp_path / "in", 1), tmp_path / "out", salt=None)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_a_folder_to_write_to(tmp_path):
    root = study(tmp_path / "in", 1)
    (tmp_path / "f").write_text("x")
    with pytest.raises(SettingError, match="out is a file"):
        run(root, tmp_path / "f")
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(SettingError, match="folder that is read"):
        run(root, tmp_path / "link")
