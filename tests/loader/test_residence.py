from itertools import islice

import pytest
import torch

from data_prep.msd import msd
from segspeed.data.cache import CacheEntry, write_entry
from segspeed.data.preprocess import Grid, preprocess
from segspeed.data.sampling import PatchSampler
from segspeed.loader.residence import DeviceLoader, choose_residence, volume_bytes
from segspeed.loader.torch_loader import TorchLoader

CPU = torch.device("cpu")


@pytest.fixture
def entries(msd_folder, tmp_path):
    cohort = msd(str(msd_folder(cases=3)))
    found = []
    for case in cohort.cases:
        write_entry(tmp_path / "cache" / case.id, case.id, preprocess(case, cohort.table, Grid((1.0, 1.0, 1.0))))
        found.append(CacheEntry(tmp_path / "cache" / case.id))
    return found


@pytest.mark.parametrize("patch", [(8, 8, 8), (24, 8, 30)], ids=["inside", "larger than the volume"])
def test_batches_cut_on_the_device_are_those_of_the_loader(entries, patch):
    sampler = PatchSampler(tuple(entries), tuple(e.norm for e in entries), patch, 0.5, 0)
    here = DeviceLoader(sampler, batch=2, device=CPU, first=4)
    there = TorchLoader(sampler, batch=2, workers=0, first=4)
    for a, b in zip(islice(here, 4), islice(there, 4), strict=True):
        assert torch.equal(a.image, b.image)
        assert torch.equal(a.label, b.label)
        assert torch.equal(a.norm, b.norm)
        assert torch.equal(a.index, b.index)
        assert a.cases == b.cases


def test_on_a_cpu_the_page_cache_is_enough(entries):
    assert choose_residence("auto", entries, CPU) == "disk"
    assert choose_residence("ram", entries, CPU) == "ram"
    assert volume_bytes(entries) == 3 * 20 * 18 * 16 * (4 + 1)


@pytest.mark.gpu
def test_a_small_set_goes_to_the_gpu(entries):
    assert choose_residence("auto", entries, torch.device("cuda")) == "device"


@pytest.mark.parametrize("where", ["ram", "device"])
def test_a_run_is_the_same_wherever_its_patches_lie(tiny, where):
    from segspeed.training import train

    plain = tiny("run.name=disk", "cache.resident=disk", "loader.workers=1")
    other = tiny("run.name=other", f"cache.resident={where}", "loader.workers=1", folder=plain.data.kwargs["root"])
    assert train(plain)["dice"] == train(other)["dice"]


@pytest.mark.parametrize("storage", [("cache.format=blosc2",), ("cache.dtype=float16",)])
def test_a_run_from_every_storage(tiny, storage):
    from segspeed.training import train

    pytest.importorskip("blosc2")
    plain = tiny("run.name=plain", "train.steps=20", "augment=none")
    other = tiny("run.name=other", "train.steps=20", "augment=none", *storage, folder=plain.data.kwargs["root"])
    assert train(other)["mean_dice"] == pytest.approx(train(plain)["mean_dice"], abs=0.02)
