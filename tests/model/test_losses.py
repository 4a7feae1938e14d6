import math

import monai.losses
import pytest
import torch
from monai.losses import DiceCELoss as MonaiDiceCE

from segspeed.model.losses import (
    DiceCELoss,
    RegionTargets,
    StepDice,
    deep_supervision,
    halving_weights,
    pools_batch,
    step_sums,
    subsample,
)


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


def test_batch_dice_by_hand():
    """Two samples of 8 voxels, no idea (p = 1/2): one with 8 voxels of the class, one with none."""
    label = torch.zeros(2, 2, 2, 2, dtype=torch.int16)
    label[0] = 1
    logits = torch.zeros(2, 2, 2, 2, 2)
    # apart: 2 * 4 / (4 + 8) = 2/3 and 0; pooled: 2 * 4 / (8 + 8) = 1/2
    assert DiceCELoss(ce_weight=0)(logits, label).item() == pytest.approx(1 - (2 / 3 + 0) / 2, abs=1e-5)
    assert DiceCELoss(ce_weight=0, batch_dice=True)(logits, label).item() == pytest.approx(1 / 2, abs=1e-5)


def test_batch_dice_agrees_with_monai():
    torch.manual_seed(0)
    logits, label = torch.randn(3, 4, 6, 5, 7), torch.randint(0, 4, (3, 6, 5, 7))
    theirs = MonaiDiceCE(
        include_background=False, to_onehot_y=True, softmax=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5
    )
    ours = DiceCELoss(batch_dice=True)
    assert ours(logits, label).item() == pytest.approx(theirs(logits, label.unsqueeze(1)).item(), rel=1e-5)
    assert ours(logits, label).item() != pytest.approx(DiceCELoss()(logits, label).item(), rel=1e-5)


def test_who_pools_over_the_batch():
    assert pools_batch(DiceCELoss(batch_dice=True))
    assert pools_batch(MonaiDiceCE(batch=True))
    assert pools_batch(RegionTargets(monai.losses.DiceLoss(sigmoid=True, batch=True), ((1, 2), (2,))))
    assert not pools_batch(DiceCELoss())
    assert not pools_batch(MonaiDiceCE())
    assert not pools_batch(torch.nn.functional.mse_loss)


@pytest.mark.parametrize("regions", [(), ((1, 2), (2,))], ids=["classes", "regions"])
@pytest.mark.parametrize("ignore", [None, 3], ids=["all", "ignore"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 1), (1, 5)], ids=str)
def test_batch_dice_of_micro_batches_with_the_sums_of_the_step_is_that_of_their_union(regions, ignore, sizes):
    g = torch.Generator().manual_seed(0)
    label = torch.randint(0, 3 if ignore is None else 4, (6, 8, 4, 8), generator=g)
    label[0] = 0  # a sample without foreground
    shapes = [(8, 4, 8), (4, 2, 4)]  # two heads
    heads = [torch.randn(6, 2 if regions else 3, *s, generator=g, requires_grad=True) for s in shapes]
    loss = DiceCELoss(batch_dice=True, regions=regions, ignore_index=ignore)
    whole = deep_supervision(loss, heads, label)
    expected = torch.autograd.grad(whole, heads)
    rows = [slice(sum(sizes[:n]), sum(sizes[: n + 1])) for n in range(len(sizes))]
    sums = sum(step_sums(loss, [h[r] for h in heads], label[r]) for r in rows)
    value = sum(
        size / 6 * deep_supervision(loss, [h[r] for h in heads], label[r], sums, size / 6)
        for r, size in zip(rows, sizes, strict=True)
    )
    assert value.item() == pytest.approx(whole.item(), abs=1e-6)
    for found, wanted in zip(torch.autograd.grad(value, heads), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
        assert wanted.abs().max() > 1e-4, "the tolerance could see a difference"
    apart = sum(
        size / 6 * deep_supervision(loss, [h[r] for h in heads], label[r]) for r, size in zip(rows, sizes, strict=True)
    )
    assert abs(apart.item() - whole.item()) > 1e-4, "without the sums it is another loss"


def test_sums_need_a_pooled_dice():
    loss = DiceCELoss()
    with pytest.raises(AssertionError, match="single samples"):
        loss(torch.zeros(1, 2, 2, 2, 2), torch.zeros(1, 2, 2, 2), StepDice(torch.ones(2, 1), 0.5))
