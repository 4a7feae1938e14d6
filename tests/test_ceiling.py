import dataclasses

import torch

from segspeed.ceiling import ceiling_samples_per_s
from segspeed.engine import Learner
from segspeed.model.losses import DiceCELoss
from segspeed.speed.ema import WeightAverage
from segspeed.speed.precision import Precision
from segspeed.types import Batch


def test_it_counts_samples_and_leaves_the_learner_as_it_was():
    torch.manual_seed(0)
    model = torch.nn.Conv3d(1, 2, 3, padding=1)
    learner = Learner(
        model, DiceCELoss(), torch.optim.AdamW(model.parameters()), Precision("fp32", torch.device("cpu")), lambda p: 1.0,
        ema=WeightAverage(model, 0.9),
    )  # fmt: skip
    batch = Batch(
        torch.randn(2, 1, 4, 4, 4),
        torch.zeros(2, 4, 4, 4, dtype=torch.int16),
        torch.zeros(2, 1, 4),
        torch.arange(2),
        ("a", "b"),
    )
    learner.update([batch], 2)
    before = [p.detach().clone() for p in model.parameters()]
    moments = [v["exp_avg"].clone() for v in learner.optimizer.state.values()]
    calls = []

    def stage(raw):
        calls.append(raw)
        return dataclasses.replace(raw)

    assert ceiling_samples_per_s(learner, stage, [batch, batch], steps=3) > 0
    assert len(calls) == 2 * (1 + 3), "a warm-up step and three more, two micro-batches each"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, v["exp_avg"]) for a, v in zip(moments, learner.optimizer.state.values(), strict=True))
    assert learner.ema.updates == 1
