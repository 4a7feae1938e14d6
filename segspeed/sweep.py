"""A search over settings: python -m segspeed.sweep 'space={optimizer.lr:{low:1e-4,high:1e-1,log:true}}' data=msd data.root=FOLDER

Every trial is a training run in a process of its own, judged by the mean Dice of its validation cases; optuna chooses the next one.
The study lies in outputs/sweeps/NAME/study.db: the same command goes on where it was interrupted, in the middle of a trial, too,
and a larger trials=N goes on with a finished one. Keys of the section sweep may stand without it. Needs pip install optuna.
"""

from __future__ import annotations

from segspeed.cli import Frame, door
from segspeed.config import Config


def main(cfg: Config) -> int:
    """Search what ``cfg`` describes; 1 if a trial failed."""
    from segspeed.proof.sweeps import begin, search, table
    from segspeed.record.live import say
    from segspeed.record.run_folder import RunFolder

    sweep = begin(cfg)
    with RunFolder(sweep.folder).locked():
        trials = search(sweep)
    text = table(trials)
    (sweep.folder / "sweep.md").write_text(text + "\n", encoding="utf-8")
    say(text)
    say(f"Table: {sweep.folder / 'sweep.md'}. The best was chosen on these validation cases; score it on others")
    failed = [str(t.number) for t in trials if t.dice is None]
    if failed:
        say(f"Failed: trial {', '.join(failed)}; the files in {sweep.folder / 'jobs'} say why")
    return int(bool(failed))


if __name__ == "__main__":
    door(main, Frame(section="sweep"))()
