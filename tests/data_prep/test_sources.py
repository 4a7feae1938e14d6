import json

import numpy as np
import pytest

from data_prep.files import label_table
from data_prep.msd import msd
from data_prep.nnunet import nnunet
from data_prep.pairs import pairs
from segspeed.types import DataError, Split


def test_decathlon(msd_folder):
    folder = msd_folder(cases=3)
    c = msd(str(folder))
    assert (c.name, c.channels) == ("balls", ("MRI",))
    assert c.labels == {"bright": (1,), "dark": (3,)}
    assert [x.id for x in c.cases] == ["b_00", "b_01", "b_02"]
    assert c.cases[1].label == folder / "labelsTr/b_01.nii.gz"
    (folder / "splits.json").write_text(json.dumps([{"train": ["b_00", "b_01"], "val": ["b_02"]}]))
    assert msd(str(folder)).splits == (Split(("b_00", "b_01"), ("b_02",)),)


def test_a_root_that_does_not_exist(tmp_path):
    for source in (msd, nnunet):
        with pytest.raises(DataError, match=r"does not exist.*nowhere"):
            source(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="does not exist"):
        pairs(root=str(tmp_path / "nowhere"), images="*", labels="*")


def test_a_folder_of_another_layout_says_what_to_do(tmp_path, msd_folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="data=pairs"):
        msd(str(tmp_path / "empty"))
    msd_folder(name="inner", root=tmp_path / "outer")
    with pytest.raises(DataError, match=r"Did you mean data\.root=.*inner"):
        msd(str(tmp_path / "outer"))
    path = tmp_path / "empty" / "dataset.json"
    path.write_text("{broken")
    with pytest.raises(DataError, match="JSON"):
        msd(str(tmp_path / "empty"))
    path.write_text(json.dumps({"channel_names": {"0": "CT"}, "labels": {"background": 0, "a": 1}}))
    with pytest.raises(DataError, match="data=nnunet"):
        msd(str(tmp_path / "empty"))
    path.write_text(
        json.dumps({"modality": {"0": "T1", "1": "T2"}, "labels": {"1": "a"}, "training": [{"image": "x.nii"}]})
    )
    both = msd(str(tmp_path / "empty"))
    assert both.channels == ("T1", "T2")
    assert both.cases[0].stacked, "the Decathlon keeps modalities along the fourth axis of one file"
    assert both.cases[0].images == (tmp_path / "empty/x.nii",) * 2


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"0": "background", "1": "liver", "7": "lesion"}, {"liver": (1,), "lesion": (7,)}),
        ({"background": 0, "liver": 1, "lesion": 7}, {"liver": (1,), "lesion": (7,)}),
        ({"liver": [1, 2]}, {"liver": (1, 2)}),
        ({"0": "air", "1": "organ", "2": "organ"}, {"organ": (1, 2)}),
        ({"0": "background", "255": "mask"}, {"mask": (255,)}),
    ],
)
def test_class_values(labels, expected):
    assert label_table(labels, "x").classes == expected


