"""Logits into classes: one by one, and as regions that overlap."""

import pytest
import torch

from segspeed.infer.decode import as_scores, class_indices, probabilities
from segspeed.types import LabelTable

NESTED = LabelTable(
    {"edema": (1,), "core": (2,), "enhancing": (3,)},
    regions={"whole": ("edema", "core", "enhancing"), "core": ("core", "enhancing"), "enhancing": ("enhancing",)},
)
FREE = LabelTable(
    {"a only": (1,), "b only": (2,), "a + b": (3,)}, regions={"a": ("a only", "a + b"), "b": ("b only", "a + b")}
)


def decoded(table, *there):
    scores = torch.tensor([3.0 if t else -3.0 for t in there]).view(1, -1, 1, 1)
    return int(class_indices(scores, table))


@pytest.mark.parametrize(
    ("there", "index"),
    [
        ((0, 0, 0), 0), ((1, 0, 0), 1), ((1, 1, 0), 2), ((1, 1, 1), 3),
        ((0, 1, 0), 2), ((0, 0, 1), 3), ((1, 0, 1), 3),  # not nested: the last region that is there decides
    ],
)  # fmt: skip
def test_nested_regions(there, index):
    assert decoded(NESTED, *there) == index


@pytest.mark.parametrize(("there", "index"), [((0, 0), 0), ((1, 0), 1), ((0, 1), 2), ((1, 1), 3)])
def test_structures_that_overlap_freely(there, index):
    assert decoded(FREE, *there) == index


def test_every_class_is_decoded_from_its_own_regions():
    for table in (NESTED, FREE):
        for index in range(1, len(table.classes) + 1):
            assert decoded(table, *(index in members for members in table.members)) == index


def test_exclusive_classes_take_the_largest():
    scores = torch.randn(2, 4, 3, 3)
    assert torch.equal(class_indices(scores, LabelTable.numbered(3)), scores.argmax(1))


@pytest.mark.parametrize("table", [NESTED, LabelTable.numbered(2)])
def test_probabilities_and_back(table):
    scores = torch.randn(2, table.outputs, 3, 3)
    shares = probabilities(scores, table)
    if not table.regions:
        torch.testing.assert_close(shares.sum(1), torch.ones(2, 3, 3))
    torch.testing.assert_close(probabilities(as_scores(shares, table), table), shares)
    assert torch.isfinite(as_scores(torch.tensor([0.0, 1.0]), table)).all()
