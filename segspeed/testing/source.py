"""The contract of a data source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import nibabel as nib

from segspeed.testing.contract import ContractError, name_of, require
from segspeed.types import Case, Cohort, few, first_line


def check_source(source: Callable[..., Any], /, *args: Any, **keys: Any) -> Cohort:
    """Whether ``source(*args, **keys)`` returns a Cohort that training can read: unique ids, files that exist, a label for each
    class, a split whose sides share no case and no patient, and the same at every call. Returns the cohort.

    Voxels are not read, only the headers of the first case: `python -m data_prep.check` looks at all of them. Raises ContractError.
    """
    name = name_of(source)
    cohort, again = _called(name, source, args, keys), _called(name, source, args, keys)
    require(bool(cohort.cases), f"{name} returns no cases; is the folder right, and the ending of its files?")
    twice = [i for i, n in Counter(c.id for c in cohort.cases).items() if n > 1]
    require(
        not twice, f"{name} gives the ids {few(twice)} to several cases; make them unique, from the path for instance"
    )
    odd = [repr(c.id) for c in cohort.cases if not _plain(c.id)]
    require(not odd, f"{name} gives the ids {few(odd)}; an id becomes a file name: text without / and \\, not empty")
    for case in cohort.cases:
        _case(name, cohort, case)
    require(
        any(c.label is not None for c in cohort.cases),
        f"{name} gives no case a label; training needs label=PATH of the cases",
    )
    _labels(name, cohort)
    _splits(name, cohort)
    require(
        [c.id for c in again.cases] == [c.id for c in cohort.cases] and again == cohort,
        f"{name} gives another cohort when it is called again; sort what the file system lists, and draw nothing",
    )
    _headers(name, cohort.cases[0])
    return cohort


def _called(name: str, source: Callable[..., Any], args: tuple[Any, ...], keys: dict[str, Any]) -> Cohort:
    try:
        cohort = source(*args, **keys)
    except Exception as error:
        raise ContractError(f"{name} fails ({type(error).__name__}: {first_line(error)})") from error
    require(
        isinstance(cohort, Cohort),
        f"{name} returns {type(cohort).__name__}; a data source returns a segspeed.types.Cohort(name, cases, labels, channels)",
    )
    assert isinstance(cohort, Cohort)
    return cohort


def _plain(case_id: Any) -> bool:
    return (
        isinstance(case_id, str)
        and bool(case_id.strip())
        and not set("/\\\0") & set(case_id)
        and case_id not in (".", "..")
    )


def _case(name: str, cohort: Cohort, case: Case) -> None:
    require(
        len(case.images) == len(cohort.channels),
        f"case {case.id} of {name} has {len(case.images)} images for the channels {', '.join(cohort.channels)}; one path each, in "
        "their order (stacked=True: the same 4D file once a channel)",
    )
    for path in (*case.images, *([case.label] if case.label else [])):
        require(
            hasattr(path, "is_file"), f"case {case.id} of {name} has {path!r} where a pathlib.Path is due: Path(...)"
        )
        require(path.is_file(), f"case {case.id} of {name} names {path}, which is no file; join it with the root?")


def _labels(name: str, cohort: Cohort) -> None:
    require(bool(cohort.labels), f"{name} names no classes; labels={{'liver': (1,)}} says which values mean what")
    values = [v for many in cohort.labels.values() for v in (many if isinstance(many, (tuple, list)) else [many])]
    require(
        all(isinstance(many, (tuple, list)) and many for many in cohort.labels.values())
        and all(isinstance(v, int) and not isinstance(v, bool) for v in values),
        f"{name} has labels={dict(cohort.labels)}; each class has a tuple of whole numbers: {{'liver': (1,)}}",
    )
    twice = [v for v, n in Counter([*values, *cohort.background, *cohort.ignore]).items() if n > 1]
    require(
        not twice, f"{name} gives two meanings to the label values {few(twice)}; one class, background or ignore each"
    )
    require(0 not in values, f"{name} calls 0 a class; it is the background")


def _splits(name: str, cohort: Cohort) -> None:
    patients = {c.id: c.patient for c in cohort.cases}
    for number, split in enumerate(cohort.splits):
        unknown = [i for i in (*split.train, *split.val) if i not in patients]
        require(not unknown, f"split {number} of {name} names cases that are not there: {few(unknown)}")
        both = set(split.train) & set(split.val)
        require(not both, f"split {number} of {name} has cases on both sides: {few(sorted(both))}")
        shared = {patients[i] for i in split.train} & {patients[i] for i in split.val}
        require(not shared, f"split {number} of {name} has patients on both sides: {few(sorted(shared))}")


def _headers(name: str, case: Case) -> None:
    """The grids of the first case's files."""
    shapes = {}
    for path in (*case.images, *([case.label] if case.label else [])):
        try:
            shapes[path.name] = tuple(nib.load(path).shape[:3])
        except Exception as error:
            raise ContractError(f"{path} of case {case.id} of {name} is no NIfTI file ({first_line(error)})") from error
    require(
        len(set(shapes.values())) == 1,
        f"the files of case {case.id} of {name} have different shapes: {shapes}; are image and label of the same case?",
    )
