"""Preprocessed volumes on disk, memory-mapped. The key is the content: files, settings, format.

``<root>/<cohort>/<case>-<key>/`` holds image.npy (or image.b2nd), label.npy, native_label.npy, foreground.npy and case.json.
A folder appears whole or not at all, so one that exists is complete.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from segspeed.data.digest import hash_text
from segspeed.data.preprocess import PreparedArrays
from segspeed.jsonio import from_plain, to_plain
from segspeed.types import DataError, Geometry, Shape3

FORMAT = 2  # raise it when the meaning of the stored arrays changes
MAX_OPEN = 128  # maps a process keeps open; each holds a file descriptor
_open: OrderedDict[str, Any] = OrderedDict()


def entry_key(digest: str, settings: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over the files' digest, the preprocessing settings and the format."""
    text = json.dumps({"files": digest, "settings": to_plain(settings), "format": FORMAT}, sort_keys=True)
    return hash_text(text)[:16]


def entry_path(root: Path, cohort: str, case_id: str, key: str) -> Path:
    """Folder of a case's entry; ``key`` is the digest of all it depends on."""
    return root / cohort / f"{_plain(case_id)}-{key}"


def _plain(name: str) -> str:
    return re.sub(r"[\\/:\0]", "_", name)


@dataclass(frozen=True)
class Storage:
    """How images are kept: format "npy" or "blosc2" (in chunks of ``chunk`` voxels, which is no part of the content) and
    dtype "float32" or "float16"."""

    format: str = "npy"
    dtype: str = "float32"
    chunk: Shape3 = (64, 64, 64)

    def key(self) -> Mapping[str, str]:
        """What of it changes the stored values."""
        return {"format": self.format, "dtype": self.dtype}


def write_entry(path: Path, case_id: str, arrays: PreparedArrays, storage: Storage = Storage()) -> int:
    """Write an entry beside its place, sync it, rename it. Returns its bytes. Another process may win the race:
    the content is the same, and ours is dropped. Raises DataError when the values do not fit the dtype."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".building-{path.name}-{uuid.uuid4().hex[:8]}")
    building.mkdir()
    try:
        _save_image(building, case_id, arrays.image, storage)
        _save(building / "label.npy", arrays.label)
        _save(building / "native_label.npy", arrays.native_label)
        classes = sorted(arrays.foreground)
        voxels = [arrays.foreground[c] for c in classes]
        _save(building / "foreground.npy", np.concatenate(voxels) if voxels else np.zeros((0, 3), np.int32))
        about = {
            "case": case_id,
            "geometry": to_plain(arrays.geometry),
            "norm": arrays.norm.tolist(),
            "classes": classes,
            "counts": [len(v) for v in voxels],
            "image_shape": list(arrays.image.shape),
        }
        with open(building / "case.json", "w", encoding="utf-8") as file:
            json.dump(about, file)
            file.flush()
            os.fsync(file.fileno())
        size = entry_bytes(building)
        try:
            os.rename(building, path)
        except OSError:
            if not path.is_dir():
                raise
        return size
    finally:
        shutil.rmtree(building, ignore_errors=True)


def entry_bytes(path: Path) -> int:
    """Bytes of an entry's files."""
    return sum(f.stat().st_size for f in path.iterdir())


