import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from monai.metrics import DiceMetric
from monai.networks.utils import one_hot

from segspeed.metric.lesions import Detection
from segspeed.metric.overlap import dice_per_target
from segspeed.metric.scores import score_case, to_plain
from segspeed.metric.surface import hausdorff, mean_surface_distance, normalised_surface_dice, surface_distances
from segspeed.types import LabelTable

MAPS = hnp.arrays(np.uint8, (4, 5, 6), elements=st.integers(0, 3))


def cube(label=1, start=5, size=5, shape=(16, 16, 16)):
    out = np.zeros(shape, np.uint8)
    out[start : start + size, start : start + size, start : start + size] = label
    return out


NOTHING = np.zeros((16, 16, 16), np.uint8)


def test_two_cubes_by_hand():
    reference = cube()
    prediction = np.roll(reference, 1, axis=0)
    s = score_case(prediction, reference, [1], (2.0, 1.0, 0.5), tolerances=(0.0, 2.0))[1]
    assert s.state == "both"
    assert s.dice == s.sensitivity == s.precision == pytest.approx(0.8)
    assert s.nsd[2.0] == 1.0
    assert 0 < s.nsd[0.0] < 1
    assert s.hd95_mm == 2.0
    assert s.volume_ml == s.reference_volume_ml == pytest.approx(0.125)
    assert s.volume_error_ml == 0
    assert s.detection is None


def test_volume_error_has_a_sign():
    small, large = cube(size=2), cube(size=4)
    assert score_case(small, large, [1], (10, 10, 10))[1].volume_error_ml == pytest.approx(8 - 64)
    s = score_case(large, small, [1], (10, 10, 10))[1]
    assert s.volume_error_ml == pytest.approx(64 - 8)
    assert (s.sensitivity, s.precision) == (1.0, 8 / 64)


def test_a_missed_structure_has_the_worst_scores_not_none():
    s = score_case(NOTHING, cube(), [1], (3.0, 1.0, 1.0), lesions=True)[1]
    assert s.state == "missed"
    assert (s.dice, dict(s.nsd)) == (0.0, {1.0: 0.0, 2.0: 0.0})
    assert s.hd95_mm == s.msd_mm == pytest.approx(np.sqrt(48**2 + 16**2 + 16**2)), "the diagonal of the volume"
    assert (s.sensitivity, s.precision) == (0.0, None)
    assert (s.volume_ml, s.reference_volume_ml) == pytest.approx((0.0, 0.375))
    assert s.detection == Detection(0, 1, 0)


def test_missing_more_never_improves_the_mean_distance():
    """Two cases, one with a small error: HD95 must rise when its structure is missed altogether."""
    near = score_case(np.roll(cube(), 1, axis=1), cube(), [1], (1, 1, 1))[1]
    missed = score_case(NOTHING, cube(), [1], (1, 1, 1))[1]
    far = cube(start=0, size=1)
    worst_found = score_case(far, cube(start=15, size=1), [1], (1, 1, 1))[1]
    assert near.hd95_mm < worst_found.hd95_mm < missed.hd95_mm


def test_an_invented_structure_is_a_failure_not_a_gap():
    s = score_case(cube(), NOTHING, [1], (1, 1, 1), lesions=True)[1]
    assert s.state == "invented"
    assert (s.dice, dict(s.nsd)) == (0.0, {1.0: 0.0, 2.0: 0.0})
    assert s.hd95_mm == s.msd_mm == pytest.approx(16 * np.sqrt(3))
    assert (s.sensitivity, s.precision) == (None, 0.0)
    assert s.volume_error_ml == pytest.approx(0.125)
    assert s.detection == Detection(0, 0, 1)


def test_absent_in_both_has_no_score_and_says_so():
    s = score_case(NOTHING, NOTHING, [1], (1, 1, 1), lesions=True)[1]
    assert s.state == "absent in both"
    assert (s.dice, s.hd95_mm, s.msd_mm, s.sensitivity, s.precision) == (None,) * 5
    assert dict(s.nsd) == {1.0: None, 2.0: None}
    assert (s.volume_ml, s.reference_volume_ml, s.volume_error_ml) == (0, 0, 0)
    assert s.detection == Detection(0, 0, 0)