def test_ignored_values_and_regions_as_nnunet_writes_them():
    table = label_table({"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3, "ignore": 4}, "x")
    assert table.ignore == (4,)
    assert table.targets == ("whole", "core", "enhancing")
    assert [table.values(t) for t in table.targets] == [(1, 2, 3), (2, 3), (3,)]
    assert list(table.classes.values()) == [(1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ({"0": "background"}, "no class"),
        ({"a": "b"}, "whole numbers"),
        ({"a": 1.5}, "whole numbers"),
        ({}, "mapping"),
        ({"background": 0, "a": 1, "ignore": 1}, "to ignore and to a class"),
        ({"background": 0, "ignore": 1}, "no class"),
    ],
)
def test_class_values_that_make_no_sense(labels, text):
    with pytest.raises(DataError, match=text):
        label_table(labels, "x")


@pytest.fixture
def nnunet_folder(tmp_path, write):
    folder = tmp_path / "Dataset001_Two"
    v = np.random.default_rng(0).normal(size=(4, 4, 4)).astype(np.float32)
    for case in ("a_b_01", "a_b_02", "x.001"):
        for channel in range(2):
            write(folder / f"imagesTr/{case}_{channel:04d}.nii.gz", v)
        write(folder / f"labelsTr/{case}.nii.gz", np.ones((4, 4, 4), np.uint8))
    about = {"channel_names": {"0": "CT", "1": "PET"}, "labels": {"background": 0, "a": 1}, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(about))
    return folder


def test_nnunet_channels_and_ids_with_underscores_and_dots(nnunet_folder):
    (nnunet_folder / "imagesTr/._a_b_01_0000.nii.gz").write_bytes(b"AppleDouble")
    c = nnunet(str(nnunet_folder))
    assert c.channels == ("CT", "PET")
    assert [x.id for x in c.cases] == ["a_b_01", "a_b_02", "x.001"]
    assert [p.name for p in c.cases[2].images] == ["x.001_0000.nii.gz", "x.001_0001.nii.gz"]
    (nnunet_folder / "splits_final.json").write_text(json.dumps([{"train": ["a_b_01"], "val": ["x.001"]}]))
    assert nnunet(str(nnunet_folder)).splits[0].val == ("x.001",)


def test_nnunet_missing_channel_is_left_to_the_check_with_its_name(nnunet_folder):
    (nnunet_folder / "imagesTr/a_b_02_0001.nii.gz").unlink()
    case = nnunet(str(nnunet_folder)).case("a_b_02")
    assert case.images[1].name == "a_b_02_0001.nii.gz"
    assert not case.images[1].exists()


def test_nnunet_names_everything_that_does_not_fit(nnunet_folder, write):
    images = nnunet_folder / "imagesTr"
    (images / "a_b_01_0000.nii.gz").rename(images / "a_b_01.nii.gz")
    (images / "a_b_01_0001.nii.gz").rename(images / "new_0002.nii.gz")
    with pytest.raises(DataError) as error:
        nnunet(str(nnunet_folder))
    for part in ("without a channel number", "a_b_01.nii.gz", "labels without an image: a_b_01", "new (channel 2)"):
        assert part in str(error.value)


@pytest.fixture
def files(tmp_path, write):
    """make(names): small volumes; even values of labels where the name says seg."""

    def make(*names):
        for n, name in enumerate(names):
            v = (
                np.full((3, 3, 3), 5 * (n % 2), np.uint8)
                if "seg" in name
                else np.random.default_rng(n).normal(size=(3, 3, 3))
            )
            if "seg" in name:
                v[0] = 2
            write(tmp_path / name, v)
        return tmp_path

    return make


def test_globs_join_by_what_the_wildcards_stand_for(files):
    images = ("i/p 1_ct.nii.gz", "i/p10_ct.NII.GZ", "i/p2.x_ct.nii")
    root = files(*images, "l/p10_seg.nii.gz", "l/p2.x_seg.nii.gz", "l/p 1_seg.nii.gz")
    c = pairs(root=str(root), images="i/*_ct.[nN]*", labels="l/*_seg.nii.gz")
    assert {x.id: (x.images[0].name, x.label.name) for x in c.cases} == {
        "p 1": ("p 1_ct.nii.gz", "p 1_seg.nii.gz"),
        "p10": ("p10_ct.NII.GZ", "p10_seg.nii.gz"),
        "p2.x": ("p2.x_ct.nii", "p2.x_seg.nii.gz"),
    }


def test_a_star_for_whole_names_leaves_the_ending_out(files):
    root = files("image/a.nii", "image/b.nii", "seg/a.nii.gz", "seg/b.nii.gz")
    assert [x.id for x in pairs(root=str(root), images="image/*", labels="seg/*").cases] == ["a", "b"]


def test_globs_over_folders_with_brackets_in_the_path(files):
    root = files(
        "study [1] ü=/p1/t1.nii.gz",
        "study [1] ü=/p1/seg.nii.gz",
        "study [1] ü=/p2/t1.nii.gz",
        "study [1] ü=/p2/seg.nii.gz",
    )
    c = pairs(images=f"{root}/study [1] ü=/*/t1.nii.gz", labels=f"{root}/study [1] ü=/*/seg.nii.gz")
    assert [x.id for x in c.cases] == ["p1", "p2"]
    assert c.labels == {"class_2": (2,), "class_5": (5,)}, "every value found becomes a class"
    deep = pairs(images=f"{root}/**/t1.nii.gz", labels=f"{root}/**/seg.nii.gz")
    assert len(deep.cases) == 2


def test_globs_without_their_partner_are_cases_and_problems(files):
    root = files("1_ct.nii", "2_ct.nii", "10_ct.nii", "1_seg.nii", "10_seg.nii", "3_seg.nii")
    c = pairs(root=str(root), images="*_ct.nii", labels="*_seg.nii")
    assert {x.id: x.label and x.label.name for x in c.cases} == {"1": "1_seg.nii", "10": "10_seg.nii", "2": None}
    (problem,) = c.problems
    assert (problem.case, problem.severity, problem.kind) == ("3", "error", "label-without-image")
    assert problem.file.endswith("/3_seg.nii")
    with pytest.raises(DataError, match=r"data\.images=z\* matches no"):
        pairs(root=str(root), images="z*", labels="*_seg.nii")


def test_globs_that_join_nothing_name_both_folders(files):
    root = files("i/1_ct.nii", "i/2_ct.nii", "l/a_seg.nii", "l/b_seg.nii", "one/x_ct.nii", "two/y_seg.nii")
    with pytest.raises(
        DataError, match=r"2 images without a label in .*/i: 1, 2; 2 labels without an image in .*/l: a, b"
    ):
        pairs(root=str(root), images="i/*_ct.nii", labels="l/*_seg.nii")
    with pytest.raises(DataError, match="no image has its label"):
        pairs(root=str(root), images="one/*_ct.nii", labels="two/*_seg.nii")
    (case,) = pairs(root=str(root), images="one/x_ct.nii", labels="two/*_seg.nii", class_names={"a": 2}).cases
    assert (case.id, case.label.name) == ("y", "y_seg.nii"), "one file was named, so no text has to agree"


def test_classes_are_guessed_from_the_labels_that_are_some(files, write):
    root = files("1_ct.nii", "2_ct.nii", "3_ct.nii", "4_ct.nii", "1_seg.nii")
    rng = np.random.default_rng(0)
    write(root / "2_seg.nii", rng.normal(0, 500, (12, 12, 12)))
    (root / "3_seg.nii").write_bytes(b"no volume")
    write(root / "4_seg.nii", np.full((3, 3, 3), 77, np.uint8))
    given = {"root": str(root), "images": "*_ct.nii", "labels": "*_seg.nii"}
    assert pairs(**given).labels == {"class_2": (2,), "class_77": (77,)}
    assert pairs(**given, exclude=["4"]).labels == {"class_2": (2,)}, "an excluded case has no say"
    assert len(pairs(**given, exclude=["4"]).cases) == 4, "leaving out is not the source's part"
    with pytest.raises(DataError, match=r"1 labels cannot be read.*3_seg.*1 labels hold more than 200.*2_seg"):
        pairs(**given, exclude=["1", "4"])


def test_an_image_as_its_own_label_does_not_hide_the_others(files):
    root = files("a.nii", "b.nii", "b_seg.nii")
    (root / "c.csv").write_text("image,label\na.nii,a.nii\nb.nii,b_seg.nii\n")
    c = pairs(csv=str(root / "c.csv"))
    assert [(p.case, p.kind) for p in c.problems] == [("a", "image-is-label")]
    assert c.labels == {"class_2": (2,)}


def test_csv(files):
    root = files("a.nii.gz", "b.nii.gz", "a_seg.nii.gz", "b_seg.nii.gz")
    table = root / "cases.csv"
    table.write_text("\ufeffid;image;label;patient;site\nx;a.nii.gz;a_seg.nii.gz;P1;north\n;b.nii.gz;b_seg.nii.gz;;\n")
    c = pairs(csv=str(table), class_names={"organ": [2, 5]}, channels=["CT"])
    assert [(x.id, x.patient, x.site) for x in c.cases] == [("x", "P1", "north"), ("b", "b", "")]
    assert c.cases[0].images == (root / "a.nii.gz",)
    assert c.labels == {"organ": (2, 5)}
    assert c.channels == ("CT",)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_csv_of_any_program(mark, end, files):
    root = files("a.nii", "a_seg.nii")
    rows = [["image", "label"], ["a.nii", "a_seg.nii"]]
    (root / "c.csv").write_bytes(end.join(mark.join(row) for row in rows).encode())
    assert pairs(csv=str(root / "c.csv")).cases[0].label == root / "a_seg.nii"


def test_csv_with_channels(files):
    root = files("a.nii.gz", "b.nii.gz", "a_seg.nii.gz")
    (root / "c.csv").write_text("image_0,image_1,label\na.nii.gz,b.nii.gz,a_seg.nii.gz\n")
    c = pairs(csv=str(root / "c.csv"))
    assert [p.name for p in c.cases[0].images] == ["a.nii.gz", "b.nii.gz"]
    assert c.channels == ("image_0", "image_1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,label\nx,y\n", "column image"),
        ("image,labl\nx,y\n", "labl"),
        ("image,image_0\nx,y\n", "image"),
        ("image,label\n,y\nx,\n,z\n", "line 2: empty image; line 4"),
        ("", "column image"),
    ],
)
def test_csv_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        pairs(csv=str(tmp_path / "c.csv"))


