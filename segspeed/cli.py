"""The frame of every door: Hydra around it, and one screen of text where Hydra would show a traceback.

Light to import: a typo is answered before torch is loaded.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from segspeed.config import Config
from segspeed.speed.signals import leave
from segspeed.types import DataError, RunStopped, SettingError
from segspeed.validate import (
    SettingsError,
    check_targets,
    is_open,
    keys,
    nearest_key,
    shown,
    unknown_key,
    validate,
    value_at,
)

REFUSED, FAILED, INTERRUPTED = 2, 1, 130


def config_folder() -> Path:
    """``conf/`` of the checkout that this file lies in, else the copy inside the installed package."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "conf"
    return checkout if (checkout / "train.yaml").is_file() else package / "_conf"


@dataclass(frozen=True)
class Frame:
    """What a door reads: its schema and the YAML of ``conf/`` with its values."""

    schema: type[BaseModel] = Config
    root: str = "train"
    section: str = ""  # whose keys may stand alone: target=0.9 for speedrun.target=0.9

    def groups(self) -> list[str]:
        """Folders of ``conf/`` that this door chooses from."""
        found = sorted(p.name for p in config_folder().iterdir() if p.is_dir() and p.name != "hydra")
        return found if self.schema is Config else [g for g in found if g in self.schema.model_fields]

    def text_keys(self) -> set[str]:
        """Keys whose values are texts, even where they look like numbers."""
        return {k.path for k in keys(self.schema) if k.type.split(" or ")[0] == "text"}


TRAIN = Frame()


def door(main: Callable[[Any], int], frame: Frame = TRAIN) -> Callable[[], NoReturn]:
    """Turn ``main(cfg) -> exit code`` into a command. Its module's docstring heads ``--help``.

    Exit codes: 2 for wrong settings, 1 for wrong data, 130 after Ctrl-C, 143 after SIGTERM, else what ``main`` gives.
    """

    def run() -> NoReturn:
        signal.signal(signal.SIGTERM, leave)
        try:
            sys.exit(_through_hydra(main, frame))
        except SettingsError as error:
            _tell("Settings:", *(f"  {p}" for p in error.problems))
            sys.exit(REFUSED)
        except RunStopped as error:
            _tell(f"Stopped: {error}")
            sys.exit(error.exit_code)
        except BrokenPipeError:  # whoever read the output (head, less) has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        except OSError as error:
            if error.filename is None:
                raise
            _tell(f"Error: {error.strerror}: {error.filename}")
            sys.exit(FAILED)
        except KeyboardInterrupt:
            _tell("Interrupted. What was finished stays; the same command goes on from there.")
            sys.exit(INTERRUPTED)
        except SystemExit as error:
            if error.code == 128 + signal.SIGTERM:
                _tell("Terminated. What was finished stays; the same command goes on from there.")
            raise

    return run


