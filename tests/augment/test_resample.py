"""The compiled resampling is the same function as torch's grid_sample with zeros outside."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segspeed.augment.cpu_backend import UNCHANGED, _place
from segspeed.augment.resample_kernel import fill
from segspeed.augment.spatial import _turn, rotation_matrix


def both(shape, patch, matrix, channels=1, seed=0):
    rng = torch.Generator().manual_seed(seed)
    image = torch.randn(1, channels, *shape, generator=rng)
    label = torch.randint(0, 4, (1, *shape), generator=rng).to(torch.int16)
    found = [(torch.full((1, channels, *patch), 7.0), torch.full((1, *patch), 7, dtype=torch.int16)) for _ in range(2)]
    (out, out_label), (grid, grid_label) = found
    _place(
        image[0].numpy(), label[0].numpy(), [UNCHANGED] * channels, matrix, np.zeros(3, bool), np.zeros(0, np.int16),
        out[0].numpy(), out_label[0].numpy(),
    )  # fmt: skip
    _turn(image, label, matrix[None], np.array([True]), grid, grid_label)
    return found


def between_two(shape, patch, matrix):
    """Output voxels whose place lies within rounding of the middle between two voxels, which may go either way."""
    size, out = np.array(shape), np.array(patch)
    offsets = np.stack(np.meshgrid(*(np.arange(n) - (n - 1) / 2 for n in patch), indexing="ij"), -1)
    places = offsets @ matrix.T + (size - out) // 2 + (out - 1) / 2
    return (np.abs(places - np.floor(places) - 0.5) < 2e-3).any(-1)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.integers(1, 14)] * 3),
    st.tuples(*[st.integers(1, 14)] * 3),
    st.tuples(*[st.floats(-3.2, 3.2)] * 3),
    st.floats(0.3, 3.0),
    st.integers(1, 3),
)
def test_any_shape_angle_and_scale(shape, patch, angles, scale, channels):
    matrix = rotation_matrix(np.array(angles)) / scale
    (ours, our_label), (theirs, their_label) = both(shape, patch, matrix, channels)
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)
    assert not ((our_label != their_label).numpy()[0] & ~between_two(shape, patch, matrix)).any()


@pytest.mark.parametrize("flip", [(1, 1, -1), (-1, -1, -1), (-1, 1, 1)])
def test_pure_mirrors_are_exact_inside(flip):
    (ours, our_label), _ = both((6, 7, 8), (6, 7, 8), np.diag(np.array(flip, float)))
    (plain, plain_label), _ = both((6, 7, 8), (6, 7, 8), np.eye(3))
    axes = [a for a in range(3) if flip[a] < 0]
    torch.testing.assert_close(ours, plain.flip([a + 2 for a in axes]), atol=1e-4, rtol=0)
    assert torch.equal(our_label, plain_label.flip([a + 1 for a in axes]))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(threads):
    angles = rotation_matrix(np.array([0.3, -0.2, 0.5]))
    torch.set_num_threads(1)
    (one, one_label), _ = both((9, 10, 11), (8, 8, 8), angles, channels=2)
    torch.set_num_threads(threads)
    (many, many_label), _ = both((9, 10, 11), (8, 8, 8), angles, channels=2)
    assert torch.equal(one, many)
    assert torch.equal(one_label, many_label)


def test_far_outside_is_zero():
    image, label = np.ones((1, 4, 4, 4), np.float32), np.ones((4, 4, 4), np.int16)
    out, out_label = np.full((1, 4, 4, 4), 9, np.float32), np.full((4, 4, 4), 9, np.int16)
    fill(image, label, np.eye(3), np.array([1e9, -1e9, 50.0]), out, out_label, 0, 4)
    assert not out.any()
    assert not out_label.any()
