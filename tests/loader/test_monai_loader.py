"""The ordinary recipe: it must train on the same data in the same axes as the other loaders."""

from itertools import islice

import nibabel as nib
import numpy as np
import pytest
import torch

from segspeed.config import AugmentConfig
from segspeed.data.sampling import PatchSampler
from segspeed.loader.monai_loader import MonaiLoader
from segspeed.loader.monai_recipe import RandMirrord, class_indices
from segspeed.types import Case, DataError, LabelTable, SettingError

OFF = {
    n: {"probability": (0, 0, 0) if n == "flip" else 0}
    for n in AugmentConfig.model_fields
    if n not in ("margin", "extra")
}
LABELS = LabelTable({"one": (1,), "two": (3, 7)})
AFFINE = np.diag([1.0, 1.5, 2.0, 1.0])


def volume(seed, shape=(14, 12, 10)):
    rng = np.random.default_rng(seed)
    return rng.normal(50, 20, shape).astype(np.float32), rng.choice([0, 1, 3, 7], shape).astype(np.uint8)


@pytest.fixture
def cases(tmp_path, write):
    made = []
    for n in range(3):
        image, label = volume(n)
        write(tmp_path / f"i{n}.nii.gz", image, AFFINE)
        write(tmp_path / f"l{n}.nii.gz", label, AFFINE)
        made.append(Case(f"c{n}", (tmp_path / f"i{n}.nii.gz",), tmp_path / f"l{n}.nii.gz"))
    return made


class Entry:
    def __init__(self, case_id):
        self.case_id = case_id


def loader(cases, patch=(8, 8, 8), batch=4, augment=None, **more):
    norms = tuple(np.array([[-1e9, 1e9, 50.0, 20.0]], np.float32) for _ in cases)
    sampler = PatchSampler(tuple(Entry(c.id) for c in cases), norms, patch, 0.5, 3)
    settings = {
        "labels": LABELS, "spacing": (2.0, 1.5, 1.0), "augment": AugmentConfig.model_validate(augment or OFF), "workers": 0,
    } | more  # fmt: skip
    return MonaiLoader(sampler, cases=cases, batch=batch, patch=patch, **settings)


def test_a_patch_of_the_whole_volume_is_what_the_cache_would_hold(cases):
    batch = next(iter(loader(cases[:1], patch=(10, 12, 14), batch=1)))
    image, label = volume(0)
    expected = torch.from_numpy((image - 50) / 20).permute(2, 1, 0)
    torch.testing.assert_close(batch.image[0, 0], expected, atol=1e-5, rtol=0)
    assert torch.equal(batch.label[0], class_indices(torch.from_numpy(label), LABELS).permute(2, 1, 0))
    assert (batch.image.dtype, batch.label.dtype) == (torch.float32, torch.int16)
    assert batch.cases == ("c0",)


def test_class_values():
    assert class_indices(torch.tensor([0, 1, 3, 7, 9]), LABELS).tolist() == [0, 1, 2, 2, 0]


def test_resumed_is_uninterrupted_for_any_number_of_workers(cases):
    augment = AugmentConfig()
    whole = list(islice(loader(cases, augment=augment.model_dump()), 6))
    assert len({float(b.image.sum()) for b in whole}) == 6
    for first, workers in ((8, 0), (8, 2)):
        rest = list(islice(loader(cases, augment=augment.model_dump(), first=first, workers=workers), 4))
        for a, b in zip(whole[2:], rest, strict=True):
            assert torch.equal(a.image, b.image)
            assert torch.equal(a.label, b.label)
            assert a.index.tolist() == b.index.tolist()


def test_four_patches_come_of_one_decoding_and_every_case_once_an_epoch(cases, monkeypatch):
    made = loader(cases, batch=8)
    assert made._dataset.samples == 4
    batches = list(islice(made, 3))
    visits = [c for b in batches for c in b.cases[::4]]
    assert sorted(visits[:3]) == ["c0", "c1", "c2"]
    assert sorted(visits[3:]) == ["c0", "c1", "c2"]


def test_kept_in_ram_is_the_same(cases):
    a, b = (next(iter(loader(cases, cache=c, augment=AugmentConfig().model_dump()))) for c in ("none", "ram"))
    assert torch.equal(a.image, b.image)
    assert torch.equal(a.label, b.label)


def test_mirroring_left_and_right_swaps_classes():
    image, label = torch.arange(4.0).view(1, 4, 1, 1), torch.tensor([1, 2, 0, 1]).view(1, 4, 1, 1)
    out = RandMirrord(1.0, 0, [(1, 2)])({"image": image, "label": label})
    assert out["image"].flatten().tolist() == [3, 2, 1, 0]
    assert out["label"].flatten().tolist() == [2, 0, 1, 2]


def own(samples=1):
    from monai import transforms as mt

    both = ["image", "label"]
    return mt.Compose(
        [
            mt.LoadImaged(both, image_only=True),
            mt.EnsureChannelFirstd(both),
            mt.RandSpatialCropSamplesd(both, roi_size=(8, 8, 8), num_samples=samples, random_size=False),
        ]
    )


def test_own_transforms_plug_in_with_the_values_of_the_file(cases):
    batch = next(iter(loader(cases, transforms=own(2), samples=2)))
    assert batch.image.shape == (4, 1, 8, 8, 8)
    assert set(batch.label.unique().tolist()) == {0, 1, 2}
    assert batch.image.mean() == pytest.approx(50, abs=10)


def test_what_does_not_go_together_is_named(cases):
    with pytest.raises(SettingError, match=r"loader\.samples=3 does not divide"):
        loader(cases, samples=3)
    with pytest.raises(SettingError, match=r"loader\.cache=disk"):
        loader(cases, cache="disk")
    with pytest.raises(SettingError, match=r"set loader\.samples=2"):
        next(iter(loader(cases, transforms=own(2), samples=1)))
    with pytest.raises(SettingError, match=r"case c\d.*\[1, 8, 8, 8\].*\[16, 8, 8\]"):
        next(iter(loader(cases, transforms=own(1), samples=1, patch=(8, 8, 16))))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_case_that_cannot_be_read_is_named(cases, workers):
    for case in cases:
        case.images[0].write_bytes(b"\x1f\x8b broken")
    with pytest.raises(DataError, match=r"^case c\d: MONAI's transforms failed: .*"):
        next(iter(loader(cases, workers=workers)))


def test_orientation_of_the_file_does_not_matter(cases, write):
    plain = next(iter(loader(cases[:1], patch=(10, 12, 14), batch=1)))
    for path in (cases[0].images[0], cases[0].label):
        image = nib.load(path)
        flipped = image.as_reoriented([[0, -1], [2, 1], [1, -1]])
        nib.save(flipped, path)
    again = next(iter(loader(cases[:1], patch=(10, 12, 14), batch=1)))
    torch.testing.assert_close(plain.image, again.image, atol=1e-5, rtol=0)
    assert torch.equal(plain.label, again.label)
