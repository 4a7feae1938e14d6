"""Draw the augmentation of each sample: numbers only, so that every backend applies the same ones.

One independent random stream a sample, a function of (seed, sample number): neither the batch nor the number of
workers changes what a sample gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from segspeed.config import AugmentConfig
from segspeed.streams import AUGMENTATION, stream


@dataclass(frozen=True)
class Params:
    """What to do to each of B samples with C channels. A neutral value (0 angle, factor 1, sigma 0) means: not drawn."""

    rotation: np.ndarray  # (B, 3) radians about D, H, W
    scale: np.ndarray  # (B,) over 1 enlarges
    flip: np.ndarray  # (B, 3) bool, along D, H, W
    noise: np.ndarray  # (B,) standard deviation
    noise_seed: np.ndarray  # (B,) int64
    blur: np.ndarray  # (B, C) sigma in voxels
    brightness: np.ndarray  # (B, C) factor
    contrast: np.ndarray  # (B, C) factor about the mean
    zoom: np.ndarray  # (B, C) resolution kept, 1 is all
    gamma: np.ndarray  # (B,) exponent
    invert: np.ndarray  # (B,) bool, gamma acts on inverted intensities


def draw(config: AugmentConfig, *, seed: int, indices: Sequence[int], channels: int) -> Params:
    """Parameters for the samples with these numbers in the run."""
    rows = [_draw_one(config, seed, int(i), channels) for i in indices]
    return Params(**{name: np.stack([row[name] for row in rows]) for name in rows[0]})


def _draw_one(c: AugmentConfig, seed: int, index: int, channels: int) -> dict[str, np.ndarray]:
    rng = stream(seed, index, AUGMENTATION)
    # Every number is drawn whether it is used or not: a changed probability shifts no other transform's numbers.
    coin = rng.random(8)
    angles = rng.uniform(-1, 1, 3) * np.radians(c.rotation.degrees)
    low, high = c.scale.range
    # as many samples shrink as grow, each side evenly (nnU-Net draws the side first, too)
    scale = rng.uniform(low, min(1.0, high)) if rng.random() < 0.5 and low < 1 else rng.uniform(max(low, 1.0), high)
    flips = rng.random(3) < np.array(c.flip.probability)
    variance = rng.uniform(*c.noise.variance)
    noise_seed = rng.integers(0, 2**62)
    a, b, e, f = (rng.random((2, channels)) for _ in range(4))
    gamma = rng.uniform(*c.gamma.range)
    invert = rng.random() < c.gamma.invert_probability

    def ranged(unit: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
        return bounds[0] + unit * (bounds[1] - bounds[0])

    blur_on = (coin[3] < c.blur.probability) & (a[0] < c.blur.channel_probability)
    zoom_on = (coin[6] < c.low_resolution.probability) & (f[0] < c.low_resolution.channel_probability)
    return {
        "rotation": angles if coin[0] < c.rotation.probability else np.zeros(3),
        "scale": np.float64(scale if coin[1] < c.scale.probability else 1.0),
        "flip": flips,
        "noise": np.float64(np.sqrt(variance) if coin[2] < c.noise.probability else 0.0),
        "noise_seed": np.int64(noise_seed),
        "blur": np.where(blur_on, ranged(a[1], c.blur.sigma), 0.0),
        "brightness": ranged(b[1], c.brightness.range) if coin[4] < c.brightness.probability else np.ones(channels),
        "contrast": ranged(e[1], c.contrast.range) if coin[5] < c.contrast.probability else np.ones(channels),
        "zoom": np.where(zoom_on, ranged(f[1], c.low_resolution.zoom), 1.0),
        "gamma": np.float64(gamma if coin[7] < c.gamma.probability else 1.0),
        "invert": np.bool_(invert),
    }
