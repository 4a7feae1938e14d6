"""Blocks become channels and voxels again; gradients, heads and checkpointing as for any network."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segspeed.model.checkpointing import apply_checkpointing
from segspeed.model.networks import as_heads, as_logits
from segspeed.model.shuffle_unet import shuffle_unet, to_channels, to_voxels
from segspeed.types import Plan


def plan(levels=4, patch=(16, 16, 16), first=(2, 2, 2)):
    return Plan(
        spacing=(1.0, 1.0, 1.0), patch=patch, batch=1, accumulate=1, features=(4, 4, 8, 8, 8)[:levels],
        strides=((1, 1, 1), first, *((2, 2, 2),) * (levels - 2)), kernels=((3, 3, 3),) * levels,
        normalisation=("zscore",), ct_norm=(None,),
    )  # fmt: skip


def test_a_block_by_hand():
    x = torch.arange(8.0).reshape(1, 1, 2, 2, 2)
    assert to_channels(x, (2, 2, 2)).flatten().tolist() == list(range(8))
    flat = torch.arange(4.0).reshape(1, 1, 1, 2, 2)
    assert to_channels(flat, (1, 2, 2)).shape == (1, 4, 1, 1, 1)


def test_each_channel_is_one_place_in_its_block():
    x = torch.randn(2, 3, 4, 6, 8)
    y = to_channels(x, (2, 3, 2))
    assert torch.equal(y[:, 12 + 1 * 6 + 2 * 2 + 1], x[:, 1, 1::2, 2::3, 1::2])


@given(st.tuples(*[st.integers(1, 3)] * 3), st.integers(1, 3))
def test_the_way_back(block, channels):
    x = torch.randn(1, channels, *(2 * b for b in block))
    assert torch.equal(to_voxels(to_channels(x, block), block), x)


@pytest.mark.parametrize("refine", [0, 4])
@pytest.mark.parametrize("first", [(2, 2, 2), (1, 2, 2)])
def test_logits_at_full_resolution(first, refine):
    net = shuffle_unet(plan(first=first), in_channels=2, out_channels=3, refine=refine)
    x = torch.randn(1, 2, 16, 16, 16)
    assert as_logits(net(x)).shape == (1, 3, 16, 16, 16)
    as_logits(net(x)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_heads_one_level_finer_than_the_inner_ones():
    net = shuffle_unet(plan(5, (32, 32, 32)), 1, 2)
    assert [tuple(h.shape[2:]) for h in as_heads(net(torch.randn(1, 1, 32, 32, 32)))] == [(32,) * 3, (16,) * 3]
    assert isinstance(net.eval()(torch.randn(1, 1, 32, 32, 32)), torch.Tensor)


def test_the_correction_begins_as_none():
    torch.manual_seed(0)
    with_it = shuffle_unet(plan(), 1, 2, refine=4)
    x = torch.randn(1, 1, 16, 16, 16)
    inner = to_voxels(with_it.inner(to_channels(x, (2, 2, 2))), (2, 2, 2))
    assert torch.equal(as_logits(with_it(x)), inner)


def test_checkpointed_gradients_are_the_plain_ones():
    grads = []
    for choice in ("none", "all"):
        torch.manual_seed(0)
        net = shuffle_unet(plan(), 1, 2)
        assert bool(apply_checkpointing(net, choice)) == (choice == "all")
        as_logits(net(torch.linspace(-1, 1, 4096).reshape(1, 1, 16, 16, 16))).square().sum().backward()
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_too_few_levels():
    with pytest.raises(ValueError, match="at least 32 voxels"):
        shuffle_unet(plan(3), 1, 2)
