import numpy as np
import pytest

from segspeed.augment.draw import draw
from segspeed.config import AugmentConfig

N = 4000


def values(**changes):
    return draw(AugmentConfig.model_validate(changes), seed=3, indices=range(N), channels=2)


def share(mask):
    return float(np.mean(mask))


def test_frequencies_and_ranges():
    p = values(
        rotation={"probability": 0.3, "degrees": (10, 20, 30)},
        scale={"probability": 0.4, "range": (0.8, 1.5)},
        flip={"probability": (0.1, 0.5, 0.9)},
        noise={"probability": 0.25, "variance": (0.01, 0.04)},
        blur={"probability": 0.6, "channel_probability": 0.5, "sigma": (0.5, 1.0)},
        low_resolution={"probability": 0.5, "channel_probability": 1.0, "zoom": (0.5, 0.9)},
        gamma={"probability": 0.7, "range": (0.7, 1.5), "invert_probability": 0.25},
    )
    close = pytest.approx
    assert share((p.rotation != 0).any(1)) == close(0.3, abs=0.03)
    assert (np.abs(p.rotation) <= np.radians([10, 20, 30])).all()
    assert share(p.scale != 1) == close(0.4, abs=0.03)
    assert share(p.scale[p.scale != 1] < 1) == close(0.5, abs=0.05), "as many shrink as grow"
    assert p.scale.min() >= 0.8
    assert p.scale.max() <= 1.5
    assert p.flip.mean(0) == close([0.1, 0.5, 0.9], abs=0.03)
    assert share(p.noise != 0) == close(0.25, abs=0.03)
    assert p.noise[p.noise > 0].min() >= 0.1
    assert p.noise.max() <= 0.2
    assert share(p.blur != 0) == close(0.3, abs=0.03)
    assert share(p.zoom != 1) == close(0.5, abs=0.03)
    assert share(p.gamma != 1) == close(0.7, abs=0.03)
    assert share(p.invert) == close(0.25, abs=0.03)


def test_a_sample_gets_the_same_whatever_its_batch():
    c = AugmentConfig()
    whole = draw(c, seed=1, indices=[5, 6, 7], channels=1)
    alone = draw(c, seed=1, indices=[6], channels=1)
    for name in vars(whole):
        np.testing.assert_array_equal(getattr(whole, name)[1:2], getattr(alone, name))


def test_streams_differ_by_sample_and_by_seed():
    a, b = (draw(AugmentConfig(), seed=s, indices=range(50), channels=1) for s in (0, 1))
    assert len(np.unique(a.noise_seed)) == 50
    assert not np.isin(a.noise_seed, b.noise_seed).any()


def test_one_probability_shifts_no_other_transform():
    plain = values()
    more = values(rotation={"probability": 0.9})
    for name in vars(plain):
        if name != "rotation":
            np.testing.assert_array_equal(getattr(plain, name), getattr(more, name))


def test_off_means_neutral():
    off = {
        k: {"probability": 0.0}
        for k in ("rotation", "scale", "noise", "blur", "brightness", "contrast", "low_resolution", "gamma")
    }
    p = values(**off, flip={"probability": (0, 0, 0)})
    assert not p.rotation.any()
    assert not p.flip.any()
    assert not p.noise.any()
    assert not p.blur.any()
    for name in ("scale", "brightness", "contrast", "zoom", "gamma"):
        assert (getattr(p, name) == 1).all(), name
