"""The bare network as TorchScript or ONNX: written, read back, and held against the one it came from."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segspeed.model.networks import as_logits
from segspeed.types import DataError, SettingError, Shape3, first_line

ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")


class Logits(nn.Module):
    """``(B, C, D, H, W)`` -> the finest logits ``(B, K, D, H, W)`` alone, float32, whatever else a network returns."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        return as_logits(self.network(image)).float()


def require_onnx() -> None:
    """Raises SettingError with the command that installs what is missing."""
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingError(
            f"format=onnx needs {', '.join(missing)}, not installed here: pip install {' '.join(missing)} "
            "(or pip install -e '.[export]' in the checkout)"
        )


def patches(channels: int, patch: Shape3, batch: int, seed: int = 0) -> Tensor:
    """Something to compare networks on: ``(B, C, D, H, W)`` float32, standard normal as normalised intensities are."""
    return torch.randn((batch, channels, *patch), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def write_torchscript(network: nn.Module, channels: int, patch: Shape3, path: Path) -> float:
    """Trace ``network`` on one patch into ``path``; the largest difference of logits between the file's network and it, on
    batches of one and of two.

    Raises DataError when the network cannot be traced.
    """
    try:
        with warnings.catch_warnings():  # a tracer warns wherever a shape is read; what it made is compared below
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(network, patches(channels, patch, 1), check_trace=False)
            torch.jit.save(traced, str(path))
            read = torch.jit.load(str(path), map_location="cpu").eval()
    except Exception as error:  # the tracer fails in many ways, all of them the network's
        raise DataError(f"the network cannot be traced ({type(error).__name__}: {first_line(error)})") from error
    return _largest_difference(network, read, channels, patch, (1, 2))


@torch.no_grad()
def write_onnx(network: nn.Module, channels: int, patch: Shape3, path: Path, batch: int | None) -> float:
    """Write ``network`` as ONNX for batches of ``batch`` patches (None: of any number); the largest difference of logits between
    onnxruntime on that file and torch.

    Raises DataError when the network has an operator that ONNX lacks.
    """
    import onnxruntime

    many = batch or 2  # an example of one would make a dynamic batch a constant
    free = ({0: torch.export.Dim("batch", min=1, max=4096)},) if batch is None else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                network,
                (patches(channels, patch, many),),
                str(path),
                dynamo=True,
                external_data=False,
                input_names=["image"],
                output_names=["logits"],
                dynamic_shapes=free,
                verbose=False,
            )
    except Exception as error:  # the exporter fails in many ways, all of them the network's
        raise DataError(
            f"the network cannot be written as ONNX ({type(error).__name__}: {first_line(error)}); format=torchscript may do"
        ) from error
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(image: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"image": image.numpy()})[0])

    return _largest_difference(network, run, channels, patch, (batch,) if batch else (1, 3))


def _largest_difference(
    network: nn.Module, other: Callable[[Tensor], Any], channels: int, patch: Shape3, batches: tuple[int, ...]
) -> float:
    found = 0.0
    for batch in batches:
        image = patches(channels, patch, batch, seed=batch)
        one, two = network(image), other(image)
        if one.shape != two.shape:
            raise DataError(f"the exported network gives {tuple(two.shape)} where the run's gives {tuple(one.shape)}")
        found = max(found, float((one - two).abs().max()))
    return found


def refuse_apart(difference: float, tolerance: float, what: str) -> None:
    """Raises DataError where logits lie farther apart than ``tolerance``, or are no numbers."""
    if not difference <= tolerance:
        raise DataError(
            f"the {what} network differs from the run's by up to {difference:.3g} in its logits, over tolerance={tolerance:g}; "
            "nothing was written. Raise it if that is good enough for you"
        )
