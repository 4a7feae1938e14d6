"""The contract checks pass what the project itself plugs in, and tell what is wrong with everything else."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from monai.losses import DiceCELoss as MonaiDiceCE
from torch import nn

from data_prep.msd import msd
from segspeed.model.losses import DiceCELoss
from segspeed.model.networks import dynunet
from segspeed.model.shuffle_unet import shuffle_unet
from segspeed.testing import (
    ContractError,
    check_augmentation,
    check_loss,
    check_metric,
    check_network,
    check_source,
)
from segspeed.types import Case, Plan, Split

CUBE = (16, 16, 16)
PLAN = Plan(
    spacing=(1.0, 1.0, 1.0), patch=CUBE, batch=2, accumulate=1, features=(4, 8, 8, 8),
    strides=((1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2)), kernels=((3, 3, 3),) * 4, normalisation=("zscore",), ct_norm=(None,),
)  # fmt: skip


@pytest.mark.parametrize("factory", [dynunet, shuffle_unet])
def test_the_projects_networks_fit(factory):
    check_network(factory(PLAN, in_channels=2, out_channels=3), in_channels=2, out_channels=3, patch=CUBE)


class Net(nn.Module):
    """A network that works; what is broken below overrides one thing."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 2, 1)

    def forward(self, x):
        return self.last(F.relu(self.first(x)))


class Coarse(Net):
    def forward(self, x):
        return super().forward(x)[..., ::2]


class OneChannel(Net):
    def forward(self, x):
        return super().forward(x)[:, :1]


class Classes(Net):
    def forward(self, x):
        return super().forward(x).argmax(1, keepdim=True).expand(-1, 2, -1, -1, -1)


class Text(Net):
    def forward(self, x):
        return {"logits": super().forward(x)}


class NotFinite(Net):
    def forward(self, x):
        return super().forward(x).log()


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Detached(Net):
    def forward(self, x):
        return super().forward(x).detach()


class CoarsestFirst(Net):
    def forward(self, x):
        full = super().forward(x)
        return [full, full[..., ::4, ::4, ::4], full[..., ::2, ::2, ::2]] if self.training else full


class OddHead(Net):
    def forward(self, x):
        full = super().forward(x)
        return [full, full[..., :5, :5, :5]] if self.training else full


class OtherChannels(Net):
    def forward(self, x):
        full = super().forward(x)
        return [full, full[:, :1]] if self.training else full


class AlwaysDrops(Net):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5)


class NoCopy(Net):
    def __deepcopy__(self, memo):
        raise TypeError("it holds a lock")


class Counting(nn.Conv3d):
    """Another result each time it runs."""

    def forward(self, x):
        self.runs = getattr(self, "runs", 0) + 1
        return super().forward(x) * (self.runs if self.training else 1) * torch.sigmoid(x[:, :1])


class Stateful(Net):
    def __init__(self):
        super().__init__()
        self.last = Counting(4, 2, 1)


class Reading(Net):
    def forward(self, x):
        sign = 1.0 if float(x.flatten()[0]) > 0 else -1.0
        return super().forward(x) * sign * (1 + x.detach().numpy().mean())


@pytest.mark.parametrize(
    ("network", "text"),
    [
        (Coarse, r"to \[2, 2, 16, 16, 8\]; logits are \[2, 2, 16, 16, 16\]"),
        (OneChannel, "one channel a class with the background"),
        (Classes, "no argmax"),
        (Text, "returned dict"),
        (NotFinite, "not finite on standard"),
        (Unused, "no gradient reaches spare.weight, spare.bias"),
        (Detached, "look for detach"),
        (CoarsestFirst, "the finest comes first: reverse"),
        (OddHead, "does not divide the patch"),
        (OtherChannels, "each has the batch and 2 channels"),
        (AlwaysDrops, "another result for the same image after model.eval"),
        (NoCopy, "copy.deepcopy .it holds a lock"),
        (Stateful, "memory.checkpointing=all"),
        (Reading, "cannot be exported"),
    ],
)
def test_what_a_network_breaks_is_told(network, text):
    with pytest.raises(ContractError, match=text):
        check_network(network(), patch=CUBE)


