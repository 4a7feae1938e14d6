"""Recomputed activations give the gradients of kept ones: for every network, and with what a run combines them with."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from monai.networks.nets import SegResNetDS, SwinUNETR
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from segspeed.engine import Learner
from segspeed.model.checkpointing import apply_checkpointing
from segspeed.model.losses import DiceCELoss, deep_supervision
from segspeed.model.networks import as_heads, dynunet
from segspeed.speed.precision import Precision
from segspeed.types import Batch, Plan


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def plan(levels=4):
    return Plan(
        spacing=(1.0, 1.0, 1.0), patch=(16, 16, 16), batch=2, accumulate=1, features=(4, 4, 8, 8)[:levels],
        strides=((1, 1, 1),) + ((2, 2, 2),) * (levels - 1), kernels=((3, 3, 3),) * levels, normalisation=("zscore",),
        ct_norm=(None,),
    )  # fmt: skip


class Forked(nn.Module):
    """A forker's network of modules that nobody knows, with dropout in one that is recomputed."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(1, 4, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.GELU(), nn.Dropout3d(0.3)) for _ in range(2)
        )
        self.fine, self.coarse = nn.Conv3d(4, 3, 1), nn.Conv3d(4, 3, 1, stride=2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.body:
            x = x + block(x)
        return [self.fine(x), self.coarse(x)]


NETWORKS = {
    "dynunet": (lambda: dynunet(plan(), 1, 3, dropout=0.2), "all", (16, 16, 16)),
    "dynunet residual": (lambda: dynunet(plan(), 1, 3, residual=True), "all", (16, 16, 16)),
    "segresnet_ds": (
        lambda: SegResNetDS(init_filters=4, out_channels=3, norm="instance", blocks_down=(1, 1), dsdepth=2),
        "all",
        (16, 16, 16),
    ),
    "swin_unetr": (
        lambda: SwinUNETR(
            in_channels=1, out_channels=3, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), drop_rate=0.1,
            attn_drop_rate=0.1,
        ),
        "all",
        (64, 32, 32),
    ),
    "forked, by name": (Forked, ("stem", "body.0", "body.1"), (16, 16, 16)),
}  # fmt: skip


def data(shape, size=1):
    g = torch.Generator().manual_seed(0)
    return torch.randn(size, 1, *shape, generator=g), torch.randint(0, 3, (size, *shape), generator=g)


def gradients(net, x, label, precision="fp32"):
    """Loss, gradients and the state of the random numbers after a step from a fixed one."""
    torch.manual_seed(1)
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        heads = as_heads(net(x))
    value = deep_supervision(DiceCELoss(), heads, label)
    value.backward()
    return value.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None], torch.get_rng_state()


@pytest.mark.parametrize(
    ("name", "precision"),
    [(n, "fp32") for n in NETWORKS]
    + [pytest.param(n, "bf16", marks=pytest.mark.long if n == "swin_unetr" else ()) for n in NETWORKS],
)
def test_gradients_are_the_plain_ones_bit_for_bit(name, precision):
    """With deep supervision, under autocast, and with dropout that draws the same again."""
    make, choice, shape = NETWORKS[name]
    torch.manual_seed(0)
    net = make().train()
    x, label = data(shape)
    loss, plain, state = gradients(net, x, label, precision)
    applied = apply_checkpointing(net, choice)
    runs = []
    module = dict(net.named_modules())[applied[-1]]
    inner = next(m for m in module.modules() if isinstance(m, (nn.Conv3d, nn.Linear)))
    inner.register_forward_pre_hook(lambda *_: runs.append(1))  # recomputing may stop inside the last layer it needs
    again, found, state_after = gradients(net, x, label, precision)
    assert len(runs) == 2, "the blocks are recomputed indeed"
    assert torch.equal(again, loss)
    assert torch.equal(state_after, state), "recomputing leaves the random numbers as they were"
    assert len(found) == len(plain) > 5
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("name", ["dynunet", "segresnet_ds", "forked, by name"])
def test_dropout_would_differ_without_the_random_state(name):
    """The test above can fail: another draw gives other gradients, where there is dropout."""
    make, _, shape = NETWORKS[name]
    torch.manual_seed(0)
    net = make().train()
    x, label = data(shape)
    _, first, _ = gradients(net, x, label)
    torch.manual_seed(2)
    net.zero_grad()
    deep_supervision(DiceCELoss(), as_heads(net(x)), label).backward()
    other = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) == (name == "segresnet_ds")


