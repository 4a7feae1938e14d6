"""What stands in a .tar, .tar.gz or .zip, entry by entry, with every name checked. Writes nothing."""

from __future__ import annotations

import gzip
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from segspeed.types import DataError

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")
MAX_DEPTH = 100  # folders in folders
MAX_HEADER = 16 << 20  # bytes; tarfile takes a header (a long name, say) into memory whole


@dataclass(frozen=True)
class Member:
    """One entry: ``parts`` is its checked path, ``size`` its unpacked bytes. ``link`` is the text of a symbolic link,
    ``copy_of`` the path that a hard link names. ``open`` gives the content of a file; it is valid until the next entry."""

    parts: tuple[str, ...]
    folder: bool = False
    size: int = 0
    link: str | None = None
    copy_of: tuple[str, ...] | None = None
    open: Callable[[], IO[bytes] | None] = lambda: None


def stem(name: str) -> str | None:
    """The name of an archive without its ending, None where it is not called as one."""
    ending = next((s for s in SUFFIXES if name.lower().endswith(s)), None)
    return name[: -len(ending)] if ending and len(name) > len(ending) else None


def kind(path: Path) -> str | None:
    """tar, tar.gz, zip or None, told by the content."""
    with path.open("rb") as file:
        head = file.read(512)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "zip"
    if head[:2] == b"\x1f\x8b":
        try:
            with gzip.open(path) as inner:
                return "tar.gz" if _is_tar(inner.read(512)) else None
        except (OSError, EOFError, zlib.error):
            return None
    return "tar" if _is_tar(head) else None


def _is_tar(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, tarfile.ENCODING, "surrogateescape")  # checks the header's own sum
    except tarfile.TarError:
        return False
    return True


def checked_parts(name: str, archive: str) -> tuple[str, ...]:
    """A member's name as path parts; () for the folder itself. Raises DataError when it could lead elsewhere."""
    parts = tuple(p for p in name.split("/") if p not in ("", "."))
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name):
        raise DataError(
            f"{archive} holds a file with the name {name[:200]!r}, which leads out of its folder; nothing was unpacked"
        )
    if len(parts) > MAX_DEPTH:
        raise DataError(f"{archive} holds {len(parts)} folders in each other, which is refused")
    return parts


class _LastBlock:
    """A file that remembers what was read last: tarfile ends quietly at a header it cannot read, we must not."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.last = file, b""

    def read(self, size: int = -1) -> bytes:
        if size > MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        self.last = self.file.read(size)
        return self.last

    def seek(self, place: int, whence: int = 0) -> int:
        return self.file.seek(place, whence)

    def tell(self) -> int:
        return self.file.tell()


def tar_members(archive: Path, raw: IO[bytes], what: str) -> Iterator[Member]:
    """The entries of a tar or tar.gz. Raises DataError for names that lead out and for devices, and what tarfile and gzip
    raise for damaged files; a file that ends too early is one."""
    stream = _LastBlock(gzip.GzipFile(fileobj=raw, mode="rb") if what == "tar.gz" else raw)  # type: ignore[arg-type]
    with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
        while (info := tar.next()) is not None:
            tar.members = []  # tarfile keeps every header it met
            parts = checked_parts(info.name, archive.name)
            if info.isdir():
                yield Member(parts, folder=True)
            elif info.isreg():
                yield Member(parts, size=info.size, open=lambda info=info: tar.extractfile(info))  # type: ignore[misc]
            elif info.issym():
                yield Member(parts, link=info.linkname)
            elif info.islnk():
                yield Member(parts, copy_of=checked_parts(info.linkname, archive.name))
            else:
                raise DataError(f"{archive.name} holds {info.name[:200]!r}, a device or pipe; nothing was unpacked")
        if stream.last.strip(b"\0"):
            raise tarfile.ReadError("what follows the last file is no header")
    while chunk := stream.read(1 << 20):  # to the end, where gzip's own checksum stands
        yield Member((), size=len(chunk))


def zip_members(archive: Path, raw: IO[bytes], room_for: Callable[[int], None]) -> Iterator[Member]:
    """The entries of a zip. ``room_for`` is told the sum of their sizes first and may refuse it. Raises as `tar_members`."""
    with zipfile.ZipFile(raw) as file:
        infos = file.infolist()
        room_for(sum(i.file_size for i in infos))  # as declared: refused before the first byte is written
        for info in infos:
            name = info.filename.replace("\\", "/")  # some programs for Windows write these
            parts = checked_parts(name, archive.name)
            form = stat.S_IFMT(info.external_attr >> 16) if info.create_system == 3 else 0
            if info.flag_bits & 1:
                raise DataError(f"{archive.name} is encrypted; unpack it by hand with its password")
            if name.endswith("/") or form == stat.S_IFDIR:
                yield Member(parts, folder=True)
            elif form == stat.S_IFLNK:
                if info.file_size > 4096:
                    raise DataError(f"{archive.name}: the link {name[:200]!r} has a target of {info.file_size} bytes")
                yield Member(parts, link=os.fsdecode(file.read(info)))
            elif form in (0, stat.S_IFREG):
                yield Member(parts, size=info.file_size, open=lambda info=info: file.open(info))  # type: ignore[misc]
            else:
                raise DataError(f"{archive.name} holds {name[:200]!r}, a device or pipe; nothing was unpacked")
