"""What a fork plugs in by `_target_`: an augmentation on the device and a metric beside Dice, in whole runs and alone."""

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from segspeed import build
from segspeed.config import AugmentConfig
from segspeed.loader.device import DeviceStage
from segspeed.loader.extra import OwnAugmentation
from segspeed.metric.own import own_values
from segspeed.monitor import Monitor
from segspeed.record.checkpoints import load_checkpoint
from segspeed.record.run_folder import differing_keys
from segspeed.record.run_record import read_record
from segspeed.training import train
from segspeed.types import Batch, DataError, LabelTable, RunStopped, SettingError
from segspeed.validate import SettingsError, check_targets

SEEN = []


def noisy(image, label, seeds, strength=0.1):
    SEEN.append(list(seeds))
    for row, seed in enumerate(seeds):
        image[row] += strength * torch.randn(image.shape[1:], generator=torch.Generator().manual_seed(seed))
    return image, label


class Darker:
    def __init__(self, by=1.0):
        self.by = by

    def __call__(self, image, label, seeds):
        return image - self.by, label


class NotCalled:
    pass


def two_arguments(image, label):
    return image, label


def volume_ml(prediction, label, spacing, scale=1.0):
    assert prediction.dtype == label.dtype == bool
    return scale * float(prediction.sum()) * float(np.prod(spacing)) / 1000


def recall(found, truth, spacing):
    return float((found & truth).sum() / truth.sum()) if truth.any() else float("nan")


def broken(prediction, label, spacing):
    raise KeyError("nothing here")


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "plug_parts", sys.modules[__name__])
    SEEN.clear()


EXTRA = "augment.extra=[{_target_: plug_parts.noisy, strength: 0.2}, {_target_: plug_parts.Darker, by: 0.5}]"


def weights(cfg):
    return load_checkpoint(Path(cfg.run.root, "balls", cfg.run.name, "last.pt"))["model"]


def test_an_own_augmentation_is_resumed_to_the_bit(tiny, monkeypatch):
    whole = tiny("run.name=whole", EXTRA)
    parts = tiny("run.name=parts", EXTRA, folder=whole.data.kwargs["root"])
    train(whole)
    assert SEEN, "it was called"
    note = Monitor.note

    def stop_once(self, finished, loss, norm):
        note(self, finished, loss, norm)
        if finished.number == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Monitor, "note", stop_once)
        with pytest.raises(RunStopped, match="SIGTERM"):
            train(parts)
    train(parts)
    a, b = weights(whole), weights(parts)
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.long
def test_all_loaders_hand_over_the_same_seeds(tiny):
    found, folder = [], None
    for number, loader in enumerate((("loader=torch",), ("loader=dali",), ("loader=monai", "loader.cache=mmap"))):
        cfg = tiny(*loader, EXTRA, f"run.name=r{number}", "train.steps=2", folder=folder)
        folder = cfg.data.kwargs["root"]
        train(cfg)
        found.append(list(SEEN[:2]))
        SEEN.clear()
    assert found[0] == found[1] == found[2]
    assert len({seed for batch in found[0] for seed in batch}) == 4


def raw(batch=2):
    torch.manual_seed(0)
    norm = torch.tensor([-9.0, 9.0, 0.0, 1.0]).expand(batch, 1, 4)
    label = torch.randint(0, 3, (batch, 6, 6, 6), dtype=torch.int16)
    return Batch(torch.randn(batch, 1, 6, 6, 6), label, norm, torch.arange(batch), ("c",) * batch)


@pytest.mark.parametrize("finished", [False, True])
def test_what_writes_in_place_leaves_the_loaders_batch_alone(finished):
    """A step that found no memory asks for the same batch again."""

    def spoil(image, label, seeds):
        image.zero_()
        label.zero_()
        return image, label

    for augment in (None, AugmentConfig()):
        own = (OwnAugmentation("spoil", spoil),)
        stage = DeviceStage(torch.device("cpu"), (6, 6, 6), (1.0,) * 3, 0, augment, finished=finished, extra=own)
        batch, same = raw(), raw()
        assert not stage(batch).image.any()
        assert torch.equal(batch.image, same.image)
        assert torch.equal(batch.label, same.label)


def test_components_have_seeds_of_their_own():
    first, second = (OwnAugmentation("a", lambda *a: a, place=n) for n in (0, 1))
    assert first.seeds(0, [0, 1]) != first.seeds(1, [0, 1])
    assert set(first.seeds(0, range(50))).isdisjoint(second.seeds(0, range(50)))
    assert first.seeds(3, [7, 9])[1] == first.seeds(3, [9])[0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda i, m, s: i, "returned Tensor; it returns"),
        (lambda i, m, s: (i[..., 1:], m), r"the image with shape \[2, 1, 6, 6, 5\]; it was \[2, 1, 6, 6, 6\]"),
        (lambda i, m, s: (i.double(), m), "the image with type torch.float64"),
        (lambda i, m, s: (i, m.float()), "the label with type torch.float32"),
        (lambda i, m, s: (i.sqrt(), m), "not finite"),
        (lambda i, m, s: (i[9], m), "failed on a batch of image"),
    ],
)
def test_what_an_own_augmentation_breaks_is_told_with_its_name(call, text):
    batch = raw()
    with pytest.raises(SettingError, match=r"augment.extra mine\.fn .*" + text):
        OwnAugmentation("mine.fn", call)(batch.image, batch.label, 0, [0, 1])


