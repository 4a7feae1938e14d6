"""Every kind of bad input, found in one pass and named."""

import dataclasses
import json
import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from data_prep.msd import msd
from segspeed.data.cohort_checks import cohort_problems
from segspeed.data.geometry import read_volume
from segspeed.data.inspect import Rules, inspect_case, inspect_cases, picture_path
from segspeed.types import Case, CaseFacts, Cohort, LabelTable, Problem

LABELS = LabelTable({"bright": (1,), "dark": (3,)})


@pytest.fixture
def case(tmp_path, write):
    """make(image, label, affine of the label): a case on disk."""

    def make(image=None, label=None, label_affine=None, affine=None):
        rng = np.random.default_rng(0)
        image = rng.normal(size=(8, 9, 10)).astype(np.float32) if image is None else image
        if label is None:
            label = np.zeros((8, 9, 10), np.uint8)
            label[3:6, 3:6, 3:6] = 1
        i = write(tmp_path / "i.nii.gz", image, affine)
        return Case(
            "c1", (i,), write(tmp_path / "l.nii.gz", label, label_affine if label_affine is not None else affine)
        )

    return make


def kinds(case, **options):
    return [
        (p.severity, p.kind)
        for p in inspect_case(case, Rules(LABELS, tolerance_mm=options.get("tolerance_mm", 0.1))).problems
    ]


def test_a_good_case_has_facts_and_no_problem(case):
    facts = inspect_case(case(), Rules(LABELS, tolerance_mm=0.1))
    assert facts.problems == ()
    assert facts.shape == (10, 9, 8)
    assert facts.class_voxels == {"bright": 27, "dark": 0}
    assert len(facts.foreground[0]) == 27
    assert facts.orientation == "RAS"


def shifted(mm):
    affine = np.eye(4)
    affine[2, 3] = mm
    return affine


def nan_image():
    image = np.ones((8, 9, 10), np.float32)
    image[0, 0, 0] = 2
    image[1, 1, 1] = np.nan
    return image


def unknown():
    label = np.zeros((8, 9, 10), np.uint8)
    label[0] = 2
    return label


