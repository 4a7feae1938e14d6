import numpy as np
import pytest
import torch
from torch import nn

from segspeed.infer.sliding import Window, predict_logits
from segspeed.speed.precision import Precision

FP32 = Precision("fp32", torch.device("cpu"))


class Pointwise(nn.Module):
    """Background, and a class where the value is positive: the same for every window."""

    def forward(self, x):
        return torch.cat([-x, x], dim=1)


@pytest.mark.parametrize(
    "shape", [(16, 16, 16), (20, 27, 33), (5, 30, 7)], ids=["one window", "many", "smaller than the patch"]
)
def test_a_pointwise_network_gives_what_it_gives_voxel_by_voxel(shape):
    image = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    out = predict_logits(Pointwise(), image, Window((16, 16, 16), 0.5, 3), FP32)
    assert out.shape == (2, *shape)
    torch.testing.assert_close(out[1], image[0], atol=1e-5, rtol=1e-5)


def test_deep_supervision_lists_and_training_mode_make_no_difference():
    class Listing(Pointwise):
        def forward(self, x):
            return [super().forward(x), x[:, :, ::2]]

    image = torch.randn(1, 16, 16, 16)
    a, b = (predict_logits(m, image, Window((16, 16, 16)), FP32) for m in (Pointwise(), Listing()))
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
    plain = predict_logits(Left(), image, window, FP32)
    right = predict_logits(Left(), image, window, FP32, mirror=(2,), swap_on_flip=[(1, 2)])
    assert torch.equal(plain.argmax(0), right.argmax(0))
    wrong = predict_logits(Left(), image, window, FP32, mirror=(2,))
    assert np.allclose(wrong[1].exp(), 0.5, atol=1e-3), "without the swap the two sides cancel out"


def test_mirroring_a_symmetric_network_changes_nothing():
    image = torch.randn(1, 12, 10, 8)
    plain = predict_logits(Pointwise(), image, Window((8, 8, 8)), FP32)
    mirrored = predict_logits(Pointwise(), image, Window((8, 8, 8)), FP32, mirror=(0, 1, 2))
    torch.testing.assert_close(mirrored.softmax(0), plain.softmax(0), atol=1e-4, rtol=1e-4)
