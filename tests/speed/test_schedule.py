import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segspeed import build
from segspeed.speed.cadence import Cadence
from segspeed.speed.precision import Precision
from segspeed.speed.schedule import BudgetHorizon, StepHorizon, learning_rate_factor, rate_scale
from segspeed.types import LabelTable, Plan
from segspeed.validate import SettingsError


def test_cosine_by_hand():
    f = lambda p: learning_rate_factor(p, name="cosine", warmup=0.2)  # noqa: E731
    assert f(0.1) == pytest.approx(0.5)
    assert f(0.2) == pytest.approx(1.0)
    assert f(0.6) == pytest.approx(0.5)
    assert f(1.0) == pytest.approx(0.0, abs=1e-12)


def test_poly_is_nnunets():
    assert learning_rate_factor(0.5, name="poly", warmup=0.0, power=0.9) == pytest.approx(0.5**0.9)


@given(st.floats(0, 1), st.sampled_from(["cosine", "poly", "constant"]), st.floats(0, 1), st.floats(0, 1))
def test_factor_stays_between_zero_and_one(progress, name, warmup, final):
    f = learning_rate_factor(progress, name=name, warmup=warmup, final=final)
    assert 0 <= f <= 1
    assert math.isfinite(f)


def test_steps():
    h = StepHorizon(10)
    assert h.progress(5, 99.0) == 0.5
    assert not h.done(9, 99.0)
    assert h.done(10, 0.0)


def test_budget_ends_on_time_with_its_rate_annealed():
    h, elapsed, step, rates = BudgetHorizon(10.0), 0.0, 0, []
    while not h.done(step, elapsed):
        rates.append(h.progress(step, elapsed))
        elapsed += 0.7 + (1.5 if step == 5 else 0.0)  # an evaluation between two steps
        step += 1
    assert elapsed == pytest.approx(10.0, abs=0.7)
    assert rates[-1] >= 0.93
    assert rates == sorted(rates)


def test_cadence_keeps_its_share():
    c, elapsed, times = Cadence(share=0.1, cost=3.0), 0.0, []
    while elapsed < 600:
        elapsed += 1.0
        if c.due(elapsed, 600 - elapsed):
            times.append(elapsed)
            elapsed += 3.0
            c.done(3.0)
    assert times[0] == 30.0
    assert 0.08 < c.spent / 600 <= 0.1
    assert times[-1] < 594


def test_no_share_no_evaluation():
    assert not Cadence(share=0.0, cost=1.0).due(1e6, 1e6)


@pytest.mark.parametrize(
    ("scaling", "effective", "reference", "factor"),
    [
        ("none", 16, None, 1.0), ("none", 16, 2, 1.0), ("linear", 16, 2, 8.0), ("linear", 2, 8, 0.25),
        ("sqrt", 8, 2, 2.0), ("sqrt", 2, 8, 0.5), ("linear", 6, 6, 1.0), ("sqrt", 6, 6, 1.0),
    ],
)  # fmt: skip
def test_scaling_by_hand(scaling, effective, reference, factor):
    assert rate_scale(scaling, effective, reference) == pytest.approx(factor)


def plan(batch, accumulate):
    return Plan(
        spacing=(1.0, 1.0, 1.0), patch=(16, 16, 16), batch=batch, accumulate=accumulate, features=(4, 8, 16),
        strides=((1, 1, 1), (2, 2, 2), (2, 2, 2)), kernels=((3, 3, 3),) * 3, normalisation=("zscore",), ct_norm=(None,),
    )  # fmt: skip


def learner(cfg, batch, accumulate):
    precision = Precision("fp32", torch.device("cpu"))
    return build.learner_from(cfg, torch.nn.Linear(1, 1), precision, LabelTable.numbered(1), plan(batch, accumulate))


def test_the_rate_of_a_run_is_scaled_and_warms_up_to_it(settings):
    cfg = settings("optimizer.lr=1e-3", "schedule.scaling=linear", "schedule.reference_batch=2", "schedule.warmup=0.2")
    made = learner(cfg, batch=2, accumulate=4)
    assert build.effective_batch(plan(2, 4)) == 8
    assert made.peak_rates == pytest.approx([4e-3])
    assert made.set_rate(0.1) == pytest.approx(2e-3)  # half of the warmup
    assert made.set_rate(0.2) == pytest.approx(4e-3)
    assert build.scaling_text(cfg, plan(2, 4), made) == (
        "Learning rate 0.004: optimizer.lr=0.001 for a batch of 2, linear scaling to 2 x 4 x 1 rank, warmup over 20% of the run"
    )
    root = settings("optimizer.lr=1e-3", "schedule.scaling=sqrt", "schedule.reference_batch=2")
    assert learner(root, batch=2, accumulate=4).peak_rates == pytest.approx([2e-3])
    assert learner(settings("optimizer.lr=1e-3"), batch=2, accumulate=4).peak_rates == pytest.approx([1e-3])


def test_ranks_count_into_the_effective_batch(settings, monkeypatch):
    monkeypatch.setattr("segspeed.build.ranks", lambda: 4)
    monkeypatch.setattr("segspeed.build.DistributedDataParallel", lambda *_, **__: None)  # nobody to talk to here
    cfg = settings("optimizer.lr=1e-3", "schedule.scaling=linear", "schedule.reference_batch=8")
    assert learner(cfg, batch=2, accumulate=2).peak_rates == pytest.approx([2e-3])
    assert "2 x 2 x 4 ranks" in build.scaling_text(cfg, plan(2, 2), learner(cfg, 2, 2))


def test_scaling_without_a_reference_is_refused(settings):
    with pytest.raises(SettingsError, match=r"schedule.scaling=sqrt needs schedule.reference_batch=N"):
        settings("schedule.scaling=sqrt")


def test_an_exact_batch_dice_needs_a_loss_that_pools(settings):
    assert learner(settings("loss.batch_dice=true", "train.exact_batch_dice=true"), 2, 2).exact_batch_dice
    with pytest.raises(SettingsError, match="loss.batch_dice=true pools"):
        settings("train.exact_batch_dice=true")
