"""NIfTI files by a glob: the text that its wildcards stand for is the case id.

As in a shell, but: ``**/`` stands for any folders; .nii and .nii.gz may have any case of letters on the disk; links to folders
are followed, each real folder once; accented letters match in both of their spellings (one character, or letter and accent).
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from segspeed.data.files import is_volume, stem
from segspeed.types import DataError

_WILD = re.compile(r"[*?\[]")
_TOKENS = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?[^]]+\])")
_ENDINGS = re.compile(r"\.nii(?:\.gz)?|\.gz", re.IGNORECASE)


@dataclass(frozen=True)
class Matches:
    """Files of a glob by case id. ``wild`` is False where a single file was named and no glob; ``folder`` is where it looked."""

    files: Mapping[str, Path]
    folder: Path
    wild: bool


def composed(text: str) -> str:
    """``text`` with each accented letter as one character (NFC). macOS stores letter and accent apart (NFD)."""
    return unicodedata.normalize("NFC", text)


def as_on_disk(path: Path) -> Path:
    """The same path as the disk spells its accented letters; ``path`` itself where there is none either way."""
    if os.path.lexists(path):
        return path
    found = Path(path.anchor)
    for part in path.parts[bool(path.anchor) :]:
        spelt = part
        if not os.path.lexists(found / part):
            if part.isascii():
                return path
            try:
                alike = sorted(name for name in os.listdir(found) if composed(name) == composed(part))
            except OSError:  # no such folder, so no such path
                return path
            if not alike:
                return path
            spelt = alike[0]
        found = found / spelt
    return found


def is_pattern(path: Path | str) -> bool:
    """Whether a path is a glob: it has wildcards, and nothing on the disk has this very name."""
    return bool(_WILD.search(str(path))) and not os.path.lexists(as_on_disk(Path(os.path.expanduser(path))))


def start_of(pattern: Path | str) -> Path:
    """The folder that a glob starts in; the path itself where it is none."""
    return _start(Path(), str(pattern))[0] if is_pattern(pattern) else Path(pattern)


def by_wildcard(base: Path, pattern: str, key: str) -> Matches:
    """The NIfTI files that ``pattern`` matches, from ``base`` on where it is relative, in order of their names.

    Raises DataError that names the setting ``key`` when there is none, with the folder that was not found, or when two files
    would be one case.
    """
    if not pattern.strip():
        raise DataError(f"{key} is empty; it names files, such as {key}=FOLDER/*.nii.gz")
    folder, rest = _start(base, pattern)
    if not rest:
        if os.path.isdir(folder):
            raise DataError(f"{key}={pattern} names a folder; name its files: {key}={pattern.rstrip('/')}/*.nii.gz")
        if not is_volume(folder):
            raise DataError(f"{key}={pattern} is no .nii or .nii.gz file")
        return Matches({composed(stem(folder)): folder}, folder.parent, False)
    text = composed("/".join(rest))
    shape = _compiled(text, key, pattern)
    found = sorted(dict.fromkeys(_walk(folder, tuple(text.split("/")))))
    volumes = [path for path in found if is_volume(path)]
    if not volumes:
        raise DataError(f"{key}={pattern} matches no .nii or .nii.gz file{_why_none(folder, rest, len(found))}")
    files: dict[str, Path] = {}
    for path in volumes:
        name = composed(path.relative_to(folder).as_posix())
        match = shape.fullmatch(name)
        assert match, f"{name} was found by {text} but does not have its shape"
        ending = len(name) - len(Path(name).name) + len(stem(Path(name)))  # .nii or .nii.gz is no part of an id
        parts = [
            name[a : min(b, ending)].strip("/") for a, b in map(match.span, range(1, shape.groups + 1)) if a < ending
        ]
        case_id = "_".join(part for part in parts if part).replace("/", "_") or stem(Path(name))
        if case_id in files:
            other = files[case_id].relative_to(folder).as_posix()
            raise DataError(f"{key}={pattern}: {other} and {name} would both be case {case_id!r}")
        files[case_id] = path
    return Matches(files, folder, True)


def folders_below(top: Path) -> Iterator[Path]:
    """``top`` and all folders below it, hidden ones left out. Links to folders are followed after all others, and each real
    folder is given once, so that circles end. Raises DataError for a folder that cannot be read."""
    real = Path(os.path.realpath(top))
    seen = set(map(str, real.parents))
    starts = deque([top])
    while starts:
        stack = [starts.popleft()]
        while stack:
            folder = stack.pop()
            if (where := os.path.realpath(folder)) in seen:
                continue
            seen.add(where)
            yield folder
            inner = [folder / n for n in _names(folder) if not n.startswith(".") and os.path.isdir(folder / n)]
            starts.extend(path for path in inner if path.is_symlink())
            stack.extend(path for path in reversed(inner) if not path.is_symlink())


def _start(base: Path, pattern: str) -> tuple[Path, tuple[str, ...]]:
    """The folder that a glob starts in, and the rest. What exists by its very name is no pattern, so that brackets in a
    path do no harm; nothing is left over where all of it exists."""
    path = Path(os.path.expanduser(pattern))
    folder, parts = (Path(path.anchor), path.parts[1:]) if path.is_absolute() else (base, path.parts)
    for count, part in enumerate(parts):
        inner = as_on_disk(folder / part)
        if not (os.path.isdir(inner) if count < len(parts) - 1 else os.path.lexists(inner)):
            return folder, parts[count:]
        folder = inner
    return folder, ()


def _why_none(folder: Path, rest: tuple[str, ...], others: int) -> str:
    if others:
        return f" in {folder} ({others} other files match)"
    if len(rest) > 1 and not _WILD.search(rest[0]):
        return f": there is no folder {folder / rest[0]}"
    if not os.path.isdir(folder):
        return f": there is no folder {folder}"
    return f" in {folder}"


def _walk(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """The paths below ``folder`` that have the shape of ``parts``, one glob a level."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        for inner in folders_below(folder):
            yield from _walk(inner, rest or ("*",))
        return
    if rest and not _WILD.search(part):
        inner = as_on_disk(folder / part)
        if os.path.isdir(inner):
            yield from _walk(inner, rest)
        return
    shape = re.compile(_expression(part, any_ending=not rest), re.DOTALL)
    for name in _names(folder):
        if not shape.fullmatch(composed(name)) or (name.startswith(".") and not part.startswith(".")):
            continue
        if not rest:
            yield folder / name
        elif os.path.isdir(folder / name):
            yield from _walk(folder / name, rest)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:  # passed over, its cases would be missing without a word
        raise DataError(f"the folder {folder} cannot be read: {error.strerror}") from error


