import dataclasses

import pytest
import torch
from torch import nn

from segspeed.engine import Learner, Progress, fit
from segspeed.model.losses import DiceCELoss
from segspeed.speed.ema import WeightAverage
from segspeed.speed.oom import is_out_of_memory
from segspeed.speed.precision import Precision
from segspeed.speed.schedule import StepHorizon
from segspeed.types import Batch, RunStopped

CPU = torch.device("cpu")


def batch(first, size, seed=0):
    g = torch.Generator().manual_seed(seed + first)
    return Batch(
        torch.randn(size, 1, 4, 4, 4, generator=g),
        torch.randint(0, 2, (size, 4, 4, 4), generator=g),
        torch.zeros(size, 1, 4),
        torch.arange(first, first + size),
        tuple(f"case{i}" for i in range(first, first + size)),
    )


def join(batches):
    return Batch(
        torch.cat([b.image for b in batches]),
        torch.cat([b.label for b in batches]),
        torch.cat([b.norm for b in batches]),
        torch.cat([b.index for b in batches]),
        sum((b.cases for b in batches), ()),
    )


def learner(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 1))
    made = Learner(
        model=model,
        loss=DiceCELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        precision=Precision("fp32", CPU),
        schedule=lambda p: 1.0,
    )
    return dataclasses.replace(made, **changes)


def weights(lr):
    return torch.cat([p.detach().flatten() for p in lr.model.parameters()])


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 1)], ids=["even", "last one smaller"])
def test_accumulated_is_the_big_batch(sizes):
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [batch(f, s) for f, s in zip(firsts, sizes, strict=True)]
    a, b = learner(), learner()
    assert torch.equal(weights(a), weights(b))
    loss_a, norm_a = a.update(parts, sum(sizes))
    loss_b, norm_b = b.update([join(parts)], sum(sizes))
    assert loss_a.item() == pytest.approx(loss_b.item(), rel=1e-5)
    assert norm_a.item() == pytest.approx(norm_b.item(), rel=1e-4)
    torch.testing.assert_close(weights(a), weights(b), rtol=1e-5, atol=1e-7)


def test_a_loader_that_ends_loses_no_remainder():
    seen = []
    lr = learner()
    fit(
        lr, [batch(i, 1) for i in range(10)], lambda b: b, StepHorizon(3), Progress(), accumulate=4,
        after_step=lambda s: seen.append((s.number, s.samples)),
    )  # fmt: skip
    assert seen == [(1, 4), (2, 4), (3, 2)]


def test_progress_counts_steps_samples_and_time():
    progress, losses = Progress(), []
    lr = learner(schedule=lambda p: 1.0)
    lr.ema = WeightAverage(lr.model, 0.9)
    same = batch(0, 4)
    fit(
        lr, [same] * 30, lambda b: b, StepHorizon(25), progress, accumulate=1,
        after_step=lambda s: losses.append(s.loss.item()),
    )  # fmt: skip
    assert (progress.step, progress.sample) == (25, 100)
    assert progress.elapsed > 0
    assert lr.ema.updates == 25
    assert losses[-1] < 0.9 * losses[0]  # it learns the one batch it sees


def test_rate_follows_the_schedule_in_optimiser_steps():
    rates = []
    lr = learner(schedule=lambda p: 1 - p)
    fit(
        lr, [batch(i, 1) for i in range(8)], lambda b: b, StepHorizon(4), Progress(), accumulate=2,
        after_step=lambda s: rates.append(s.rate),
    )  # fmt: skip
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_a_stop_between_steps_ends_the_loop():
    def stop(step):
        if step.number == 2:
            raise RunStopped("asked to")

    progress = Progress()
    with pytest.raises(RunStopped):
        fit(learner(), [batch(i, 1) for i in range(9)], lambda b: b, StepHorizon(9), progress, after_step=stop)
    assert progress.step == 2


def test_a_finite_loader_begins_again_and_an_empty_one_is_refused():
    from itertools import islice

    from segspeed.engine import micro_batches
    from segspeed.types import SettingError

    assert list(islice(micro_batches([1, 2, 3], 2), 3)) == [(1, 2), (3,), (1, 2)]
    with pytest.raises(SettingError, match="no batches"):
        next(micro_batches([], 2))


class Small(nn.Module):
    """A network whose memory holds ``room`` patches at a time, and one more once its blocks are recomputed."""

    def __init__(self, inner, room):
        super().__init__()
        self.inner, self.room, self.failures = inner, room, 0

    def forward(self, x):
        if len(x) > self.room + getattr(self, "segspeed_recomputes", False):
            self.failures += 1
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory")
        return self.inner(x)


def two_steps(lr, batches):
    seen = []
    fit(
        lr,
        batches,
        lambda b: b,
        StepHorizon(2),
        Progress(),
        after_step=lambda s: seen.append((s.samples, float(s.loss))),
    )
    return seen


@pytest.mark.parametrize("room", [1, 2, 3])
def test_out_of_memory_is_survived_with_the_same_effective_batch(room):
    batches = [batch(0, 6), batch(6, 6)]
    whole = learner()
    expected = two_steps(whole, batches)
    tight = learner()
    tight.model = Small(tight.model, room)
    found = two_steps(tight, batches)
    assert [n for n, _ in found] == [6, 6]
    assert [v for _, v in found] == pytest.approx([v for _, v in expected], rel=1e-6)
    torch.testing.assert_close(weights(tight), weights(whole), atol=1e-6, rtol=1e-5)
    assert tight.parts == {1: 6, 2: 4, 3: 2}[room]
    assert tight.model.failures <= 3, "the second step begins as small as the first ended"
    assert "each batch of 6 now goes in" in tight.notes[-1]


def test_one_patch_that_does_not_fit_is_recomputed_and_then_refused():
    tight = learner()
    tight.model = Small(tight.model, 0)
    assert len(two_steps(tight, [batch(0, 2)])) == 2
    assert "activations of" in tight.notes[-1]
    hopeless = learner()
    hopeless.model = Small(hopeless.model, -1)
    before = weights(hopeless).clone()
    with pytest.raises(RunStopped, match="one patch at a time and all blocks recomputed.*can't allocate"):
        two_steps(hopeless, [batch(0, 2)])
    assert torch.equal(weights(hopeless), before)
    assert all(p.grad is None for p in hopeless.model.parameters())


def test_other_errors_are_not_taken_for_it():
    lr = learner()
    lr.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        two_steps(lr, [batch(0, 2)])
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_gradients_are_exchanged_with_the_last_micro_batch_only():
    """Under DDP ``no_sync`` keeps the others to themselves."""
    from contextlib import contextmanager

    lr, log = learner(), []

    class Exchanging(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            log.append(len(x))
            return self.inner(x)

        @contextmanager
        def no_sync(self):
            log.append("quiet")
            yield
            log.append("loud")

    lr.model = Exchanging(lr.model)
    lr.update([batch(0, 2), batch(2, 2), batch(4, 1)], 5)
    assert log == ["quiet", 2, "loud", "quiet", 2, "loud", 1]


def test_nothing_is_kept_from_step_to_step():
    """Live tensors and what they hold stay flat over 200 steps."""
    import gc

    def held():
        gc.collect()
        alive = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if torch.is_tensor(t)
        }
        return len(alive), sum(alive.values())

    lr = learner(ema=None)
    found = []
    fit(
        lr, [batch(0, 2)], lambda b: b, StepHorizon(200), Progress(),
        after_step=lambda s: found.append(held()) if s.number in (20, 110, 200) else None,
    )  # fmt: skip
    assert found[0] == found[1] == found[2]
