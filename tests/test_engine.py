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


class Heads(nn.Module):
    """Two heads of deep supervision, with what makes a forward pass leave traces: dropout and BatchNorm."""

    def __init__(self, outputs=3, dropout=0.0, norm=None):
        super().__init__()
        self.first, self.drop = nn.Conv3d(1, 4, 3, padding=1), nn.Dropout3d(dropout)
        self.norm = norm or nn.Identity()
        self.fine, self.coarse = nn.Conv3d(4, outputs, 1), nn.Conv3d(4, outputs, 1, stride=2)

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.first(x))))
        return [self.fine(x), self.coarse(x)]


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


@pytest.mark.parametrize("regions", [(), ((1, 2), (2,))], ids=["classes", "regions"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 1)], ids=["even", "last one smaller"])
@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "cut after out of memory"])
def test_exact_batch_dice_accumulates_to_the_big_batch(regions, sizes, parts):
    """With deep supervision, ignored voxels and a last micro-batch that is smaller."""

    def made(exact):
        torch.manual_seed(0)
        model = Heads(2 if regions else 3)
        loss = DiceCELoss(batch_dice=True, regions=regions, ignore_index=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return learner(model=model, loss=loss, optimizer=optimizer, exact_batch_dice=exact)

    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    micro = [batch(f, s) for f, s in zip(firsts, sizes, strict=True)]
    for n, b in enumerate(micro):
        b.label[:] = torch.randint(0, 4, b.label.shape, generator=torch.Generator().manual_seed(n))
    exact, whole, plain = made(True), made(False), made(False)
    exact.parts = parts
    loss, norm = exact.update(iter(micro), sum(sizes))
    big_loss, big_norm = whole.update([join(micro)], sum(sizes))
    plain.update(micro, sum(sizes))
    assert loss.item() == pytest.approx(big_loss.item(), abs=1e-6)
    assert norm.item() == pytest.approx(big_norm.item(), rel=1e-5)
    torch.testing.assert_close(weights(exact), weights(whole), rtol=0, atol=1e-6)
    assert (weights(plain) - weights(whole)).abs().max() > 1e-5, "without the switch it is another step"


def test_the_pass_for_the_sums_leaves_no_trace():
    """Dropout draws the same in both passes, BatchNorm counts each micro-batch once, and so nothing differs from a step in which
    the sums fell from the sky."""
    micro = [batch(0, 2), batch(2, 2)]

    def made(exact):
        torch.manual_seed(0)
        model = Heads(2, dropout=0.5, norm=nn.BatchNorm3d(4))
        return learner(
            model=model, loss=DiceCELoss(batch_dice=True), optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            exact_batch_dice=exact,
        )  # fmt: skip

    exact, plain = made(True), made(False)
    torch.manual_seed(5)
    exact.update(micro, 4)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    plain.update(micro, 4)
    assert torch.equal(after, torch.get_rng_state())
    for name, value in plain.model.named_buffers():
        torch.testing.assert_close(dict(exact.model.named_buffers())[name], value, msg=name)
    # the sums are those of the very forward pass that is differentiated
    again, seen = made(True), []
    again.model.first.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    values = []
    again.loss.register_forward_hook(lambda loss, args, _: values.append((args[2].sums, loss.sums(*args[:2]))))
    torch.manual_seed(5)
    again.update(micro, 4)
    assert seen == [False, False, True, True]
    for head in (0, 1):
        torch.testing.assert_close(values[head][0], values[head][1] + values[head + 2][1])


def test_one_micro_batch_needs_no_second_pass():
    calls = []
    lr = learner(loss=DiceCELoss(batch_dice=True), exact_batch_dice=True)
    lr.model.register_forward_hook(lambda *_: calls.append(1))
    lr.update([batch(0, 4)], 4)
    assert len(calls) == 1


def test_out_of_memory_in_the_pass_for_the_sums_is_survived_exactly():
    def made(exact):
        torch.manual_seed(0)
        model = Heads(2)
        return learner(
            model=model, loss=DiceCELoss(batch_dice=True), optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            exact_batch_dice=exact,
        )  # fmt: skip

    batches = [batch(0, 6), batch(6, 6)]
    whole, tight = made(False), made(True)
    tight.model = Small(tight.model, 2)
    expected, found = two_steps(whole, batches), two_steps(tight, batches)
    assert [v for _, v in found] == pytest.approx([v for _, v in expected], abs=1e-6)
    torch.testing.assert_close(weights(tight), weights(whole), atol=1e-6, rtol=0)
    assert not any("pools" in n for n in tight.notes)
    loose = made(False)
    loose.model = Small(loose.model, 2)
    two_steps(loose, batches)
    assert sum("the loss pools its Dice over micro-batches of 3, 2 a step" in n for n in loose.notes) == 1


def test_cautions_say_what_accumulation_does_not_do():
    pooled = learner(loss=DiceCELoss(batch_dice=True))
    assert pooled.cautions(4, 1) == []
    (text,) = pooled.cautions(4, 3)
    assert "micro-batches of 4, 3 a step" in text
    assert "train.exact_batch_dice=true" in text
    assert learner(loss=DiceCELoss(batch_dice=True), exact_batch_dice=True).cautions(4, 3) == []
    assert learner().cautions(4, 3) == []
    normed = learner()
    normed.model = nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2))
    (text,) = normed.cautions(2, 8)
    assert "1 BatchNorm layers (1, ...) take their statistics from 2 patches" in text
    assert "model.norm=instance" in text
    assert "SyncBatchNorm" in text
    assert normed.cautions(8, 1) == []
    normed.model = nn.SyncBatchNorm.convert_sync_batchnorm(normed.model)
    assert normed.cautions(2, 8) == []


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

    from torch._subclasses.fake_tensor import FakeTensor

    def held():
        gc.collect()
        alive = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if torch.is_tensor(t) and not isinstance(t, FakeTensor)  # those of another test hold nothing
        }
        return len(alive), sum(alive.values())

    lr = learner(ema=None)
    found = []
    fit(
        lr, [batch(0, 2)], lambda b: b, StepHorizon(200), Progress(),
        after_step=lambda s: found.append(held()) if s.number in (20, 110, 200) else None,
    )  # fmt: skip
    assert found[0] == found[1] == found[2]


