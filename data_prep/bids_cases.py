"""Which images and which label make one case."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from data_prep.bids_names import OF, BidsFile, Fixed, allowed, choose, same, which_key
from data_prep.files import some
from segspeed.types import Case

# Entities that name what was derived; all others name the image that it was derived from.
DERIVED = {"space", "res", "den", "label", "desc", "seg", "atlas", "scale", "hemi"}
OWN_SPACE = {"orig", "individual"}  # names for "the grid of the image itself"; its suffix (space-T1w) is one as well


@dataclass
class Study:
    """The images of a subject, session and run, and what labels fit them."""

    id: str
    subject: str
    images: dict[str, list[BidsFile]] = field(default_factory=lambda: defaultdict(list))
    labels: dict[str, list[BidsFile]] = field(default_factory=lambda: defaultdict(list))  # by place
    elsewhere: set[str] = field(default_factory=set)  # spaces of labels that lie on another grid


def studies_of(images: Sequence[BidsFile], fixed: Fixed) -> list[Study]:
    """Images by subject, session and run, in order."""
    one_run = "run" in fixed and len(fixed["run"] or (None,)) == 1  # then the run is no part of the case
    found: dict[tuple[str | None, ...], Study] = {}
    for image in images:
        run = None if one_run else image.number
        parts = [f"{key}-{image.get(key)}" for key in ("sub", "ses", "run") if image.get(key) is not None]
        case_id = "_".join(p for p in parts if not (one_run and p.startswith("run-")))
        study = found.setdefault((image.get("sub"), image.get("ses"), run), Study(case_id, f"sub-{image.get('sub')}"))
        study.images[image.suffix].append(image)
    return sorted(found.values(), key=lambda s: s.id)


def join(
    studies: Sequence[Study],
    labels: Mapping[str, Sequence[BidsFile]],
    fixed: Fixed,
    wanted: Sequence[str],
    problems: list[str],
) -> list[BidsFile]:
    """Give every label to its study; gives those that belong to none."""
    by_subject: dict[str, list[Study]] = defaultdict(list)
    for study in studies:
        by_subject[study.subject].append(study)
    orphans = []
    for place, files in labels.items():
        for file in files:
            if not allowed(file, fixed) or file.entities.get(OF, wanted[0]) not in wanted:
                continue
            near = [s for s in by_subject[f"sub-{file.get('sub')}"] if _fits(file, s)]
            here = [s for s in near if _same_grid(file, s, wanted)]
            for study in near if not here else ():
                study.elsewhere.add(f"space-{file.get('space')}" if file.get("space") else "no space named")
            if len(here) > 1:
                problems.append(
                    f"{file.path.name} names no session or run and fits {some(s.id for s in here)}: write it into its name, "
                    "or choose with data.session or data.entities"
                )
            elif here:
                here[0].labels[place].append(file)
            elif not near:
                orphans.append(file)
    return orphans


def _fits(label: BidsFile, study: Study) -> bool:
    """Whether a label's name says the session, run and acquisition of the study's images, as far as it says any."""
    images = [f for files in study.images.values() for f in files]
    for key, value in label.entities.items():
        if key in DERIVED or key in ("sub", OF):
            continue
        said = [have for image in images if (have := image.get(key)) is not None]
        if not any(same(have, value) if key == "run" else have == value for have in said):
            return False
    return True


def _same_grid(label: BidsFile, study: Study, wanted: Sequence[str]) -> bool:
    spaces = {f.get("space") for files in study.images.values() for f in files}
    space = label.get("space")
    return space in spaces or (None in spaces and space in OWN_SPACE | set(wanted))


def cases_of(
    studies: Sequence[Study],
    wanted: Sequence[str],
    fixed: Fixed,
    unlabelled: str,
    incomplete: str,
    problems: list[str],
) -> tuple[list[Case], list[BidsFile], list[str]]:
    """Cases with their labels; what is chosen as labels, and what was left out. Adds to ``problems``."""
    cases, chosen, skipped, bare = [], [], [], []
    first_of: dict[str, str] = {}  # place of labels -> a case that has its label there alone
    for study in studies:
        images = {c: choose(study.images[c], fixed) for c in wanted}
        missing = [c for c, files in images.items() if not files]
        if missing and incomplete == "skip":
            skipped.append(f"{study.id} (no {', '.join(missing)})")
            continue
        if missing:
            there = ", ".join(c for c in wanted if c not in missing)
            problems.append(f"{study.id} has {there}, but no {', '.join(missing)} (data.incomplete=skip leaves it out)")
        problems += [
            f"{study.id} has {len(files)} images for {c}: {some(f.path.name for f in files)}; {which_key(files)}"
            for c, files in images.items()
            if len(files) > 1
        ]
        files = [f for place in study.labels.values() for f in choose(place, fixed)]
        if not files:
            bare.append(f"{study.id} (its labels: {some(sorted(study.elsewhere))})" if study.elsewhere else study.id)
            continue
        if len(study.labels) > 1:
            problems.append(
                f"{study.id} has labels in {' and in '.join(study.labels)}: choose with data.derivative="
                f"{next(iter(study.labels))}"
            )
        else:
            first_of.setdefault(next(iter(study.labels)), study.id)
        if len(study.labels) == 1 and len(files) > 1:
            problems.append(
                f"{study.id} has {len(files)} labels: {some(f.path.name for f in files)}; {which_key(files)}"
            )
        problems += [
            f"{study.id}: {label.path.name} names no {key}, as {other.path.name} does, so it seems to be of that image"
            for label in files[:1]
            for c, alternatives in study.images.items()
            for other in alternatives
            for key, values in fixed.items()
            if values and other not in images[c] and other.get(key) is None and label.get(key) is None
        ]
        if not missing:
            cases.append(Case(study.id, tuple(images[c][0].path for c in wanted), files[0].path, study.subject))
            chosen.append(files[0])
    if len(first_of) > 1:
        where = ", ".join(f"{place} ({case})" for place, case in first_of.items())
        problems.append(
            f"the labels of different cases lie in different places: {where}. They may mean different things: choose with "
            f"data.derivative={next(iter(first_of))}, and data.unlabelled=skip leaves out those that have none there"
        )
    if bare and unlabelled == "error":
        problems.append(f"{len(bare)} images without a label: {some(bare)} (data.unlabelled=skip leaves them out)")
    return cases, chosen, [*skipped, *(f"{b} (no label)" for b in bare)]
