import itertools

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform

from segspeed.data.geometry import VolumeError, corner_distance_mm, read_channels, read_volume, to_file_axes
from segspeed.types import Case

CODES = ["".join(c) for axes in itertools.permutations(("LR", "PA", "IS")) for c in itertools.product(*axes)]


def spots(shape=(5, 6, 7)):
    """An array in RAS order in which every voxel is its own."""
    return np.arange(np.prod(shape), dtype=np.int16).reshape(shape)


@pytest.mark.parametrize("codes", CODES)
def test_all_48_orientations_read_the_same_and_go_back_exactly(tmp_path, write, codes):
    ras = spots()
    affine = np.diag([2.0, 3.0, 4.0, 1.0])
    change = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(codes))
    stored = nib.orientations.apply_orientation(ras, change)
    volume = read_volume(write(tmp_path / "x.nii.gz", stored, affine @ inv_ornt_aff(change, ras.shape)))
    assert volume.orientation == codes
    assert volume.spacing == (4.0, 3.0, 2.0)
    np.testing.assert_array_equal(volume.array, ras.transpose(2, 1, 0))
    np.testing.assert_array_equal(to_file_axes(volume.array, volume.geometry()), stored)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-0.6, 0.6), min_size=3, max_size=3), st.permutations(range(3)))
def test_oblique_volumes_go_back_exactly(tmp_path_factory, angles, order):
    (a, b, c) = angles
    rx = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    ry = np.array([[np.cos(b), 0, np.sin(b)], [0, 1, 0], [-np.sin(b), 0, np.cos(b)]])
    rz = np.array([[np.cos(c), -np.sin(c), 0], [np.sin(c), np.cos(c), 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3, :3] = (rx @ ry @ rz @ np.diag([1.0, 2.0, 3.5]))[:, list(order)]
    affine[:3, 3] = (10, -20, 30)
    path = tmp_path_factory.mktemp("oblique") / "x.nii"
    stored = spots()
    nib.save(nib.Nifti1Image(stored, affine), path)
    volume = read_volume(path)
    np.testing.assert_array_equal(to_file_axes(volume.array, volume.geometry()), stored)
    assert sorted(volume.spacing) == pytest.approx([1.0, 2.0, 3.5], rel=1e-5)


def test_spacing_comes_from_the_affine(tmp_path, write):
    image = nib.Nifti1Image(spots(), np.diag([2.0, 3.0, 4.0, 1.0]))
    image.header["pixdim"][1:4] = (9, 9, 9)
    image.header["qform_code"] = 0
    nib.save(image, tmp_path / "x.nii")
    assert read_volume(tmp_path / "x.nii").spacing == (4.0, 3.0, 2.0)


def test_trailing_axes_of_length_one_are_dropped_and_said(tmp_path, write):
    volume = read_volume(write(tmp_path / "x.nii.gz", np.zeros((4, 5, 6, 1, 1))))
    assert volume.shape == (6, 5, 4)
    assert volume.notes[0][0] == "squeezed"


def test_big_endian_becomes_native(tmp_path):
    header = nib.Nifti1Header(endianness=">")
    header.set_data_dtype(np.int16)
    nib.save(nib.Nifti1Image(np.full((3, 4, 5), 100, ">i2"), np.eye(4), header), tmp_path / "x.nii")
    array = read_volume(tmp_path / "x.nii").array
    assert array.dtype.isnative
    assert (array == 100).all()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, np.float32, np.float64])
def test_types_are_read_as_float32(tmp_path, write, kind):
    array = read_volume(write(tmp_path / "x.nii", np.full((3, 3, 3), 7, kind))).array
    assert array.dtype == np.float32
    assert (array == 7).all()


def test_slope_is_applied_to_images(tmp_path, write):
    path = write(tmp_path / "x.nii", np.full((3, 3, 3), 10, np.int16))
    raw = bytearray(path.read_bytes())
    raw[112:120] = np.array([2.0, -1024.0], np.float32).tobytes()  # scl_slope, scl_inter
    path.write_bytes(raw)
    assert (read_volume(path).array == 2 * 10 - 1024).all()


def rgb(path):
    kind = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])
    nib.save(nib.Nifti1Image(np.zeros((3, 3, 3), kind), np.eye(4)), path)