def test_clipping_is_once_a_step_over_the_accumulated_gradient(monkeypatch):
    clip, norms = torch.nn.utils.clip_grad_norm_, []

    def counted(parameters, limit):
        norms.append(clip(parameters, limit))
        return norms[-1]

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", counted)
    micro = [batch(0, 2), batch(2, 2), batch(4, 1)]
    lr, whole = learner(clip=0.1), learner(clip=0.1)
    before = weights(lr)
    _, norm = lr.update(micro, 5)
    assert norms == [norm]
    assert float((weights(lr) - before).norm()) == pytest.approx(0.5 * 0.1, rel=1e-4), "lr times the largest norm"
    assert norm.item() == pytest.approx(whole.update([join(micro)], 5)[1].item(), rel=1e-4)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_weights_average_and_optimiser_stay_in_single_precision(name):
    lr = learner(precision=Precision(name, CPU))
    lr.optimizer = torch.optim.AdamW(lr.model.parameters())
    lr.ema = WeightAverage(lr.model, 0.9)
    seen = []
    lr.model[0].register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    lr.update([batch(0, 2)], 2)
    assert seen == [{"bf16": torch.bfloat16, "fp16": torch.float16}[name]], "the forward pass is in half precision"
    kept = [*lr.model.parameters(), *lr.ema.shadow]
    kept += [v for state in lr.optimizer.state.values() for v in state.values()]
    assert len(kept) > 8
    assert {t.dtype for t in kept} == {torch.float32}


def test_a_short_last_window_weighs_its_own_patches_only():
    """Ten patches, four a step: the third step is that of one batch of the two that are left."""
    stepped, alone = learner(), learner()
    batches = [batch(i, 1) for i in range(10)]
    fit(stepped, batches, lambda b: b, StepHorizon(2), Progress(), accumulate=4, after_step=lambda s: None)
    alone.model.load_state_dict(stepped.model.state_dict())
    stepped.update(batches[8:], 2)
    alone.update([join(batches[8:])], 2)
    torch.testing.assert_close(weights(stepped), weights(alone), rtol=1e-5, atol=1e-7)