def compiled(backend, name):
    make, choice, shape = NETWORKS[name]
    torch.manual_seed(0)
    net = make().train()
    for module in net.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout3d)):
            module.p = 0.0  # a compiled graph draws its own random numbers
    x, label = data(shape)
    loss, plain, _ = gradients(net, x, label)
    applied = apply_checkpointing(net, choice)
    assert applied
    net.compile(backend=backend)
    again, found, _ = gradients(net, x, label)
    torch.testing.assert_close(again, loss, atol=1e-6, rtol=1e-5)
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["dynunet", "segresnet_ds", "forked, by name"])
def test_traced_by_the_compiler(name):
    """What torch.compile makes of recomputed blocks before it generates code."""
    torch.compiler.reset()
    compiled("aot_eager", name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dynunet", "segresnet_ds", "swin_unetr", "forked, by name"])
def test_compiled(name):
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    torch.compiler.reset()
    compiled("inductor", name)


def checkpointed_under_ddp(rank, world, name):
    """Whether gradients of two steps under DDP are the same bits with and without checkpointing."""
    make, choice, shape = NETWORKS[name]
    x, label = data(shape, 2)
    rows = slice(rank, None, world)
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        net = make().train()
        if checkpointing:
            assert apply_checkpointing(net, choice)
        wrapped = DistributedDataParallel(net)
        for _ in range(2):  # the second step meets what the first has left in the reducer
            grads = gradients(wrapped, x[rows], label[rows])[1]
        found.append(grads)
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def step_over_ranks(rank):
    """How far weights after a step of two ranks with micro-batches of 2 and 1 are from those after one batch of 6, where Dice is
    pooled over the step and where it is not."""
    x, label = data((8, 8, 8), 6)
    label[0] = 0

    def part(start, stop):
        rows = slice(start, stop)
        names = tuple(f"case{n}" for n in range(start, stop))
        return Batch(x[rows], label[rows], torch.zeros(stop - start, 1, 4), torch.arange(start, stop), names)

    def weights(batches, *, exact=False, alone=False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1))
        learner = Learner(
            model=net,
            loss=DiceCELoss(batch_dice=True),
            optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
            precision=Precision("fp32", torch.device("cpu")),
            schedule=lambda p: 1.0,
            exact_batch_dice=exact,
            parallel=None if alone else DistributedDataParallel(net),
        )
        learner.update(batches, sum(len(b.cases) for b in batches))
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    first = 3 * rank
    mine = [part(first, first + 2), part(first + 2, first + 3)]
    whole = weights([part(0, 6)], alone=True)
    return [float((weights(mine, exact=e) - whole).abs().max()) for e in (True, False)]


@contextmanager
def group(rank, world, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_two(rank, folder):
    """One of two ranks; leaves what it found in a file."""
    torch.set_num_threads(1)
    with group(rank, 2, folder / "store"):
        same = {name: checkpointed_under_ddp(rank, 2, name) for name in ("dynunet", "forked, by name")}
        (folder / f"{rank}.json").write_text(json.dumps([same, step_over_ranks(rank)]))


def test_with_ddp_on_one_rank(tmp_path):
    with group(0, 1, tmp_path / "store"):
        assert checkpointed_under_ddp(0, 1, "dynunet")
        assert checkpointed_under_ddp(0, 1, "forked, by name")


@pytest.mark.slow
def test_with_ddp_on_two_ranks(tmp_path):
    """Checkpointed gradients, and Dice pooled over the micro-batches of both ranks."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_checkpointing as t, pathlib; "
    code += f"t.of_two(int(sys.argv[1]), pathlib.Path({str(tmp_path)!r}))"
    both = [subprocess.Popen([sys.executable, "-c", code, str(rank)], stderr=subprocess.PIPE) for rank in (0, 1)]
    for process in both:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()[-3000:]
    for rank in (0, 1):
        same, (exact, plain) = json.loads((tmp_path / f"{rank}.json").read_text())
        assert same == {"dynunet": True, "forked, by name": True}
        assert exact < 1e-6
        assert plain > 1e-5, "without the switch it is another step"
