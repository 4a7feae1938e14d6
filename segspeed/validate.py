"""Settings, checked before anything is loaded: every problem in one text, with the nearest valid name."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from segspeed.config import Component, Config
from segspeed.types import first_line

# Names that other tools use, or that are easily taken for each other.
MOVED = {
    "checkpointing": "memory.checkpointing", "checkpoint.every": "save.every", "phantoms.kind": "data.kind",
    "steps": "train.steps", "epochs": "train.steps or train.budget (a run has no epochs)",
    "batch_size": "plan.batch", "bs": "plan.batch",
    "num_workers": "loader.workers", "workers": "loader.workers", "learning_rate": "optimizer.lr", "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "amp": "precision", "output": "run.root", "output_dir": "run.root", "patch_size": "plan.patch",
    "roi_size": "plan.patch", "spacing": "plan.spacing", "gpu": "device",
}  # fmt: skip

# What build.py hands to a component besides the user's own keys (see `segspeed.build`).
SUPPLIED = {
    "data": (),
    "loader": (
        "sampler",
        "batch",
        "first",
        "workers",
        "prefetch",
        "pin_memory",
        "timeout",
        "augment",
        "patch",
        "spacing",
        "seed",
        "swap_on_flip",
        "device",
        "cases",
        "labels",
    ),  # fmt: skip
    "model": ("plan", "spatial_dims", "in_channels", "out_channels"),
    "loss": (),
    "optimizer": ("params",),
    "logger": ("folder",),
}


T = typing.TypeVar("T", bound=BaseModel)


class SettingsError(ValueError):
    """Settings that cannot work; ``problems`` are lines for the user."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def validate(raw: Mapping[str, Any], schema: type[T] = Config) -> T:  # type: ignore[assignment]
    """The settings as a `Config`, or as another schema. ``raw`` is the composed configuration as plain values; "???" marks
    what is missing.

    Raises SettingsError with every problem.
    """
    problems = [f"{path} is missing: give {path}=..." for path in _missing(raw)]
    try:
        cfg = schema.model_validate(raw)
    except ValidationError as error:
        raise SettingsError([*problems, *_explain(error, raw, schema)]) from error
    problems += _impossible(cfg) if isinstance(cfg, Config) else []
    if problems:
        raise SettingsError(problems)
    return cfg


