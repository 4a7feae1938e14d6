import dataclasses

import pytest
import torch
from torch import nn

from segspeed.engine import Learner, Progress, fit
from segspeed.model.losses import DiceCELoss
from segspeed.speed.ema import WeightAverage
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
