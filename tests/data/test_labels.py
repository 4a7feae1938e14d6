import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segspeed.data.geometry import Volume, VolumeError, read_volume
from segspeed.data.labels import choose_labels, regions_of, to_class_indices, to_file_values
from segspeed.types import DataError, LabelTable, SettingError

CLASSES = {"a": (1,), "b": (3, 4), "c": (255,)}


def indices(path, labels=None):
    return to_class_indices(read_volume(path, scaled=False), LabelTable(labels or CLASSES))


def test_values_become_indices_and_merged_ones_share_one(tmp_path, write):
    path = write(tmp_path / "x.nii.gz", np.array([0, 1, 3, 4, 255], np.uint8).reshape(5, 1, 1))
    assert indices(path).ravel().tolist() == [0, 1, 2, 2, 3]
    assert indices(path).dtype == np.uint8


def test_floats_in_an_integer_file_are_rounded_right(tmp_path):
    """nibabel quantises floats to the slope it chooses: 3 comes back as 2.99995, which a cast would make 2."""
    header = nib.Nifti1Header()
    header.set_data_dtype(np.int16)
    values = np.array([0, 1, 2, 3, 7], float).reshape(5, 1, 1)
    nib.save(nib.Nifti1Image(values, np.eye(4), header), tmp_path / "x.nii.gz")
    read = read_volume(tmp_path / "x.nii.gz", scaled=False).array.ravel()
    assert read.astype(int).tolist() != [0, 1, 2, 3, 7], "the trap this test is about is gone"
    labels = {n: (v,) for n, v in zip("abcd", (1, 2, 3, 7), strict=True)}
    assert indices(tmp_path / "x.nii.gz", labels).ravel().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.uint16, np.int16])
def test_every_type_of_whole_numbers_is_taken(tmp_path, kind):
    image = nib.Nifti1Image(np.array([0, 1, 3], kind).reshape(3, 1, 1), np.eye(4), dtype=kind)
    nib.save(image, tmp_path / "x.nii")
    assert indices(tmp_path / "x.nii").ravel().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [(0.4, "non-integer-label", "0.4 away"), (np.nan, "nan", "NaN"), (9, "unknown-label", r"9 \(2 voxels\).*a")],
)
def test_bad_values_are_named(tmp_path, write, value, kind, text):
    path = write(tmp_path / "x.nii", np.array([0, 1, value, value], np.float32).reshape(4, 1, 1))
    with pytest.raises(VolumeError, match=text) as error:
        indices(path)
    assert error.value.kind == kind


@given(st.lists(st.integers(-300, 70000).filter(bool), min_size=1, max_size=6, unique=True))
def test_indices_go_back_to_the_users_values_in_the_smallest_type(values):
    labels = {f"c{i}": (v,) for i, v in enumerate(values)}
    out = to_file_values(np.arange(len(values) + 1), labels)
    assert out.tolist() == [0, *values]
    smaller = [np.int8, np.int16] if min(values) < 0 else [np.uint8, np.uint16]
    low, high = min(0, *values), max(values)
    for kind in smaller:
        if np.dtype(kind).itemsize < out.dtype.itemsize:
            assert not (np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)


@pytest.mark.parametrize(
    "kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint64, np.float32, ">i2", ">f8"]
)
def test_every_type_and_byte_order_gives_the_same_indices(tmp_path, kind):
    wide = np.dtype(kind).itemsize > 1
    labels = {"low": (-100,) if np.dtype(kind).kind != "u" else (5,), "high": (100,), "far": (30000 if wide else 101,)}
    values = np.array([0, labels["low"][0], 100, labels["far"][0]]).astype(kind).reshape(1, 2, 2)
    volume = Volume(values if np.dtype(kind).isnative else values.astype(np.dtype(kind).newbyteorder("=")), np.eye(4),
                    (2, 2, 1), np.zeros((3, 2)), (1.0, 1.0, 1.0))  # fmt: skip
    assert to_class_indices(volume, LabelTable(labels)).ravel().tolist() == [0, 1, 2, 3]


def test_values_too_far_apart_for_a_table():
    values = np.array([0, 7, 2**40], np.int64).reshape(1, 1, 3)
    volume = Volume(values, np.eye(4), (3, 1, 1), np.zeros((3, 2)), (1.0, 1.0, 1.0))
    assert to_class_indices(volume, LabelTable({"a": (7,), "b": (2**40,)})).ravel().tolist() == [0, 1, 2]
    with pytest.raises(VolumeError, match=r"7 \(1 voxels\)"):
        to_class_indices(volume, LabelTable({"b": (2**40,)}))


NONE = {"classes": {}, "background": (), "ignore": (), "regions": {}}
BRAIN = LabelTable({"edema": (1,), "core": (2,), "enhancing": (4,), "vessel": (9,)})


