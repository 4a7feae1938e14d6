import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from data_prep.msd import msd
from data_prep.phantoms import CLASSES, make_phantom, phantoms
from segspeed.data.geometry import read_volume
from segspeed.metric.overlap import dice_per_target
from segspeed.types import DataError, LabelTable


@pytest.fixture(scope="module", params=["ct", "mr"])
def volumes(request, tmp_path_factory):
    """(image, label) arrays (D, H, W) of 12 cases, as read from their files."""
    cohort = phantoms(str(tmp_path_factory.mktemp("phantoms")), kind=request.param, cases=12)
    return [(read_volume(c.images[0]), read_volume(c.label, scaled=False)) for c in cohort.cases]


def test_every_class_is_in_every_case(volumes):
    counts = np.array([np.bincount(m.array.astype(int).ravel(), minlength=6) for _, m in volumes])
    assert counts.shape[1] == 6
    assert counts.min() > 150, "voxels of the smallest structure"


def test_spacing_and_orientation_vary_and_image_and_label_agree(volumes):
    assert len({i.spacing for i, _ in volumes}) == 12
    assert len({i.orientation for i, _ in volumes}) >= 4
    assert all(i.spacing[0] > 1.3 * i.spacing[1] for i, _ in volumes), "slices are thick"
    for image, label in volumes:
        np.testing.assert_array_equal(image.affine, label.affine)


def test_left_is_left_whatever_the_file_axes(volumes):
    """In canonical (D, H, W) order W runs towards the right."""
    for _, label in volumes:
        centre = {n: np.argwhere(label.array == v)[:, 2].mean() for v, n in enumerate(CLASSES, start=1)}
        assert centre["kidney_left"] < centre["aorta"] < centre["kidney_right"]
        assert centre["spleen"] < centre["liver"]


def test_organs_touch(volumes):
    touching = 0
    for _, label in volumes:
        liver = ndimage.binary_dilation(label.array == 1)
        touching += bool((liver & (label.array > 1)).any())
    assert touching > len(volumes) / 2


def test_no_threshold_reaches_a_dice_of_06(volumes):
    """The best interval of intensities for each class, chosen on the test cases themselves."""
    best = []
    for value in range(1, 6):
        inside = np.concatenate([i.array[m.array == value][::10] for i, m in volumes])
        cuts = np.percentile(inside, [0, 2, 10, 25, 50, 75, 90, 98, 100])
        scores = [
            np.mean([_dice((i.array >= a) & (i.array <= b), m.array == value) for i, m in volumes])
            for a, b in itertools.combinations(cuts, 2)
        ]
        best.append(max(scores))
    assert np.mean(best) < 0.6


def test_a_mean_atlas_stays_below_06(volumes):
    """Each case from the average of the others on a common grid."""
    common = (34, 64, 80)
    shares = []
    for _, label in volumes:
        factors = [a / b for a, b in zip(common, label.shape, strict=True)]
        one_hot = [(label.array == k).astype(np.float32) for k in range(6)]
        shares.append(np.stack([ndimage.zoom(h, factors, order=1, mode="nearest", grid_mode=True) for h in one_hot]))
    total = sum(shares)
    scores = [dice_per_target(s.argmax(0), (total - s).argmax(0), LabelTable.numbered(5)) for s in shares]
    assert np.nanmean(np.array(scores, dtype=float)) < 0.6


def _dice(a, b):
    return 2 * (a & b).sum() / (a.sum() + b.sum())


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path):
    a, b, c = (phantoms(str(tmp_path / n), cases=2, seed=s) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    for one, two, other in zip(a.cases, b.cases, c.cases, strict=True):
        assert one.images[0].read_bytes() == two.images[0].read_bytes()
        assert one.label.read_bytes() == two.label.read_bytes()
        assert one.images[0].read_bytes() != other.images[0].read_bytes()


def test_only_missing_files_are_written_again(tmp_path):
    first = phantoms(str(tmp_path), cases=3)
    kept, lost = first.cases[0].images[0], first.cases[1].label
    stamp = kept.stat().st_mtime_ns
    lost.unlink()
    again = phantoms(str(tmp_path), cases=3)
    assert again == first
    assert lost.exists()
    assert kept.stat().st_mtime_ns == stamp


def test_the_folder_reads_as_a_decathlon_task(tmp_path):
    cohort = phantoms(str(tmp_path), kind="mr", cases=2)
    folder = cohort.cases[0].images[0].parents[1]
    again = msd(str(folder))
    assert (again.cases, dict(again.labels), again.channels) == (cohort.cases, dict(cohort.labels), ("MR",))


def test_kinds_differ_and_are_checked(tmp_path):
    ct, mr = make_phantom("ct", 0, 0)[0], make_phantom("mr", 0, 0)[0]
    assert ct.min() < -900
    assert mr.min() >= 0
    with pytest.raises(DataError, match="ct or mr"):
        phantoms(str(tmp_path), kind="pet")
    with pytest.raises(DataError, match="at least 1"):
        phantoms(str(tmp_path), cases=0)
    assert not list(Path(tmp_path).iterdir())
