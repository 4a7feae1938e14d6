"""Unpack an archive that somebody else made: .tar, .tar.gz, .tgz and .zip, into a folder of its own or not at all.

Nothing in it is trusted. Every name is checked by us and every file is created anew, so that what Python's tarfile and
zipfile would follow or overwrite (absolute paths, "..", links, devices, modes) has no way out of the folder.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.archive_formats import SUFFIXES, Member, kind, tar_members, zip_members
from segspeed.types import DataError

MAX_RATIO = 100.0  # of all bytes unpacked to the bytes of the archive
MAX_FILES = 1_000_000
SMALL = 64 << 20  # bytes that are unpacked whatever the ratio
RESERVE = 256 << 20  # bytes of the disk that stay free
CHUNK = 1 << 20
MACOS = re.compile(r"__MACOSX|\._.*|\.DS_Store", re.DOTALL)  # resource forks; "._case.nii.gz" is no volume

Progress = Callable[[int], None]  # called with the bytes of the archive that are done


def unpack(
    archive: Path, target: Path, work: Path, *, max_ratio: float = MAX_RATIO, progress: Progress = lambda done: None
) -> dict[str, int]:
    """Unpack ``archive`` so that ``target`` appears whole. A single folder that holds everything is left out:
    ``Task04/imagesTr`` becomes ``target/imagesTr``. ``work`` is a folder of the same disk that is made and taken away.

    Gives the files by their path inside ``target`` with their sizes in bytes. Raises DataError when the archive is none,
    is damaged, holds a name, link or device that could reach outside, would fill the disk, or unpacks to more than
    ``max_ratio`` times its size; then nothing is left.
    """
    refuse_existing(target)
    what = kind(archive)
    if what is None:
        raise DataError(f"{archive} is no archive ({_looks_like(archive)}); {', '.join(SUFFIXES)} are unpacked")
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    work.mkdir(parents=True)
    try:
        out = _Unpacker(archive, work / "content", max_ratio)
        with archive.open("rb") as raw:
            for member in zip_members(archive, raw, out.room_for) if what == "zip" else tar_members(archive, raw, what):
                out.add(member)
                progress(raw.tell())
        source = out.finish()
        refuse_existing(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(source, target)
        return out.files_below(source)
    except DataError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"{archive.name}: the disk of {work.parent} became full while unpacking") from error
        if isinstance(error, gzip.BadGzipFile):
            raise _damaged(archive, error) from error
        raise DataError(f"{archive.name} cannot be unpacked: {error.strerror}: {error.filename}") from error
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, struct.error, OverflowError) as error:
        raise _damaged(archive, error) from error
    except (NotImplementedError, RuntimeError, ValueError) as error:  # zipfile: an unknown method, a header of nonsense
        raise DataError(f"{archive.name} cannot be unpacked here: {error}; use another program to unpack it") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def refuse_existing(target: Path) -> None:
    """Raises DataError when there is something where ``target`` should come to lie."""
    if target.exists() or target.is_symlink():
        raise DataError(
            f"{target} is there already, and what is there is not overwritten: move it away, or unpack to another "
            "place (out=FOLDER, or name=NAME for another folder name)"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if abs(size) < 10**18 else "more than a billion GB"


def _damaged(archive: Path, error: BaseException) -> DataError:
    return DataError(f"{archive} is damaged or not whole ({error}); delete it and fetch it again")


def _looks_like(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(256)
    if re.match(rb"\s*<(!doctype|html|\?xml)", head, re.IGNORECASE):
        return "it is a web page or an XML text: the address may need a login, or name the page about the file"
    if not head:
        return "it is empty"
    return f"it begins with {head[:8]!r}"


@dataclass
class _Unpacker:
    """Writes members below ``root`` and counts what they cost."""

    archive: Path
    root: Path
    max_ratio: float
    written: int = 0
    entries: int = 0
    files: dict[tuple[str, ...], int] = field(default_factory=dict)
    links: dict[tuple[str, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir()
        self.limit = max(SMALL, int(self.max_ratio * self.archive.stat().st_size))
        self.free = shutil.disk_usage(self.root).free - RESERVE

    def room_for(self, size: int) -> None:
        """Raises DataError when ``size`` more bytes go over a limit."""
        total = self.written + size
        if size < 0 or total > self.limit:
            raise DataError(
                f"{self.archive.name} unpacks to more than {self.max_ratio:g} times its size "
                f"({_gigabytes(total)}), as no set of images does; if you trust it, raise max_ratio"
            )
        if total > self.free:
            raise DataError(
                f"{self.archive.name} needs more than {_gigabytes(total)}, but only {max(0, self.free) / 1e9:.2f} GB "
                f"can be used on the disk of {self.root.parent.parent} ({RESERVE >> 20} MiB stay free)"
            )

    def skip(self, size: int) -> None:
        """Count an entry that is read over: it takes time if no room."""
        self.room_for(size)
        self.entries += 1
        if self.entries > MAX_FILES:
            raise DataError(f"{self.archive.name} holds more than {MAX_FILES} entries, which is refused")

    def add(self, member: Member) -> None:
        self.skip(member.size)
        if not member.parts or any(MACOS.fullmatch(p) for p in member.parts):
            self.written += member.size
            return
        path = self.root.joinpath(*member.parts)
        try:
            if member.folder:
                path.mkdir(parents=True, exist_ok=True)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.link is not None:
                if member.parts in self.links or path.exists():
                    raise FileExistsError
                self.links[member.parts] = member.link  # made last: nothing is ever written through one
                return
            self._write(member, path)
        except (FileExistsError, NotADirectoryError) as error:
            raise self._twice(member.parts) from error

    def _twice(self, parts: tuple[str, ...]) -> DataError:
        return DataError(
            f"{self.archive.name} holds {'/'.join(parts)} twice (perhaps in small and capital letters), "
            "or as a file and as a folder; nothing was unpacked"
        )

    def _write(self, member: Member, path: Path) -> None:
        if member.copy_of is not None:
            if member.copy_of not in self.files:
                raise DataError(f"{self.archive.name}: {'/'.join(member.parts)} is a hard link to no file before it")
            self.room_for(self.files[member.copy_of])
        source = self.root.joinpath(*member.copy_of).open("rb") if member.copy_of is not None else member.open()
        assert source is not None, "a file has content"
        size = 0
        with source, path.open("xb") as out:  # x: an existing file, or a link, is an error
            while chunk := source.read(CHUNK):
                self.room_for(len(chunk))
                self.written += len(chunk)
                size += out.write(chunk)
        self.files[member.parts] = size

    def finish(self) -> Path:
        """Make the links, and give the folder that becomes the target. Raises DataError when a link leads out of it."""
        if not self.files:
            raise DataError(f"{self.archive.name} holds no file")
        top = {parts[0] for parts in (*self.files, *self.links)}
        single = len(top) == 1 and all(len(parts) > 1 for parts in (*self.files, *self.links))
        home = self.root / top.pop() if single else self.root
        for parts, text in self.links.items():
            path = self.root.joinpath(*parts)
            depth = len(parts) - (2 if single else 1)
            if not text or os.path.isabs(text) or _climbs_out(depth, text):
                raise self._link_out(parts, text)
            try:
                path.symlink_to(text)
            except FileExistsError as error:
                raise self._twice(parts) from error
        for parts, text in self.links.items():  # when all are there: a link may lead through another one
            if not _below(Path(os.path.realpath(home)), Path(os.path.realpath(self.root.joinpath(*parts)))):
                raise self._link_out(parts, text)
        return home

    def _link_out(self, parts: tuple[str, ...], text: str) -> DataError:
        return DataError(
            f"{self.archive.name}: the link {'/'.join(parts)} -> {text[:200]!r} leads out of its folder; "
            "nothing was unpacked"
        )

    def files_below(self, source: Path) -> dict[str, int]:
        skip = len(source.relative_to(self.root).parts)
        return {"/".join(parts[skip:]): size for parts, size in self.files.items()}


def _climbs_out(depth: int, text: str) -> bool:
    """Whether a link that lies ``depth`` folders deep goes above the uppermost one on its way, by its text alone."""
    for part in text.split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            return True
    return False


def _below(folder: Path, path: Path) -> bool:
    return path == folder or folder in path.parents
