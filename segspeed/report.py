"""Several runs on one page: python -m segspeed.report runs=[outputs/COHORT/A,outputs/COHORT/B]

Draws Dice against the wall clock of every run on one axis, with a table (recipe, network, machine, time, patches a second, Dice,
memory) and the settings in which the runs differ, as one HTML page that needs no network, and the picture as PNG. Runs that are not
finished are shown as far as they are. An existing file is never replaced, unless it is such a page and overwrite=true.
"""

from __future__ import annotations

import os
from pathlib import Path

from segspeed.cli import Frame, door
from segspeed.config_inference import ReportConfig


def main(cfg: ReportConfig) -> int:
    """Write the page that ``cfg`` asks for; 0 when it is there."""
    from segspeed.folds import find_runs
    from segspeed.proof.runs_page import refuse_existing, write_comparison
    from segspeed.proof.runs_table import markdown, notes, read_entries
    from segspeed.record.live import say

    folders = find_runs(cfg.runs)
    parent = os.path.commonpath([f.resolve().parent for f in folders])
    target = Path(cfg.target).expanduser() if cfg.target else Path(parent) / "comparison.html"
    refuse_existing(target, overwrite=cfg.overwrite)
    entries = read_entries(folders)
    picture = write_comparison(entries, target)
    say(markdown(entries))
    for text in notes(entries):
        say(text)
    say(f"Page: {target}. The picture: {picture}")
    return 0


if __name__ == "__main__":
    door(main, Frame(ReportConfig, "report"))()
