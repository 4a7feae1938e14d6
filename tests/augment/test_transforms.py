"""Each transform against a reference that knows nothing of ours: scipy, numpy, or values worked out by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import ndimage

from segspeed.augment import torch_backend
from segspeed.augment.draw import Params
from segspeed.augment.intensity import low_resolution_matrix
from segspeed.augment.spatial import rotation_matrix
from segspeed.augment.torch_backend import augment, source_shape
from segspeed.config import AugmentConfig

SHAPE = (9, 12, 15)


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def backend(request, monkeypatch):
    """Every test runs through the CPU's compiled loops and through the torch code that GPUs run."""
    monkeypatch.setattr(torch_backend, "compiled", lambda image: request.param == "compiled")
    return request.param


def neutral(batch=1, channels=1):
    return Params(
        rotation=np.zeros((batch, 3)), scale=np.ones(batch), flip=np.zeros((batch, 3), bool), noise=np.zeros(batch),
        noise_seed=np.arange(batch), blur=np.zeros((batch, channels)), brightness=np.ones((batch, channels)),
        contrast=np.ones((batch, channels)), zoom=np.ones((batch, channels)), gamma=np.ones(batch),
        invert=np.zeros(batch, bool),
    )  # fmt: skip


def smooth(shape=SHAPE, seed=0):
    noise = np.random.default_rng(seed).normal(size=shape)
    return ndimage.gaussian_filter(noise, 1.5).astype(np.float32) * 10


def run(image, label=None, patch=None, spacing=(1.0, 1.0, 1.0), swap=(), **changes):
    image = torch.from_numpy(np.ascontiguousarray(image))
    image = image[None, None] if image.ndim == 3 else image
    label = torch.zeros((image.shape[0], *image.shape[2:]), dtype=torch.int16) if label is None else label
    params = dataclasses.replace(neutral(image.shape[0], image.shape[1]), **changes)
    return augment(image, label, params, patch=patch or tuple(image.shape[2:]), spacing=spacing, swap_on_flip=swap)


def test_nothing_drawn_changes_nothing():
    image = smooth()
    out, _ = run(image)
    np.testing.assert_array_equal(out[0, 0].numpy(), image)


@pytest.mark.parametrize("angles", [(20, 0, 0), (0, 15, 0), (0, 0, -25), (10, -12, 14)])
@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (3.0, 1.0, 0.8)])
def test_rotation_and_scale_are_scipys(angles, spacing):
    """Angles are angles in mm: scipy gets the matrix mm -> voxels worked out here."""
    image, radians, scale = smooth((15, 18, 21)), np.radians(angles), 1.2
    out, _ = run(image, spacing=spacing, rotation=radians[None], scale=np.array([scale]))
    mm = np.diag(spacing)
    matrix = np.linalg.inv(mm) @ rotation_matrix(radians).T @ mm / scale
    centre = (np.array(image.shape) - 1) / 2
    expected = ndimage.affine_transform(image, matrix, centre - matrix @ centre, order=1, mode="grid-constant")
    np.testing.assert_allclose(out[0, 0].numpy(), expected, atol=2e-3)


def test_rotation_by_hand_turns_h_towards_w():
    """A spot on the H axis, turned by 90 degrees about D, lands on the W axis."""
    image = np.zeros((5, 5, 5), np.float32)
    image[2, 4, 2] = 1
    out, _ = run(image, rotation=np.radians([[90.0, 0, 0]]))
    assert np.unravel_index(int(out.argmax()), (5, 5, 5)) == (2, 2, 4)
    assert out.max() == pytest.approx(1, abs=1e-4)


def test_the_label_goes_where_the_image_goes():
    label = (smooth((15, 18, 21)) > 0.5).astype(np.int16)
    out, moved = run(
        label.astype(np.float32), torch.from_numpy(label)[None],
        rotation=np.radians([[10.0, 12, -9]]), scale=np.array([1.15]), flip=np.array([[True, False, True]]),
    )  # fmt: skip
    certain = (out[0, 0] < 0.05) | (out[0, 0] > 0.95)
    assert certain.float().mean() > 0.5
    assert torch.equal(moved[0][certain], out[0, 0][certain].round().to(torch.int16))


