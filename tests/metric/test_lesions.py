import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from segspeed.metric.lesions import Detection, detect

MASKS = hnp.arrays(bool, (4, 5, 6))


def lesions(*boxes):
    """A mask with a box of ones at each ((d, h, w), size)."""
    mask = np.zeros((20, 20, 20), bool)
    for (d, h, w), size in boxes:
        mask[d : d + size, h : h + size, w : w + size] = True
    return mask


def test_found_missed_and_false_by_hand():
    reference = lesions(((1, 1, 1), 3), ((10, 10, 10), 2), ((16, 2, 2), 2))
    prediction = lesions(((3, 3, 3), 2), ((10, 10, 10), 2), ((2, 15, 15), 1))
    d = detect(prediction, reference)
    assert d == Detection(found=2, missed=1, false=1), "one voxel in common is enough"
    assert (d.sensitivity, d.precision) == pytest.approx((2 / 3, 2 / 3))
    assert d.f1 == pytest.approx(4 / (4 + 1 + 1))


def test_voxels_that_share_a_corner_are_one_lesion():
    reference = lesions(((1, 1, 1), 1), ((2, 2, 2), 1))
    assert detect(lesions(), reference) == Detection(0, 1, 0)


def test_a_share_of_the_lesion_can_be_asked_for():
    reference, prediction = lesions(((0, 0, 0), 10)), lesions(((0, 0, 0), 10))
    prediction[1:] = False  # 100 of 1000 voxels
    assert detect(prediction, reference, overlap=0.1).found == 1, "exactly the share counts"
    assert detect(prediction, reference, overlap=0.11) == Detection(0, 1, 0), "missed, but it is not false either"


def test_the_share_is_of_all_predicted_pieces_together():
    reference, prediction = lesions(((5, 5, 5), 4)), lesions(((5, 5, 5), 4))
    prediction[6] = False
    assert detect(prediction, reference, overlap=0.75).found == 1


def test_small_components():
    reference = lesions(((1, 1, 1), 1), ((10, 10, 10), 3))
    prediction = lesions(((1, 1, 1), 2), ((10, 10, 10), 1), ((2, 16, 16), 1))
    assert detect(prediction, reference) == Detection(2, 0, 1)
    # the speck in the large lesion no longer finds it; the prediction over the small one is not false
    assert detect(prediction, reference, min_voxels=2) == Detection(0, 1, 0)


def test_two_lesions_joined_by_the_prediction_are_both_found():
    reference = lesions(((5, 5, 2), 2), ((5, 5, 8), 2))
    prediction = reference.copy()
    prediction[5, 5, 2:9] = True
    assert detect(prediction, reference) == Detection(2, 0, 0)


def test_ratios_without_a_denominator_are_none():
    nothing = detect(lesions(), lesions())
    assert (nothing.sensitivity, nothing.precision, nothing.f1) == (None, None, None)
    invented = detect(lesions(((1, 1, 1), 2)), lesions())
    assert (invented.sensitivity, invented.precision, invented.f1) == (None, 0.0, 0.0)
    missed = detect(lesions(), lesions(((1, 1, 1), 2)))
    assert (missed.sensitivity, missed.precision, missed.f1) == (0.0, None, 0.0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="one 3D grid"):
        detect(np.zeros((2, 2, 2)), np.zeros((2, 2, 3)))
    with pytest.raises(ValueError, match="share"):
        detect(lesions(), lesions(), overlap=1.5)


@settings(deadline=None)
@given(MASKS, MASKS, st.integers(1, 4))
def test_properties(prediction, reference, min_voxels):
    d = detect(prediction, reference, min_voxels)
    assert d.found + d.missed == detect(reference, reference, min_voxels).found, "every lesion is found or missed"
    assert detect(prediction[:, ::-1], reference[:, ::-1], min_voxels) == d
    assert detect(prediction, prediction) == Detection(detect(prediction, prediction).found, 0, 0)
    assert detect(prediction, reference, overlap=1.0).found <= detect(prediction, reference).found