def truncated(path):
    nib.save(nib.Nifti1Image(np.random.default_rng(0).normal(size=(20, 20, 20)), np.eye(4)), path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def plain_named_gz(path):
    nib.save(nib.Nifti1Image(np.zeros((3, 3, 3)), np.eye(4)), path.with_name("tmp.nii"))
    path.with_name("tmp.nii").rename(path)


def singular(path):
    header = nib.Nifti1Header()
    image = nib.Nifti1Image(np.zeros((3, 3, 3), np.int16), None, header)
    image.header["sform_code"] = 1
    image.header["srow_x"][:] = (1, 0, 0, 0)
    image.header["srow_y"][:] = (0, 0, 0, 0)
    image.header["srow_z"][:] = (0, 0, 1, 0)
    image.to_filename(path)


BAD = {
    "missing-file": lambda p: None,
    "rgb": rgb,
    "complex": lambda p: nib.save(nib.Nifti1Image(np.zeros((3, 3, 3), np.complex64), np.eye(4)), p),
    "four-dimensional": lambda p: nib.save(nib.Nifti1Image(np.zeros((3, 3, 3, 5)), np.eye(4)), p),
    "not-3d": lambda p: nib.save(nib.Nifti1Image(np.zeros((3, 3)), np.eye(4)), p),
    "bad-affine": singular,
}


@pytest.mark.parametrize("kind", BAD)
def test_unusable_files_are_refused_by_kind(tmp_path, kind):
    path = tmp_path / "x.nii.gz"
    BAD[kind](path)
    with pytest.raises(VolumeError) as error:
        read_volume(path)
    assert error.value.kind == kind


@pytest.mark.parametrize(("make", "text"), [(truncated, "cut short"), (plain_named_gz, "not a gzip file")])
def test_unreadable_files_say_why(tmp_path, make, text):
    path = tmp_path / "x.nii.gz"
    make(path)
    with pytest.raises(VolumeError, match=text) as error:
        read_volume(path)
    assert error.value.kind == "unreadable"


def test_a_file_of_nonsense_is_unreadable(tmp_path):
    (tmp_path / "x.nii").write_bytes(b"hello" * 100)
    with pytest.raises(VolumeError, match="damaged"):
        read_volume(tmp_path / "x.nii")


def test_no_coded_orientation_is_noted(tmp_path):
    image = nib.Nifti1Image(spots(), np.diag([-2, 3, 4, 1.0]))
    image.header["qform_code"] = image.header["sform_code"] = 0
    image.to_filename(tmp_path / "x.nii")
    raw = bytearray((tmp_path / "x.nii").read_bytes())
    raw[252:256] = bytes(4)  # qform_code and sform_code, which saving fills in
    (tmp_path / "x.nii").write_bytes(raw)
    assert [k for k, _ in read_volume(tmp_path / "x.nii").notes] == ["no-orientation"]


def test_two_orientations_that_disagree_are_noted(tmp_path):
    image = nib.Nifti1Image(spots(), np.eye(4))
    image.set_sform(np.diag([-2, -3, 4, 1.0]), code=1)
    image.set_qform(np.diag([2, 3, 4, 1.0]), code=1)
    image.to_filename(tmp_path / "x.nii")
    # the far corners of 2 x (n - 1) and 3 x (m - 1) mm, mirrored at the origin
    apart = np.hypot(4 * (spots().shape[0] - 1), 6 * (spots().shape[1] - 1))
    assert read_volume(tmp_path / "x.nii").forms_apart_mm == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize(("off", "kinds"), [(1e-5, []), (1e-3, ["direction-noise"]), (0.05, ["shear"])])
def test_noise_of_directions_is_told_from_shear(tmp_path, write, off, kinds):
    affine = np.eye(4)
    affine[0, 1] = off
    assert [k for k, _ in read_volume(write(tmp_path / "x.nii", spots(), affine)).notes] == kinds


def test_channels_along_the_fourth_axis(tmp_path, write):
    both = np.stack([spots(), spots() + 5], axis=-1)
    path = write(tmp_path / "x.nii.gz", both.astype(np.int16), np.diag([-2, -3, 4, 1.0]))
    first, second = read_channels(Case("c", (path, path), stacked=True))
    single = read_volume(write(tmp_path / "one.nii", spots().astype(np.int16), np.diag([-2, -3, 4, 1.0])))
    np.testing.assert_array_equal(first.array, single.array)
    np.testing.assert_array_equal(second.array, single.array + 5)
    assert first.spacing == single.spacing == (4, 3, 2)
    with pytest.raises(VolumeError, match="3 channels are declared"):
        read_channels(Case("c", (path,) * 3, stacked=True))
    with pytest.raises(VolumeError, match="not one volume"):
        read_volume(path)


def test_corner_distance_by_hand():
    moved = np.eye(4)
    moved[0, 3] = 3.0
    moved[1, 3] = 4.0
    assert corner_distance_mm(np.eye(4), (5, 5, 5), moved, (5, 5, 5)) == pytest.approx(5.0)
    # spacing 1.5 against 1 over nine steps: the far corner is off by 4.5 mm
    longer = np.diag([1, 1, 1.5, 1])
    assert corner_distance_mm(np.eye(4), (1, 1, 10), longer, (1, 1, 10)) == pytest.approx(4.5)


DAMAGE = {
    "dim": (40, b"\x03\x00\xff\x7f\xff\x7f\xff\x7f"),
    "datatype": (70, b"\x99\x99"),
    "vox_offset": (108, b"\x00\x00\x80\xff"),
    "vox_offset huge": (108, b"\xff\xff\x7f\x7f"),
    "negative dim": (42, b"\xff\xff"),
}


@pytest.mark.parametrize("field", DAMAGE)
def test_a_damaged_header_is_one_error_of_that_file(tmp_path, write, field):
    path = write(tmp_path / "x.nii", spots().astype(np.int16))
    data = bytearray(path.read_bytes())
    place, what = DAMAGE[field]
    data[place : place + len(what)] = what
    path.write_bytes(bytes(data))
    with pytest.raises(VolumeError):
        read_volume(path)
