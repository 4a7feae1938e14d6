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

SINGLE = 20  # random numbers of a sample that its channels share


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
    """Parameters for the samples with these numbers in the run.

    Every number is drawn whether it is used or not: a changed probability shifts no other transform's numbers.
    """
    c = config
    unit = np.stack([stream(seed, int(i), AUGMENTATION).random(SINGLE + 6 * channels) for i in indices])
    coin, angles, (side, size), flips = unit[:, :8], unit[:, 8:11], unit[:, 11:13].T, unit[:, 13:16]
    variance, noise_seed, gamma, invert = unit[:, 16:SINGLE].T
    blur_on, sigma, bright, spread, zoom_on, zoom = unit[:, SINGLE:].reshape(len(unit), 6, channels).swapaxes(0, 1)

    def ranged(share: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
        return bounds[0] + share * (bounds[1] - bounds[0])

    low, high = c.scale.range
    # as many samples shrink as grow, each side evenly (nnU-Net draws the side first, too)
    shrinks = (side < 0.5) & (low < 1)
    scale = np.where(shrinks, ranged(size, (low, min(1.0, high))), ranged(size, (max(low, 1.0), high)))
    blurred = (coin[:, 3:4] < c.blur.probability) & (blur_on < c.blur.channel_probability)
    coarse = (coin[:, 6:7] < c.low_resolution.probability) & (zoom_on < c.low_resolution.channel_probability)
    return Params(
        rotation=np.where(coin[:, :1] < c.rotation.probability, (2 * angles - 1) * np.radians(c.rotation.degrees), 0.0),
        scale=np.where(coin[:, 1] < c.scale.probability, scale, 1.0),
        flip=flips < np.array(c.flip.probability),
        noise=np.where(coin[:, 2] < c.noise.probability, np.sqrt(ranged(variance, c.noise.variance)), 0.0),
        noise_seed=(noise_seed * 2**53).astype(np.int64),
        blur=np.where(blurred, ranged(sigma, c.blur.sigma), 0.0),
        brightness=np.where(coin[:, 4:5] < c.brightness.probability, ranged(bright, c.brightness.range), 1.0),
        contrast=np.where(coin[:, 5:6] < c.contrast.probability, ranged(spread, c.contrast.range), 1.0),
        zoom=np.where(coarse, ranged(zoom, c.low_resolution.zoom), 1.0),
        gamma=np.where(coin[:, 7] < c.gamma.probability, ranged(gamma, c.gamma.range), 1.0),
        invert=invert < c.gamma.invert_probability,
    )
