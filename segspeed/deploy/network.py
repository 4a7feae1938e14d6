"""A trained network as a file that runs without segspeed: TorchScript or ONNX, compared with the network it came from."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segspeed.model.networks import as_logits
from segspeed.types import DataError, SettingError, Shape3, first_line

ONNX_NEEDS = ("onnx", "onnxruntime", "onnxscript")
BATCHES = (2, 1)  # compared at both; a file that takes one window only says so


class FinestLogits(nn.Module):
    """What is exported: windows ``(B, C, D, H, W)``, normalised, to logits ``(B, K, D, H, W)`` in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: Tensor) -> Tensor:
        """Windows ``(B, C, D, H, W)`` to logits ``(B, K, D, H, W)``."""
        return as_logits(self.model(windows)).float()


@dataclass(frozen=True)
class Exported:
    """A file of a network: the largest absolute difference of its logits to torch's, the largest logit it was measured at, and
    whether it takes batches of any size or single windows only."""

    path: Path
    difference: float
    largest: float
    any_batch: bool


def portable(model: nn.Module) -> nn.Module:
    """A copy of a network in float32 on the CPU, in the ordinary memory layout, ready to be written."""
    plain = copy.deepcopy(model).to("cpu", torch.float32).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return FinestLogits(plain).eval().requires_grad_(False)


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over names, shapes and values of all weights and buffers, the same for every format."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def require_onnx() -> None:
    """Raise SettingError where the packages that write and run ONNX are missing."""
    missing = [name for name in ONNX_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingError(
            f"format=onnx needs {', '.join(missing)}: pip install 'segspeed[export]', or pip install {' '.join(missing)}"
        )


def save_torchscript(model: nn.Module, channels: int, patch: Shape3, path: Path, tolerance: float) -> Exported:
    """Trace `portable` ``model``, write it, load it again and compare. Raises DataError when it cannot be traced or differs."""
    example = _windows(1, channels, patch)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the tracer warns of every shape that becomes a constant; the comparison decides
            torch.jit.save(torch.jit.trace(model, example, check_trace=False), str(path))
    except Exception as error:  # a network of anybody's fails in as many ways as it can be written
        raise DataError(f"the network cannot be traced ({type(error).__name__}: {first_line(error)})") from error
    _forget_sources(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loaded = torch.jit.load(str(path), map_location="cpu")
    return _compared(model, loaded, channels, patch, path, tolerance)


def save_onnx(model: nn.Module, channels: int, patch: Shape3, path: Path, tolerance: float) -> Exported:
    """Write `portable` ``model`` as ONNX and compare what onnxruntime makes of it. Raises DataError when it cannot be written or
    differs, SettingError where packages are missing."""
    require_onnx()
    import onnxruntime

    failure: Exception | None = None
    for batch in (torch.export.Dim("batch", min=1), None):
        try:
            _write_onnx(model, _windows(1 if batch is None else 2, channels, patch), batch, path)
            break
        except Exception as error:  # some networks fix the batch they saw; those are written for single windows
            failure = error
    else:
        assert failure is not None
        raise DataError(f"the network cannot be written as ONNX ({type(failure).__name__}: {first_line(failure)})")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(windows: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"windows": windows.numpy()})[0])

    return _compared(model, run, channels, patch, path, tolerance)


def _write_onnx(model: nn.Module, example: Tensor, batch: Any, path: Path) -> None:
    import onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (example,),
            str(path),
            input_names=["windows"],
            output_names=["logits"],
            dynamic_shapes=None if batch is None else {"windows": {0: batch}},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    written = onnx.load(str(path))
    for part in (written.graph, *written.functions):
        for node in part.node:  # each names the lines of Python that it came from, with the paths of this machine
            del node.metadata_props[:]
            node.doc_string = ""
        if hasattr(part, "value_info"):
            for value in (*part.value_info, *getattr(part, "input", ()), *getattr(part, "output", ())):
                if not isinstance(value, str):
                    del value.metadata_props[:]
    for tensor in written.graph.initializer:
        del tensor.metadata_props[:]
    del written.metadata_props[:]
    del written.graph.metadata_props[:]
    onnx.checker.check_model(written)
    onnx.save(written, str(path))


def _compared(
    model: nn.Module, other: Callable[[Tensor], Tensor], channels: int, patch: Shape3, path: Path, tolerance: float
) -> Exported:
    """Both on the same windows. A file that refuses a batch is compared, and from then on used, with single windows."""
    difference, largest, any_batch = 0.0, 0.0, True
    with torch.inference_mode():
        for size in BATCHES:
            windows = _windows(size, channels, patch)
            expected = model(windows)
            try:
                found = other(windows)
            except Exception as error:  # torch and onnxruntime each raise their own
                if size == 1:
                    raise DataError(
                        f"{path.name} does not run ({type(error).__name__}: {first_line(error)})"
                    ) from error
                any_batch = False
                continue
            if found.shape != expected.shape and size > 1:
                any_batch = False
                continue
            apart = (found.float() - expected).abs().max().item() if found.shape == expected.shape else float("inf")
            difference, largest = max(difference, apart), max(largest, expected.abs().max().item())
    if not difference <= tolerance:  # NaN counts as different
        raise DataError(
            f"the exported network differs from the trained one by up to {difference:.3g} (logits up to {largest:.3g}), more than "
            f"tolerance={tolerance:g}; nothing was written. Is there something random or data-dependent in its forward?"
        )
    return Exported(path, difference, largest, any_batch)


def _windows(batch: int, channels: int, patch: Shape3) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn((batch, channels, *patch), generator=generator)


def _forget_sources(path: Path) -> None:
    """Take the debug records out of a TorchScript archive: they hold paths of the machine that wrote it."""
    lighter = path.with_name(f"{path.name}.lighter")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(lighter, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                new.writestr(zipfile.ZipInfo(entry.filename), old.read(entry))
    lighter.replace(path)