def _tell(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _through_hydra(main: Callable[[Any], int], frame: Frame) -> int:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    codes: list[int] = []
    stopped: list[BaseException] = []
    home = os.getpid()

    def task(composed: DictConfig) -> None:
        """One job. What it raises is kept for later: Hydra would print its own lines around it. A job of a sweep that fails
        stops no other, but wrong settings, which the others share, and signals do."""
        if stopped:
            return
        code = FAILED
        try:
            code = main(_settings(composed))
        except SettingError as error:
            _tell(f"Settings: {error}")
            code = REFUSED
        except DataError as error:
            _tell(f"Error: {error}")
        except RunStopped as error:
            if error.exit_code > 128:
                stopped.append(error)
            else:
                _tell(f"Stopped: {error}")
                code = error.exit_code
        except (SettingsError, BrokenPipeError) as error:
            stopped.append(error)
        except Exception as error:
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                stopped.append(error)
            else:
                traceback.print_exception(type(error), error, error.__traceback__)
        except BaseException as error:
            stopped.append(error)
        codes.append(code)
        if os.getpid() != home and (stopped or code):  # a launcher's own process, whose lists nobody at home will see
            raise _as_seen_from_home(stopped[0] if stopped else None, code, HydraConfig.get().job.num)

    def _settings(composed: DictConfig) -> BaseModel:
        try:
            raw = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
        except OmegaConfBaseException as error:
            raise SettingsError([str(error).splitlines()[0]]) from error
        chosen = HydraConfig.get().runtime.choices.get("experiment")
        if frame.schema is Config and chosen and isinstance(raw, dict):
            raw["run"]["experiment"] = raw["run"]["experiment"] or str(chosen)
        cfg = validate(raw, frame.schema)  # type: ignore[arg-type]
        check_targets(cfg)
        return cfg

    task.__module__ = main.__module__
    doc = inspect.getdoc(sys.modules[main.__module__]) or ""
    OmegaConf.register_new_resolver("segspeed.doc", lambda *_: doc, replace=True)
    sys.argv = [sys.argv[0], *prepare_arguments(sys.argv[1:], frame)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would otherwise print and swallow
    try:
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=frame.root)(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise SettingsError([_hydra_problem(error)]) from error
    if stopped:
        raise stopped[0]
    return max(codes, default=0)


def _as_seen_from_home(error: BaseException | None, code: int, job: int) -> BaseException:
    """What a job of a sweep in another process raises, so that the command ends with its exit code; its log tells the rest."""
    if isinstance(error, SettingsError):
        return RunStopped(f"job {job}: wrong settings: {'; '.join(error.problems)}", REFUSED)
    if error is None:
        return RunStopped(f"job {job} of the sweep failed (its log in hydra.sweep.dir says why)", code)
    return error


def prepare_arguments(arguments: Sequence[str], frame: Frame = TRAIN) -> list[str]:
    """Command-line arguments as Hydra takes them; raises SettingsError with every override that cannot work.

    Keyword arguments of an open section (model.act=relu) need no plus sign here, and the length of a run given in
    steps takes the place of one given as a budget, and the other way round.
    """
    from hydra._internal.utils import get_args_parser

    parsed = get_args_parser().parse_args(list(arguments))
    overrides: list[str] = list(parsed.overrides)
    sweeping = bool(parsed.multirun)
    problems: list[str] = []
    out = []
    given: dict[str, Any] = {}
    for text in overrides:
        key, value, replacement = _override(text, problems, sweeping, frame)
        given[key] = value
        out.append(replacement)
    if problems:
        raise SettingsError(problems)
    for one, other in (("train.steps", "train.budget"), ("train.budget", "train.steps")):
        if frame.schema is Config and given.get(one) is not None and other not in given:
            out.append(f"{other}=null")
    flags = list(arguments)
    for text in overrides:
        flags.remove(text)
    return [*flags, *out]


def _override(text: str, problems: list[str], sweeping: bool, frame: Frame) -> tuple[str, Any, str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException:
        problems.append(_unreadable(text))
        return text, None, text
    key = parsed.key_or_group
    if parsed.is_sweep_override():
        if not sweeping:
            problems.append(f"{text}: a comma makes a sweep. " + _quoted(text, "For a path or text with commas"))
            return key, None, text
        return key, "sweep", text
    known = {k.path for k in keys(frame.schema)}
    if frame.section and "." not in key and key not in known and f"{frame.section}.{key}" in known:
        key, text = f"{frame.section}.{key}", f"{frame.section}.{text.lstrip('+')}"
    section = key.split(".")[0]
    if "/" in key or section == "hydra" or parsed.is_delete():
        return key, None, text
    groups = frame.groups()
    if key in groups:
        value = parsed.value()
        if not isinstance(value, str) and (
            value is not None or key not in ("experiment", "debug", "bench") and frame.schema is Config
        ):
            problems.append(f"{text}: name one of the choices: {', '.join(_choices(key))}")
        return key, value, text
    inside = any(k.startswith(f"{key}.") for k in known)  # a whole section or group
    if isinstance(parsed.value(), (int, float)) and not isinstance(parsed.value(), bool) and key in frame.text_keys():
        bare = text.partition("=")[2].strip()  # 2026_01_02 is a name, not the number 20260102
        return key, bare, f'{key}="{bare}"'
    if key in known or inside:
        optional = frame.schema is not Config and "." in key  # of a section that may be absent as a whole
        return key, parsed.value(), ("++" if optional else "") + text.lstrip("+")
    if is_open(section, frame.schema) and "." in key:
        return key, parsed.value(), "++" + text.lstrip("+")  # checked against the signature of the target
    near = get_close_matches(key, groups, 1)
    if near and nearest_key(key, frame.schema) is None:
        problems.append(f"unknown group {key}; did you mean {near[0]}={text.partition('=')[2]}?")
    else:
        problems.append(unknown_key(key, frame.schema))
    return key, None, text


def _unreadable(text: str) -> str:
    if "=" not in text:
        if text.startswith("-"):
            return f"unknown option {text}; see --help"
        return f"{text!r} is no setting: write key=value, for instance data=msd data.root=FOLDER"
    return f"{text}: " + _quoted(text, "A value with spaces, brackets, =, or letters beyond a to z")


def _quoted(text: str, what: str) -> str:
    key, _, value = text.partition("=")
    # Hydra takes a backslash for itself, unless a double quote follows
    inner = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), value)
    written = f'{key}="{inner}"'
    return f"{what} needs both pairs of quotes: {shlex.quote(written)}"


def _choices(group: str) -> list[str]:
    return sorted(p.stem for p in (config_folder() / group).glob("*.yaml"))


def _hydra_problem(error: BaseException) -> str:
    """Hydra's and OmegaConf's own complaints in one or a few lines."""
    from hydra.errors import MissingConfigException

    if "hydra/launcher/submitit_" in str(error):
        return "this launcher needs another package: pip install hydra-submitit-launcher"
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        group, _, wanted = str(error.missing_cfg_file).rpartition("/")
        near = get_close_matches(wanted, list(error.options), 1)
        hint = f"; did you mean {group}={near[0]}?" if near else ""
        return f"{group}={wanted}: there is no such choice{hint} (there are: {', '.join(error.options)})"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n  ".join(lines[:4]) or type(error).__name__


def key_table() -> str:
    """All keys of the schema as Markdown, for README, with the values of a run without any setting."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        raw = OmegaConf.to_container(compose("train"), resolve=True)
    rows = [f"| `{k.path}` | {k.type} | {shown(value_at(raw, k.path))} | {k.meaning} |" for k in keys()]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    if sys.argv[1:] != ["keys"]:
        sys.exit("python -m segspeed.cli keys prints the table of all settings")
    print(key_table())
