import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from monai.metrics import DiceMetric
from monai.networks.utils import one_hot

from segspeed.metric.overlap import dice_per_target
from segspeed.types import LabelTable

MAPS = hnp.arrays(np.uint8, (4, 5, 6), elements=st.integers(0, 3))


def test_by_hand():
    reference = np.array([[[0, 1, 1, 2]]])
    prediction = np.array([[[1, 1, 0, 2]]])
    assert dice_per_target(reference, prediction, LabelTable.numbered(3)) == [2 * 1 / (2 + 2), 1.0, None]


def test_missed_and_invented_structures_score_zero():
    empty, cube = np.zeros((3, 3, 3), int), np.zeros((3, 3, 3), int)
    cube[1, 1, 1] = 1
    assert dice_per_target(cube, empty, LabelTable.numbered(1)) == [0.0]
    assert dice_per_target(empty, cube, LabelTable.numbered(1)) == [0.0]
    assert dice_per_target(empty, empty, LabelTable.numbered(1)) == [None]


def test_different_grids_are_refused():
    with pytest.raises(ValueError, match="different grids"):
        dice_per_target(np.zeros((2, 2, 2)), np.zeros((2, 2, 3)), LabelTable.numbered(1))


@settings(deadline=None)
@given(MAPS, MAPS)
def test_monais_dice(reference, prediction):
    as_onehot = lambda a: one_hot(torch.from_numpy(a.astype(np.int64))[None, None], 4)  # noqa: E731
    metric = DiceMetric(include_background=False, ignore_empty=False)
    expected = metric(as_onehot(prediction), as_onehot(reference))[0].tolist()
    ours = dice_per_target(reference, prediction, LabelTable.numbered(3))
    for mine, theirs in zip(ours, expected, strict=True):
        assert (1.0 if mine is None else mine) == pytest.approx(theirs, abs=1e-6)


@given(MAPS, MAPS)
def test_symmetric_and_invariant_under_flips(a, b):
    assert dice_per_target(a, b, LabelTable.numbered(3)) == dice_per_target(b, a, LabelTable.numbered(3))
    assert dice_per_target(a[:, ::-1], b[:, ::-1], LabelTable.numbered(3)) == dice_per_target(
        a, b, LabelTable.numbered(3)
    )
    assert all(d in (None, 1.0) for d in dice_per_target(a, a, LabelTable.numbered(3)))


def test_regions_overlap_and_ignored_voxels_are_in_no_sum():
    table = LabelTable({"x": (1,), "y": (2,)}, ignore=(9,), regions={"both": ("x", "y"), "y": ("y",)})
    reference = np.array([1, 1, 2, 0, 3, 3]).reshape(1, 1, 6)  # 3 is the index of what is ignored
    prediction = np.array([1, 2, 2, 1, 2, 0]).reshape(1, 1, 6)
    both, y = dice_per_target(reference, prediction, table)
    assert both == 2 * 3 / (3 + 4), "three of the reference, four predicted where it counts"
    assert y == 2 * 1 / (1 + 2)
