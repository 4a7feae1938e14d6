"""Label files into class indices, and back into the user's own values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from segspeed.data.geometry import Volume, VolumeError
from segspeed.types import DataError, LabelTable, SettingError

INTEGER_TOLERANCE = 1e-3  # how far a value may lie from an integer, beside what the file's own scaling rounds away
LOOKUP = 65536  # widest range of values that is mapped by a table
HUGE = 2**62
MAX_REGIONS = 16  # their combinations are looked up in a table of two to the power of this


def class_dtype(classes: int) -> type[np.unsignedinteger]:
    """Smallest unsigned type that holds the indices 0 to ``classes``."""
    return np.uint8 if classes < 256 else np.uint16


def to_class_indices(volume: Volume, labels: LabelTable) -> np.ndarray:
    """``(D, H, W)`` class indices of a label volume read unscaled, `LabelTable.ignore_index` where it is to be ignored.

    nibabel quantises float labels in an integer file to multiples of its scl_slope (``volume.step``), so a value may be off
    by half of that. Raises VolumeError for values that are no integers, that no class declares, or that are NaN.
    """
    whole = _whole(volume.array, volume.step)
    low, high = (int(whole.min()), int(whole.max())) if whole.size else (0, 0)
    if high - low < LOOKUP:  # counting is ten times faster than sorting; a plane at a time, since indices take 8 bytes
        counted = np.zeros(high - low + 1, np.int64)
        for plane in whole:
            counted += np.bincount(plane.ravel().astype(np.intp) - low, minlength=len(counted))
        found = np.flatnonzero(counted) + low
        counts = counted[found - low]
    else:
        found, inverse, counts = np.unique(whole, return_inverse=True, return_counts=True)
    index = index_of_values(labels)
    unknown = [(int(v), int(n)) for v, n in zip(found, counts, strict=True) if int(v) not in index]
    if unknown:
        listed = ", ".join(f"{v} ({n} voxels)" for v, n in unknown[:8]) + (" ..." if len(unknown) > 8 else "")
        names = [f"{'/'.join(map(str, v))} = {k}" for k, v in labels.classes.items()]
        declared = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        raise VolumeError(
            "unknown-label",
            f"label values that no class declares: {listed}; declared: {declared}",
        )
    table = np.zeros(high - low + 1 if high - low < LOOKUP else len(found), class_dtype(max(index.values())))
    table[found - low if high - low < LOOKUP else slice(None)] = [index[int(v)] for v in found]
    if high - low >= LOOKUP:
        return table[inverse.reshape(whole.shape)]
    out = np.empty(whole.shape, table.dtype)
    for plane, mapped in zip(whole, out, strict=True):
        mapped[...] = table[plane.astype(np.intp) - low]
    return out


def index_of_values(labels: LabelTable) -> dict[int, int]:
    """Index in arrays of each value that files may hold."""
    index = dict.fromkeys((0, *labels.background), 0)
    for position, values in enumerate(labels.classes.values(), start=1):
        index.update({int(v): position for v in values})
    if labels.ignore_index is not None:
        index.update(dict.fromkeys(labels.ignore, labels.ignore_index))
    return index


def regions_of(named: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, ...]]]:
    """Classes that exclude each other, and regions made of them, from structures that share values: ``{"tumour": (1, 2),
    "core": (2,)}`` becomes the classes "tumour only" and "tumour + core". No regions where no value is shared.
    """
    values = sorted({v for group in named.values() for v in group})
    inside = {v: tuple(name for name, group in named.items() if v in group) for v in values}
    if all(len(names) == 1 for names in inside.values()):
        return dict(named), {}
    title = {names: " + ".join(names) if len(names) > 1 else f"{names[0]} only" for names in inside.values()}
    if len(set(title.values())) < len(title):
        raise SettingError("structures whose names hold ' + ' or ' only' cannot be told from combinations; rename them")
    classes: dict[str, tuple[int, ...]] = {}
    for names in sorted(title, key=lambda names: ([list(named).index(n) for n in names], len(names))):
        classes[title[names]] = tuple(v for v in values if inside[v] == names)
    return classes, {name: tuple(title[n] for n in title if name in n) for name in named}


def choose_labels(
    labels: LabelTable,
    *,
    classes: Mapping[str, object],
    background: tuple[str | int, ...],
    ignore: tuple[str | int, ...],
    regions: Mapping[str, object],
) -> LabelTable:
    """``labels`` as the user wants them: classes merged or renamed (a class or a list of them under a new name), dropped into
    the background, ignored, or joined to regions. A class is named by its name or by a value of the files.

    Raises SettingError for names that do not exist and for values that are claimed twice, and DataError where ``labels``
    itself makes no sense.
    """
    _check(labels)
    found = dict(labels.classes)
    ignored, dropped = set(labels.ignore), set(labels.background)

    def values_of(item: object, key: str) -> tuple[int, ...]:
        if isinstance(item, (list, tuple)):
            return tuple(v for part in item for v in values_of(part, key))
        if str(item) in labels.classes:
            return labels.classes[str(item)]
        try:
            return (int(str(item)),)
        except ValueError:
            raise SettingError(
                f"{key} names the class {item!r}, which the data does not have; it has {', '.join(labels.classes)}"
            ) from None

    def take(values: tuple[int, ...]) -> None:
        for name in list(found):
            found[name] = tuple(v for v in found[name] if v not in values)
            if not found[name]:
                del found[name]

    for key, items, kept in (("data.background", background, dropped), ("data.ignore", ignore, ignored)):
        for item in items:
            values = values_of(item, key)
            take(values)
            kept.update(values)
    both = sorted(ignored & dropped)
    merged = {name: values_of(item, f"data.classes.{name}") for name, item in classes.items()}
    if nothing := [name for name, values in merged.items() if not values]:
        raise SettingError(f"data.classes.{nothing[0]} names nothing; give a class, a value, or a list of them")
    claimed = [v for values in merged.values() for v in values]
    twice = sorted({v for v in claimed if claimed.count(v) > 1 or v in ignored or v in dropped} | set(both))
    if twice:
        raise SettingError(f"the value {twice[0]} is claimed twice among data.classes, data.background and data.ignore")
    take(tuple(claimed))
    clash = [name for name in merged if name in found]
    if clash:
        raise SettingError(f"data.classes makes {clash[0]}, which is also the name of a class that stays as it is")
    order = {v: n for n, (_, values) in enumerate(labels.classes.items()) for v in values}
    found = dict(sorted({**found, **merged}.items(), key=lambda pair: min(order.get(v, len(order)) for v in pair[1])))
    if 0 in {v for values in found.values() for v in values}:
        raise SettingError("the value 0 is the background; no class can have it")
    if not found:
        raise SettingError("data.background and data.ignore leave no class to learn")
    table = LabelTable(found, tuple(sorted(dropped - {0})), tuple(sorted(ignored)))
    return _with_regions(table, labels, regions)


def _with_regions(table: LabelTable, before: LabelTable, regions: Mapping[str, object]) -> LabelTable:
    if not regions and before.regions:
        regions = {name: [v for c in parts for v in before.classes[c]] for name, parts in before.regions.items()}
        left_out = {*table.background, *table.ignore}
        kept = {name: [v for v in values if v not in left_out] for name, values in regions.items()}  # type: ignore[attr-defined]
        regions = {name: values for name, values in kept.items() if values}
    if not regions:
        return table
    of_value = {str(v): name for name, values in table.classes.items() for v in values}
    made: dict[str, tuple[str, ...]] = {}
    for name, parts in regions.items():
        listed = [str(p) for p in (parts if isinstance(parts, (list, tuple)) else [parts])]
        names = [p if p in table.classes else of_value.get(p, "") for p in listed]
        if not all(names) or not names:
            wrong = next((p for p, n in zip(listed, names, strict=True) if not n), "nothing")
            raise SettingError(
                f"data.regions.{name} names {wrong!r}, which is no class; the classes are {', '.join(table.classes)}"
            )
        made[name] = tuple(dict.fromkeys(names))
    left = [name for name in table.classes if not any(name in parts for parts in made.values())]
    if left:
        raise SettingError(
            f"data.regions leaves {', '.join(left)} in no region, so nothing would learn it; add it to one, or name it in "
            "data.background or data.ignore"
        )
    if len(made) > MAX_REGIONS:
        raise SettingError(f"data.regions has {len(made)} regions; at most {MAX_REGIONS} are trained at once")
    found = LabelTable(table.classes, table.background, table.ignore, made)
    _told_apart(found)
    return found


def _told_apart(labels: LabelTable) -> None:
    """Raises SettingError where two regions, or two classes, lie in the same places of the table: nothing could tell them
    apart, and an exported map would name one for the other."""
    same: dict[tuple[int, ...], str] = {}
    for name, members in zip(labels.targets, labels.members, strict=True):
        other = same.setdefault(tuple(sorted(members)), name)
        if other != name:
            raise SettingError(f"the regions {other} and {name} hold the same classes; one of them is enough")
    alike: dict[tuple[str, ...], str] = {}
    for name in labels.classes:
        other = alike.setdefault(tuple(r for r, parts in labels.regions.items() if name in parts), name)
        if other != name:
            raise SettingError(
                f"the classes {other} and {name} lie in the same regions, so nothing tells them apart; merge them first: "
                f"data.classes={{NAME: [{other}, {name}]}}"
            )


def _check(labels: LabelTable) -> None:
    """Raises DataError where a source contradicts itself."""
    owner: dict[int, str] = {}
    for name, values in (*labels.classes.items(), ("background", labels.background), ("ignore", labels.ignore)):
        if not values and name in labels.classes:
            raise DataError(f"the data declares the class {name} without a value")
        for value in values:
            if owner.setdefault(value, name) != name:
                raise DataError(f"the data gives the value {value} to {owner[value]} and to {name}")
            if not -(2**31) <= value < 2**32:
                raise DataError(f"the data declares the value {value} for {name}; label maps hold at most 32 bits")
    unknown = [part for parts in labels.regions.values() for part in parts if part not in labels.classes]
    if unknown:
        raise DataError(f"the data's regions name the class {unknown[0]}, which it does not declare")


def _whole(values: np.ndarray, step: float) -> np.ndarray:
    """``values`` as integers. Raises VolumeError where they are none."""
    if values.dtype.kind in "iu":
        if values.dtype.itemsize == 8 and values.size and int(values.max()) > HUGE:
            raise VolumeError(
                "unknown-label", f"label values up to {int(values.max())}; no class can have such a value"
            )
        return values
    if not np.isfinite(values).all():
        raise VolumeError("nan", f"the label has {int((~np.isfinite(values)).sum())} voxels that are NaN or infinite")
    rounded = np.rint(values)
    off = float(np.abs(values - rounded).max()) if values.size else 0.0
    if off > max(INTEGER_TOLERANCE, step if step < 0.01 else 0.0):
        raise VolumeError(
            "non-integer-label",
            f"label values are up to {off:.3g} away from an integer (a probability map, or labels resampled with "
            "interpolation?); give a map of whole numbers",
        )
    return rounded.astype(np.int64)


def to_file_values(indices: np.ndarray, labels: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """Class indices (any shape) into the values of the user's files (the first where several are merged), in the smallest
    unsigned type that holds them (signed where a value is negative)."""
    values = np.array([0, *(v[0] for v in labels.values())], dtype=np.int64)
    kinds = (np.uint8, np.uint16, np.uint32) if values.min() >= 0 else (np.int8, np.int16, np.int32)
    kind = next(k for k in kinds if np.iinfo(k).min <= values.min() and values.max() <= np.iinfo(k).max)
    table = values.astype(kind)
    out = np.empty_like(indices, dtype=kind)  # in the same memory order, so that planes of both lie together
    slow = int(np.argmax(np.abs(indices.strides)))
    planes, mapped = np.moveaxis(indices, slow, 0), np.moveaxis(out, slow, 0)
    for number, plane in enumerate(planes):  # one at a time: an index takes 8 bytes
        mapped[number] = table[plane]
    return out
