import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segspeed.speed.cadence import Cadence
from segspeed.speed.schedule import BudgetHorizon, StepHorizon, learning_rate_factor


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
