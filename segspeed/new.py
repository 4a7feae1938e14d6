"""A fork of your own: python -m segspeed.new target=../my-organ

Writes a small package that works as it stands: a data source, a network, a loss, an augmentation and a metric, the YAMLs that
name them, tests, CI. segspeed itself is not touched. The package is called after the folder, or package=my_organ. The folder
must be empty or not there.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path

from pydantic import Field

from segspeed.cli import Frame, door
from segspeed.config import Strict
from segspeed.types import DataError, SettingError

TEMPLATE = Path(__file__).resolve().parent / "template"
ENDING = ".txt"  # which hides the template's files from whatever collects Python and YAML files
TAKEN = ("segspeed", "data_prep", "conf", "test", "tests", "example", "outputs")


class NewConfig(Strict):
    """Where the fork goes, and its name."""

    target: str = Field(min_length=1, description="folder, empty or not there yet")
    package: str | None = Field(None, description="name of its package; that of the folder if empty")


def main(cfg: NewConfig) -> int:
    """Write the fork that ``cfg`` describes and say what to do with it."""
    from segspeed.record.live import say

    target = Path(cfg.target).expanduser()
    package = package_name(target, cfg.package)
    files = write_fork(target, package)
    folder = shlex.quote(str(target))
    say(f"Written: {len(files)} files in {target}")
    say("Next:")
    say(f"  cd {folder}")
    say("  pip install -e '.[dev]' && python -m pytest")
    say(f"  python -m {package}.example example")
    say(
        f"  python -m segspeed.train --config-dir conf experiment={package} data.root=example plan.patch=[16,16,16] train.steps=50"
    )
    say(f"README.md says which file to edit for what; {package}/ is yours from here on")
    return 0


def package_name(target: Path, given: str | None) -> str:
    """The name of the package: ``given``, or that of the folder with underscores.

    Raises SettingError for a name that cannot be imported, or that is another package's.
    """
    name = re.sub(r"[-. ]+", "_", target.absolute().name).lower() if given is None else given
    origin = f"target={target}: its name makes" if given is None else f"package={given} is"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise SettingError(
            f"{origin} no package name; small letters, digits and _, a letter first, no word of Python: package=my_organ"
        )
    if name in TAKEN or name in sys.stdlib_module_names or _installed(name):
        raise SettingError(f"the package name {name} is taken already; choose another: package=my_{name}")
    return name


def _installed(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None  # without an origin it is just a folder of that name


def write_fork(target: Path, package: str) -> list[Path]:
    """Write all files of the fork into ``target``, which is made; returns their paths.

    Raises DataError where there is anything already.
    """
    if target.exists() or target.is_symlink():
        if not target.is_dir():
            raise DataError(f"target={target} is a file; name a folder that is not there yet")
        if any(target.iterdir()):
            raise DataError(
                f"target={target} is not empty, and nothing is overwritten; name a folder that is not there yet"
            )
    files = rendered(package)
    for path, text in files.items():
        whole = target / path
        whole.parent.mkdir(parents=True, exist_ok=True)
        with open(whole, "x", encoding="utf-8") as file:
            file.write(text)
    return [target / path for path in files]


def rendered(package: str) -> dict[Path, str]:
    """The fork's files by their path within it."""
    found = {}
    for source in sorted(TEMPLATE.rglob(f"*{ENDING}")):
        text = source.read_text(encoding="utf-8")
        text = text.replace("@package@", package).replace("@project@", package.replace("_", "-"))
        found[_path(source.relative_to(TEMPLATE), package)] = text
    return found


def _path(source: Path, package: str) -> Path:
    """dot_github/x.yml.txt is .github/x.yml, and package.yaml.txt carries the package's name."""
    parts = [re.sub(r"^dot_", ".", part) for part in source.with_name(source.name.removesuffix(ENDING)).parts]
    return Path(*(re.sub(r"^package(?=$|\.yaml$)", package, part) for part in parts))


if __name__ == "__main__":
    door(main, Frame(NewConfig, "new"))()
