"""The plain types of `segspeed.types` as JSON and back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

T = TypeVar("T")
PLAIN = (float, int, str)


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and paths as what JSON holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [v if type(v) in PLAIN else to_plain(v) for v in value]  # long lists of numbers need no call each
    if isinstance(value, Path):
        return str(value)
    return value


def from_plain(value: Any, kind: type[T]) -> T:
    """A value of type ``kind`` (a dataclass of `segspeed.types`), checked. Raises ValueError."""
    found: T = _reader(cast(Hashable, kind)).validate_python(value)
    return found


@cache
def _reader(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, kind))  # 20 ms, which a cohort of many cases must not pay for each


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all; numbers that JSON lacks (NaN) are refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path, kind: type[T]) -> T:
    """A value of type ``kind`` from a file. Raises ValueError where it is none, OSError where there is no file."""
    return from_plain(json.loads(path.read_text(encoding="utf-8")), kind)
