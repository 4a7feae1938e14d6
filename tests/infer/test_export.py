import itertools

import nibabel as nib
import numpy as np
import pytest
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform

from segspeed.data.geometry import read_volume
from segspeed.data.preprocess import preprocess
from segspeed.infer.export import save_label_map, to_native
from segspeed.types import Case

CODES = ["".join(c) for p in itertools.permutations(("LR", "PA", "IS")) for c in itertools.product(*p)]
LABELS = {"organ": (117,), "lesion": (300,)}


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
    out = preprocess(case, LABELS, volume.spacing, None)
    scores = np.stack([(out.label == k).astype(np.float32) for k in range(3)])
    save_label_map(tmp_path / "out.nii.gz", to_native(scores, out.geometry), out.geometry, LABELS)
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
    out = preprocess(case, {"a": (1,)}, (1.0, 1.0, 1.0), None)
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
    out = preprocess(case, LABELS, read_volume(case.images[0]).spacing, None)
    save_label_map(tmp_path / "o.nii", out.native_label, out.geometry, LABELS)
    written = nib.load(tmp_path / "o.nii")
    assert written.header["qform_code"] == 0
    np.testing.assert_array_equal(written.affine, nib.load(case.images[0]).affine)
