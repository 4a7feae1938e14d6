"""Benchmarks: python -m segspeed.bench bench=loader

bench=loader measures augmented patches per second and CPU time per patch, segspeed's two backends beside MONAI's dictionary
transforms and batchgeneratorsv2 (pip install batchgeneratorsv2), with the same transforms, probabilities and ranges.
bench=memory measures peak memory and time of a training step: recomputed blocks, precision, batch; predicted against measured.
bench=predict measures peak memory and the network's share when a large volume is predicted.
bench=scale measures how check, preparation, training, scoring and report grow with cases, voxels and classes (exit code 1 where
faster than linearly).
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from segspeed.cli import door
from segspeed.config import BenchConfig, Config
from segspeed.types import SettingError


def main(cfg: Config) -> int:
    """Run the benchmark that ``cfg.bench`` names and write its table; 1 if a contender could not run."""
    if cfg.bench is None:
        raise SettingError("say which benchmark: bench=loader, bench=memory, bench=predict or bench=scale")
    return {"predict": predict, "memory": memory, "scale": scale}.get(cfg.bench.name, loader)(cfg, cfg.bench)


def predict(cfg: Config, b: BenchConfig) -> int:
    """Peak memory and network share of predicting a large volume."""
    from segspeed.benchmarks.predict import measure_prediction, synthetic_volume, table
    from segspeed.record.live import track

    root = Path(cfg.run.root) / "bench"
    volume = synthetic_volume(root / f"ct_{'x'.join(map(str, b.volume))}.nii.gz", b.volume)
    runs = (measure_prediction(volume, b.patch, classes, b.cases) for classes in b.classes)
    found = list(track(runs, len(b.classes), "predicting"))
    tell(table(found, b.volume, b.patch, b.cases), root / "predict.md")
    return 0


def memory(cfg: Config, b: BenchConfig) -> int:
    """Peak memory and time of a training step of ``cfg.model``, predicted and measured."""
    from segspeed import build
    from segspeed.benchmarks.memory import measure_memory, table
    from segspeed.record.live import track

    device, model = build.device_from(cfg), cfg.model.target.rpartition(".")[2]
    root = Path(cfg.run.root) / "bench"
    root.mkdir(parents=True, exist_ok=True)
    settings = len(b.precisions) * len(b.sides) * len(b.batches) * len(b.checkpointing)
    tell(
        table(list(track(measure_memory(cfg, b, device), settings, "measuring")), model, device),
        root / f"memory_{model}.md",
    )
    return 0


def scale(cfg: Config, b: BenchConfig) -> int:
    """Growth with cases, voxels and classes; 1 if something grows faster than linearly."""
    from segspeed.benchmarks.scale import Measure, grows_too_fast, measure_scale, sizes_of, table
    from segspeed.jsonio import write_json
    from segspeed.record.live import track

    root = Path(cfg.run.root) / "bench"
    root.mkdir(parents=True, exist_ok=True)
    parts = track(measure_scale(cfg, b, root / "scale"), len(sizes_of(b)), "measuring")
    found: list[Measure] = []
    for part in parts:
        found += part
        write_json(root / "scale.json", found)  # what is measured stays, whatever comes after
    tell(table(found), root / "scale.md")
    return int(bool(grows_too_fast(found)))


def loader(cfg: Config, b: BenchConfig) -> int:
    """CPU time of an augmented patch, ours beside the peers'."""
    from segspeed.benchmarks.floor import floor_text
    from segspeed.benchmarks.loader import Setting, measure_reading, run_contenders, synthetic_entries, table
    from segspeed.record.live import say

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
    tell(text, root / f"{b.name}_{'x'.join(map(str, b.patch))}.md")
    return int(any(isinstance(rounds, str) for rounds in found.values()))


def tell(text: str, path: Path) -> None:
    """Print a table and keep it as a file."""
    from segspeed.record.live import say

    path.write_text(text + "\n", encoding="utf-8")
    say(text)
    say(f"Table: {path}")


if __name__ == "__main__":
    door(main)()
