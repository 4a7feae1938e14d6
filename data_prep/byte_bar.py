"""A bar of bytes: how many, how fast, how long still; where there is no terminal, a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from segspeed.record.live import LINE_SECONDS, console

Update = Callable[[int, "int | None"], None]  # bytes here, bytes in all (None: not known)
Tell = Callable[[str], None]


@contextmanager
def byte_bar(title: str) -> Iterator[tuple[Update, Tell]]:
    """``update(here, total)`` for every piece, and ``tell(text)`` for a line beside the bar."""
    out = console()
    if not out.is_terminal:
        yield _lines(title, out), lambda text: out.print(text, markup=False)
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=out) as shown:
        task = shown.add_task(title, total=None)
        started = False

        def update(here: int, total: int | None) -> None:
            nonlocal started
            if not started:  # the rate is that of this command: what was here before came at no time
                started = True
                shown.reset(task, total=total, completed=here)
            shown.update(task, completed=here, total=total)

        yield update, lambda text: shown.console.print(text, markup=False)


def _lines(title: str, out: Console) -> Update:
    last = first = time.monotonic()
    begin: int | None = None

    def update(here: int, total: int | None) -> None:
        nonlocal last, first, begin
        now = time.monotonic()
        if begin is None or here < begin:  # also when it begins anew
            begin, first = here, now
        if now - last < LINE_SECONDS:
            return
        last = now
        rate = (here - begin) / max(1e-9, now - first)
        left = f", {(total - here) / rate / 60:.1f} min left" if total and rate else ""
        whole = f" of {total / 1e6:.1f}" if total else ""
        out.print(f"{title}: {here / 1e6:.1f}{whole} MB, {rate / 1e6:.2f} MB/s{left}", markup=False)

    return update