BAD = {
    "shape": (
        {"label": np.ones((8, 9, 11), np.uint8)},
        ("error", "shape-mismatch"),
        r"\(11, 9, 8\).*11 x 9 x 8 against 10 x 9 x 8 mm",
    ),
    "affine": ({"label_affine": shifted(1.5)}, ("error", "affine-mismatch"), r"1\.50 mm"),
    "nan": ({"image": nan_image()}, ("error", "nan"), "1 voxels"),
    "constant": ({"image": np.full((8, 9, 10), 5.0, np.float32)}, ("warning", "constant-image"), "5"),
    "unknown value": ({"label": unknown()}, ("error", "unknown-label"), r"2 \(90 voxels\)"),
    "fractions": ({"label": np.full((8, 9, 10), 0.5, np.float32)}, ("error", "non-integer-label"), "0.5"),
    "empty": ({"label": np.zeros((8, 9, 10), np.uint8)}, ("warning", "empty-label"), "healthy"),
    "trailing axis": ({"image": np.random.default_rng(0).normal(size=(8, 9, 10, 1))}, ("info", "squeezed"), "trailing"),
    "time series": ({"image": np.zeros((8, 9, 10, 3))}, ("error", "four-dimensional"), "pick one frame"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(case, name):
    parts, expected, text = BAD[name]
    facts = inspect_case(case(**parts), Rules(LABELS, tolerance_mm=0.1))
    assert [(p.severity, p.kind) for p in facts.problems] == [expected]
    assert re.search(text, facts.problems[0].message)
    assert facts.problems[0].case == "c1"


def test_tolerance_is_in_mm(case):
    assert kinds(case(label_affine=shifted(0.05))) == []
    assert kinds(case(label_affine=shifted(1.5)), tolerance_mm=2.0) == []


def test_float_labels_are_fine(case):
    label = np.zeros((8, 9, 10), np.float32)
    label[2] = 3.0
    assert kinds(case(label=label)) == []


def test_missing_and_truncated_files(case):
    good = case()
    assert kinds(dataclasses.replace(good, label=None)) == [("error", "missing-label")]
    assert kinds(dataclasses.replace(good, label=good.label.with_name("gone.nii.gz"))) == [("error", "missing-label")]
    data = good.images[0].read_bytes()
    good.images[0].write_bytes(data[: len(data) // 2])
    assert nib.load(good.images[0]).shape == (8, 9, 10), "the header alone tells nothing"
    assert kinds(good) == [("error", "unreadable")]


def test_a_missing_channel_is_named(case):
    good = case()
    facts = inspect_case(
        dataclasses.replace(good, images=(good.images[0], good.images[0].with_name("t2.nii"))), Rules(LABELS)
    )
    assert [(p.kind, p.file) for p in facts.problems] == [("missing-file", f"{good.images[0].parent.name}/t2.nii")]


def test_image_and_label_swapped_is_refused(case):
    good = case()
    swapped = Case("c1", (good.label,), good.images[0])
    assert [k for s, k in kinds(swapped) if s == "error"] == ["swapped"]
    both = Case("c1", (good.label,), good.label)
    assert [k for s, k in kinds(both) if s == "error"] == ["image-is-label"]


def test_all_problems_of_a_cohort_come_at_once_and_are_remembered(msd_folder, tmp_path):
    folder = msd_folder(
        cases=5,
        change={
            1: lambda i, m: (i, None),
            2: lambda i, m: (i * np.nan, m),
            3: lambda i, m: (i, m[:, :, :-1]),
        },
    )
    cohort = msd(str(folder))
    memo = tmp_path / "memo"
    first = {f.id: f for f in inspect_cases(cohort, Rules(cohort.table), memo=memo, workers=1)}
    again = {f.id: f for f in inspect_cases(cohort, Rules(cohort.table), memo=memo, workers=1)}
    assert first == again
    assert {i: [p.kind for p in f.problems] for i, f in first.items()} == {
        "b_00": [], "b_01": ["missing-label"], "b_02": ["nan"], "b_03": ["shape-mismatch"], "b_04": [],
    }  # fmt: skip
    with open(memo / "inspected.jsonl", "a") as file:
        file.write('["torn by a ki')
    assert {f.id: f for f in inspect_cases(cohort, Rules(cohort.table), memo=memo, workers=1)} == first


def test_a_changed_file_is_read_again(msd_folder, tmp_path, write):
    cohort = msd(str(msd_folder(cases=2)))
    before = {f.id: f for f in inspect_cases(cohort, Rules(cohort.table), memo=tmp_path, workers=1)}
    write(cohort.cases[0].images[0], np.full((20, 18, 16), 3.0, np.float32))
    after = {f.id: f for f in inspect_cases(cohort, Rules(cohort.table), memo=tmp_path, workers=1)}
    assert after["b_00"].digest != before["b_00"].digest
    assert after["b_01"] == before["b_01"]


def test_processes_find_the_same(msd_folder, tmp_path):
    cohort = msd(str(msd_folder(cases=9, change={3: lambda i, m: (i * np.nan, m)})))
    one = {f.id: f for f in inspect_cases(cohort, Rules(cohort.table), memo=None, workers=1)}
    two = {f.id: f for f in inspect_cases(cohort, Rules(cohort.table), memo=None, workers=2)}
    assert one == two


def test_duplicates_over_a_cohort(msd_folder):
    folder = msd_folder(cases=3)
    for kind in ("imagesTr", "labelsTr"):
        (folder / kind / "b_02.nii.gz").write_bytes((folder / kind / "b_00.nii.gz").read_bytes())
    cohort = msd(str(folder))
    facts = [inspect_case(c, Rules(cohort.table)) for c in cohort.cases]
    assert [(p.case, p.kind) for p in cohort_problems(cohort, facts)] == [("b_02", "duplicate"), ("", "mapped-values")]
    twice = Cohort("x", (cohort.cases[0], cohort.cases[0]), cohort.labels, ("MRI",))
    assert ("b_00", "error", "duplicate-id") in [
        (p.case, p.severity, p.kind) for p in cohort_problems(twice, facts[:1])
    ]


def test_a_class_nobody_has_and_a_spacing_far_off_are_warned_about(msd_folder, write):
    folder = msd_folder(cases=4)
    about = json.loads((folder / "dataset.json").read_text())
    about["labels"]["9"] = "never"
    (folder / "dataset.json").write_text(json.dumps(about))
    for kind in ("imagesTr", "labelsTr"):
        path = folder / kind / "b_01.nii.gz"
        write(path, np.asarray(nib.load(path).dataobj), np.diag([0.001, 0.001, 0.001, 1]))
    cohort = msd(str(folder))
    found = cohort_problems(cohort, [inspect_case(c, Rules(cohort.table)) for c in cohort.cases])
    assert [(p.case, p.severity, p.kind) for p in found] == [
        ("", "warning", "absent-class"), ("b_01", "warning", "odd-spacing"), ("", "info", "mapped-values"),
    ]  # fmt: skip
    assert "never" in found[0].message


def test_a_folder_in_the_place_of_a_file(tmp_path):
    (tmp_path / "i.nii.gz").mkdir()
    facts = inspect_case(Case("c", (tmp_path / "i.nii.gz",), None), Rules(LABELS, tolerance_mm=0.1))
    assert "is a folder" in facts.problems[0].message


def test_real_files_get_their_verdict(real_data):
    real = real_data / "real"
    ct = Case("ct5", (real / "ct_5mm_image.nii.gz",), real / "ct_5mm_label.nii.gz")
    facts = inspect_case(ct, Rules(LabelTable({"spleen": (1,)}), ("CT",)))
    assert [(p.severity, p.kind) for p in facts.problems] == [("info", "anisotropic")]
    assert facts.spacing == pytest.approx((5.0, 0.793, 0.793), abs=1e-2)
    rgb = inspect_case(Case("rgb", (real / "rgb.nii.gz",), None), Rules(LabelTable.numbered(1)))
    assert "rgb" in [p.kind for p in rgb.problems]
    many = np.unique(np.asarray(nib.load(real / "ct_3mm_label_many_classes.nii.gz").dataobj)).astype(int)
    names = {f"c{v}": (int(v),) for v in many if v}
    case = Case("ct3", (real / "ct_3mm_image.nii.gz",), real / "ct_3mm_label_many_classes.nii.gz")
    facts = inspect_case(case, Rules(LabelTable(names), ("CT",)))
    assert [(p.severity, p.kind) for p in facts.problems] == [("info", "below-air")]
    mapped = cohort_problems(Cohort("x", (case,), names, ("CT",)), [facts])
    assert [p.kind for p in mapped] == ["mapped-values"]
    assert str(min(many[many > 0])) in mapped[0].message
    lps = read_volume(real / "mr_lps_image.nii.gz")
    assert (lps.orientation, lps.notes) == ("LPS", ())
    assert lps.array.min() < 0
    assert len(names) == 41
    assert all(facts.class_voxels.values())


def found(case, channels=("CT",), **rules):
    return {p.kind: p for p in inspect_case(case, Rules(LABELS, channels, **rules)).problems}


def test_values_that_are_no_hounsfield_units_are_told(case, write):
    good = case()
    tissue = np.random.default_rng(0).normal(1000, 50, (8, 9, 10)).astype(np.float32)  # rescale intercept forgotten
    write(good.images[0], tissue)
    assert found(good)["not-hu"].severity == "warning"
    assert "not-hu" not in found(good, ("MRI",))
    tissue[:3], tissue[0, 0, 0] = -1000, -2000
    write(good.images[0], tissue)
    assert "1 voxels below -1024" in found(good)["below-air"].message
    assert "not-hu" not in found(good)


def test_the_lowest_int16_is_told_as_padding_where_it_disturbs(case, write):
    good = case()
    image = np.random.default_rng(0).integers(0, 500, (8, 9, 10)).astype(np.int16)
    image[0] = -32768
    write(good.images[0], image)
    assert "90 voxels are -32768" in found(good, ("MRI",))["padding"].message
    facts = inspect_case(good, Rules(LABELS, ("MRI",)))
    assert facts.crop_shape == (10, 9, 7), "(D, H, W): padding is no content"


def test_a_label_on_another_grid_is_resampled_only_when_asked(case):
    plain = inspect_case(case(), Rules(LABELS))
    moved = case(label_affine=shifted(2.0))
    assert found(moved)["affine-mismatch"].severity == "error"
    assert "data.resample_labels" in found(moved)["affine-mismatch"].message
    taken = inspect_case(moved, Rules(LABELS, resample_labels=True))
    assert [(p.severity, p.kind) for p in taken.problems] == [("warning", "resampled-label")]
    assert 0 < sum(taken.class_voxels.values()) <= sum(plain.class_voxels.values())


def test_shear_is_an_error_whose_case_is_read_all_the_same(case, write):
    good = case()
    affine = np.eye(4)
    affine[0, 2] = 0.1
    for path in (good.images[0], good.label):
        write(path, np.asarray(nib.load(path).dataobj), affine)
    facts = inspect_case(good, Rules(LABELS))
    assert [(p.severity, p.kind) for p in facts.problems] == [("error", "shear")]
    assert facts.shape == (10, 9, 8), "data.accept=[shear] lets it in, so its facts are needed"


def test_the_same_voxels_under_another_header_are_a_copy(msd_folder, write):
    folder = msd_folder(cases=3)
    source = nib.load(folder / "imagesTr/b_00.nii.gz")
    write(folder / "imagesTr/b_02.nii.gz", np.asarray(source.dataobj).astype(np.float64), source.affine)
    cohort = msd(str(folder))
    facts = [inspect_case(c, Rules(cohort.table)) for c in cohort.cases]
    assert facts[0].digest != facts[2].digest
    assert ("b_02", "duplicate") in [(p.case, p.kind) for p in cohort_problems(cohort, facts)]


def test_ignored_voxels_are_no_foreground(case):
    facts = inspect_case(case(), Rules(LabelTable({"bright": (1,)}, ignore=(3,))))
    whole = inspect_case(case(), Rules(LABELS))
    assert facts.class_voxels == {"bright": whole.class_voxels["bright"]}
    assert len(facts.foreground[0]) == facts.class_voxels["bright"]


def test_pictures_are_made_while_reading(case, tmp_path):
    good = case()
    facts = inspect_case(good, Rules(LABELS, pictures=tmp_path / "p"))
    assert picture_path(tmp_path / "p", facts.digest).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    facts = inspect_case(good, Rules(LABELS, pictures=tmp_path / "file"))
    assert [p.kind for p in facts.problems] == ["no-picture"], "a picture that cannot be written fails no case"


def test_a_label_that_belongs_elsewhere_is_no_empty_one(case):
    away = case(label_affine=shifted(500.0))
    assert found(away, resample_labels=True)["label-elsewhere"].severity == "error"
    partly = case(label_affine=shifted(5.0))  # planes 3 to 5 come to 8 to 10 of 10
    assert found(partly, resample_labels=True)["resampled-label"].message.endswith(
        "33.3% of its foreground lies outside the image"
    )


def test_another_order_of_axes_in_the_label_file_is_the_same_grid(case, write):
    good = case()
    affine = np.diag([-1, 1, 1, 1.0])
    affine[0, 3] = 7.0  # LAS on the same places
    write(good.label, np.asarray(nib.load(good.label).dataobj)[::-1], affine)
    facts = inspect_case(good, Rules(LABELS))
    assert facts.problems == ()
    assert facts.class_voxels["bright"] == 27


def test_a_checksum_that_does_not_fit_is_seen(case):
    good = case()
    data = bytearray(good.label.read_bytes())
    data[-6] ^= 1  # of the eight bytes at the end the first four are the CRC
    good.label.write_bytes(data)
    assert "CRC" in found(good)["unreadable"].message
    good.label.write_bytes(data[:-8])
    assert "unreadable" in found(good)


def test_a_header_that_claims_more_than_its_file_can_hold_is_refused_unread(case):
    import gzip

    good = case()
    raw = bytearray(gzip.decompress(good.images[0].read_bytes()))
    raw[42:48] = np.array([2000, 2000, 400], "<i2").tobytes()
    good.images[0].write_bytes(gzip.compress(bytes(raw)))
    assert "6400 MB of voxels, more than" in found(good)["unreadable"].message


def test_hounsfield_units_under_another_name_are_noticed(case, write):
    good = case()
    image = np.random.default_rng(0).normal(40, 20, (8, 9, 10)).astype(np.float32)
    image[:4] = -1000
    write(good.images[0], image)
    assert "data.channels=[CT]" in found(good, ("image_0",))["maybe-ct"].message
    assert "maybe-ct" not in found(good, ("CT",))


def several(cases, voxels=None):
    cohort = Cohort("x", tuple(Case(i, (Path("x"),), patient=p) for i, p in cases), {"a": (1,), "b": (255,)}, ("MRI",))
    voxels = voxels or [(5, 5)] * len(cases)
    facts = [
        CaseFacts(i, i, (4, 4, 4), (1, 1, 1), class_voxels={"a": a, "b": b})
        for (i, _), (a, b) in zip(cases, voxels, strict=True)
    ]
    return [p.kind for p in cohort_problems(cohort, facts) if p.kind.startswith("maybe")]


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (["p08_a", "p08_b", "p09", "p10"], True),
        (["p08-1", "p08-2", "q-1", "r-1"], True),
        ([f"hippocampus_{n:03d}" for n in range(9)], False),
        (["a_1", "a_2", "b_1", "b_2"], False),
    ],
)
def test_ids_that_speak_of_one_patient(ids, told):
    assert ("maybe-one-patient" in several([(i, "") for i in ids])) is told
    assert "maybe-one-patient" not in several([(i, i[:3] + "x") for i in ids]), "somebody has told the patients"


def test_two_classes_that_never_meet():
    ids = [(f"c{n}x", "") for n in range(4)]
    assert several(ids, [(5, 0), (0, 5), (5, 0), (0, 5)]) == ["maybe-one-class"]
    assert several(ids, [(5, 0), (0, 5), (5, 0), (0, 0)]) == []
    assert several(ids, [(5, 0), (0, 5), (5, 0), (5, 5)]) == []


def test_copies_of_one_patient_are_no_warning(msd_folder):
    folder = msd_folder(cases=3)
    (folder / "imagesTr/b_02.nii.gz").write_bytes((folder / "imagesTr/b_00.nii.gz").read_bytes())
    cohort = msd(str(folder))
    facts = [inspect_case(c, Rules(cohort.table)) for c in cohort.cases]
    one = dataclasses.replace(cohort, cases=tuple(dataclasses.replace(c, patient="p") for c in cohort.cases))
    assert "duplicate" in [p.kind for p in cohort_problems(cohort, facts)]
    assert "duplicate" not in [p.kind for p in cohort_problems(one, facts)]


def test_what_a_source_found_wrong_is_in_the_report():
    wrong = Problem("z", "labels/z.nii", "error", "label-without-image", "no image")
    assert cohort_problems(Cohort("x", (), {"a": (1,)}, ("CT",), problems=(wrong,)), [])[0] == wrong


@pytest.mark.parametrize("line", [b'["k", {"id": 3}]', b"\xff\xfe\xff", b'[["a"], 1]', b"[1, 2, 3]"])
def test_a_damaged_memo_is_no_fault(msd_folder, tmp_path, line):
    cohort = msd(str(msd_folder(cases=2)))
    rules = Rules(cohort.table)
    first = list(inspect_cases(cohort, rules, memo=tmp_path, workers=1))
    path = tmp_path / "inspected.jsonl"
    known = [json.loads(row)[0] for row in path.read_text().splitlines() if row]
    path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps([known[0], {"id": 3}]).encode() + b"\n")
    assert sorted(f.id for f in inspect_cases(cohort, rules, memo=tmp_path, workers=1)) == sorted(f.id for f in first)
