import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segspeed.augment.intensity import normalise
from segspeed.config import AugmentConfig
from segspeed.data.sampling import PatchSampler, read_patch
from segspeed.loader.device import DeviceStage
from segspeed.loader.torch_loader import TorchLoader
from segspeed.types import Batch, DataError, RunStopped


@dataclass(frozen=True)
class Entry:
    """Stands in for a cache entry: arrays in memory."""

    case_id: str
    image: np.ndarray
    label: np.ndarray
    norm: np.ndarray = field(default_factory=lambda: np.array([[-1e9, 1e9, 0.0, 1.0]], np.float32))

    @property
    def class_indices(self):
        return tuple(int(v) for v in np.unique(self.label) if v > 0)

    def foreground(self, index):
        return np.argwhere(self.label == index).astype(np.int32)


def entry(name, shape=(12, 10, 14), seed=0, voxels=((3, 4, 5, 1), (9, 8, 2, 2))):
    image = np.random.default_rng(seed).normal(size=(1, *shape)).astype(np.float32)
    label = np.zeros(shape, np.uint8)
    for d, h, w, value in voxels:
        label[d, h, w] = value
    return Entry(name, image, label)


def sampler(entries, patch=(4, 4, 4), foreground=0.5, seed=3):
    return PatchSampler(tuple(entries), tuple(e.norm for e in entries), patch, foreground, seed)


def test_every_case_comes_once_an_epoch_in_a_new_order():
    s = sampler([entry(f"c{i}", seed=i) for i in range(7)])
    order = [s.draw(i)[0] for i in range(21)]
    epochs = [tuple(order[i : i + 7]) for i in (0, 7, 14)]
    assert all(sorted(e) == list(range(7)) for e in epochs)
    assert len(set(epochs)) == 3


def test_foreground_share_and_class_balance():
    common = [(d, h, w, 1) for d in range(4) for h in range(4) for w in range(4)]
    s = sampler([entry("a", (40, 40, 40), voxels=[*common, (30, 30, 30, 2)])], patch=(6, 6, 6), foreground=1.0)
    hits = Counter(int(s.read(i)[2].max()) for i in range(200))
    assert 70 <= hits[2] <= 130
    assert hits[1] == 200 - hits[2]
    none = sampler([entry("a", (40, 40, 40), voxels=[(30, 30, 30, 2)])], patch=(6, 6, 6), foreground=0.0)
    assert sum(none.read(i)[2].max() > 0 for i in range(200)) < 30


def test_a_case_without_foreground_still_gives_patches():
    s = sampler([entry("healthy", voxels=())], foreground=1.0)
    assert all(s.read(i)[2].max() == 0 for i in range(20))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 9)] * 3),
    patch=st.tuples(*[st.integers(1, 9)] * 3),
    index=st.integers(0, 1000),
)
def test_patches_have_their_size_and_the_volumes_voxels(shape, patch, index):
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(1, *shape) + 1
    e = Entry("a", image, np.ones(shape, np.uint8))
    s = sampler([e], patch=patch, foreground=0.5)
    _, start = s.draw(index)
    got, label = np.full((1, *patch), 9, np.float32), np.full(patch, 9, np.int16)
    read_patch(e, start, got, label, fill=np.zeros(1, np.float32))
    assert got.shape == (1, *patch)
    assert label.shape == patch
    covered = [min(a, b) for a, b in zip(shape, patch, strict=True)]
    assert (label == 1).sum() == np.prod(covered)  # as much of the volume as fits; the rest is background
    inside = np.argwhere(label == 1)
    first = inside[0]
    assert got[(0, *first)] == image[(0, *(first + np.asarray(start)))]
    assert (got[0][label == 0] == 0).all()


