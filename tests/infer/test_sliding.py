import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from torch import nn

from segspeed.infer.sliding import Window, finished_planes, forward_of, predict_logits
from segspeed.speed.precision import Precision
from segspeed.types import LabelTable

FP32 = Precision("fp32", torch.device("cpu"))


def logits(model, image, window, **mirroring):
    return predict_logits(forward_of(model.eval(), FP32, LabelTable.numbered(2), **mirroring), image, window)


class Pointwise(nn.Module):
    """Background, and a class where the value is positive: the same for every window."""

    def forward(self, x):
        return torch.cat([-x, x], dim=1)


@pytest.mark.parametrize(
    "shape", [(16, 16, 16), (20, 27, 33), (5, 30, 7)], ids=["one window", "many", "smaller than the patch"]
)
def test_a_pointwise_network_gives_what_it_gives_voxel_by_voxel(shape):
    image = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    out = logits(Pointwise(), image, Window((16, 16, 16), 0.5, 3))
    assert out.shape == (2, *shape)
    torch.testing.assert_close(out[1], image[0], atol=1e-5, rtol=1e-5)


def test_deep_supervision_lists_and_training_mode_make_no_difference():
    class Listing(Pointwise):
        def forward(self, x):
            return [super().forward(x), x[:, :, ::2]]

    image = torch.randn(1, 16, 16, 16)
    a, b = (logits(m, image, Window((16, 16, 16))) for m in (Pointwise(), Listing()))
    torch.testing.assert_close(a, b)


class Left(nn.Module):
    """Class 1 in the half of low W, class 2 in the other, whatever it sees."""

    def forward(self, x):
        w = torch.arange(x.shape[-1]).expand_as(x)
        low = (w < x.shape[-1] / 2).float() * 20
        return torch.cat([torch.zeros_like(x), low, 20 - low], dim=1)


def test_mirroring_swaps_left_and_right():
    image = torch.zeros(1, 8, 8, 8)
    window = Window((8, 8, 8))
    plain = logits(Left(), image, window)
    right = logits(Left(), image, window, mirror=(2,), swap_on_flip=[(1, 2)])
    assert torch.equal(plain.argmax(0), right.argmax(0))
    wrong = logits(Left(), image, window, mirror=(2,))
    assert np.allclose(wrong[1].exp(), 0.5, atol=1e-3), "without the swap the two sides cancel out"


def test_mirroring_a_symmetric_network_changes_nothing():
    image = torch.randn(1, 12, 10, 8)
    plain = logits(Pointwise(), image, Window((8, 8, 8)))
    mirrored = logits(Pointwise(), image, Window((8, 8, 8)), mirror=(0, 1, 2))
    torch.testing.assert_close(mirrored.softmax(0), plain.softmax(0), atol=1e-4, rtol=1e-4)


def network(channels=2, classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(channels, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, classes, 3, padding=1)).eval()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.7])
@pytest.mark.parametrize("shape", [(8, 12, 10), (19, 23, 31), (5, 40, 9)])
def test_the_same_scores_as_monais_inferer(shape, overlap, axis):
    net, volume = network(), torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    window = Window((8, 12, 10), overlap, 3)
    with torch.no_grad():
        expected = sliding_window_inference(
            volume[None], window.patch, 2, net, overlap, "gaussian", sigma_scale=0.125, padding_mode="constant"
        )[0]
    found = torch.full_like(expected, float("nan"))
    reached = 0
    for first, scores in finished_planes(forward_of(net, FP32, LabelTable.numbered(2)), volume, window, axis):
        assert first == reached, "planes come in order, each once"
        reached += scores.shape[axis + 1]
        found.narrow(axis + 1, first, scores.shape[axis + 1]).copy_(scores)
    assert reached == shape[axis]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert (found.argmax(0) == expected.argmax(0)).float().mean() > 0.9999


def test_windows_of_one_value_are_seen_by_the_network_once():
    calls = []

    class Counting(nn.Module):
        def forward(self, x):
            calls.append(len(x))
            return torch.cat([x, -x], 1)

    volume = torch.full((1, 32, 32, 32), -1.0)
    volume[0, :8, :8, :8] = torch.randn(8, 8, 8)
    out = logits(Counting(), volume, Window((8, 8, 8), 0.0, 4))
    assert sum(calls) == 2, "one window with content, one of the 63 without"
    torch.testing.assert_close(out[0], volume[0])


def test_what_is_held_is_as_deep_as_one_window():
    volume = torch.randn(1, 64, 8, 8)
    depths = [
        s.shape[1]
        for _, s in finished_planes(forward_of(Pointwise(), FP32, LabelTable.numbered(2)), volume, Window((8, 8, 8)))
    ]
    assert max(depths) <= 8
    assert sum(depths) == 64
