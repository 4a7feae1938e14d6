"""Rungs change what they say and nothing else."""

import dataclasses

import pytest

from segspeed.proof.rungs import MONAI, RUNGS, TORCH, pinned, rungs_of, with_length, with_values
from segspeed.record.run_folder import flatten
from segspeed.types import Plan, SettingError

PLAN = Plan(
    spacing=(1.0, 1.0, 2.0), patch=(16, 16, 16), batch=3, accumulate=2, features=(4, 8, 16),
    strides=((1, 1, 1), (2, 2, 2), (2, 2, 2)), kernels=((3, 3, 3),) * 3, normalisation=("zscore",), ct_norm=(None,),
)  # fmt: skip


@pytest.fixture
def own(settings):
    return pinned(settings("train.steps=10", "optimizer.lr=0.01", "loader.workers=1"), PLAN)


def changes(before, after):
    a, b = (dict(flatten(c.model_dump(mode="json", by_alias=True))) for c in (before, after))
    return {k: b.get(k) for k in {*a, *b} if a.get(k) != b.get(k)}


def test_the_plan_is_set_by_hand(own):
    assert (own.plan.spacing, own.plan.patch, own.plan.batch) == ((1.0, 1.0, 2.0), (16, 16, 16), 3)
    assert own.plan.features == (4, 8, 16)
    assert own.plan.normalisation == ("zscore",)
    assert (own.train.accumulate, own.memory.checkpointing) == (2, "none")
    blocks = dataclasses.replace(PLAN, checkpointing=("inner.a",))
    assert pinned(own, blocks).memory.checkpointing == ("inner.a",)


def test_the_baseline_is_the_ordinary_recipe(own):
    base = RUNGS["baseline"].change(own, own)
    assert base.loader.target == MONAI
    assert base.loader.kwargs["cache"] == "none"
    assert base.loader.workers == 1  # what all loaders share stays
    assert (base.precision, base.channels_last, base.compile) == ("fp32", False, False)
    assert base.optimizer == own.optimizer


def test_each_rung_changes_one_thing(own):
    base = RUNGS["baseline"].change(own, own)
    cache = RUNGS["cache"].change(base, own)
    assert changes(base, cache) == {"loader.cache": "mmap"}
    augmentation = RUNGS["augmentation"].change(cache, own)
    assert augmentation.loader == own.loader
    assert augmentation.loader.target == TORCH
    assert set(changes(cache, augmentation)) == {
        "loader._target_", "loader.cache", "cache.resident"
    }  # fmt: skip
    assert changes(augmentation, RUNGS["precision"].change(augmentation, own)) == {
        "precision": "auto",
        "channels_last": "auto",
    }
    assert changes(augmentation, RUNGS["compile"].change(augmentation, own)) == {"compile": True, "channels_last": True}
    checkpointing = RUNGS["checkpointing"].change(augmentation, own)
    assert changes(augmentation, checkpointing) == {"memory.checkpointing": "all", "plan.batch": 6}
    accumulation = RUNGS["accumulation"].change(checkpointing, own)
    assert changes(checkpointing, accumulation) == {
        "train.accumulate": 4, "schedule.warmup": 0.1, "schedule.scaling": "sqrt", "schedule.reference_batch": 6,
    }  # fmt: skip


def test_the_same_samples_whatever_the_batch(own):
    assert with_length(own, 600).train.steps == 100  # 3 x 2 patches a step
    larger = RUNGS["checkpointing"].change(own, own)
    assert with_length(larger, 600).train.steps == 50
    assert with_length(own, 1).train.steps == 1


def test_own_rungs_and_unknown_ones(settings):
    cfg = settings("ladder.rungs=[baseline,cache]", "ladder.own={slow:{optimizer:{lr:0.5}}}")
    rungs = rungs_of(cfg)
    assert [r.name for r in rungs] == ["baseline", "cache", "slow"]
    assert rungs[2].title == "optimizer.lr=0.5"
    assert rungs[2].change(cfg, cfg).optimizer.kwargs["lr"] == 0.5
    for wrong, text in (
        ("ladder.rungs=[baseline,cahce]", "cahce"),
        ("ladder.rungs=[cache,cache]", "twice"),
        ("ladder.own={a-b:{seed:1}}", "letters"),
    ):
        with pytest.raises(SettingError, match=text):
            rungs_of(settings(wrong))


def test_a_section_with_another_target_keeps_what_the_schema_knows(own):
    sgd = with_values(own, {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}})
    assert sgd.optimizer.kwargs == {"lr": 0.1}  # AdamW's weight_decay went with it
    with pytest.raises(SettingError, match="speed"):
        with_values(own, {"speed": 3})
