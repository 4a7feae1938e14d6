import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from segspeed.benchmarks.memory import cube
from segspeed.memory.account import HEAP, Ledger, account, block_costs
from segspeed.memory.forecast import Forecast, Unsuitable
from segspeed.memory.probe import Measured
from segspeed.memory.settings import Subject
from segspeed.types import Cohort


@pytest.fixture
def subject(settings):
    """subject("model=..."): a network of one channel and two classes on the CPU in fp32."""

    def make(*overrides):
        cfg = settings("data.swap_on_flip=[]", *overrides)
        return Subject.of(cfg, Cohort("x", (), {"a": (1,), "b": (2,)}, ("MR",)), torch.device("cpu"), "fp32")

    return make


def small(side=32, batch=1):
    return dataclasses.replace(
        cube(side, batch), features=(4, 8, 16), strides=((1, 1, 1), (2, 2, 2), (2, 2, 2)), kernels=((3, 3, 3),) * 3
    )


def test_the_ledger_counts_storages_by_hand():
    with FakeTensorMode(), Ledger() as ledger:
        a = torch.empty(1000)
        view = a.view(10, 100)
        assert (ledger.live, ledger.peak) == (4000, 4000)
        b = view * 2
        assert ledger.live == 8000
        del a
        assert ledger.live == 8000, "the view still holds it"
        del view
        assert (ledger.live, ledger.peak) == (4000, 8000)
        large = torch.empty(HEAP // 4)
        assert ledger.part == [4000, HEAP]
        del large, b
        assert (ledger.live, ledger.part, ledger.part_peak) == (0, [0, 0], [8000, HEAP])


def test_what_is_held_is_weights_average_and_two_moments(subject):
    s = subject()
    learner = s.learner(small(), (), torch.device("cpu"))
    weights = sum(p.numel() * 4 for p in learner.model.parameters())
    counters = 4 * len(list(learner.model.parameters()))  # Adam keeps its number of steps a parameter
    found = account(s, small(), ())
    assert weights * 4 <= found.held <= weights * 4 + 2 * counters
    assert account(subject("train.ema=null"), small(), ()).held == found.held - weights


def test_activations_grow_with_the_batch_and_voxels_and_shrink_with_recomputing(subject):
    s = subject()
    one, two, three = (account(s, small(batch=n), ()) for n in (1, 2, 3))
    assert three.peak - two.peak == pytest.approx(two.peak - one.peak, rel=0.02)
    wide = account(s, small(64), ())
    assert (wide.peak - wide.held) / (one.peak - one.held) == pytest.approx(8, rel=0.1)
    names = tuple(block.name for block in block_costs(s, small()))
    assert len(names) == 5
    assert account(s, small(64), names).peak - wide.held < 0.7 * (wide.peak - wide.held)


def test_nothing_is_really_allocated(subject):
    huge = account(subject(), small(512), ())
    assert huge.peak > 5e9


def test_blocks_by_what_they_save_for_their_time(subject):
    costs = block_costs(subject(), small())
    assert all(c.saved > 0 and c.seconds > 0 for c in costs)
    worth = [c.saved / c.seconds for c in costs]
    assert worth == sorted(worth, reverse=True)


def test_a_forecast_learns_from_probes(subject):
    forecast = Forecast(subject("loader.workers=0"))
    before = forecast.predict(small())
    found = forecast.account(small())
    tensors = found.held + found.resident
    forecast.learn(small(), Measured("killed"))
    assert forecast.predict(small()) == before
    forecast.learn(small(), Measured("done", base=10**8, peak=10**8 + tensors + 7, step_s=1.0, samples_per_s=1.0))
    assert forecast.overheads == [7]
    assert forecast.predict(small()) == 10**8 + tensors + 7, "what was measured stands"
    four = forecast.account(small(batch=4))
    assert forecast.predict(small(batch=4)) == 10**8 + four.held + four.resident + 7
    assert four.peak == account(forecast.subject, small(batch=4), ()).peak, "the straight line is exact"


def test_a_patch_that_the_network_refuses(subject, caplog):
    with pytest.raises(Unsuitable, match="does not take it"):
        Forecast(subject()).predict(small(30))
    assert not caplog.records
