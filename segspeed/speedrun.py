"""Time to a Dice that was named before: python -m segspeed.speedrun data=msd data.root=FOLDER target=0.87 train.budget=10min

Runs one schedule, declared before, once a seed (seeds=[0,1,2]), leaves none out, and reports the mean Dice against the target with
a one-sided t-test, and preparation, training, and training + evaluation apart. A record is a folder under outputs/speedruns.
report=true makes a table of all records; compare=[outputs/speedruns/A,outputs/speedruns/B] tests B against A.
Keys of the section speedrun may stand without it.
"""

from __future__ import annotations

from pathlib import Path

from segspeed.cli import Frame, door
from segspeed.config import Config
from segspeed.types import DataError, SettingError


def main(cfg: Config) -> int:
    """Make a record, tell of all of them, or compare two; 1 if the target was not reached."""
    from segspeed.proof.records import compare_records, records_table
    from segspeed.proof.speedruns import load_records, records_folder, speedrun
    from segspeed.record.live import say

    if cfg.speedrun.compare:
        if len(cfg.speedrun.compare) != 2:
            raise SettingError("compare takes two records: compare=[outputs/speedruns/A,outputs/speedruns/B]")
        say(compare_records(*load_records([Path(p) for p in cfg.speedrun.compare])))
        return 0
    root = records_folder(cfg)
    if cfg.speedrun.report:
        found = load_records(sorted(p.parent for p in root.glob("*/record.json")))
        if not found:
            raise DataError(f"there are no records under {root}")
        text = records_table(found)
        (root / "records.md").write_text(text + "\n", encoding="utf-8")
        say(text)
        say(f"Table: {root / 'records.md'}")
        return 0
    record, folder = speedrun(cfg)
    say(records_table([record]))
    say(f"Record: {folder / 'record.json'}. All records: python -m segspeed.speedrun report=true")
    if not record.reached:
        say(f"The target of {record.target:g} was not reached")
    return int(not record.reached)


if __name__ == "__main__":
    door(main, Frame(section="speedrun"))()
