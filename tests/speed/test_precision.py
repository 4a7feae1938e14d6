import pytest
import torch
from torch import nn

from segspeed.speed.ema import WeightAverage
from segspeed.speed.precision import Precision, bf16_speedup_cpu, choose_precision
from segspeed.speed.watch import LateReader, LossGuard

CPU = torch.device("cpu")


def one_step(name, clip):
    torch.manual_seed(0)
    net = nn.Linear(4, 1, bias=False)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    before = net.weight.detach().clone()
    precision = Precision(name, CPU)
    precision.backward((net(torch.ones(1, 4)) * 100).sum())
    norm = precision.step(opt, net.parameters(), clip)
    return norm.item(), (before - net.weight.detach()).norm().item()


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_clipping_acts_on_the_unscaled_gradient(name):
    norm, moved = one_step(name, clip=1.0)
    assert norm == pytest.approx(200.0, rel=1e-3)  # 100 * sqrt(4), whatever the loss scale
    assert moved == pytest.approx(1.0, rel=1e-3)
    assert one_step(name, clip=None)[1] == pytest.approx(200.0, rel=1e-3)


def test_fp16_skips_a_step_that_overflowed_and_lowers_the_scale():
    net = nn.Linear(1, 1, bias=False)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    precision = Precision("fp16", CPU)
    before, scale = net.weight.detach().clone(), precision.scaler.get_scale()
    precision.backward(net(torch.full((1, 1), 1e38)).sum() * 1e3)
    precision.step(opt, net.parameters(), 1.0)
    assert torch.equal(net.weight.detach(), before)
    assert precision.scaler.get_scale() < scale


def test_autocast_computes_in_the_named_precision():
    x, net = torch.randn(2, 4), nn.Linear(4, 4)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with Precision(name, CPU).autocast():
            assert net(x).dtype == dtype
    assert net.weight.dtype == torch.float32


def test_choice():
    assert choose_precision("fp16", CPU) == ("fp16", "as asked for")
    name, reason = choose_precision("auto", CPU)
    assert name in ("fp32", "bf16")
    assert "measured" in reason
    assert bf16_speedup_cpu(seconds=0.0) > 0


def test_average_by_hand_and_swap_back_bit_for_bit():
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(0.0)
    ema = WeightAverage(net, decay=0.5)
    for value in (1.0, 2.0):
        with torch.no_grad():
            net.weight.fill_(value)
        ema.update(net)
    # decays 1/10 and 2/11: 0.9, then 2/11 * 0.9 + 9/11 * 2
    assert ema.shadow[0].item() == pytest.approx(2 / 11 * 0.9 + 9 / 11 * 2)
    with ema.swapped(net):
        assert net.weight.item() == pytest.approx(ema.shadow[0].item())
    assert net.weight.item() == 2.0
    other = WeightAverage(net, decay=0.5)
    other.load_state_dict(ema.state_dict())
    assert other.updates == 2
    assert torch.equal(other.shadow[0], ema.shadow[0])


def test_swap_back_after_a_fault():
    net = nn.Linear(1, 1)
    own = net.weight.detach().clone()
    ema = WeightAverage(net, 0.9)
    ema.shadow[0] += 1
    with pytest.raises(RuntimeError), ema.swapped(net):
        raise RuntimeError("in the middle of an evaluation")
    assert torch.equal(net.weight.detach(), own)


def test_late_reader_is_not_late_on_cpu():
    reader = LateReader[str]()
    assert reader.push("a", torch.tensor(1.5), torch.tensor(2.0)) == ("a", [1.5, 2.0])
    assert reader.flush() is None


@pytest.mark.gpu
def test_late_reader_gives_the_step_before_on_cuda():
    reader = LateReader[str]()
    assert reader.push("a", torch.tensor(1.0, device="cuda")) is None
    assert reader.push("b", torch.tensor(2.0, device="cuda")) == ("a", [1.0])
    assert reader.flush() == ("b", [2.0])


@pytest.mark.parametrize(
    ("loss", "norm", "scaled", "word"),
    [
        (float("nan"), 1.0, False, "nan"),
        (float("inf"), 1.0, True, "inf"),
        (1.0, float("inf"), False, "norm"),
        (500.0, 1.0, False, "exploded"),
    ],
)
def test_guard_names_what_is_wrong(loss, norm, scaled, word):
    guard = LossGuard()
    assert guard.verdict(2.0, 1.0, scaled=scaled) is None
    assert word in guard.verdict(loss, norm, scaled=scaled)


def test_guard_lets_a_skipped_fp16_step_pass():
    assert LossGuard().verdict(1.0, float("inf"), scaled=True) is None


def test_skipped_updates_are_counted_and_a_good_one_ends_the_row():
    net = nn.Linear(1, 1, bias=False)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    precision = Precision("fp16", CPU)
    for value in (1e38, 1e38, 1.0, 1e38):
        precision.backward(net(torch.full((1, 1), value)).sum() * (1e3 if value > 1 else 1e-3))
        precision.step(opt, net.parameters(), 1.0)
        opt.zero_grad()
    assert (precision.skipped, precision.skipped_in_a_row) == (3, 1)
    assert Precision("bf16", CPU).skipped == 0


def test_norm_statistics_are_those_of_single_precision_whatever_the_input():
    """An offset that bf16 sums would lose: mean 300, spread 1."""
    x = 300 + torch.randn(1, 2, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    norm = nn.InstanceNorm3d(2)
    half = norm(x.bfloat16()).float()
    assert half.mean().abs() < 0.01
    assert float(half.std()) == pytest.approx(float(norm(x.bfloat16().float()).std()), rel=0.02)
