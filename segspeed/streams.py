"""Random numbers as a function of (seed, number, purpose): any sample can be drawn first, by any process."""

from __future__ import annotations

import numpy as np

# The purposes of one sample (or one epoch); no two share numbers.
PATCH, ORDER, AUGMENTATION, OWN_AUGMENTATION = 1, 2, 3, 4


def stream(seed: int, index: int, purpose: int) -> np.random.Generator:
    """The generator of one purpose of sample ``index`` (Philox, counter-based: Salmon et al. 2011)."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, (index << 4) | purpose], dtype=np.uint64)))
