"""What all tests share: volumes on disk, a small cohort in Decathlon layout, real data where it is at hand."""

import json
import signal
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

REAL = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure():
    # A shell gives its background jobs an ignored Ctrl-C, which the commands that tests start would inherit and never obey.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def real_data():
    """Folder of real volumes; the test skips where it is not at hand."""
    if not REAL.is_dir():
        pytest.skip("no real data beside the checkout")
    return REAL


@pytest.fixture(autouse=True)
def _threads():
    """Two threads whatever a run inside the test set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def write():
    """write(path, array, affine=None, **header): a NIfTI file, folders made."""

    def save(path, array, affine=None, slope=None):
        path.parent.mkdir(parents=True, exist_ok=True)
        image = nib.Nifti1Image(np.asarray(array), np.eye(4) if affine is None else affine)
        if slope is not None:
            image.header.set_slope_inter(slope, 0)
        nib.save(image, path)
        return path

    return save


@pytest.fixture(scope="session")
def make_cohort(write):
    """make_cohort(folder, cases=4, shape=(20, 18, 16), change={case number: function(image, label) -> (image, label)}).

    A folder in Decathlon layout: a bright ball (left, value 1) and a dark one (right, value 3) in noise.
    """

    def make(folder, cases=4, shape=(20, 18, 16), change=None):
        for n in range(cases):
            image, label = balls(shape, seed=n)
            if change and n in change:
                image, label = change[n](image, label)
            if image is not None:
                write(folder / f"imagesTr/b_{n:02d}.nii.gz", image)
            if label is not None:
                write(folder / f"labelsTr/b_{n:02d}.nii.gz", label)
        about = {
            "name": folder.name,
            "modality": {"0": "MRI"},
            "labels": {"0": "background", "1": "bright", "3": "dark"},
            "training": [
                {"image": f"./imagesTr/b_{n:02d}.nii.gz", "label": f"./labelsTr/b_{n:02d}.nii.gz"} for n in range(cases)
            ],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "dataset.json").write_text(json.dumps(about))
        return folder

    return make


@pytest.fixture
def msd_folder(tmp_path, make_cohort):
    """msd_folder(name="balls", root=None, ...): `make_cohort` in this test's own folder."""

    def make(name="balls", root=None, **cohort):
        return make_cohort((root or tmp_path) / name, **cohort)

    return make


@pytest.fixture(scope="session")
def settings():
    """settings("data=msd", "train.steps=3"): a Config as the command line would give it."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from segspeed.cli import config_folder, prepare_arguments
    from segspeed.validate import validate

    def make(*overrides):
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = compose("train", overrides=prepare_arguments(overrides))
        return validate(OmegaConf.to_container(composed, resolve=True, throw_on_missing=False))

    return make


@pytest.fixture
def tiny(settings, msd_folder, tmp_path):
    """tiny("train.steps=3", cases=4): settings of a run that takes a second, on balls in noise."""

    def make(*overrides, folder=None, **cohort):
        folder = folder or msd_folder(**cohort)
        length = () if any(o.startswith(("train.steps", "train.budget")) for o in overrides) else ("train.steps=4",)
        return settings(
            "debug=default", "data=msd", f'data.root="{folder}"', "data.folds=2", "plan.patch=[16,16,16]",
            "plan.features=[4,8,16]", f'run.root="{tmp_path / "runs"}"', "cache.workers=1", "augment=nnunet", "resume=auto",
            *length, *overrides,
        )  # fmt: skip

    return make


def balls(shape, seed):
    rng = np.random.default_rng(seed)
    image = rng.normal(100, 10, shape).astype(np.float32)
    label = np.zeros(shape, np.uint8)
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"))
    for centre, value, shift in ((0.3, 1, 80), (0.7, 3, -80)):
        at = np.array(shape) * centre + rng.uniform(-1, 1, 3)
        inside = np.sqrt(((grid - at[:, None, None, None]) ** 2).sum(0)) < 3.5
        image[inside] += shift
        label[inside] = value
    return image, label