def _missing(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _missing(inner, f"{path}.{key}" if path else str(key))
    elif value == "???":
        yield path


def _impossible(cfg: Config) -> list[str]:
    problems = []
    if cfg.data.splits == "draw" and cfg.data.fold >= cfg.data.folds:
        problems.append(f"data.fold={cfg.data.fold}: with data.folds={cfg.data.folds} it is 0 to {cfg.data.folds - 1}")
    if cfg.loader.pin_memory is True and cfg.device in ("cpu", "mps"):
        problems.append(f"loader.pin_memory=true serves the copy to a CUDA device; with device={cfg.device} use auto")
    if cfg.precision == "fp16" and cfg.device == "mps":
        problems.append("precision=fp16 needs loss scaling, which device=mps lacks; use fp32")
    if cfg.cache.resident == "device" and not cfg.loader.target.endswith(".TorchLoader"):
        problems.append("cache.resident=device cuts patches on the device itself; it goes with loader=torch only")
    if cfg.train.exact_batch_dice and cfg.loss.kwargs.get("batch_dice") is not True:
        problems.append(
            "train.exact_batch_dice=true pools a Dice over the step that loss.batch_dice=true pools; set that, too"
        )
    low = [n for n in cfg.plan.patch if n < 1] if cfg.plan.patch != "auto" else []
    if low:
        problems.append(f"plan.patch={list(cfg.plan.patch)} must be positive")
    return problems


def _explain(error: ValidationError, raw: Mapping[str, Any], schema: type[BaseModel]) -> list[str]:
    """pydantic's errors as lines; the alternatives of one value ("auto" or a number) in one line."""
    lines: dict[str, list[str]] = {}
    for item in error.errors():
        path = _dotted(item["loc"], raw)
        if value_at(raw, path) == "???":
            continue  # reported as missing
        if item["type"] == "extra_forbidden":
            lines.setdefault(unknown_key(path, schema), [])
        elif item["type"] == "missing" and isinstance(item["loc"][-1], int):
            lines.setdefault(f"{path}={shown(value_at(raw, path))}", []).append("has too few values")
        elif item["type"] == "missing":
            lines.setdefault(f"{path} is missing", [])
        else:
            given = value_at(raw, path) if path else None
            head = f"{path}={shown(given)}" if path and not isinstance(given, Mapping) else path
            lines.setdefault(head, []).append(_plain_message(item["msg"]))
    return [
        f"{head}: {' or '.join(dict.fromkeys(m))}" if m and head else (head or " or ".join(m))
        for head, m in lines.items()
    ]


def _dotted(loc: Sequence[Any], raw: Mapping[str, Any]) -> str:
    """The place of an error as a key; pydantic adds the names of the alternatives it tried, which are no keys."""
    parts: list[str] = []
    value: Any = raw
    for number, part in enumerate(loc):
        inside = isinstance(value, Mapping) and part in value
        if isinstance(part, str) and (inside or (isinstance(value, Mapping) and number == len(loc) - 1)):
            parts.append(part)
            value = value.get(part) if isinstance(value, Mapping) else None
    return ".".join(parts)


def value_at(raw: Any, path: str) -> Any:
    """The value of a dotted key, None where there is none."""
    for part in path.split("."):
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    return raw


def shown(value: Any) -> str:
    """A value as one would write it on the command line."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(shown, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain_message(text: str) -> str:
    text = text.replace("Value error, ", "").replace("Input should be ", "must be ")
    text = text.replace("a valid integer, unable to parse string as an integer", "a whole number")
    text = text.replace("a valid number, unable to parse string as a number", "a number")
    return re.sub(r"a valid boolean.*", "true or false", text)


def unknown_key(path: str, schema: type[BaseModel] = Config) -> str:
    """One line for a key that does not exist."""
    hint = (MOVED.get(path) if schema is Config else None) or nearest_key(path, schema)
    return f"unknown key {path}" + (f"; did you mean {hint}?" if hint else "; README lists all keys")


def nearest_key(path: str, schema: type[BaseModel] = Config) -> str | None:
    """The valid key most like ``path``: the same last word somewhere else, or a similar spelling."""
    known = [key.path for key in keys(schema)]
    last = path.rsplit(".", 1)[-1]
    same = [k for k in known if k.rsplit(".", 1)[-1] == last]
    if len(same) == 1:
        return same[0]
    if near := get_close_matches(path, [*known, *schema.model_fields], 1, cutoff=0.75):
        return near[0]
    by_word = get_close_matches(last, [k.rsplit(".", 1)[-1] for k in known], 1, cutoff=0.7)
    found = [k for k in known if by_word and k.rsplit(".", 1)[-1] == by_word[0]]
    return found[0] if len(found) == 1 else None


class Key(typing.NamedTuple):
    """One setting of the schema."""

    path: str
    type: str
    meaning: str


def keys(schema: type[BaseModel] = Config) -> list[Key]:
    """Every key of the schema, in order."""
    return list(_keys(schema, ""))


def _keys(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        inner = next((t for t in (field.annotation, *typing.get_args(field.annotation)) if _is_model(t)), None)
        if inner is not None:
            yield from _keys(inner, f"{path}.")
        else:
            yield Key(path, _annotation_text(field.annotation), field.description or "")


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _annotation_text(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _annotation_text(args[0])
    if origin is typing.Literal:
        return ", ".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_annotation_text(a) for a in args)
    if origin is tuple:
        inner = [a for a in args if a is not Ellipsis]
        return "list" if Ellipsis in args or not inner else f"[{', '.join(_annotation_text(a) for a in inner)}]"
    return {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


def is_open(section: str, schema: type[BaseModel] = Config) -> bool:
    """Whether a section takes keys beside those of the schema: the keyword arguments of its ``_target_``."""
    field = schema.model_fields.get(section)
    kinds = (field.annotation, *typing.get_args(field.annotation)) if field is not None else ()
    return any(isinstance(kind, type) and issubclass(kind, Component) for kind in kinds)


def check_targets(cfg: BaseModel) -> None:
    """Import every ``_target_`` and hold its keys against its signature. Imports torch where a target does.

    Raises SettingsError with every problem.
    """
    problems: list[str] = []
    for section, supplied in SUPPLIED.items():
        component = getattr(cfg, section, None)
        if component is None:
            continue
        target = _import(f"{section}._target_", component.target, problems)
        if target is not None:
            problems += _signature_problems(section, component, target, supplied)
        for key, value in component.kwargs.items():
            _nested(f"{section}.{key}", value, problems)
    if problems:
        raise SettingsError(problems)


def _import(path: str, name: str, problems: list[str]) -> Any:
    from hydra.utils import get_object

    try:
        found = get_object(name)
    except Exception as error:  # importing a user's own module can fail in any way; each is reported with its text
        cause = error.__cause__ or error
        parent, _, last = name.rpartition(".")
        near = get_close_matches(last, _names_of(parent), 1)
        hint = f"; did you mean {parent}.{near[0]}?" if near else ""
        problems.append(f"{path}={name} cannot be imported ({type(cause).__name__}: {first_line(cause)}){hint}")
        return None
    if not callable(found):
        problems.append(f"{path}={name} is a {type(found).__name__}; it must be a function or a class")
        return None
    return found


def _names_of(module: str) -> list[str]:
    import sys

    return [n for n in vars(sys.modules[module]) if not n.startswith("_")] if module in sys.modules else []


def _signature_problems(section: str, component: Component, target: Any, supplied: Sequence[str]) -> list[str]:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # a builtin that tells nothing about itself: it will complain when it is called
        return []
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    problems = []
    given = component.kwargs
    for key in given:
        if key not in named and not takes_any and not key.startswith("_"):
            offered = [n for n in named if n not in supplied] + [
                f.alias or n for n, f in type(component).model_fields.items() if n != "target"
            ]
            near = get_close_matches(key, offered, 1)
            hint = f"did you mean {section}.{near[0]}?" if near else f"it takes {', '.join(offered) or 'none'}"
            problems.append(f"unknown key {section}.{key}: {component.target} has no such argument; {hint}")
    problems += _type_problems(section, given, target)
    open_ones = [
        n for n, p in named.items() if p.default is p.empty and n not in given and n not in supplied and n != "self"
    ]
    if open_ones:
        listed = ", ".join(f"{section}.{n}" for n in open_ones)
        problems.append(f"{component.target} needs {listed}, which the settings do not give")
    return problems


def _type_problems(section: str, given: Mapping[str, Any], target: Any) -> list[str]:
    """Texts where a number or a truth value is due. Only what the annotations say plainly is judged."""
    try:
        hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):  # annotations may name what is not imported; then nothing is said
        return []
    problems = []
    for key, value in given.items():
        kinds = {t for t in (typing.get_args(hints.get(key)) or (hints.get(key),)) if t is not type(None)}
        numbers = kinds & {int, float, bool}
        texts = [t for t in kinds if t not in (int, float, bool) and getattr(t, "__name__", "") != "Tensor"]
        if isinstance(value, str) and value != "???" and numbers and not texts:
            wanted = " or ".join(
                sorted({int: "a whole number", float: "a number", bool: "true or false"}[t] for t in numbers)
            )
            problems.append(f"{section}.{key}={value}: must be {wanted}")
    return problems


def _nested(path: str, value: Any, problems: list[str]) -> None:
    if isinstance(value, Mapping):
        if "_target_" in value:
            _import(f"{path}._target_", str(value["_target_"]), problems)
        for key, inner in value.items():
            _nested(f"{path}.{key}", inner, problems)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            _nested(f"{path}[{number}]", inner, problems)