def test_one_of_two_ways(tmp_path):
    for arguments in ({}, {"images": "*", "csv": "x.csv"}):
        with pytest.raises(DataError, match="one of the two ways"):
            pairs(**arguments)
    with pytest.raises(DataError, match=r"data\.csv"):
        pairs(csv=str(tmp_path / "gone.csv"))
    for empty in ({"images": "", "labels": "*"}, {"images": "*", "labels": " "}, {"csv": ""}):
        with pytest.raises(DataError, match=r"data\.\w+ is empty|matches no"):
            pairs(root=str(tmp_path), **empty)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("image,site\na.nii,Köln\n".encode("cp1252"), r"c\.csv, line 2: .*Windows-1252.*CSV UTF-8"),
        ("image\na.nii\n".encode("utf-16"), "UTF-16"),
        ("image,label\na.nii,b.nii\n".encode("utf-16-le"), "UTF-16"),
        (b"PK\x03\x04\x00\x00", "Excel workbook"),
        (b'image,label\na.nii,b.nii\n"c.nii,d.nii\n', r"line 3: .*quotation mark"),
        (b'image,label\n"a".nii,b.nii\n', r"line 2: .*quotation mark"),
        (b"image,label\n" + b"a" * 200_000 + b",b.nii\n", r"line 2: field larger"),
        (b"image,label\n", "no row below"),
        (b"image_" + b"1" * 5000 + b"\na.nii\n", "needs a column image"),
    ],
)
def test_csv_files_that_are_none(tmp_path, raw, text):
    (tmp_path / "c.csv").write_bytes(raw)
    with pytest.raises(DataError, match=text):
        pairs(csv=str(tmp_path / "c.csv"))


