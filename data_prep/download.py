"""One file over HTTP, whole and checked or not at all; what came before the line broke is kept and gone on from."""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.web import Broken, Changed, NoName, Remote, chunks, content_length, open_address, validator
from segspeed.jsonio import write_json
from segspeed.types import DataError

RESERVE = 256 << 20  # bytes of the disk that stay free
LONGEST_PAUSE = 60.0  # s
GAIN = 1 << 20  # bytes beyond the furthest point so far, after which the tries are counted anew

Progress = Callable[[int, "int | None"], None]  # bytes here, bytes in all (None: the server does not say)


@dataclass(frozen=True)
class Fetched:
    """What came: size in bytes and both checksums."""

    size: int
    sha256: str
    md5: str


@dataclass(frozen=True)
class Line:
    """How patient to be: seconds without a byte until a try counts as failed, and failed tries in a row."""

    timeout: float = 60.0
    retries: int = 6
    pause: float = 1.0  # s after the first failure; doubled after each


def digests(path: Path, progress: Progress = lambda done, total: None) -> Fetched:
    """Size and checksums of a file."""
    size, total, sums = 0, path.stat().st_size, _sums()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            size += len(chunk)
            for s in sums:
                s.update(chunk)
            progress(size, total)
    return Fetched(size, sums[0].hexdigest(), sums[1].hexdigest())


def _sums() -> tuple[Any, Any]:
    # Neither guards a secret; said so, machines in FIPS mode still give MD5
    return hashlib.sha256(), hashlib.new("md5", usedforsecurity=False)


def mismatch(remote: Remote, got: Fetched) -> str | None:
    """Which checksum is not the expected one, as a text; None when all is well."""
    for kind in ("sha256", "md5"):
        wanted, found = getattr(remote, kind), getattr(got, kind)
        if wanted is not None and wanted != found:
            return f"its {kind} is {found}, not {wanted}"
    return None


def download(
    remote: Remote,
    part: Path,
    line: Line = Line(),
    *,
    spare: float = 0.0,
    progress: Progress = lambda done, total: None,
    tell: Callable[[str], None] = lambda text: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Fetched:
    """Fetch ``remote`` into ``part``, going on from what is there if the server says it is the same file.

    ``part`` is complete and checked when this returns; after any error but a wrong checksum it stays for the next try,
    beside ``<part>.json``, which says what it is a part of. ``spare``: bytes needed on the disk besides, as a multiple
    of the file's size. Raises DataError with one text a cause.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    failures, furthest, began = 0, -GAIN, part.stat().st_size if part.exists() else 0
    while True:
        try:
            _one_try(remote, part, line, spare, progress, tell)
            break
        except Changed:
            tell(f"{remote.name}: the file on the server is another one than before; from the beginning")
            _forget(part)
        except Broken as error:
            here = part.stat().st_size if part.exists() else 0
            if isinstance(error, NoName) and here == began:
                raise DataError(f"{remote.shown}: {error}") from error  # nothing came yet, so waiting will not mend it
            failures = 1 if here >= furthest + GAIN else failures + 1
            furthest = max(furthest, here)
            if failures > line.retries:
                stays = f"; {here / 1e6:.1f} MB stay, the same command goes on from there" if here else ""
                raise DataError(f"{remote.shown}: {error} ({failures} tries){stays}") from error
            pause = min(LONGEST_PAUSE, line.pause * 2 ** (failures - 1)) * random.uniform(0.75, 1.25)
            pause = min(LONGEST_PAUSE, max(pause, error.wait or 0.0))
            tell(f"{remote.name}: {error}; again in {pause:.0f} s")
            sleep(pause)
    got = digests(part)
    wrong = mismatch(remote, got)
    if wrong is not None:
        _forget(part)
        old = " (a part of it was of an earlier try)" if began else ""
        raise DataError(
            f"{remote.shown}: {wrong}{old}. Either the checksum is that of another file or the file was changed; "
            "what came is deleted"
        )
    return got


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _notes(part).unlink(missing_ok=True)


def _notes(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _one_try(
    remote: Remote, part: Path, line: Line, spare: float, progress: Progress, tell: Callable[[str], None]
) -> None:
    """Bring ``part`` to its end. Raises Broken, Changed or DataError."""
    known = _known(part, remote)
    here = part.stat().st_size if known is not None else 0
    if known is not None and here == known["total"]:
        return
    headers = {"User-Agent": "segspeed", "Accept-Encoding": "identity"}
    if known is not None and here:
        headers |= {"Range": f"bytes={here}-", "If-Range": known["validator"]}
    with closing(open_address(remote, headers, line.timeout)) as answer:
        total: int | None
        if answer.status == 206 and "Range" in headers:
            total = _continues(answer, here, known)
        elif answer.status == 200:
            if here:
                tell(f"{remote.name}: changed on the server, or the server sends no parts; from the beginning")
            here, total = 0, content_length(answer, remote)
        else:
            raise DataError(f"{remote.shown}: the server answered {answer.status}, which is no file")
        _check_disk(part, remote, here, total, spare)
        if here == 0:
            part.write_bytes(b"")
            write_json(_notes(part), {"url": remote.shown, "validator": validator(answer.headers), "total": total})
        _receive(answer, part, here, total, progress)


def _known(part: Path, remote: Remote) -> dict[str, Any] | None:
    """What ``part`` is the beginning of; None when that cannot be said, so that nothing is glued to it."""
    try:
        notes = json.loads(_notes(part).read_text(encoding="utf-8"))
        size = part.stat().st_size
    except (OSError, ValueError):
        return None
    if not isinstance(notes, dict) or notes.get("url") != remote.shown:
        return None
    total = notes.get("total")
    if not isinstance(total, int) or not 0 <= size <= total:
        return None
    return notes if size == total or isinstance(notes.get("validator"), str) else None


def _continues(answer: http.client.HTTPResponse, here: int, known: dict[str, Any] | None) -> int:
    """The total size, if the answer goes on exactly where ``part`` ends and is of the same file. Raises Changed."""
    match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", answer.headers.get("Content-Range", "").strip())
    same = known is not None and validator(answer.headers) in (None, known["validator"])
    if not match or int(match[1]) != here or not same or known is None or int(match[3]) != known["total"]:
        raise Changed
    return int(match[3])


def _check_disk(part: Path, remote: Remote, here: int, total: int | None, spare: float) -> None:
    free = shutil.disk_usage(part.parent).free - RESERVE
    needed = (total or 0) - here + int(spare * (total or 0))
    if needed > free:
        unpacked = " (with its unpacked files)" if spare else ""
        raise DataError(
            f"{remote.name} needs {needed / 1e9:.2f} GB more{unpacked}, but only {max(0, free) / 1e9:.2f} GB can be used on "
            f"the disk of {part.parent} ({RESERVE >> 20} MiB stay free)"
        )


def _receive(answer: http.client.HTTPResponse, part: Path, here: int, total: int | None, progress: Progress) -> None:
    try:
        with part.open("ab") as out:
            for chunk in chunks(answer):
                out.write(chunk)
                here += len(chunk)
                progress(here, total)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"the disk of {part.parent} became full after {here / 1e9:.2f} GB; free some and give the same command"
            ) from error
        raise
    if total is not None and here < total:
        raise Broken(f"the connection ended after {here} of {total} bytes")
    if total is None:  # an answer without a length ends where it ends; http.client has checked its pieces, if any
        notes = json.loads(_notes(part).read_text(encoding="utf-8"))
        write_json(_notes(part), {**notes, "total": here})
