"""What a ladder, a speedrun or a search said it would do, held against what it is now asked to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from segspeed.record.run_folder import differing_keys
from segspeed.record.versions import environment, machine
from segspeed.types import DataError


def refuse_other_machine(folder: Path, section: str, versions: Mapping[str, Any]) -> None:
    """Raise DataError when what lies in ``folder`` was begun on another machine than this: ``versions`` is the `environment` of
    then. ``section`` is "ladder" or "speedrun"."""
    then, here = machine(versions), machine(environment())
    if then != here:
        raise DataError(
            f"{folder} holds a {section} that was begun on {then}, and this is {here}: their times do not compare.\n"
            f"Choose another {section}.name"
        )


def refuse_changed(
    folder: Path, section: str, began: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str] = ()
) -> None:
    """Raise DataError when the configuration that was begun in ``folder`` differs from ``now`` in what is measured.

    ``section`` is "ladder", "speedrun" or "sweep"; its keys in ``free`` may change.
    """
    ours, theirs = began[section], now[section]
    changed = differing_keys(began, now) + [
        f"{section}.{key}: {ours.get(key)!r} -> {value!r}"
        for key, value in theirs.items()
        if key not in free and ours.get(key) != value
    ]
    if changed:
        lines = "\n  ".join(dict.fromkeys(changed))
        raise DataError(f"{folder} holds a {section} of other settings:\n  {lines}\nChoose another {section}.name")