def no_memory(image, label, seeds):
    raise MemoryError("none left")


def test_no_memory_is_not_the_augmentations_fault():
    batch = raw()
    with pytest.raises(MemoryError):
        OwnAugmentation("mine.fn", no_memory)(batch.image, batch.label, 0, [0, 1])


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("augment.extra={_target_: plug_parts.noisi}", "did you mean plug_parts.noisy"),
        ("augment.extra={_target_: plug_parts.noisy, strenght: 1}", "did you mean augment.extra.strength"),
        ("augment.extra={_target_: plug_parts.two_arguments}", "cannot be called with"),
        ("augment.extra={_target_: plug_parts.noisy, seeds: 1}", "multiple values"),
        ("augment.extra=[{_target_: plug_parts.noisy}, {_target_: plug_parts.no}]", r"augment.extra\[1\]._target_"),
        ("evaluation.metrics={a: {_target_: plug_parts.two_arguments}}", "evaluation.metrics.a: plug_parts"),
        ("evaluation.metrics={a: {_target_: plug_parts.volume_ml, b: 1}}", "evaluation.metrics.a.b"),
    ],
)
def test_wrong_components_are_told_before_anything_is_loaded(settings, override, text):
    with pytest.raises(SettingsError, match=text):
        check_targets(settings(override))


def test_names_of_metrics(settings):
    cfg = settings("evaluation.metrics=[{_target_: plug_parts.recall}]")
    assert list(cfg.evaluation.metrics) == ["recall"]
    assert list(settings("evaluation.metrics={_target_: plug_parts.recall}").evaluation.metrics) == ["recall"]
    with pytest.raises(SettingsError, match="two of them are called recall"):
        settings("evaluation.metrics=[{_target_: plug_parts.recall}, {_target_: other.recall}]")


def test_an_object_that_cannot_be_called(settings):
    with pytest.raises(SettingError, match="NotCalled, whose objects cannot be called"):
        build.extra_from(settings("augment.extra={_target_: plug_parts.NotCalled}"))


def test_own_metrics_stand_beside_dice(tiny):
    cfg = tiny(
        "evaluation.metrics={ml: {_target_: plug_parts.volume_ml, scale: 2.0}, recall: {_target_: plug_parts.recall}}",
        "run.name=m",
        "evaluation.share=0.5",
    )
    result = train(cfg)
    folder = Path(cfg.run.root, "balls", "m")
    assert json.loads((folder / "result.json").read_text()) == result
    assert set(result["metrics"]) == {"ml", "recall"}
    for found in result["metrics"].values():
        assert set(found["classes"]) == {"bright", "dark"}
        assert found["mean"] == pytest.approx(np.mean(list(found["classes"].values())))
    last = [e for e in read_record(folder / "run.jsonl") if e["kind"] == "evaluation"][-1]
    assert set(last["metrics"]["ml"]["cases"]) == set(last["cases"])
    assert "Own metrics" in (folder / "report.html").read_text()


def test_a_metric_that_fails_ends_the_run_before_its_first_step(tiny):
    with pytest.raises(DataError, match=r"evaluation.metrics broken failed on bright \(KeyError"):
        train(tiny("evaluation.metrics=[{_target_: plug_parts.broken}]"))


def test_masks_regions_and_ignored_voxels_by_hand():
    reference = np.array([[[0, 1, 2, 3]]])  # 3: ignored
    prediction = np.array([[[1, 1, 2, 2]]])
    labels = LabelTable({"a": (1,), "b": (2,)}, ignore=(9,), regions={"ab": ("a", "b"), "b": ("b",)})
    both = own_values(reference, prediction, labels, (1.0, 1.0, 1000.0), {"ml": volume_ml, "recall": recall})
    assert both == {"ml": [3.0, 1.0], "recall": [1.0, 1.0]}
    assert own_values(reference * 0, prediction, labels, (1, 1, 1), {"r": recall}) == {"r": [None, None]}
    with pytest.raises(DataError, match="bad gave inf for ab"):
        own_values(reference, prediction, labels, (1, 1, 1), {"bad": lambda p, t, s: float("inf")})


def test_a_run_that_is_older_than_the_plug_point_goes_on():
    assert differing_keys({"augment": {"margin": 1.0}}, {"augment": {"margin": 1.0, "extra": []}}) == []
    used = {"augment": {"extra": [{"_target_": "mine.fn"}]}}
    for before in ({"extra": []}, {"margin": 1.0}):
        assert any(text.startswith("augment.extra:") for text in differing_keys({"augment": before}, used))
