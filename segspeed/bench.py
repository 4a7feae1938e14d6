"""Benchmarks: python -m segspeed.bench bench=loader

bench=loader measures augmented patches per second and CPU time per patch, segspeed's two backends beside MONAI's dictionary
transforms and batchgeneratorsv2 (pip install batchgeneratorsv2), with the same transforms, probabilities and ranges.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from segspeed.cli import door
from segspeed.config import Config
from segspeed.types import DataError


def main(cfg: Config) -> int:
    """Run the benchmark that ``cfg.bench`` names and write its table; 1 if a contender could not run."""
    from segspeed.benchmarks.floor import floor_text
    from segspeed.benchmarks.loader import Setting, measure_reading, run_contenders, synthetic_entries, table
    from segspeed.record.live import say

    if cfg.bench is None:
        raise DataError("say which benchmark: bench=loader")
    b = cfg.bench
    setting = Setting(b.name, b.volume, b.cases, b.patch, b.batch, b.workers, b.rounds, b.patches)
    root = Path(cfg.run.root) / "bench"
    root.mkdir(parents=True, exist_ok=True)
    say(f"Making {b.cases} volumes in {root} unless they are there, then {b.rounds} rounds of {b.patches} patches each")
    entries = synthetic_entries(root, setting)
    found = run_contenders(entries, setting, cfg.augment, list(b.contenders))
    inside = all(n >= p for n, p in zip(b.volume, b.patch, strict=True))
    reading = measure_reading(entries, setting) if inside else None
    text = table(found, reading, setting)
    if reading is not None:
        ours = found.get("segspeed torch")
        spent = median(r.cpu_s / r.patches for r in ours) if isinstance(ours, list) and ours else None
        text += "\n\n" + floor_text(cfg.augment, b.patch, median(reading.ram_s), spent)
    path = root / f"{b.name}_{'x'.join(map(str, b.patch))}.md"
    path.write_text(text + "\n", encoding="utf-8")
    say(text)
    say(f"Table: {path}")
    return int(any(isinstance(rounds, str) for rounds in found.values()))


if __name__ == "__main__":
    door(main)()