def _save_image(folder: Path, case_id: str, image: np.ndarray, storage: Storage) -> None:
    if storage.dtype == "float16":
        largest = float(np.abs(image).max())
        if largest > float(np.finfo(np.float16).max):
            raise DataError(f"case {case_id}: values up to {largest:.4g} do not fit float16; use cache.dtype=float32")
        image = image.astype(np.float16)
    if storage.format == "npy":
        _save(folder / "image.npy", image)
        return
    blosc2 = _blosc2()
    chunks = (1, *(min(c, n) for c, n in zip(storage.chunk, image.shape[1:], strict=True)))
    filters = {"codec": blosc2.Codec.LZ4, "clevel": 5, "filters": [blosc2.Filter.SHUFFLE]}
    blosc2.asarray(image, chunks=chunks, urlpath=str(folder / "image.b2nd"), mode="w", cparams=filters)
    handle = os.open(folder / "image.b2nd", os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _blosc2() -> Any:
    try:
        import blosc2
    except ImportError as error:
        raise DataError(
            "cache.format=blosc2 needs the package blosc2 (pip install blosc2); or use cache.format=npy"
        ) from error
    blosc2.set_nthreads(1)  # loader processes run side by side already
    return blosc2


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class CacheEntry:
    """One case in the cache. Cheap to make and to pickle; arrays are mapped when first read."""

    path: Path

    @property
    def about(self) -> Mapping[str, Any]:
        """What ``case.json`` says of the entry."""
        return _about(self.path)

    @property
    def case_id(self) -> str:
        """Id of the case."""
        return str(self.about["case"])

    @property
    def image(self) -> Any:
        """``(C, D, H, W)`` float32 or float16, raw intensities on the planned grid: a memory map, or something that gives
        arrays when it is sliced."""
        packed = self.path / "image.b2nd"
        array = _mapped(packed if packed.exists() else self.path / "image.npy")
        if list(array.shape) != self.about["image_shape"]:
            raise _damaged(self.path, f"image.npy has shape {array.shape}")
        return array

    @property
    def label(self) -> np.ndarray:
        """``(D, H, W)`` class indices on the planned grid, memory-mapped."""
        label = _mapped(self.path / "label.npy")
        if list(label.shape) != self.about["image_shape"][1:]:
            raise _damaged(self.path, f"label.npy has shape {label.shape}")
        return label

    @property
    def native_label(self) -> np.ndarray:
        """``(D, H, W)`` class indices on the file's whole grid in canonical order, memory-mapped."""
        return _mapped(self.path / "native_label.npy")

    def foreground(self, class_index: int) -> np.ndarray:
        """Voxel coordinates ``(n, 3)`` of a class in ``label``."""
        place = self.about["classes"].index(class_index)
        start = sum(self.about["counts"][:place])
        return _mapped(self.path / "foreground.npy")[start : start + self.about["counts"][place]]

    @property
    def class_indices(self) -> tuple[int, ...]:
        """Classes present in ``label``."""
        return tuple(self.about["classes"])

    @property
    def norm(self) -> np.ndarray:
        """``(C, 4)`` float32: low, high, mean, std of each channel of this case."""
        return np.array(self.about["norm"], dtype=np.float32)

    @property
    def geometry(self) -> Geometry:
        """The way back to the file's grid."""
        return from_plain(self.about["geometry"], Geometry)


_abouts: dict[Path, Mapping[str, Any]] = {}


def _about(path: Path) -> Mapping[str, Any]:
    if path not in _abouts:
        try:
            _abouts[path] = json.loads((path / "case.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _damaged(path, f"case.json: {error}") from error
    return _abouts[path]


def _mapped(path: Path) -> Any:
    key = str(path)
    if key in _open:
        _open.move_to_end(key)
        return _open[key]
    try:
        if path.suffix == ".b2nd":
            array = _blosc2().open(str(path), mode="r")
        else:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DataError:
        raise
    except (OSError, ValueError, EOFError, RuntimeError) as error:
        if getattr(error, "errno", None) == errno.EMFILE:
            raise DataError(f"too many open files at {path.parent.name}; raise the limit (ulimit -n 4096)") from error
        raise _damaged(path.parent, f"{path.name}: {error}") from error
    _open[key] = array
    while len(_open) > MAX_OPEN:
        _open.popitem(last=False)
    return array


@dataclass(frozen=True)
class ResidentEntry:
    """An entry whose image and label lie in memory that forked processes share: one copy for all workers."""

    case_id: str
    image: np.ndarray
    label: np.ndarray
    norm: np.ndarray
    voxels: Mapping[int, np.ndarray]

    @property
    def class_indices(self) -> tuple[int, ...]:
        """Classes present in ``label``."""
        return tuple(self.voxels)

    def foreground(self, class_index: int) -> np.ndarray:
        """Voxel coordinates ``(n, 3)`` of a class in ``label``."""
        return self.voxels[class_index]


def resident(entry: CacheEntry) -> ResidentEntry:
    """``entry`` read into shared memory."""
    return ResidentEntry(
        entry.case_id,
        _shared(np.asarray(entry.image[:])),
        _shared(np.asarray(entry.label)),
        entry.norm,
        {c: np.array(entry.foreground(c)) for c in entry.class_indices},
    )


def _shared(array: np.ndarray) -> np.ndarray:
    out = np.frombuffer(mmap.mmap(-1, max(1, array.nbytes)), dtype=array.dtype, count=array.size).reshape(array.shape)
    out[...] = array
    return out


def old_entries(root: Path, cohort: str, in_use: Collection[Path]) -> list[Path]:
    """Entries of a cohort that are not in use, and what killed builders left more than a day ago."""
    folder = root / cohort
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        left = path.name.startswith(".building-") and path.stat().st_mtime < time.time() - 86400
        if path.is_dir() and path not in in_use and (left or (path / "case.json").exists()):
            found.append(path)
    return found


def _damaged(path: Path, what: str) -> DataError:
    return DataError(
        f"the cache entry {path.name} is damaged ({what}). Delete the folder {path} and run data_prep.prepare "
        "with the same data settings: only what is missing is built again"
    )