def _compiled(text: str, key: str, pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression whose groups are its wildcards."""
    head, slash, tail = text.rpartition("/")
    try:
        return re.compile(_expression(head + slash) + _expression(tail, any_ending=True), re.DOTALL)
    except re.error as error:
        raise DataError(f"{key}={pattern}: the brackets hold no set of letters ({error})") from error


def _expression(glob: str, any_ending: bool = False) -> str:
    kinds = {"**/": "((?:.*/)?)", "**": "(.*)", "*": "([^/]*)", "?": "([^/])"}
    out = ""
    for place, token in enumerate(_TOKENS.split(glob)):
        if place % 2 == 0:
            out += _literal(token) if any_ending else re.escape(token)
        elif token in kinds:
            out += kinds[token]
        else:
            inner = re.sub(r"([\\\[&~|^])", r"\\\1", token[1:-1])
            out += f"([{'^' + inner[1:] if inner.startswith('!') else inner}])"
    return out


def _literal(text: str) -> str:
    """``text`` as it stands, but .nii and .nii.gz in it in any case of letters."""
    out, at = "", 0
    for found in _ENDINGS.finditer(text):
        out += re.escape(text[at : found.start()]) + f"(?i:{re.escape(found[0])})"
        at = found.end()
    return out + re.escape(text[at:])