def chosen(**wanted):
    return choose_labels(BRAIN, **{**NONE, **wanted})


def test_classes_are_renamed_merged_dropped_and_ignored():
    table = chosen(
        classes={"tumour": ("core", "enhancing"), "swelling": "edema"}, background=("vessel",), ignore=(255,)
    )
    assert dict(table.classes) == {"swelling": (1,), "tumour": (2, 4)}, "in the order of the data"
    assert (table.background, table.ignore, table.ignore_index) == ((9,), (255,), 3)
    volume = Volume(
        np.array([0, 1, 2, 4, 9, 255], np.int16).reshape(1, 1, 6), np.eye(4), (6, 1, 1), np.zeros((3, 2)), (1, 1, 1)
    )
    assert to_class_indices(volume, table).ravel().tolist() == [0, 1, 2, 2, 0, 3]
    assert dict(chosen(classes={"x": 9}).classes)["x"] == (9,), "by value, too"
    assert chosen() == BRAIN


def test_regions_are_unions_of_classes():
    wanted = {"whole": ("edema", "core", "enhancing"), "core": ("core", 4), "rim": 4}
    table = chosen(regions=wanted, ignore=("vessel",))
    assert (table.targets, table.members, table.outputs) == (("whole", "core", "rim"), ((1, 2, 3), (2, 3), (3,)), 3)
    assert table.values("core") == (2, 4)
    assert BRAIN.outputs == 5, "four classes and the background"


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"classes": {"x": "nothing"}}, "names the class 'nothing'.*it has edema"),
        ({"classes": {"x": "core", "y": "core"}}, "value 2 is claimed twice"),
        ({"classes": {"x": "core"}, "ignore": ("core",)}, "value 2 is claimed twice"),
        ({"classes": {"edema": "core"}}, "also the name of a class"),
        ({"background": ("edema", "core", "enhancing", "vessel")}, "leave no class"),
        ({"regions": {"whole": ("edema", "core")}}, "leaves enhancing, vessel in no region"),
        ({"regions": {"whole": "tumor"}}, "names 'tumor', which is no class"),
        ({"regions": {"whole": ()}}, "names 'nothing'"),
        (
            {"regions": {"a": ("edema", "core", "enhancing", "vessel"), "b": "edema"}},
            "core and enhancing lie in the same regions",
        ),
        ({"regions": {"a": "edema", "b": ("core", "enhancing", "vessel"), "c": 1}}, "a and c hold the same classes"),
        ({"classes": {"x": ()}}, "names nothing"),
        ({"ignore": ("core",), "background": (2,)}, "value 2 is claimed twice"),
        ({"regions": {f"r{n}": ("edema", "core", "enhancing", "vessel") for n in range(17)}}, "at most 16"),
    ],
)
def test_choices_that_cannot_be_meant(wanted, text):
    with pytest.raises(SettingError, match=text):
        chosen(**wanted)


def test_structures_that_share_values_become_classes_and_regions():
    classes, regions = regions_of({"whole": (1, 2, 3), "core": (2, 3), "other": (7,)})
    assert classes == {"whole only": (1,), "whole + core": (2, 3), "other only": (7,)}
    assert regions == {"whole": ("whole only", "whole + core"), "core": ("whole + core",), "other": ("other only",)}
    assert regions_of({"a": (1,), "b": (2, 3)}) == ({"a": (1,), "b": (2, 3)}, {})
    with pytest.raises(SettingError, match="cannot be told from combinations"):
        regions_of({"a": (1,), "b + c": (1,), "a + b": (2,), "c": (2,)})
    kept = choose_labels(LabelTable(classes, regions=regions), **{**NONE, "background": (7,)})
    assert kept.targets == ("whole", "core"), "a region whose values are dropped goes with them"


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (LabelTable({"a": (1,), "b": (1,)}), "value 1 to a and to b"),
        (LabelTable({"a": (1,)}, ignore=(1,)), "value 1 to a and to ignore"),
        (LabelTable({"a": (1,)}, background=(1,)), "value 1 to a and to background"),
        (LabelTable({"a": ()}), "class a without a value"),
        (LabelTable({"a": (2**32,)}), "at most 32 bits"),
        (LabelTable({"a": (1,)}, regions={"r": ("b",)}), "name the class b"),
    ],
)
def test_a_source_that_contradicts_itself_is_refused(table, text):
    with pytest.raises(DataError, match=text):
        choose_labels(table, **NONE)


def test_values_beyond_everything_are_unknown(tmp_path):
    volume = Volume(np.full((1, 1, 2), 2**63 + 5, np.uint64), np.eye(4), (2, 1, 1), np.zeros((3, 2)), (1.0, 1.0, 1.0))
    with pytest.raises(VolumeError, match="no class can have such a value"):
        to_class_indices(volume, LabelTable.numbered(1))
