"""The DALI graph against the torch backend: the same drawn numbers must give the same batch."""

import dataclasses
from itertools import islice

import numpy as np
import pytest
import torch

from segspeed.augment.draw import draw
from segspeed.augment.torch_backend import source_shape
from segspeed.config import AugmentConfig
from segspeed.data.sampling import PatchSampler
from segspeed.loader.dali_loader import DaliLoader, dali_matrix, swapped
from segspeed.loader.device import DeviceStage
from segspeed.loader.torch_loader import TorchLoader
from segspeed.types import RunStopped

pytest.importorskip("nvidia.dali")
CPU = torch.device("cpu")
OFF = {
    "rotation": {"probability": 0}, "scale": {"probability": 0}, "flip": {"probability": (0, 0, 0)},
    "noise": {"probability": 0}, "blur": {"probability": 0}, "brightness": {"probability": 0},
    "contrast": {"probability": 0}, "low_resolution": {"probability": 0}, "gamma": {"probability": 0},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Entry:
    case_id: str
    image: np.ndarray
    label: np.ndarray
    class_indices = (1, 2)

    def foreground(self, index):
        return np.argwhere(self.label == index).astype(np.int32)


def sampler(patch, channels=1, seed=0):
    entries, norms = [], []
    for n in range(3):
        rng = np.random.default_rng(n)
        coarse = rng.normal(size=(channels, 6, 7, 8)).astype(np.float32)
        image = coarse.repeat(4, 1).repeat(4, 2).repeat(4, 3) * 30 + 100
        label = (image[0] > 110).astype(np.uint8) + (image[0] > 130).astype(np.uint8)
        entries.append(Entry(f"c{n}", np.ascontiguousarray(image), label))
        norms.append(np.array([[40, 160, 100, 20]] * channels, np.float32))
    return PatchSampler(tuple(entries), tuple(norms), patch, 0.5, seed)


def both(
    config, *, patch=(12, 16, 14), channels=1, batch=4, batches=3, spacing=(2.0, 1.0, 1.0), first=0, workers=0, swap=()
):
    """The same samples through DALI and through torch."""
    made = sampler(source_shape(patch, config), channels)
    dali = DaliLoader(
        made, batch=batch, augment=config, patch=patch, spacing=spacing, seed=0, device=CPU, first=first,
        workers=workers, swap_on_flip=swap,
    )  # fmt: skip
    stage = DeviceStage(CPU, patch, spacing, 0, config, swap)
    plain = map(stage, TorchLoader(made, batch=batch, first=first, workers=0))
    return list(islice(dali, batches)), list(islice(plain, batches))


def only(**changes):
    return AugmentConfig.model_validate({**OFF, **changes})


CASES = {
    "nothing": only(),
    "rotation": only(rotation={"probability": 1, "degrees": (20, 25, 30)}),
    "scale": only(scale={"probability": 1}),
    "flip": only(flip={"probability": (0.5, 0.5, 0.5)}),
    "all spatial": only(
        rotation={"probability": 0.7}, scale={"probability": 0.5}, flip={"probability": (0.5, 0.5, 0.5)}
    ),
    "blur": only(blur={"probability": 1, "channel_probability": 1}),
    "brightness": only(brightness={"probability": 1}),
    "contrast": only(contrast={"probability": 1}),
    "low resolution": only(low_resolution={"probability": 1, "channel_probability": 1}),
    "gamma": only(gamma={"probability": 1, "invert_probability": 0.5}),
    "margin": only(margin=1.4, rotation={"probability": 0.5}),
}


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_same_numbers_same_batch(name, channels):
    # odd sides: the voxels that a lower resolution keeps are then never a tie, which single precision breaks either way
    dali, plain = both(CASES[name], channels=channels, patch=(11, 17, 13))
    for a, b in zip(dali, plain, strict=True):
        assert a.cases == b.cases
        assert torch.equal(a.index, b.index)
        assert a.image.shape == b.image.shape
        assert a.label.shape == b.label.shape
        different = (a.label.int() != b.label.int()).float().mean()
        assert different < 2e-3, "nearest neighbours may differ where two voxels are equally near"
        error = (a.image - b.image).abs()
        assert error.max() < 2e-2
        assert error.mean() < 1e-4


def test_everything_at_once_agrees_where_there_is_no_noise():
    config = AugmentConfig.model_validate({"noise": {"probability": 0}, "gamma": {"probability": 0.5}})
    dali, plain = both(config, batch=6, batches=6)
    for a, b in zip(dali, plain, strict=True):
        assert (a.image - b.image).abs().mean() < 1e-3


def test_noise_has_the_same_distribution():
    config = only(noise={"probability": 1, "variance": (0.04, 0.09)})
    quiet, _ = both(only(), batch=8, batches=1, patch=(20, 20, 20))
    dali, plain = both(config, batch=8, batches=1, patch=(20, 20, 20))
    drawn = draw(config, seed=0, indices=range(8), channels=1).noise
    for batches in (dali, plain):
        noise = batches[0].image - quiet[0].image
        np.testing.assert_allclose(noise.std((1, 2, 3, 4)).numpy(), drawn, rtol=0.05)
        assert noise.mean().abs() < 0.01


def test_left_and_right_trade_places():
    dali, plain = both(only(flip={"probability": (0, 0, 1)}), swap=((1, 2),))
    for a, b in zip(dali, plain, strict=True):
        assert torch.equal(a.label.int(), b.label.int())
    assert swapped(np.array([0, 1, 2, 3]), [(1, 2)]).tolist() == [0, 2, 1, 3]


def test_resumed_and_whatever_the_workers_the_batches_are_the_same():
    config = AugmentConfig()
    whole, _ = both(config, batches=4)
    later, _ = both(config, batches=2, first=8)
    apart, _ = both(config, batches=4, workers=2)
    for a, b in zip(whole[2:], later, strict=True):
        assert torch.equal(a.image, b.image)
        assert torch.equal(a.label, b.label)
    for a, b in zip(whole, apart, strict=True):
        assert torch.equal(a.image, b.image)


def test_matrix_by_hand():
    """Identity over an even margin: output voxel 0 (centre 0.5) is source voxel 2 (centre 2.5)."""
    matrix = dali_matrix(np.eye(3), (12, 12, 12), (8, 8, 8))
    np.testing.assert_allclose(matrix @ [0.5, 0.5, 0.5, 1], [2.5, 2.5, 2.5])


def test_a_run_with_dali_learns_the_same_as_with_torch(tiny):
    from segspeed.training import train

    plain = tiny("augment=none", "train.steps=12", "run.name=torch", "loader.workers=0")
    dali = tiny(
        "augment=none",
        "train.steps=12",
        "run.name=dali",
        "loader=dali",
        "loader.workers=0",
        folder=plain.data.kwargs["root"],
    )
    assert train(dali)["mean_dice"] == pytest.approx(train(plain)["mean_dice"], abs=0.02)


@dataclasses.dataclass(frozen=True)
class Broken(Entry):
    @property
    def image(self):
        raise OSError("the disk is gone")


def test_a_case_that_cannot_be_read_ends_with_its_name():
    made = sampler((8, 8, 8))
    broken = object.__new__(Broken)
    for name in ("case_id", "label"):
        object.__setattr__(broken, name, getattr(made.entries[0], name))
    made = dataclasses.replace(made, entries=(broken, *made.entries[1:]))
    loader = DaliLoader(
        made, batch=3, augment=only(), patch=(8, 8, 8), spacing=(1.0, 1.0, 1.0), seed=0, device=CPU, workers=0
    )
    with pytest.raises(RunStopped, match=r"(?s)cases c0, c1, c2.*disk is gone"):
        next(iter(loader))