def test_background_is_never_scored():
    """With 99 % background a Dice of background is near 1 whatever the model does."""
    reference, prediction = cube(2), cube(1)
    scores = score_case(prediction, reference, [1, 2, 3], (1, 1, 1))
    assert [s.state for s in scores.values()] == ["invented", "missed", "absent in both"]
    with pytest.raises(ValueError, match="background"):
        score_case(prediction, reference, [0, 1], (1, 1, 1))


def test_plain_is_json():
    maps = cube(1), cube(1) + cube(2, start=12, size=2)
    scores = score_case(*maps, [1, 2, 3], (1, 1, 1), tolerances=(1.0, 2.5), lesions=True)
    plain = json.loads(json.dumps({c: to_plain(s) for c, s in scores.items()}, allow_nan=False))
    assert plain["1"]["nsd"] == {"1": 1.0, "2.5": 1.0}
    counts, ratios = {"found": 1, "missed": 0, "false": 0}, {"sensitivity": 1.0, "precision": 1.0, "f1": 1.0}
    assert plain["1"]["detection"] == counts | ratios
    assert plain["2"]["state"] == "missed"
    assert plain["3"]["dice"] is None
    assert to_plain(score_case(*maps, [1], (1, 1, 1))[1])["detection"] is None


@settings(deadline=None, max_examples=60)
@given(MAPS, MAPS)
def test_dice_is_monais_and_the_houses(prediction, reference):
    scores = score_case(prediction, reference, [1, 2, 3], (1, 2, 3))
    dice = [scores[c].dice for c in (1, 2, 3)]
    assert dice == dice_per_target(reference, prediction, LabelTable.numbered(3))
    as_onehot = lambda a: one_hot(torch.from_numpy(a.astype(np.int64))[None, None], 4)  # noqa: E731
    metric = DiceMetric(include_background=False, ignore_empty=False)
    monais = metric(as_onehot(prediction), as_onehot(reference))[0].tolist()
    assert [1.0 if d is None else d for d in dice] == pytest.approx(monais, abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(MAPS, MAPS)
def test_the_box_of_a_class_changes_nothing(prediction, reference):
    spacing = (3.0, 0.7, 1.0)
    for c, s in score_case(prediction, reference, [1, 2, 3], spacing).items():
        if s.state == "both":
            d = surface_distances(prediction == c, reference == c, spacing)
            assert (s.hd95_mm, s.msd_mm) == pytest.approx((hausdorff(d), mean_surface_distance(d)))
            assert s.nsd == pytest.approx({t: normalised_surface_dice(d, t) for t in (1.0, 2.0)})


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, ">i2"])
def test_every_whole_number_and_layout_will_do(dtype):
    reference, prediction = cube(), np.roll(cube(), 1, axis=2)
    expected = score_case(prediction, reference, [1], (1, 1, 1))
    assert score_case(np.asfortranarray(prediction.astype(dtype)), reference.astype(dtype), [1], (1, 1, 1)) == expected


def test_what_is_refused():
    with pytest.raises(ValueError, match="whole numbers"):
        score_case(cube().astype(np.float32), cube(), [1], (1, 1, 1))
    with pytest.raises(ValueError, match="one 3D grid"):
        score_case(cube(), cube()[1:], [1], (1, 1, 1))
    with pytest.raises(ValueError, match="spacing"):
        score_case(NOTHING, NOTHING, [1], (1, 1, -1))
    assert score_case(cube(), cube(), [], (1, 1, 1)) == {}


def test_no_array_of_the_size_of_the_volume_is_made():
    shape = (200, 200, 200)
    reference, prediction = cube(1, start=90, size=30, shape=shape), cube(1, start=92, size=30, shape=shape)
    score_case(prediction[80:130], reference[80:130], [1], (1, 1, 1))  # tables are made once
    tracemalloc.start()
    score_case(prediction, reference, [1], (1, 1, 1), lesions=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < reference.nbytes / 2
