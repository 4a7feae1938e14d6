import numpy as np
import pytest

from segspeed.metric.summary import summarise

CASES = {"x": {"a": 0.8, "b": None}, "y": {"a": 0.4, "b": 1.0}, "z": {"a": 0.6, "b": 0.0}}


def test_means_by_hand_with_the_empties_counted():
    s = summarise(CASES)
    assert s.dice == pytest.approx({"a": 0.6, "b": 0.5})
    assert s.mean_dice == pytest.approx(0.55)
    assert s.empty == {"a": 0, "b": 1}
    assert [c for c, _ in s.ranked()] == ["x", "y", "z"]


def test_a_class_nobody_has_is_none_not_zero():
    s = summarise({"x": {"a": 0.5, "b": None}})
    assert s.dice == {"a": 0.5, "b": None}
    assert s.mean_dice == 0.5
    assert s.interval is None, "one case has no interval"
    assert summarise({"x": {"a": None}}).mean_dice is None


def test_interval_covers_the_mean_and_shrinks_with_cases():
    rng = np.random.default_rng(0)
    few, many = ({str(i): {"a": float(v)} for i, v in enumerate(rng.uniform(0.7, 0.9, n))} for n in (10, 400))
    a, b = summarise(few), summarise(many)
    assert a.interval[0] < a.mean_dice < a.interval[1]
    assert b.interval[1] - b.interval[0] < (a.interval[1] - a.interval[0]) / 3
    # the half-width of a mean of 400 even draws is 1.96 * (0.2 / sqrt(12)) / 20
    assert (b.interval[1] - b.interval[0]) / 2 == pytest.approx(1.96 * 0.2 / np.sqrt(12) / 20, rel=0.15)
    assert summarise(few).interval == a.interval, "reproducible"
