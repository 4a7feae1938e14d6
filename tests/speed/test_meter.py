import time

import pytest
import torch

from segspeed.speed.meter import PARTS, StepMeter, gpu_utilisation, verdict

CPU = torch.device("cpu")


def test_parts_add_up():
    meter = StepMeter(CPU)
    assert meter.shares() == dict.fromkeys(PARTS, 0.0)
    for _ in range(3):
        with meter("forward"):
            time.sleep(0.01)
    meter.add("waiting", meter.seconds["forward"])
    assert meter.seconds["forward"] >= 0.03
    assert meter.shares()["waiting"] == pytest.approx(0.5)
    assert sum(meter.shares().values()) == pytest.approx(1)


@pytest.mark.gpu
def test_events_on_cuda_are_read_without_waiting():
    meter = StepMeter(torch.device("cuda"))
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        with meter("forward"):
            x = x @ x / 4096
    torch.cuda.synchronize()
    assert meter.shares()["forward"] == 1


def test_no_gpu_no_utilisation():
    assert gpu_utilisation(CPU) is None


def shares(**given):
    rest = dict.fromkeys(PARTS, 0.0) | given
    return rest | {"forward": 1 - sum(given.values())}


@pytest.mark.parametrize(
    ("given", "precision", "text"),
    [
        ({"waiting": 0.41}, "bf16", "41% of the step is waiting for data .* raise loader.workers from 2"),
        ({"augmentation": 0.3}, "bf16", "30% of the step is augmentation"),
        ({"transfer": 0.2}, "bf16", "20% of the step is the copy"),
        ({}, "fp32", "100% of the step is the network itself on cpu.*precision=bf16"),
        ({}, "bf16", "compile=true"),
    ],
)
def test_the_verdict_names_the_bottleneck_and_the_setting(given, precision, text):
    import re

    found = verdict(shares(**given), workers=2, device="cpu", precision=precision, augmenting_loader=False)
    assert re.search(text, found), found
