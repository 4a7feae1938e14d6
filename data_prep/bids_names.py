"""BIDS file names: what they say, and which of them are asked for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.files import some
from segspeed.data.files import is_volume, stem
from segspeed.data.wildcards import folders_below
from segspeed.types import SettingError

_ENTITY = re.compile(r"([A-Za-z]+)-([A-Za-z0-9+]+)")
OF = (
    "of"  # our own: the bare word in names such as sub-01_T2w_lesion-manual, which says what image a label was drawn on
)

Fixed = Mapping[str, "tuple[str, ...] | None"]  # entity -> the values asked for, None: must not stand in the name


@dataclass(frozen=True)
class BidsFile:
    """A file by its name: entities ({"sub": "01", "acq": "highres"}) and suffix ("T1w")."""

    path: Path
    entities: Mapping[str, str]
    suffix: str

    def get(self, entity: str) -> str | None:
        """The value of an entity ("acq", "run"); None where the name has none."""
        return self.entities.get(entity)

    @property
    def number(self) -> str | None:
        """The run without leading zeros: many programs write run-1 for what was run-01."""
        run = self.get("run")
        return (run.lstrip("0") or "0") if run is not None and run.isdecimal() else run


def parse(path: Path, name: str | None = None) -> BidsFile | None:
    """What a file name says; None when it is none of BIDS. ``name``: without its ending."""
    *parts, suffix = (stem(path) if name is None else name).split("_")
    entities: dict[str, str] = {}
    for part in parts:
        match = _ENTITY.fullmatch(part)
        key, value = (match[1], match[2]) if match else (OF, part)
        if key in entities or not value.isascii() or not re.fullmatch(r"[A-Za-z0-9+]+", value):
            return None
        entities[key] = value
    return BidsFile(path, entities, suffix)


def volumes(root: Path) -> list[Path]:
    """NIfTI files in the subject folders below ``root``, in order of their names. Hidden folders are left out; links to
    folders are followed, each real folder once a subject."""
    found = []
    for subject in sorted(root.glob("sub-*")):
        for folder in folders_below(subject) if subject.is_dir() else ():
            found += [path for path in folder.iterdir() if is_volume(path) and not path.is_dir()]
    return sorted(found)


def named(paths: Iterable[Path], root: Path, suffixes: Collection[str], problems: list[str]) -> list[BidsFile]:
    """The files that end in one of ``suffixes``. Names that cannot be read, or that say another subject or session than
    their folder, go to ``problems``; so do links whose content is not here."""
    found = []
    for path in paths:
        if stem(path).rpartition("_")[2] not in suffixes:
            continue
        file = parse(path)
        folders = {m[1]: m[2] for part in path.relative_to(root).parts[:-1] if (m := _ENTITY.fullmatch(part))}
        if file is None or file.get("sub") is None:
            problems.append(f"{path.name} is no BIDS name (key-value pairs of letters and digits, joined by _)")
        elif wrong := [k for k in ("sub", "ses") if folders.get(k, file.get(k)) != file.get(k)]:
            problems.append(
                f"{path.relative_to(root)} lies in {wrong[0]}-{folders[wrong[0]]}, but its name says otherwise"
            )
        elif path.is_symlink() and not path.exists():
            problems.append(f"{path.relative_to(root)} is a link whose content is not here (datalad get fetches it)")
        else:
            found.append(file)
    return found


def fixed_entities(entities: Mapping[str, object] | None, session: object) -> dict[str, tuple[str, ...] | None]:
    """``data.entities`` and ``data.session`` in one form. Raises SettingError."""
    found: dict[str, tuple[str, ...] | None] = {}
    for key, value in {**(entities or {}), **({"ses": session} if session is not None else {})}.items():
        if not re.fullmatch(r"[A-Za-z]+", str(key)) or isinstance(value, (Mapping, bool)):
            raise SettingError(
                f"data.entities={{{key}: {value}}}: it maps the keys of file names to values: {{acq: highres}}"
            )
        if key == "ses" and "ses" in found:
            raise SettingError("data.session and data.entities both name a session; give one of them")
        values = value if isinstance(value, (list, tuple)) else [value]
        found[str(key)] = None if value is None else tuple(str(v).removeprefix(f"{key}-") for v in values)
    return found


def same(a: str, b: str) -> bool:
    """Equal, or the same number: 1 is 01, since a command line may drop the zero."""
    return a == b or (a.isdecimal() and b.isdecimal() and a.lstrip("0") == b.lstrip("0"))


def check_fixed(fixed: Fixed, files: Sequence[BidsFile]) -> None:
    """Raises SettingError for an entity or a value that no file name has: it would choose nothing, quietly."""
    for key, values in fixed.items():
        there = sorted({v for f in files if (v := f.get(key)) is not None})
        what = "data.session" if key == "ses" else f"data.entities: {key}"
        if not there and values is not None:
            keys = sorted({k for f in files for k in f.entities} - {"sub", OF})
            raise SettingError(f"{what}: no file name has {key}-...; they have: {', '.join(keys) or 'none'}")
        for value in values or ():
            if not any(same(value, v) for v in there):
                raise SettingError(f"{what}={value}: no file name has it; there are: {some(there)}")


def allowed(file: BidsFile, fixed: Fixed) -> bool:
    """Whether a name does not contradict what is asked for; one without the entity does not."""
    for key, values in fixed.items():
        have = file.get(key)
        if have is not None and (values is None or not any(same(have, v) for v in values)):
            return False
    return True


def choose(files: Sequence[BidsFile], fixed: Fixed) -> list[BidsFile]:
    """Of several files for one place those that have the entities asked for, where some have them and others not."""
    left = list(files)
    for key, values in fixed.items():
        if values is not None and any(f.get(key) is not None for f in left):
            left = [f for f in left if f.get(key) is not None]
    return left


def which_key(files: Sequence[BidsFile]) -> str:
    """What to set so that one of ``files`` is chosen."""
    keys = dict.fromkeys(k for f in files for k in f.entities)
    for key in keys:
        values = [f.get(key) for f in files]
        if len(set(values)) > 1 and key != OF:
            value = next(v for v in values if v is not None)
            absent = f" (or {{{key}: null}} for the one without)" if None in values else ""
            return f"'data.entities={{{key}: {value}}}' chooses one{absent}"
    if len({f.suffix for f in files}) > 1:
        return f"data.label={files[0].suffix} chooses one"
    return "their names say the same: keep one of them"
