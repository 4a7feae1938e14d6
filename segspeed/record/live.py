"""What a person sees while it runs: bars on a terminal, calm lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

T = TypeVar("T")
LINE_SECONDS = 30.0  # between lines where there is no terminal


_silent = False


def silence() -> None:
    """Nothing more is said by this process: another one speaks for the run."""
    global _silent
    _silent = True


def console() -> Console:
    """Standard output, at most 100 columns wide; nowhere once `silence` was asked for."""
    if _silent:
        return Console(quiet=True, width=100)
    made = Console(highlight=False, soft_wrap=True)
    if made.width > 100 or not made.is_terminal:
        made = Console(highlight=False, soft_wrap=True, width=100)
    return made


def say(text: str) -> None:
    """One line for the person who runs this."""
    console().print(text, markup=False)


def track(iterable: Iterable[T], total: int, description: str) -> Iterator[T]:
    """Pass ``iterable`` on with a bar (rate and time left); in a log, a line at the start of long work and its end."""
    out = console()
    try:
        yield from (
            _bar(iterable, total, description, out) if out.is_terminal else _lines(iterable, total, description, out)
        )
    finally:
        close = getattr(iterable, "close", None)  # a generator that holds processes lets them go now, not some time
        if close is not None:
            close()


def _lines(iterable: Iterable[T], total: int, description: str, out: Console) -> Iterator[T]:
    started = last = time.perf_counter()
    for count, item in enumerate(iterable, start=1):
        now = time.perf_counter()
        if now - last >= LINE_SECONDS:
            last = now
            left = (now - started) / count * (total - count)
            out.print(f"{description}: {count} of {total}, {_time(left)} left", markup=False)
        yield item
    if total:
        out.print(f"{description}: {total} in {_time(time.perf_counter() - started)}", markup=False)


def _bar(iterable: Iterable[T], total: int, description: str, out: Console) -> Iterator[T]:
    started = time.perf_counter()
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=out) as bar:
        task = bar.add_task(description, total=total, rate="")
        for count, item in enumerate(iterable, start=1):
            rate = count / max(1e-9, time.perf_counter() - started)
            bar.update(task, completed=count, rate=f"{rate:.1f}/s")
            yield item


class LiveBar:
    """The bar of a training run: step, loss, patches/s, share of time waiting for data, last Dice, time left."""

    def __init__(self) -> None:
        self.out = console()
        self._last = 0.0
        self._started = time.perf_counter()
        self._bar: Progress | None = None
        if self.out.is_terminal:
            self._bar = Progress(
                TextColumn("{task.fields[text]}"), BarColumn(bar_width=16), TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"), console=self.out,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=1.0, text="starting", left="")

    def __enter__(self) -> LiveBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(
        self,
        *,
        step: int,
        loss: float,
        samples_per_s: float,
        wait_share: float,
        dice: float | None,
        remaining: float,
        done: float,
    ) -> None:
        """Show one step; ``remaining`` in seconds, ``done`` the share of the run."""
        score = "--" if dice is None else f"{dice:.3f}"
        text = f"step {step}  loss {loss:.3f}  {samples_per_s:.1f} patches/s  wait {wait_share:.0%}  Dice {score}"
        left = f"{_time(remaining)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=text, left=left)
            return
        now = time.perf_counter()
        if now - self._last >= LINE_SECONDS or step == 1:
            self._last = now
            self.out.print(f"{done:4.0%}  {text}  {left}", markup=False)


def print_result(result: dict[str, Any], report: Path) -> None:
    """The table at the end of a run, and what to do next."""
    out = console()
    table = Table(title=f"{result['cohort']}: last weights ({result['weights']}), {result['cases']} validation cases")
    table.add_column("class")
    table.add_column("mean Dice", justify="right")
    table.add_column("absent in both", justify="right")
    own = result.get("metrics") or {}
    for metric in own:
        table.add_column(metric, justify="right")
    for name, dice in result["dice"].items():
        values = (_dice(found["classes"].get(name)) for found in own.values())
        table.add_row(name, _dice(dice), str(result["empty"].get(name, 0)), *values)
    table.add_section()
    table.add_row("mean of classes", _dice(result["mean_dice"]), "", *(_dice(found["mean"]) for found in own.values()))
    out.print(table)
    interval = result.get("interval")
    if interval:
        out.print(f"95 % interval of the mean over cases (bootstrap): {interval[0]:.3f} to {interval[1]:.3f}")
    out.print(
        f"{result['steps']} steps in {_time(result['train_s'])} of training ({result['samples_per_s']:.1f} patches/s, "
        f"{result['wait_share']:.1%} waiting for data, {result['precision']}); setup {_time(result['setup_s'])}, "
        f"cache {_time(result['cache_s'])}, evaluation {_time(result['evaluation_s'])}; "
        f"peak memory {result['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    split = ", ".join(f"{part} {share:.1%}" for part, share in result["split"].items())
    ceiling = result["ceiling_samples_per_s"]
    rate = f"; {result['samples_per_s'] / ceiling:.0%} of the rate with data for free" if ceiling else ""
    out.print(f"A step: {split}{rate}", markup=False, soft_wrap=False)
    out.print(result["verdict"], markup=False)
    out.print(f"Report: {report}", markup=False)
    out.print(
        "Next: open it in a browser; train longer with train.budget=1h; all folds with --multirun data.fold=0,1,2,3,4"
    )


def _dice(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _time(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