def test_a_network_is_left_as_it_was():
    model = Net().eval()
    before = [p.clone() for p in model.parameters()]
    check_network(model, patch=CUBE)
    assert not model.training
    assert not hasattr(model, "segspeed_recomputes")
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ContractError, match=r"no torch.nn.Module"):
        check_network(len)
    check_network(Reading(), patch=CUBE, export=False)


def as_own(logits, label):
    return MonaiDiceCE(to_onehot_y=True, softmax=True)(logits.float(), label.long().unsqueeze(1))


@pytest.mark.parametrize(
    "loss",
    [
        DiceCELoss(), DiceCELoss(batch_dice=True), DiceCELoss(ignore_index=3), as_own,
        DiceCELoss(regions=((1, 2), (2,)), ignore_index=3),
    ],
)  # fmt: skip
def test_the_projects_losses_fit(loss):
    check_loss(loss)


def entropy(logits, label, **more):
    return F.cross_entropy(logits.float(), label.long(), **more)


def no_empty(logits, label):
    p = logits.float().softmax(1)[:, 1:]
    hit = F.one_hot(label.long(), 3).movedim(-1, 1)[:, 1:]
    return 1 - (2 * (p * hit).sum() / hit.sum())


@pytest.mark.parametrize(
    ("loss", "more", "text"),
    [
        (lambda x, y: entropy(x, y, reduction="none"), {}, "take the mean"),
        (lambda x, y: float(entropy(x, y)), {}, "returns float; a loss returns a tensor"),
        (lambda x, y: -entropy(x, y), {}, "must be lowest for the right one"),
        (lambda x, y: entropy(x.detach(), y), {}, "gives no gradient"),
        (lambda x, y: (x * 0).sum() + 1, {}, "the gradient of .* is 0"),
        (lambda x, y: F.cross_entropy(x, y), {}, "label.long()"),
        (lambda x, y: entropy(x, y).log() - 99 * (y.sum() < 0) + (1 / (x * 0)).sum(), {}, "must be finite"),
        (no_empty, {}, "is -?(nan|inf) for a patch without foreground"),
        (lambda x, y: entropy(x, y.clamp(0, 2)), {"ignore_index": 3}, "which it should ignore"),
        (entropy, {"ignore_index": 3}, "fails for ignored voxels"),
    ],
)
def test_what_a_loss_breaks_is_told(loss, more, text):
    with pytest.raises(ContractError, match=text):
        check_loss(loss, **more)


@pytest.fixture(scope="module")
def cohort(make_cohort, tmp_path_factory):
    return msd(str(make_cohort(tmp_path_factory.mktemp("source") / "balls")))


def test_the_projects_source_fits(cohort):
    root = str(cohort.cases[0].images[0].parents[1])
    assert check_source(msd, root=root) == cohort


def first(cohort, **changes):
    return (dataclasses.replace(cohort.cases[0], **changes), *cohort.cases[1:])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: {"cases": ()}, "no cases"),
        (lambda c: {"cases": first(c, id=c.cases[1].id)}, "to several cases"),
        (lambda c: {"cases": first(c, id="a/b")}, "an id becomes a file name"),
        (lambda c: {"channels": ("T1", "T2")}, "has 1 images for the channels T1, T2"),
        (lambda c: {"cases": first(c, label=c.cases[0].label.with_name("no.nii.gz"))}, "which is no file"),
        (lambda c: {"cases": first(c, label=str(c.cases[0].label))}, "pathlib.Path is due"),
        (lambda c: {"cases": tuple(Case(x.id, x.images) for x in c.cases)}, "no case a label"),
        (lambda c: {"labels": {}}, "names no classes"),
        (lambda c: {"labels": {"a": 1}}, "tuple of whole numbers"),
        (lambda c: {"labels": {"a": (1,), "b": (1,)}}, "two meanings to the label values 1"),
        (lambda c: {"labels": {"a": (0,)}}, "it is the background"),
        (lambda c: {"splits": (Split(("b_00",), ("nobody",)),)}, "not there: nobody"),
        (lambda c: {"splits": (Split(("b_00",), ("b_00",)),)}, "cases on both sides"),
        (
            lambda c: {"cases": first(c, patient="b_01"), "splits": (Split(("b_00",), ("b_01",)),)},
            "patients on both sides: b_01",
        ),
    ],
)
def test_what_a_source_breaks_is_told(cohort, change, text):
    changed = dataclasses.replace(cohort, **change(cohort))
    with pytest.raises(ContractError, match=text):
        check_source(lambda: changed)


