"""Fetch data: python -m data_prep.fetch task=Task04_Hippocampus out=data

A Medical Segmentation Decathlon task by its name, or any file by its address: url=https://HOST/FILE.zip sha256=SUM, several as
urls=[A,B] or urls=FILE.txt (an address a line, a checksum before it if there is one). .tar, .tar.gz and .zip are unpacked into
out/NAME. A broken connection is gone on from, by the same command as well; what is there and right is not fetched again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import Field, model_validator

from data_prep.archive import refuse_existing, unpack
from data_prep.archive_formats import stem
from data_prep.byte_bar import byte_bar
from data_prep.download import Fetched, Line, digests, download, mismatch
from data_prep.web import Remote, check_address, file_name
from segspeed.cli import Frame, door
from segspeed.config import Seconds, Strict
from segspeed.config_inference import Name, Names
from segspeed.jsonio import write_json
from segspeed.types import DataError, SettingError

# The archives that MONAI names, and their MD5 sums.
DECATHLON = "https://msd-for-monai.s3-us-west-2.amazonaws.com/"
TASKS = {
    "Task01_BrainTumour": "240a19d752f0d9e9101544901065d872",
    "Task02_Heart": "06ee59366e1e5124267b774dbd654057",
    "Task03_Liver": "a90ec6c4aa7f6a3d087205e23d4e6397",
    "Task04_Hippocampus": "9d24dba78a72977dbd1d2e110310f31b",
    "Task05_Prostate": "35138f08b1efaef89d7424d2bcc928db",
    "Task06_Lung": "8afd997733c7fc0432f71255ba4e52dc",
    "Task07_Pancreas": "4f7080cfca169fa8066d17ce6eb061e4",
    "Task08_HepaticVessel": "641d79e80ec66453921d997fbf12a29c",
    "Task09_Spleen": "410d4a301da4e5b2f6f86ec3ddba524e",
    "Task10_Colon": "bad7a188931dc2f6acf72b08eb6202d0",
}


class FetchConfig(Strict):
    """What to fetch, and where to."""

    task: Name | None = Field(None, description="a Decathlon task, e.g. Task04_Hippocampus")
    url: Name | None = Field(None, description="address of a file (http or https)")
    urls: Name | Names | None = Field(None, description="several addresses, or a text file with one a line")
    out: Name = Field("data", description="folder for what comes")
    name: str | None = Field(None, description="file name for url=..., where the address does not end in one")
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = Field(None, description="checksum of url=...")
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = Field(None, description="checksum of url=...")
    unpack: bool = Field(True, description="unpack .tar, .tar.gz, .tgz and .zip")
    keep: bool = Field(False, description="keep an archive after it was unpacked")
    max_ratio: float = Field(100.0, ge=1, description="refuse an archive that unpacks to more times its size")
    timeout: Annotated[Seconds, Field(gt=0)] = Field(60.0, description="without a byte for so long, a try has failed")
    retries: int = Field(6, ge=0, le=1000, description="failed tries in a row after which it stops")

    @model_validator(mode="after")
    def _one_source(self) -> FetchConfig:
        if sum(v is not None for v in (self.task, self.url, self.urls)) != 1:
            raise ValueError("give one of task=Task04_Hippocampus, url=https://HOST/FILE, or urls=[A,B]")
        if self.url is None and (self.sha256 or self.md5 or self.name):
            raise ValueError(
                "sha256, md5 and name belong to url=...; in urls=FILE.txt a checksum stands before its address"
            )
        return self


def main(cfg: FetchConfig) -> int:
    """Fetch what ``cfg`` names; 0 when all of it is there."""
    from segspeed.record.live import say

    remotes, out = wanted(cfg), Path(cfg.out).expanduser()
    places, failed = [], []
    for remote in remotes:
        try:
            places.append(fetch(remote, out, cfg))
        except DataError as error:
            if len(remotes) == 1:
                raise
            failed.append(str(error))
            say(f"failed: {error}")
    if len(remotes) > 1:
        say(f"{len(places)} of {len(remotes)} are there" + "".join(f"\n  failed: {text}" for text in failed))
    for place in places:
        if command := next_command(place):
            say(f"Next: {command}")
    return int(bool(failed))


def wanted(cfg: FetchConfig) -> list[Remote]:
    """The files that the settings name. Raises SettingError or DataError before anything is fetched."""
    if cfg.task is not None:
        if cfg.task not in TASKS:
            near = get_close_matches(cfg.task, TASKS, 1) or [t for t in TASKS if cfg.task.lower() in t.lower()]
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TASKS)}"
            raise SettingError(f"task={cfg.task}: there is no such task; {hint}")
        return [Remote(f"{DECATHLON}{cfg.task}.tar", f"{cfg.task}.tar", md5=TASKS[cfg.task])]
    if cfg.url is not None:
        return [_remote(cfg.url, cfg.sha256, cfg.md5, cfg.name)]
    urls = cfg.urls
    if isinstance(urls, str):
        found = [_remote(urls)] if "://" in urls else _from_list(Path(urls).expanduser())
    else:
        found = [_remote(u) for u in urls or ()]
    seen: dict[str, str] = {}
    for remote in found:
        place = ((stem(remote.name) if cfg.unpack else None) or remote.name).lower()
        if place in seen:
            raise SettingError(
                f"{seen[place]} and {remote.shown} would both become {remote.name}; fetch one of them with "
                "url=... name=ANOTHER"
            )
        seen[place] = remote.shown
    return found


def _remote(url: str, sha256: str | None = None, md5: str | None = None, name: str | None = None) -> Remote:
    check_address(url)
    if name is not None and (not name.strip(". ") or re.search(r"[/\\\0:]", name) or name.startswith(".")):
        raise SettingError(f"name={name} must be a plain file name, such as data.zip")
    url = quote(url, safe="%/:=&?~#+!$,;'@()*[]")  # letters beyond a to z as %C3%BC
    return Remote(url, name or file_name(url), sha256.lower() if sha256 else None, md5.lower() if md5 else None)


def _from_list(path: Path) -> list[Remote]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the list {path} cannot be read ({error}); urls=FILE.txt holds an address a line") from error
    found, problems = [], []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        *sums, url = words
        known = {64: "sha256", 32: "md5"}
        if len(sums) > 1 or any(len(s) not in known or not re.fullmatch(r"[0-9a-fA-F]+", s) for s in sums):
            problems.append(f"line {number}: {line[:100]!r} is neither ADDRESS nor CHECKSUM ADDRESS (SHA-256 or MD5)")
            continue
        try:
            found.append(_remote(url, **{known[len(s)]: s for s in sums}))
        except DataError as error:
            problems.append(f"line {number}: {error}")
    if problems or not found:
        raise DataError(f"{path}: " + ("; ".join(problems[:20]) or "holds no address"))
    return found


def fetch(remote: Remote, out: Path, cfg: FetchConfig) -> Path:
    """Bring ``remote`` into ``out``: the folder it is unpacked into, else the file. Raises DataError."""
    from segspeed.record.live import say

    notes = out / ".fetch"
    notes.mkdir(parents=True, exist_ok=True)
    with _alone(notes / f"{remote.name}.lock", remote):
        receipt = _receipt(notes / f"{remote.name}.json")
        inner = stem(remote.name) if cfg.unpack else None
        folder = out / inner if inner else None
        if folder is not None and folder.is_dir() and isinstance(receipt.get("files"), dict):
            _same_folder(folder, receipt, remote)
            say(f"{folder} is there already ({len(receipt['files'])} files)")
            return folder
        if folder is not None:
            refuse_existing(folder)
        archive, got, ours = _whole(remote, out, notes, receipt, cfg, spare=1.0 if folder else 0.0)
        if folder is None:
            return archive
        with byte_bar(f"unpacking {archive.name}") as (progress, _):
            files = unpack(
                archive, folder, notes / f"{remote.name}.unpacking", max_ratio=cfg.max_ratio,
                progress=lambda done: progress(done, got.size),
            )  # fmt: skip
        _write_receipt(notes, remote, got, files)
        if ours and not cfg.keep:
            archive.unlink()
        say(f"{folder}: {len(files)} files, {sum(files.values()) / 1e6:.1f} MB")
        return folder


def _whole(
    remote: Remote, out: Path, notes: Path, receipt: dict[str, Any], cfg: FetchConfig, spare: float
) -> tuple[Path, Fetched, bool]:
    """The file of ``remote`` in ``out``, whole; what is known of it, and whether this command fetched it."""
    from segspeed.record.live import say

    place = out / remote.name
    if place.exists():
        with byte_bar(f"checking {remote.name}") as (progress, _):
            got = digests(place, progress)
        ours = receipt.get("sha256") == got.sha256
        if wrong := mismatch(remote, got):
            raise DataError(f"{place} is there already, but {wrong}; it is not overwritten: move it away")
        if ours and not remote.sha256 and not remote.md5 and receipt.get("url") != remote.shown:
            raise _another(place, receipt, remote)
        if not ours and remote.sha256 is None and remote.md5 is None:
            raise DataError(
                f"{place} is there already, and nothing says whether it is whole and the right one: move it away, or give "
                f"the checksum it should have (it has sha256={got.sha256})"
            )
        say(f"{place} is there already, and right")
        return place, got, ours
    part = notes / f"{remote.name}.part"
    with byte_bar(remote.name) as (progress, tell):
        line = Line(cfg.timeout, cfg.retries)
        got = download(remote, part, line, spare=spare, progress=progress, tell=tell)
    _write_receipt(notes, remote, got, None)
    os.replace(part, place)
    part.with_name(part.name + ".json").unlink(missing_ok=True)
    compared = "as expected" if remote.sha256 or remote.md5 else f"not compared with any; next time sha256={got.sha256}"
    say(f"{place}: {got.size / 1e6:.1f} MB, checksum {compared}")
    return place, got, True


def _write_receipt(notes: Path, remote: Remote, got: Fetched, files: dict[str, int] | None) -> None:
    about = {"url": remote.shown, "size": got.size, "sha256": got.sha256, "md5": got.md5, "files": files}
    write_json(notes / f"{remote.name}.json", about)


def _receipt(path: Path) -> dict[str, Any]:
    """What was fetched under a name before; empty when nothing is known."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _same_folder(folder: Path, receipt: dict[str, Any], remote: Remote) -> None:
    """Raises DataError unless ``folder`` holds what was unpacked, of an archive with this address or checksum."""
    for kind in ("sha256", "md5"):
        expected = getattr(remote, kind)
        if expected is not None and receipt.get(kind) != expected:
            raise DataError(
                f"{folder} was unpacked from an archive with {kind} {receipt.get(kind)}, not {expected}; move it away, and "
                "the same command fetches the other one"
            )
    if remote.sha256 is None and remote.md5 is None and receipt.get("url") != remote.shown:
        raise _another(folder, receipt, remote)
    wrong = [p for p, size in receipt["files"].items() if not _has_size(folder / p, size)]
    if wrong:
        raise DataError(
            f"{folder}: {len(wrong)} of {len(receipt['files'])} files are missing or have another size than when they were "
            f"unpacked: {', '.join(wrong[:5])}. Move the folder away, and the same command makes it anew"
        )


