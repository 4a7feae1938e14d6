"""The plan of a memory limit as a table and as planning.json, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from segspeed.jsonio import from_plain, to_plain, write_json
from segspeed.memory.candidates import shape
from segspeed.memory.limit import shown_bytes
from segspeed.memory.planner import Option, Planning
from segspeed.memory.settings import Subject
from segspeed.types import Fingerprint, Plan

# Settings that decide what a plan takes and how fast it is.
DECIDING = (
    "plan",
    "model",
    "loss",
    "optimizer",
    "memory",
    "precision",
    "compile",
    "channels_last",
    "device",
    "threads",
)
DECIDING_KEYS = (
    ("train", "accumulate"), ("train", "ema"), ("augment", "margin"), ("loader", "workers"), ("loader", "prefetch"),
)  # fmt: skip


def key_of(subject: Subject, fp: Fingerprint) -> str:
    """The same for the same question: settings, network, data, device and version of torch."""
    raw = subject.cfg.model_dump(mode="json", by_alias=True)
    about = {
        "settings": {name: raw[name] for name in DECIDING},
        "keys": {f"{section}.{key}": raw[section][key] for section, key in DECIDING_KEYS},
        "channels": subject.cohort.channels,
        "labels": subject.cohort.table,
        "fingerprint": fp,
        "device": subject.device,
        "precision": subject.precision,
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(to_plain(about), sort_keys=True).encode()).hexdigest()


def save_planning(path: Path, found: Planning, key: str) -> None:
    """``planning.json``: the choice, all alternatives, sizes in bytes."""
    write_json(
        path,
        {
            "key": key,
            "limit_bytes": found.limit,
            "seconds": round(found.seconds, 1),
            "probes": found.probes,
            "needs_bytes": needs(found.chosen),
            "plan": found.chosen.plan,
            "alternatives": [row(o, found.precision) for o in found.options],
        },
    )


def load_plan(path: Path, key: str, limit: int) -> tuple[Plan, int] | None:
    """The plan that stands in ``path`` and what it takes (bytes), if it answers the same question within ``limit``."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key or stored["needs_bytes"] > limit:
            return None
        return from_plain(stored["plan"], Plan), int(stored["needs_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or one of another version: planning again is always right


def needs(option: Option) -> int:
    """Bytes: measured where it was, else predicted."""
    if option.done and option.measured is not None:
        return option.measured.peak + option.waiting
    assert option.predicted is not None
    return option.predicted


def row(option: Option, precision: str) -> Mapping[str, Any]:
    """One alternative as plain values for planning.json."""
    plan, measured = option.plan, option.measured
    return {
        "patch": plan.patch,
        "batch": plan.batch,
        "accumulate": plan.accumulate,
        "checkpointing": plan.checkpointing,
        "precision": precision,
        "predicted_bytes": option.predicted,
        "measured_bytes": needs(option) if option.done else None,
        "outcome": measured.outcome if measured else None,
        "samples_per_s": round(measured.samples_per_s, 4) if measured and option.done else None,
        "why": option.why,
    }


def table(found: Planning) -> Table:
    """All alternatives, at most 100 columns wide."""
    out = Table(title=f"Plans for {shown_bytes(found.limit)} in {found.precision}")
    out.add_column("patch")
    for column in ("batch", "recom-\nputed", "pre-\ndicted", "measured", "patches/s"):
        out.add_column(column, justify="right")
    out.add_column("", max_width=36)
    for o in found.options:
        rate = f"{o.measured.samples_per_s:.2f}" if o.done and o.measured else "-"
        out.add_row(
            shape(o.plan),
            f"{o.plan.batch} x {o.plan.accumulate}",
            str(len(o.plan.checkpointing) or "none"),
            shown_bytes(o.predicted) if o.predicted is not None else "-",
            shown_bytes(needs(o)) if o.done else "-",
            rate,
            o.why,
            style="bold" if o.why.startswith("chosen") else None,
        )
    return out