def test_csv_cells_that_are_no_paths_do_not_stop_the_others(files):
    root = files("a.nii", "a_seg.nii")
    long = "x" * 300
    (root / "c.csv").write_text(
        f"image,label\na.nii,a_seg.nii\n\n{long}.nii,a_seg.nii\nn\0l.nii,a_seg.nii\n~none/b.nii,\n"
    )
    c = pairs(csv=str(root / "c.csv"))
    assert [x.id for x in c.cases] == ["a", "n\u2400l", "b"]
    assert [(p.case, p.kind) for p in c.problems] == [("x" * 100, "path-too-long")]
    assert "line 4 of c.csv" in c.problems[0].message
    assert c.cases[2].images[0].name == "b.nii"


def test_csv_cells_find_names_in_their_other_spelling(files):
    root = files("u\u0308.nii", "seg_e\u0301.nii")
    (root / "c.csv").write_text("image,label\n\u00fc.nii,seg_\u00e9.nii\n", encoding="utf-8")
    (case,) = pairs(csv=str(root / "c.csv")).cases
    assert case.images[0].exists()
    assert case.label.exists()


def test_images_given_as_labels_are_refused(files, write, tmp_path):
    root = files("1_ct.nii")
    write(root / "1_big.nii", np.random.default_rng(0).normal(0, 500, (12, 12, 12)))
    with pytest.raises(DataError, match="no label maps"):
        pairs(root=str(root), images="1_ct.nii", labels="1_big.nii")


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ({"liver": [0, 1]}, "background"),
        ({"1": "2", "2": "1"}, "either way round"),
        ({"a": 1e999}, "whole numbers"),
        ({"a": "9" * 400}, "whole numbers"),
        ({"9" * 400: "a"}, "whole numbers"),
    ],
)
def test_class_values_that_could_mean_something_else(labels, text):
    with pytest.raises(DataError, match=text):
        label_table(labels, "x")


def test_a_class_may_be_called_like_a_number_word():
    assert label_table({"0": "background", "1": "inf", "2": "nan"}, "x").classes == {"inf": (1,), "nan": (2,)}


@pytest.mark.parametrize("modality", ["CT", ["CT"], {"0": "CT"}])
def test_msd_modality_in_every_form(msd_folder, modality):
    root = msd_folder()
    about = json.loads((root / "dataset.json").read_text()) | {"modality": modality}
    (root / "dataset.json").write_text(json.dumps(about))
    assert msd(str(root)).channels == ("CT",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,label\na.nii,b.nii,c.nii\n", "line 2: more cells"),
        ("image,label,label\na.nii,b.nii,c.nii\n", "twice: label"),
        ("image,label\na.nii,a.nii\n", "the same file"),
    ],
)
def test_csv_rows_that_do_not_fit_their_header(tmp_path, text, message):
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        pairs(csv=str(tmp_path / "c.csv"))
