"""Pixels of DICOM planes in real-world values (HU, Bq/ml, or the scanner's own of MR)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from segspeed.data.dicom_files import UNREADABLE, Frame, from_groups, pydicom_module, silent
from segspeed.types import DataError

PLUGINS = {
    "JPEG 2000": "pylibjpeg pylibjpeg-openjpeg",
    "High-Throughput": "pylibjpeg pylibjpeg-openjpeg",
    "JPEG-LS": "pyjpegls",
    "JPEG": "pylibjpeg pylibjpeg-libjpeg (GPL; or python-gdcm)",
}  # by how the name of the transfer syntax starts; the first that fits


def read_planes(frames: Sequence[Frame]) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """Values ``(n, rows, columns)`` float32 in the order of ``frames``, which of them are 0 in every stored pixel, and the
    data sets of the files (without pixels, one a file in the order met).

    Slope and intercept (or the modality table) are those of each plane. Raises DataError that names the decoder to install
    where one is missing, and how many files cannot be decoded.
    """
    pydicom = pydicom_module()
    rows, columns = frames[0].shape
    values = np.empty((len(frames), rows, columns), dtype=np.float32)
    empty = np.zeros(len(frames), dtype=bool)
    heads = []
    order = sorted(range(len(frames)), key=lambda n: (str(frames[n].file), frames[n].number or 0))
    broken = 0
    with silent():
        for path, group in groupby(order, key=lambda n: frames[n].file):
            members = list(group)
            try:
                one = pydicom.dcmread(path)
                check_decoder(one)
                stored = pydicom.pixels.pixel_array(one)
                for n in members:
                    number = frames[n].number
                    plane = stored[number] if number is not None and stored.ndim == 3 else stored
                    empty[n] = not plane.any()
                    values[n] = _rescaled(plane, one, number)
                for keyword in ("PixelData", "FloatPixelData", "DoubleFloatPixelData"):
                    if keyword in one:
                        del one[keyword]
                heads.append(one)
            except DataError:
                raise
            except (RuntimeError, *UNREADABLE):  # decoders end in any of these; their texts may quote the header
                broken += 1
    if broken:
        raise DataError(
            f"the pixels of {broken} files cannot be decoded: damaged or cut short. Export them again from the archive"
        )
    return values, empty, heads


def check_decoder(one: Any) -> None:
    """Raises DataError with the plugin to install where the pixels are compressed and nothing here decodes them."""
    from pydicom.pixels.decoders.base import get_decoder

    syntax = one.file_meta.TransferSyntaxUID
    if not syntax.is_compressed or syntax.is_deflated:
        return
    try:
        able = get_decoder(syntax).is_available
    except NotImplementedError:
        able = False
    if not able:
        package = next((p for start, p in PLUGINS.items() if syntax.name.startswith(start)), None)
        fix = f"pip install {package}" if package else "export it uncompressed"
        raise DataError(f"its pixels are compressed as {syntax.name}, which nothing installed here decodes; {fix}")


def _rescaled(stored: np.ndarray, one: Any, number: int | None) -> np.ndarray:
    """Stored pixels as real-world values in float64, so that the whole range of int16 survives any sign."""
    from pydicom.pixels.processing import apply_modality_lut

    if number is not None:
        slope = from_groups(one, number, "PixelValueTransformationSequence", "RescaleSlope")
        intercept = from_groups(one, number, "PixelValueTransformationSequence", "RescaleIntercept")
        if slope is not None or intercept is not None:
            return _line(stored, slope, intercept)
    if one.get("ModalityLUTSequence", None):
        table: np.ndarray = apply_modality_lut(stored, one)
        return table
    return _line(stored, one.get("RescaleSlope", None), one.get("RescaleIntercept", None))


def _line(stored: np.ndarray, slope: Any, intercept: Any) -> np.ndarray:
    factor = 1.0 if slope in (None, "") else float(slope)
    offset = 0.0 if intercept in (None, "") else float(intercept)
    return stored.astype(np.float64) * factor + offset


def smallest_type(values: np.ndarray) -> np.ndarray:
    """``values`` (any shape) as int16 where that keeps them exactly, else as they are."""
    low, high = np.iinfo(np.int16).min, np.iinfo(np.int16).max
    if values.min() >= low and values.max() <= high and np.array_equal(values, np.rint(values)):
        return values.astype(np.int16)
    return values
