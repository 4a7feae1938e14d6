"""A search over settings: optuna asks and is told, every trial is a run in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segspeed import build
from segspeed.config import Config, Dimension
from segspeed.proof.declared import refuse_changed
from segspeed.proof.ladder_table import markdown_table
from segspeed.proof.processes import STOPPED, run_child
from segspeed.record.live import say
from segspeed.types import RunStopped, SettingError
from segspeed.validate import check_targets, is_open, keys, unknown_key, validate


@dataclass(frozen=True)
class Sweep:
    """A search: its folder, the settings that all trials share, and where each setting may lie."""

    folder: Path
    base: Config
    space: Mapping[str, Dimension]


@dataclass(frozen=True)
class Trial:
    """One trial that came to its end; ``dice`` is None where it failed."""

    number: int
    values: Mapping[str, Any]
    dice: float | None


def begin(cfg: Config) -> Sweep:
    """The search that ``cfg`` describes. Raises SettingError without optuna or a space, for unknown keys, and where a bound of the
    space makes settings that cannot work."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise SettingError("segspeed.sweep needs another package: pip install optuna") from error
    space = cfg.sweep.space
    if not space:
        raise SettingError("say what to search: 'space={optimizer.lr:{low:1e-4,high:1e-1,log:true}}'")
    sweep = Sweep(Path(cfg.run.root) / "sweeps" / cfg.sweep.name, cfg, space)
    known = {k.path for k in keys()}
    for key, dimension in space.items():
        if key not in known and not ("." in key and is_open(key.split(".")[0])):
            raise SettingError(f"sweep.space: {unknown_key(key)}")
        for value in dimension.choices or (dimension.low, dimension.high):
            check_targets(with_setting(cfg, {key: value}))
    return sweep


def with_setting(cfg: Config, values: Mapping[str, Any]) -> Config:
    """``cfg`` with other values of dotted keys, checked anew. Raises SettingsError."""
    raw = cfg.model_dump(mode="json", by_alias=True)
    for key, value in values.items():
        *path, last = key.split(".")
        section = raw
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return validate(raw)


def search(sweep: Sweep) -> list[Trial]:
    """Run trials until there are ``sweep.trials`` of them; those of earlier calls count. Returns all.

    Raises DataError when the folder holds another search, RunStopped when told to stop.
    """
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=f"sqlite:///{(sweep.folder / 'study.db').resolve()}",
        study_name=sweep.base.sweep.name,
        direction="maximize",
        load_if_exists=True,
    )
    _declare(study, sweep)
    for begun in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if set(begun.params) == set(sweep.space):
            _run(study, sweep, begun.number, begun.params)
        else:  # killed while its values were drawn
            study.tell(begun.number, state=TrialState.FAIL)
    while len(study.trials) < sweep.base.sweep.trials:
        # a sampler a trial, so that an interrupted search draws what an uninterrupted one would
        study.sampler = optuna.samplers.TPESampler(seed=(sweep.base.seed + len(study.trials)) % 2**32)
        trial = study.ask()
        for key, dimension in sweep.space.items():
            _draw(trial, key, dimension)
        _run(study, sweep, trial.number, trial.params)
    return [Trial(t.number, _decoded(sweep, t.params), t.value) for t in study.trials]


def _declare(study: Any, sweep: Sweep) -> None:
    """Write down what is searched, or hold it against what was. Raises DataError."""
    config = sweep.base.model_dump(mode="json", by_alias=True)
    if "config" not in study.user_attrs:
        study.set_user_attr("config", config)
    refuse_changed(sweep.folder, "sweep", study.user_attrs["config"], config, free=("name", "trials"))


def _draw(trial: Any, key: str, dimension: Dimension) -> None:
    low, high = dimension.low, dimension.high
    if dimension.choices:
        trial.suggest_categorical(key, [json.dumps(c) for c in dimension.choices])  # optuna takes no lists
    elif isinstance(low, int) and isinstance(high, int):
        trial.suggest_int(key, low, high, log=dimension.log)
    else:
        trial.suggest_float(key, low, high, log=dimension.log)


def _decoded(sweep: Sweep, params: Mapping[str, Any]) -> dict[str, Any]:
    return {k: json.loads(v) if sweep.space[k].choices else v for k, v in params.items()}


def _run(study: Any, sweep: Sweep, number: int, params: Mapping[str, Any]) -> None:
    """One trial, or the rest of one that was interrupted; optuna is told its Dice, or that it failed."""
    from optuna.trial import TrialState

    values, name = _decoded(sweep, params), f"trial{number:04d}"
    say(
        f"\nTrial {number + 1} of {sweep.base.sweep.trials}: {', '.join(f'{k}={_shown(v)}' for k, v in values.items())}"
    )
    place = {
        "run.name": name, "run.root": str(sweep.folder / "runs"), "cache.root": str(build.cache_root(sweep.base)),
        "sweep.space": None,
    }  # fmt: skip
    ended = run_child(with_setting(sweep.base, {**values, **place}), sweep.folder / "jobs" / f"{name}.json")
    if ended.code in STOPPED:
        raise RunStopped("the search was stopped; the same command goes on from here.", exit_code=ended.code)
    results = list((sweep.folder / "runs").glob(f"*/{name}/result.json"))
    dice = json.loads(results[0].read_text(encoding="utf-8"))["mean_dice"] if results and not ended.code else None
    if dice is None:
        say(f"trial {number} failed: {(ended.error or 'no case has any foreground').splitlines()[0]}")
        study.tell(number, state=TrialState.FAIL)
    else:
        study.tell(number, float(dice))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value).replace('"', "")


def table(trials: Sequence[Trial]) -> str:
    """Markdown, the best trial first, failed ones last, and the best one as settings for a command line."""
    names = list(dict.fromkeys(k for t in trials for k in t.values))
    ranked = sorted(trials, key=lambda t: -1.0 if t.dice is None else t.dice, reverse=True)
    rows = [
        [str(t.number), "failed" if t.dice is None else f"{t.dice:.4f}", *(_shown(t.values.get(n)) for n in names)]
        for t in ranked
    ]
    lines = markdown_table(["trial", "mean Dice", *names], rows)
    best = ranked[0]
    if best.dice is not None:
        settings = " ".join(f"{k}={v if isinstance(v, float) else _shown(v)}" for k, v in best.values.items())
        lines += ["", f"Best: {settings}"]
    return "\n".join(lines)
