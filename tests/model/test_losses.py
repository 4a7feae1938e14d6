import math

import monai.losses
import pytest
import torch
from monai.losses import DiceCELoss as MonaiDiceCE

from segspeed.model.losses import DiceCELoss, RegionTargets, deep_supervision, halving_weights, subsample


def test_perfect_and_hopeless_predictions_by_hand():
    label = torch.zeros(1, 2, 2, 2, dtype=torch.int16)
    label[0, 0] = 1
    right = torch.full((1, 2, 2, 2, 2), -50.0)
    right.scatter_(1, label.long().unsqueeze(1), 50.0)
    assert DiceCELoss()(right, label).item() == pytest.approx(0.0, abs=1e-5)
    # the wrong class everywhere: Dice term 1, cross-entropy 100
    assert DiceCELoss()(-right, label).item() == pytest.approx(101.0, rel=1e-4)
    # no idea, two classes: cross-entropy ln 2; soft Dice 2 * 2 / (4 + 4) = 1/2
    even = torch.zeros(1, 2, 2, 2, 2)
    assert DiceCELoss()(even, label).item() == pytest.approx(math.log(2) + 0.5, rel=1e-5)


def test_agrees_with_monai():
    torch.manual_seed(0)
    logits, label = torch.randn(3, 4, 6, 5, 7), torch.randint(0, 4, (3, 6, 5, 7))
    theirs = MonaiDiceCE(include_background=False, to_onehot_y=True, softmax=True, smooth_nr=1e-5, smooth_dr=1e-5)
    assert DiceCELoss()(logits, label).item() == pytest.approx(theirs(logits, label.unsqueeze(1)).item(), rel=1e-5)


def test_half_precision_logits_do_not_overflow():
    label = torch.ones(1, 64, 64, 64, dtype=torch.int16)  # 262,144 ones, past the range of float16
    logits = torch.stack([torch.full((64, 64, 64), -8.0), torch.full((64, 64, 64), 8.0)])[None].half()
    value = DiceCELoss()(logits, label)
    assert value.dtype == torch.float32
    assert value.item() < 0.01


def test_class_absent_from_sample_and_prediction_costs_nothing():
    label = torch.zeros(1, 2, 2, 2, dtype=torch.int16)
    logits = torch.full((1, 3, 2, 2, 2), -50.0)
    logits[:, 0] = 50.0
    assert DiceCELoss()(logits, label).item() == pytest.approx(0.0, abs=1e-4)


def test_halving_weights():
    assert halving_weights(1) == [1.0]
    assert halving_weights(3) == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_deep_supervision_weighs_heads_at_their_own_size():
    torch.manual_seed(0)
    label = torch.randint(0, 2, (2, 8, 8, 4))
    heads = [torch.randn(2, 2, 8, 8, 4), torch.randn(2, 2, 4, 4, 2)]
    loss = DiceCELoss()
    expected = 2 / 3 * loss(heads[0], label) + 1 / 3 * loss(heads[1], label[:, ::2, ::2, ::2])
    assert deep_supervision(loss, heads, label).item() == pytest.approx(expected.item(), rel=1e-6)


def test_head_that_does_not_divide_the_patch_is_refused():
    with pytest.raises(ValueError, match="does not divide"):
        subsample(torch.zeros(1, 8, 8, 8), (3, 4, 4))


REGIONS = ((1, 2), (2,))


def test_regions_are_sigmoid_channels_as_monai_has_them():
    label = torch.randint(0, 3, (2, 6, 5, 4))
    logits = torch.randn(2, 2, 6, 5, 4)
    target = torch.stack([label > 0, label == 2], 1).float()
    dice = monai.losses.DiceLoss(sigmoid=True, smooth_nr=1e-5, smooth_dr=1e-5)(logits, target)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
    assert DiceCELoss(regions=REGIONS)(logits, label).item() == pytest.approx((dice + bce).item(), rel=1e-5)
    assert RegionTargets(monai.losses.DiceLoss(sigmoid=True), REGIONS)(logits, label).item() == pytest.approx(
        dice.item(), rel=1e-4
    )


@pytest.mark.parametrize("regions", [(), REGIONS])
def test_ignored_voxels_have_no_say(regions):
    torch.manual_seed(0)
    label = torch.randint(0, 3, (2, 6, 5, 4))
    logits = torch.randn(2, 2 if regions else 3, 6, 5, 4, requires_grad=True)
    loss = DiceCELoss(regions=regions, ignore_index=3)
    assert loss(logits, label).item() == pytest.approx(DiceCELoss(regions=regions)(logits, label).item(), rel=1e-6)
    label[:, :, :, 2:] = 3
    value = loss(logits, label)
    value.backward()
    assert logits.grad[..., 2:].abs().max() == 0
    assert logits.grad[..., :2].abs().min() > 0
    kept = DiceCELoss(regions=regions)(logits[..., :2], label[..., :2])
    assert value.item() == pytest.approx(kept.item(), rel=1e-6), "as if the rest were not there"


def test_a_sample_of_nothing_but_ignored_voxels_costs_nothing():
    label = torch.full((1, 4, 4, 4), 3)
    logits = torch.randn(1, 3, 4, 4, 4, requires_grad=True)
    loss = DiceCELoss(ignore_index=3)(logits, label)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert logits.grad.abs().max() == 0


@pytest.mark.parametrize("regions", [(), REGIONS])
def test_accumulated_samples_with_ignored_voxels_equal_the_batch(regions):
    label = torch.randint(0, 4, (3, 6, 5, 4))
    logits = torch.randn(3, 2 if regions else 3, 6, 5, 4)
    loss = DiceCELoss(regions=regions, ignore_index=3)
    single = sum(loss(logits[n : n + 1], label[n : n + 1]) for n in range(3)) / 3
    assert loss(logits, label).item() == pytest.approx(single.item(), rel=1e-5)