def test_padding_is_even_and_normalises_to_zero():
    e = Entry("small", np.full((1, 2, 8, 8), 7.0, np.float32), np.ones((2, 8, 8), np.uint8))
    s = PatchSampler((e,), (np.array([[0.0, 9.0, 4.0, 2.0]], np.float32),), (6, 8, 8), 0.0, 0)
    _, image, label = s.read(0)
    assert image[0, :, 0, 0].tolist() == [4, 4, 7, 7, 4, 4]
    assert label[:, 0, 0].tolist() == [0, 0, 1, 1, 0, 0]
    norm = torch.tensor([[[0.0, 9.0, 4.0, 2.0]]])
    assert normalise(torch.from_numpy(image)[None], norm)[0, 0, :, 0, 0].tolist() == [0, 0, 1.5, 1.5, 0, 0]


def test_normalise_clips_first():
    image = torch.tensor([-100.0, 0.0, 100.0]).view(1, 1, 3, 1, 1)
    out = normalise(image, torch.tensor([[[-10.0, 10.0, 5.0, 5.0]]]))
    assert out.flatten().tolist() == [-3.0, -1.0, 1.0]
    assert image.flatten().tolist() == [-100.0, 0.0, 100.0]  # the raw patch is left as it was


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_batches_for_any_number_of_workers_and_from_any_sample_on(workers):
    s = sampler([entry(f"c{i}", seed=i) for i in range(5)])
    alone = list(islice(TorchLoader(s, batch=3, workers=0), 6))
    helped = list(islice(TorchLoader(s, batch=3, workers=workers), 6))
    later = list(islice(TorchLoader(s, batch=3, first=9, workers=workers), 3))
    for a, b in zip(alone + alone[3:], helped + later, strict=True):
        assert a.cases == b.cases
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.image, b.image)
        assert torch.equal(a.label, b.label)


def test_stage_is_a_function_of_the_samples_alone():
    s = sampler([entry(f"c{i}", (12, 12, 12), seed=i) for i in range(4)], patch=(8, 8, 8))
    raw = next(iter(TorchLoader(s, batch=4, workers=0)))
    stage = DeviceStage(torch.device("cpu"), (8, 8, 8), (1.0, 1.0, 1.0), 5, AugmentConfig(), channels_last=True)
    out, again = stage(raw), stage(raw)
    assert torch.equal(out.image, again.image)
    assert torch.equal(out.label, again.label)
    assert out.image.is_contiguous(memory_format=torch.channels_last_3d)
    half = Batch(raw.image[2:], raw.label[2:], raw.norm[2:], raw.index[2:], raw.cases[2:])
    assert torch.allclose(stage(half).image, out.image[2:], atol=1e-5)
    assert torch.equal(stage(half).label, out.label[2:])


@dataclass(frozen=True)
class Faulty(Entry):
    """A case whose image cannot be read: it hangs, or it is damaged."""

    fault: str = "hang"

    def __getattribute__(self, name):
        if name == "image" and object.__getattribute__(self, "fault") == "damaged":
            raise DataError("the cache entry bad is damaged")
        if name == "image":
            time.sleep(60)
        return object.__getattribute__(self, name)


def faulty(fault):
    good, other = entry("good"), entry("bad", seed=1)
    bad = Faulty("bad", other.image, other.label, fault=fault)
    return PatchSampler((good, bad), (good.norm, good.norm), (4, 4, 4), 0.5, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_case_is_one_line(workers):
    with pytest.raises(DataError) as error:
        list(islice(TorchLoader(faulty("damaged"), batch=2, workers=workers), 3))
    assert str(error.value) == "the cache entry bad is damaged"


def test_a_case_that_hangs_ends_the_run_with_its_name():
    loader = TorchLoader(faulty("hang"), batch=2, workers=1, timeout=1.0)
    start = time.perf_counter()
    with pytest.raises(RunStopped, match=r"no batch within 1 s.*bad, good"):
        next(iter(loader))
    assert time.perf_counter() - start < 30


def test_too_little_shared_memory_is_said_before_a_bus_error(monkeypatch):
    from segspeed.loader import torch_loader

    monkeypatch.setattr(torch_loader.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    good = entry("good")
    sampler = PatchSampler((good,), (good.norm,), (4, 4, 4), 0.5, 0)
    with pytest.raises(DataError, match="--shm-size"):
        TorchLoader(sampler, batch=2, workers=1)
    TorchLoader(sampler, batch=2, workers=0)