def test_a_source_that_fails_or_changes_its_mind(cohort, write, tmp_path):
    with pytest.raises(ContractError, match="returns list; a data source returns"):
        check_source(lambda: [])
    with pytest.raises(ContractError, match="fails .ZeroDivisionError"):
        check_source(lambda: 1 / 0)
    orders = iter([cohort, dataclasses.replace(cohort, cases=cohort.cases[::-1])])
    with pytest.raises(ContractError, match="sort what the file system lists"):
        check_source(lambda: next(orders))
    small = write(tmp_path / "small.nii.gz", np.zeros((2, 2, 2), np.uint8))
    with pytest.raises(ContractError, match="different shapes"):
        check_source(lambda: dataclasses.replace(cohort, cases=first(cohort, label=small)))
    text = tmp_path / "x.nii.gz"
    text.write_text("no volume")
    with pytest.raises(ContractError, match="is no NIfTI file"):
        check_source(lambda: dataclasses.replace(cohort, cases=first(cohort, label=text)))


def noisy(image, label, seeds):
    for row, seed in enumerate(seeds):
        rng = torch.Generator().manual_seed(seed)
        if torch.rand((), generator=rng) < 0.2:
            image[row] += 0.1 * torch.randn(image.shape[1:], generator=rng)
    return image, label


def test_augmentations_that_fit():
    check_augmentation(noisy)
    check_augmentation(lambda i, m, s: (i.flip(-1), m.flip(-1)), channels=2, drawn=False)


@pytest.mark.parametrize(
    ("augment", "text"),
    [
        (lambda i, m, s: (i + torch.randn_like(i), m), "another result for the same seeds"),
        (
            lambda i, m, s: (i + torch.randn(i.shape, generator=torch.Generator().manual_seed(s[0])), m),
            "another result for a sample alone",
        ),
        (lambda i, m, s: (i, m), "for 50 different seeds"),
        (lambda i, m, s: (i[..., :4], m), "with shape"),
        (lambda i, m, s: (i, m.long()), "with type torch.int64"),
        (lambda i, m, s: (i / 0, m), "not finite"),
        (lambda i, m, s: (i, m + 1), r"label values \[3\], which it did not have"),
        (lambda i, m: (i, m), "failed on a batch"),
    ],
)
def test_what_an_augmentation_breaks_is_told(augment, text):
    with pytest.raises(ContractError, match=text):
        check_augmentation(augment)


def dice(prediction, label, spacing):
    total = prediction.sum() + label.sum()
    return float(2 * (prediction & label).sum() / total) if total else float("nan")


def test_metrics_that_fit():
    check_metric(dice, perfect=1.0, worst=0.0)
    check_metric(lambda p, r, s: abs(p.sum() - r.sum()) * np.prod(s) / 1000, perfect=0.0)


def writes(prediction, label, spacing):
    prediction[:] = False
    return 0.0


def drawn(prediction, label, spacing, rng=np.random.default_rng(0)):
    return rng.random()


@pytest.mark.parametrize(
    ("metric", "more", "text"),
    [
        (dice, {"worst": 1.0}, "where 1.0 is due"),
        (dice, {"perfect": 0.0}, "is 1 for equal masks, where 0.0 is due"),
        (lambda p, r, s: (p & r).sum() / max(1, r.sum()) if p.any() else 1 // 0, {}, "fails for an empty prediction"),
        (lambda p, r, s: float("nan"), {}, "is nan for equal masks"),
        (lambda p, r, s: 1.0 if r.any() else float("inf"), {}, "is inf for an empty reference"),
        (lambda p, r, s: np.array([1.0]), {}, "returns ndarray"),
        (lambda p, r, s: None, {}, "returns NoneType"),
        (lambda p, r, s: True, {}, "returns bool"),
        (writes, {}, "do not write into the masks"),
        (drawn, {}, "has no random part"),
    ],
)
def test_what_a_metric_breaks_is_told(metric, more, text):
    with pytest.raises(ContractError, match=text):
        check_metric(metric, **more)
