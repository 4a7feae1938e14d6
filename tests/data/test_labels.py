import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segspeed.data.geometry import Volume, VolumeError, read_volume
from segspeed.data.labels import to_class_indices, to_file_values

CLASSES = {"a": (1,), "b": (3, 4), "c": (255,)}


def indices(path, labels=None):
    return to_class_indices(read_volume(path, scaled=False), labels or CLASSES)


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
    assert to_class_indices(volume, labels).ravel().tolist() == [0, 1, 2, 3]


def test_values_too_far_apart_for_a_table():
    values = np.array([0, 7, 2**40], np.int64).reshape(1, 1, 3)
    volume = Volume(values, np.eye(4), (3, 1, 1), np.zeros((3, 2)), (1.0, 1.0, 1.0))
    assert to_class_indices(volume, {"a": (7,), "b": (2**40,)}).ravel().tolist() == [0, 1, 2]
    with pytest.raises(VolumeError, match=r"7 \(1 voxels\)"):
        to_class_indices(volume, {"b": (2**40,)})
