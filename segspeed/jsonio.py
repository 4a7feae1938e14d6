"""The plain types of `segspeed.types` as JSON and back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and paths as what JSON holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def from_plain(value: Any, kind: type[T]) -> T:
    """A value of type ``kind`` (a dataclass of `segspeed.types`), checked. Raises ValueError."""
    return TypeAdapter(kind).validate_python(value)


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all; numbers that JSON lacks (NaN) are refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path, kind: type[T]) -> T:
    return from_plain(json.loads(path.read_text(encoding="utf-8")), kind)