@pytest.mark.parametrize("flip", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_flips_move_voxels_exactly(flip):
    image, label = smooth(), torch.arange(np.prod(SHAPE)).reshape(1, *SHAPE).to(torch.int16)
    axes = [a for a in range(3) if flip[a]]
    out, moved = run(image, label, flip=np.array([flip], bool))
    np.testing.assert_array_equal(out[0, 0].numpy(), np.flip(image, axes))
    np.testing.assert_array_equal(moved[0].numpy(), np.flip(label[0].numpy(), axes))


def test_left_and_right_trade_places_only_under_a_left_right_flip():
    label = torch.zeros((3, 4, 4, 4), dtype=torch.int16)
    label[:, 0, 0, 0], label[:, 0, 0, 3] = 1, 2
    flips = np.array([[0, 0, 1], [0, 1, 0], [0, 0, 0]], bool)
    _, out = run(np.zeros((3, 1, 4, 4, 4), np.float32), label, swap=[(1, 2)], flip=flips)
    assert (out[0, 0, 0, 0], out[0, 0, 0, 3]) == (1, 2), "mirrored, then renamed: left is left again"
    assert (out[1, 0, 3, 0], out[1, 0, 3, 3]) == (1, 2)
    assert (out[2, 0, 0, 0], out[2, 0, 0, 3]) == (1, 2)


def test_swapped_labels_under_a_flip_with_rotation():
    label = torch.zeros((1, 9, 9, 9), dtype=torch.int16)
    label[:, 3:6, 3:6, 0:3], label[:, 3:6, 3:6, 6:9] = 1, 2
    _, out = run(
        np.zeros((1, 1, 9, 9, 9), np.float32), label, swap=[(1, 2)],
        flip=np.array([[0, 0, 1]], bool), rotation=np.radians([[5.0, 0, 0]]),
    )  # fmt: skip
    assert out[0, 4, 4, 1] == 1
    assert out[0, 4, 4, 7] == 2


def test_a_larger_source_fills_the_corners():
    config = AugmentConfig(margin=1.5)
    patch = (8, 8, 8)
    assert source_shape(patch, config) == (12, 12, 12)
    ones = np.ones((12, 12, 12), np.float32)
    out, _ = run(ones, patch=patch, rotation=np.radians([[15.0, 0, 0]]))
    assert out.shape[2:] == patch
    assert out.min() > 0.999
    bare, _ = run(np.ones(patch, np.float32), rotation=np.radians([[45.0, 0, 0]]))
    assert bare.min() == 0


@pytest.mark.parametrize("source", [(12, 12, 12), (11, 12, 13)])
def test_a_turned_patch_lies_where_the_cut_one_lies(source):
    """Angle almost zero: the resampled patch equals the centre crop, whatever the parity of the margin."""
    image = smooth(source)
    cut, _ = run(image, patch=(8, 8, 8))
    turned, _ = run(image, patch=(8, 8, 8), rotation=np.array([[1e-7, 0, 0]]))
    np.testing.assert_allclose(turned.numpy(), cut.numpy(), atol=1e-4)


@pytest.mark.parametrize("sigma", [0.5, 0.77, 1.0])
def test_blur_is_scipys(sigma):
    image = smooth()
    out, _ = run(image, blur=np.array([[sigma]]))
    np.testing.assert_allclose(out[0, 0].numpy(), ndimage.gaussian_filter(image, sigma, mode="mirror"), atol=1e-4)


def test_brightness_and_contrast_by_numpy():
    image = np.stack([smooth(seed=0), smooth(seed=1)])[None]
    out, _ = run(image, brightness=np.array([[1.2, 1.0]]))
    np.testing.assert_allclose(out[0, 0].numpy(), image[0, 0] * 1.2, rtol=1e-6)
    np.testing.assert_array_equal(out[0, 1].numpy(), image[0, 1])
    out, _ = run(image, contrast=np.array([[1.25, 0.75]]))
    for channel, factor in ((0, 1.25), (1, 0.75)):
        x = image[0, channel]
        expected = np.clip((x - x.mean()) * factor + x.mean(), x.min(), x.max())
        np.testing.assert_allclose(out[0, channel].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("invert", [False, True])
def test_gamma_by_numpy_keeps_mean_and_spread(invert):
    image = smooth()
    out, _ = run(image, gamma=np.array([0.7]), invert=np.array([invert]))
    x = -image.astype(np.float64) if invert else image.astype(np.float64)
    y = ((x - x.min()) / (x.max() - x.min())) ** 0.7
    y = (y - y.mean()) * x.std(ddof=1) / y.std(ddof=1) + x.mean()
    expected = -y if invert else y
    np.testing.assert_allclose(out[0, 0].numpy(), expected, atol=2e-4)
    assert out.mean() == pytest.approx(image.mean(), abs=1e-4)


def test_gamma_of_a_constant_patch_stays_finite():
    out, _ = run(np.full(SHAPE, 2.0, np.float32), gamma=np.array([1.3]))
    np.testing.assert_allclose(out.numpy(), 2.0, atol=1e-5)


def test_low_resolution_by_hand():
    """Half of 8 voxels keeps numbers 1, 3, 5 and 7 (the nearest to the coarse centres), then interpolates."""
    line = np.array([0, 10, 20, 30, 40, 50, 60, 70], np.float32)
    small = line[[1, 3, 5, 7]]
    at = np.clip((np.arange(8) + 0.5) / 2 - 0.5, 0, 3)
    np.testing.assert_allclose(low_resolution_matrix(8, 0.5) @ line, np.interp(at, np.arange(4), small), atol=1e-5)


def test_noise_has_its_spread_and_belongs_to_the_sample():
    zeros = np.zeros((3, 1, 20, 20, 20), np.float32)
    std, seeds = np.array([0.3, 0.0, 0.1]), np.array([11, 12, 13])
    out, _ = run(zeros, noise=std, noise_seed=seeds)
    assert out.std((1, 2, 3, 4)).tolist() == pytest.approx([0.3, 0.0, 0.1], rel=0.03)
    alone, _ = run(zeros[2:], noise=std[2:], noise_seed=seeds[2:])
    assert torch.equal(alone[0], out[2])


def test_rows_do_not_touch_each_other():
    image = np.stack([smooth(seed=s) for s in range(4)])[:, None]
    params = {
        "rotation": np.radians([[0, 0, 0], [9, 0, 0], [0, 0, 0], [0, 9, 0]]),
        "blur": np.array([[0], [0.8], [0.8], [0]]),
    }
    out, _ = run(image, **params)
    for row in range(4):
        alone, _ = run(image[row : row + 1], **{k: v[row : row + 1] for k, v in params.items()})
        np.testing.assert_allclose(out[row].numpy(), alone[0].numpy(), atol=1e-5)


def test_the_input_is_left_as_it_was():
    image = torch.from_numpy(smooth())[None, None]
    before = image.clone()
    params = dataclasses.replace(neutral(), brightness=np.array([[2.0]]), flip=np.array([[True, True, True]]))
    augment(image, torch.zeros((1, *SHAPE), dtype=torch.int16), params, patch=SHAPE, spacing=(1, 1, 1))
    assert torch.equal(image, before)
