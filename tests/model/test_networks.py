import pytest
import torch
from monai.networks.nets import SegResNetDS, SwinUNETR
from torch import nn

from segspeed.model.checkpointing import apply_checkpointing, block_names
from segspeed.model.losses import DiceCELoss, deep_supervision
from segspeed.model.networks import as_heads, as_logits, dynunet
from segspeed.types import DataError, Plan


def plan(levels=3, features=(4, 8, 16), patch=(16, 16, 16)):
    return Plan(
        spacing=(1.0, 1.0, 1.0),
        patch=patch,
        batch=2,
        accumulate=1,
        features=features[:levels],
        strides=((1, 1, 1),) + ((2, 2, 2),) * (levels - 1),
        kernels=((3, 3, 3),) * levels,
        normalisation=("zscore",),
        ct_norm=(None,),
    )


def test_heads_in_training_one_output_in_evaluation():
    net = dynunet(plan(4, (4, 8, 16, 32), (16, 24, 16)), in_channels=2, out_channels=3)
    x = torch.randn(2, 2, 16, 24, 16)
    assert [tuple(h.shape) for h in as_heads(net(x))] == [(2, 3, 16, 24, 16), (2, 3, 8, 12, 8)]
    assert tuple(as_logits(net.eval()(x)).shape) == (2, 3, 16, 24, 16)


def test_heads_are_freed_with_the_step():
    net = dynunet(plan(4, (4, 4, 8, 8)), 1, 2)
    assert len(net(torch.randn(1, 1, 16, 16, 16))) == 2
    assert all(h.numel() == 0 for h in net.heads)


def test_deep_supervision_off():
    net = dynunet(plan(4, (4, 4, 8, 8)), 1, 2, deep_supervision=False)
    assert isinstance(net(torch.randn(1, 1, 16, 16, 16)), torch.Tensor)


def test_two_levels_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match="plan.patch"):
        dynunet(plan(levels=2), 1, 2)


def test_as_heads_takes_tensor_list_and_stack_and_refuses_the_rest():
    t = torch.zeros(2, 3, 4, 4, 4)
    assert as_heads(t)[0] is t
    assert len(as_heads([t, t])) == 2
    assert [tuple(h.shape) for h in as_heads(torch.zeros(2, 5, 3, 4, 4, 4))] == [(2, 3, 4, 4, 4)] * 5
    with pytest.raises(ValueError, match="dict"):
        as_heads({"logits": t})


def gradients(net, x, label):
    torch.manual_seed(1)
    net.zero_grad()
    value = deep_supervision(DiceCELoss(), as_heads(net(x)), label)
    value.backward()
    return value.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "make",
    [
        lambda: dynunet(plan(4, (4, 4, 8, 8)), 1, 3, dropout=0.2),
        lambda: SegResNetDS(
            init_filters=4, in_channels=1, out_channels=3, norm="instance", blocks_down=(1, 1), dsdepth=2
        ),
    ],
    ids=["dynunet-dropout", "segresnet_ds"],
)
def test_checkpointed_gradients_are_the_plain_ones_bit_for_bit(make):
    torch.manual_seed(0)
    net = make().train()
    x, label = torch.randn(2, 1, 16, 16, 16), torch.randint(0, 3, (2, 16, 16, 16))
    plain_loss, plain = gradients(net, x, label)
    assert len(apply_checkpointing(net, "all")) >= 3
    loss, grads = gradients(net, x, label)
    assert torch.equal(loss, plain_loss)
    assert len(plain) > 5
    assert all(torch.equal(a, b) for a, b in zip(plain, grads, strict=True))


def test_checkpointing_recomputes_in_training_only():
    net = dynunet(plan(), 1, 2)
    calls = []
    net.input_block.register_forward_hook(lambda *_: calls.append(1))
    inner = net.input_block.conv1
    inner.register_forward_hook(lambda *_: calls.append(2))
    apply_checkpointing(net, "all")
    as_heads(net(torch.randn(1, 1, 16, 16, 16)))[0].sum().backward()
    assert calls.count(2) == 2
    calls.clear()
    with torch.no_grad():
        net.eval()(torch.randn(1, 1, 16, 16, 16))
    assert calls.count(2) == 1


def test_checkpointing_by_name():
    net = dynunet(plan(), 1, 2)
    assert apply_checkpointing(net, "none") == []
    assert "input_block" in block_names(net)
    assert apply_checkpointing(net, ["input_block"]) == ["input_block"]
    with pytest.raises(DataError, match="nearest: input_block"):
        apply_checkpointing(dynunet(plan(), 1, 2), ["input_blok"])


def test_networks_without_known_blocks_are_checkpointed_by_what_the_root_calls():
    net = SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))
    assert block_names(net)

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList([nn.Conv3d(1, 1, 1), nn.Conv3d(1, 1, 1)])

        def forward(self, x):
            return self.stages[1](self.stages[0](x))

    assert block_names(Listed()) == ["stages.0", "stages.1"]
    with pytest.raises(DataError, match="never called: stages"):
        apply_checkpointing(Listed(), ["stages"])