def _another(place: Path, receipt: dict[str, Any], remote: Remote) -> DataError:
    return DataError(
        f"{place} is there already, but it came from {receipt.get('url')}, not from {remote.shown}: give this one another name "
        "(url=... name=OTHER) or another folder (out=...); or its checksum, if both are the same file"
    )


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


@contextmanager
def _alone(path: Path, remote: Remote) -> Iterator[None]:
    """Two commands that fetch the same file into one folder would write into each other's part."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another command is fetching {remote.name} into {path.parent.parent} now") from error
        yield


def next_command(place: Path) -> str | None:
    """The check of what was fetched, if its layout can be told."""
    if not place.is_dir():
        return None
    for pattern in ("", "*/", "*/*/"):
        for found in sorted(place.glob(f"{pattern}dataset.json")):
            text = found.read_text(encoding="utf-8", errors="replace")
            return _check("nnunet" if '"channel_names"' in text else "msd", found.parent)
        for found in sorted(place.glob(f"{pattern}dataset_description.json")):
            return _check("bids", found.parent)
    return None


def _check(layout: str, root: Path) -> str:
    plain = re.fullmatch(r"[A-Za-z0-9_./+-]+", str(root))
    return f"python -m data_prep.check data={layout} " + (
        f"data.root={root}" if plain else shlex.quote(f'data.root="{root}"')
    )


if __name__ == "__main__":
    door(main, Frame(FetchConfig, "fetch"))()
