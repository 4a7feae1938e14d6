import itertools

import nibabel as nib
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform
from scipy import ndimage
from scipy.spatial.transform import Rotation

from segspeed.data.geometry import read_volume
from segspeed.data.preprocess import Grid, preprocess
from segspeed.infer import export
from segspeed.infer.export import label_map, native_planes, save_label_map, to_native
from segspeed.types import Case, Geometry, LabelTable

CODES = ["".join(c) for p in itertools.permutations(("LR", "PA", "IS")) for c in itertools.product(*p)]
TABLE = LabelTable({"organ": (117,), "lesion": (300,)})
LABELS = TABLE.classes


def corner(shape=(6, 7, 8)):
    label = np.zeros(shape, np.uint16)
    label[0, 0, 0] = 117
    label[1:3, 2, 5:8] = 300
    return label


@pytest.mark.parametrize("codes", [*CODES, "oblique"])
def test_a_label_map_comes_back_voxel_for_voxel(tmp_path, write, codes):
    """Through preprocessing and export: same voxels, same affine to the bit, the user's own values."""
    label = corner()
    affine = np.diag([2.0, 3.0, 4.0, 1.0])
    affine[:3, 3] = (-11.3, 7.7, 100.1)
    if codes == "oblique":
        turn, c, s = np.eye(4), np.cos(0.3), np.sin(0.3)
        turn[:2, :2] = [[c, -s], [s, c]]
        affine = turn @ affine
    else:
        change = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(codes))
        label = nib.orientations.apply_orientation(label, change)
        affine = affine @ inv_ornt_aff(change, (6, 7, 8))
    image = write(tmp_path / "i.nii.gz", np.random.default_rng(0).normal(size=label.shape).astype(np.float32), affine)
    case = Case("c", (image,), write(tmp_path / "l.nii.gz", label, affine))
    volume = read_volume(image)
    out = preprocess(case, TABLE, Grid(volume.spacing))
    scores = np.stack([(out.label == k).astype(np.float32) for k in range(3)])
    save_label_map(tmp_path / "out.nii.gz", to_native(scores, out.geometry, TABLE), out.geometry, LABELS)
    written = nib.load(tmp_path / "out.nii.gz")
    np.testing.assert_array_equal(np.asarray(written.dataobj), label)
    assert np.asarray(written.dataobj).dtype == np.uint16
    np.testing.assert_array_equal(written.affine, nib.load(image).affine)
    assert written.header["sform_code"] == 1


def test_no_text_of_the_source_travels_along(tmp_path, write):
    image = nib.Nifti1Image(np.ones((4, 4, 4), np.float32), np.eye(4))
    image.header["descrip"] = b"Doe^John 1970-01-01"
    image.header["aux_file"] = b"Doe"
    nib.save(image, tmp_path / "i.nii.gz")
    case = Case("c", (tmp_path / "i.nii.gz",), write(tmp_path / "l.nii.gz", np.ones((4, 4, 4), np.uint8)))
    out = preprocess(case, LabelTable({"a": (1,)}), Grid((1.0, 1.0, 1.0)))
    save_label_map(tmp_path / "out.nii", out.native_label, out.geometry, {"a": (1,)})
    assert b"Doe" not in (tmp_path / "out.nii").read_bytes()


def test_a_shear_that_no_quaternion_holds_leaves_the_qform_out(tmp_path, write):
    affine = np.eye(4)
    affine[0, 1] = 0.05
    case = Case(
        "c",
        (write(tmp_path / "i.nii", corner().astype(np.float32), affine),),
        write(tmp_path / "l.nii", corner(), affine),
    )
    out = preprocess(case, TABLE, Grid(read_volume(case.images[0]).spacing))
    save_label_map(tmp_path / "o.nii", out.native_label, out.geometry, LABELS)
    written = nib.load(tmp_path / "o.nii")
    assert written.header["qform_code"] == 0
    np.testing.assert_array_equal(written.affine, nib.load(case.images[0]).affine)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("native", [(20, 15, 31), (9, 8, 40), (12, 10, 14)])
def test_planes_come_back_as_scipys_zoom_brings_the_whole(native, axis, monkeypatch):
    """However the planes are dealt out, the result is that of one linear resampling with grid corners aligned."""
    small = (12, 10, 14)
    scores = np.random.default_rng(0).normal(size=(3, *small)).astype(np.float32)
    geometry = Geometry(
        affine=tuple(map(tuple, np.eye(4))), file_shape=native[::-1], ornt=((2, 1), (1, 1), (0, 1)), shape=native,
        crop=tuple((0, n) for n in native), spacing=(1, 1, 1), target_shape=small, target_spacing=(1, 1, 1),
    )  # fmt: skip
    factors = [n / s for n, s in zip(native, small, strict=True)]
    whole = np.stack([ndimage.zoom(s, factors, order=1, mode="nearest", grid_mode=True) for s in scores])
    monkeypatch.setattr(export, "SLAB_BYTES", 4 * 3 * 500)

    def dealt():
        place = 0
        for size in (1, 4, 2, 100):
            part = np.take(scores, range(place, min(place + size, small[axis])), axis + 1)
            if part.shape[axis + 1]:
                yield place, torch.from_numpy(part)
            place += part.shape[axis + 1]

    found = np.empty_like(whole)
    for first, part in native_planes(dealt(), geometry, axis):
        np.moveaxis(found, axis + 1, 0)[first : first + len(part)] = part.numpy()
    np.testing.assert_allclose(found, whole, atol=1e-4)
    again = label_map(native_planes(dealt(), geometry, axis), geometry, LabelTable.numbered(2), axis)
    assert (again == whole.argmax(0)).mean() > 0.999


ANGLES = st.tuples(*[st.floats(-0.5, 0.5)] * 3)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    codes=st.sampled_from(CODES), angles=ANGLES, spacing=st.tuples(*[st.floats(0.3, 6.0)] * 3),
    shape=st.tuples(*[st.integers(1, 11)] * 3), origin=st.tuples(*[st.floats(-500, 500)] * 3), seed=st.integers(0, 999),
)  # fmt: skip
def test_any_geometry_comes_back_to_the_bit(tmp_path, write, codes, angles, spacing, shape, origin, seed):
    """Orientation, obliqueness, spacing and odd sizes: the affine bit for bit, and the voxels where nothing is resampled."""
    rng = np.random.default_rng(seed)
    label = rng.choice(np.array([0, 0, 117, 300], np.uint16), shape)
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", angles).as_matrix() @ np.diag(spacing)
    affine[:3, 3] = origin
    change = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(codes))
    affine = affine @ inv_ornt_aff(change, shape)
    label = nib.orientations.apply_orientation(label, change)
    image = write(tmp_path / "i.nii", rng.normal(size=label.shape).astype(np.float32), affine)
    case = Case("c", (image,), write(tmp_path / "l.nii", label, affine))
    out = preprocess(case, TABLE, Grid(read_volume(image).spacing))
    scores = np.stack([(out.label == k).astype(np.float32) for k in range(3)])
    save_label_map(tmp_path / "out.nii", to_native(scores, out.geometry, TABLE), out.geometry, LABELS)
    written = nib.load(tmp_path / "out.nii")
    np.testing.assert_array_equal(np.asarray(written.dataobj), label)
    assert written.affine.tobytes() == nib.load(image).affine.tobytes()
