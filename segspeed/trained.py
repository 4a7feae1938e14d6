"""A run folder as something that predicts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segspeed import build
from segspeed.config import Config
from segspeed.config_inference import InferenceConfig
from segspeed.evaluation import Predictor
from segspeed.infer.sliding import Window
from segspeed.jsonio import read_json
from segspeed.record.checkpoints import BEST, LAST, load_checkpoint
from segspeed.record.run_folder import RunFolder
from segspeed.speed.ema import WeightAverage
from segspeed.speed.precision import DTYPES, Precision
from segspeed.types import Case, Cohort, DataError, Plan, Split, first_line

TRUSTED = ("segspeed", "monai", "torch")


@dataclass(frozen=True)
class TrainedRun:
    """A network with its weights, and what its data was like."""

    folder: Path
    cohort: Cohort
    split: Split
    plan: Plan
    predictor: Predictor


@dataclass(frozen=True)
class StoredRun:
    """What a run folder says of a run, its weights not loaded. ``precision`` is the one it was trained in."""

    folder: Path
    cfg: Config
    precision: str
    cohort: Cohort
    split: Split
    plan: Plan


def read_run(folder: Path) -> StoredRun:
    """The settings, data and Plan of a run. Raises DataError when the folder holds none."""
    paths = RunFolder(folder)
    if folder.is_file():
        raise DataError(f"{folder} is a file; name the run folder that holds it")
    try:
        stored = json.loads(paths.config.read_text(encoding="utf-8"))
        cfg = Config.model_validate(stored["config"])
        trained_in = stored["precision"]
        if trained_in not in DTYPES:
            raise ValueError(f"precision {trained_in}")
        plan, cohort = read_json(paths.plan, Plan), read_json(folder / "cohort.json", Cohort)
        split = read_json(folder / "split.json", Split)
    except FileNotFoundError as error:
        raise DataError(f"{folder} holds no run: {Path(str(error.filename)).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds a damaged run ({type(error).__name__}: {first_line(error)})") from error
    return StoredRun(folder, cfg, trained_in, cohort, split, plan)


def load_run(folder: Path, how: InferenceConfig, device: torch.device) -> TrainedRun:
    """The network of a run with its last (averaged) or best weights. Raises DataError when the folder holds no run, or names
    objects of packages that are not trusted."""
    run = read_run(folder)
    cfg, cohort, plan = run.cfg, run.cohort, run.plan
    refuse_strangers(cfg.model.model_dump(by_alias=True), how.trust, folder)
    precision = Precision(run.precision if how.precision == "run" else how.precision, device)
    bare = cfg.model_copy(update={"memory": cfg.memory.model_copy(update={"checkpointing": "none"}), "compile": False})
    model = build.network_from(bare, plan, cohort, precision)
    put_weights(model, read_weights(folder, how.weights), folder)
    axes = tuple(axis for axis, p in enumerate(cfg.augment.flip.probability) if p > 0) if how.mirror else ()
    window = Window(plan.patch, how.overlap, how.windows)
    predictor = Predictor(model.eval(), window, precision, cohort.table, axes, build.output_pairs(cfg.data, cohort))
    return TrainedRun(folder, cohort, run.split, plan, predictor)


def load_runs(folders: str | tuple[str, ...], how: InferenceConfig, device: torch.device) -> list[TrainedRun]:
    """One run or several that predict the same classes from the same channels. Raises DataError where they do not."""
    runs = [load_run(Path(f), how, device) for f in ([folders] if isinstance(folders, str) else folders)]
    first = runs[0].cohort
    for run in runs[1:]:
        same = run.cohort.class_names == first.class_names and dict(run.cohort.regions) == dict(first.regions)
        if not same or run.cohort.channels != first.channels:
            raise DataError(
                f"{run.folder} predicts {', '.join(run.cohort.table.targets)} from {', '.join(run.cohort.channels)}, but "
                f"{runs[0].folder} predicts {', '.join(first.table.targets)} from {', '.join(first.channels)}; "
                "only runs on the same classes and channels can be averaged"
            )
    return runs


def refuse_strangers(settings: Mapping[str, Any], trust: tuple[str, ...], folder: Path) -> None:
    """Raise DataError where a run's settings name objects of packages that nobody said to trust: a run folder may come from
    anywhere, and importing a module runs its code."""
    for key, value in settings.items():
        if key == "_target_":
            package = str(value).partition(".")[0]
            if package not in (*TRUSTED, *trust):
                raise DataError(
                    f"{folder} takes its network from {value}. If the package {package} is yours, say trust=[{package}]"
                )
        elif isinstance(value, Mapping):
            refuse_strangers(value, trust, folder)
        elif isinstance(value, (list, tuple)):
            refuse_strangers({str(n): v for n, v in enumerate(value)}, trust, folder)


def read_weights(folder: Path, which: str) -> dict[str, Any]:
    """What the checkpoint of a run's "last" or "best" weights holds. Raises DataError when there is none, or it is damaged."""
    path = folder / (LAST if which == "last" else BEST)
    try:
        state = load_checkpoint(path)
        if not isinstance(state.get("model"), dict):
            raise ValueError("it holds no weights")
    except FileNotFoundError as error:
        raise DataError(f"{folder} has no {path.name}; has the run been evaluated or saved yet?") from error
    except Exception as error:  # a damaged or foreign archive fails in many ways
        raise DataError(f"{path} cannot be loaded ({type(error).__name__}: {first_line(error)})") from error
    return state


def put_weights(model: torch.nn.Module, state: Mapping[str, Any], folder: Path) -> None:
    """Give ``model`` the weights of a checkpoint, the averaged ones where there are any. Raises DataError when they do not fit."""
    try:
        model.load_state_dict(state["model"])
        if state.get("ema"):
            average = WeightAverage(model, 0.0)
            average.load_state_dict(state["ema"])
            average.put_into(model)
    except Exception as error:  # a state of another network, or a foreign one
        raise DataError(
            f"the weights of {folder} cannot be loaded ({type(error).__name__}: {first_line(error)})"
        ) from error


def with_values_of(cohort: Cohort, other: Cohort) -> Cohort:
    """``cohort`` with the label values that ``other`` has for its classes. Raises DataError when ``other`` lacks one."""
    missing = [name for name in cohort.class_names if name not in other.labels]
    if missing:
        raise DataError(
            f"the run predicts {', '.join(missing)}, which {other.name} does not declare (it has "
            f"{', '.join(other.class_names)}); give the same names in data.class_names or dataset.json"
        )
    return dataclasses.replace(
        cohort,
        labels={name: other.labels[name] for name in cohort.class_names},
        background=(*other.background, *_rest(cohort, other)),
        ignore=other.ignore,
    )


def _rest(cohort: Cohort, other: Cohort) -> list[int]:
    """Values of the classes of ``other`` that ``cohort`` does not know: background to it, where it has regions."""
    if not cohort.regions:
        return []
    return [v for name, values in other.labels.items() if name not in cohort.labels for v in values]


def seen_before(run: TrainedRun, cases: Sequence[Case]) -> list[str]:
    """Cases whose image files are those of a case that the run was trained on."""
    trained = {p.resolve() for i in run.split.train for p in run.cohort.case(i).images}
    return [c.id for c in cases if any(p.resolve() in trained for p in c.images)]
