"""What a run says and does about steps of several micro-batches."""

import pytest

from segspeed.training import train

POOLED = ("loss.batch_dice=true", "train.accumulate=2", "train.steps=2", "run.name=a")


def test_a_pooled_dice_under_accumulation_is_said_once_with_its_remedy(tiny, capsys):
    assert train(tiny(*POOLED))["steps"] == 2
    said = capsys.readouterr().out
    assert said.count("the loss pools its Dice over micro-batches of") == 1
    assert "train.exact_batch_dice=true" in said.replace("\n", "")


def test_exact_it_is_trained_and_says_nothing(tiny, capsys):
    cfg = tiny(
        *POOLED, "train.exact_batch_dice=true", "schedule.scaling=sqrt", "schedule.reference_batch=1", "plan.batch=2"
    )
    assert train(cfg)["steps"] == 2
    said = capsys.readouterr().out
    assert "pools its Dice" not in said
    assert "sqrt scaling to 2 x 2 x 1 rank" in " ".join(said.split())


@pytest.mark.parametrize(("norm", "warned"), [("batch", True), ("instance", False)])
def test_batch_norm_under_small_micro_batches_is_warned_about(tiny, capsys, norm, warned):
    cfg = tiny("model=segresnet_ds", f"model.norm={norm}", "model.init_filters=8", "model.blocks_down=[1,1]",
               "model.dsdepth=1", "plan.batch=2", "train.steps=1", "run.name=a")  # fmt: skip
    assert train(cfg)["steps"] == 1
    assert ("BatchNorm layers" in capsys.readouterr().out) == warned
