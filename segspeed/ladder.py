"""Every speed technique proven on your own data: python -m segspeed.ladder data=msd data.root=FOLDER samples=2000

Trains the same network on the same patches once a rung, each in its own process, from what people do today (NIfTI decoded each
epoch, dictionary transforms, fp32) upwards, and writes time, memory, waiting and Dice of each beside the first one's, with a
non-inferiority verdict: a table, ladder.md, ladder.html and ladder.png. The same command goes on where it was interrupted.
quick=true measures throughput alone, in minutes. Keys of the section ladder may stand without it: seeds=[0,1,2].
"""

from __future__ import annotations

from segspeed.cli import Frame, door
from segspeed.config import Config


def main(cfg: Config) -> int:
    """Climb the ladder that ``cfg`` describes; 1 if a rung failed with any of its seeds."""
    from segspeed import build
    from segspeed.preparation import prepare
    from segspeed.proof.climb import begin, check_ladder, climb
    from segspeed.proof.ladder_page import write_ladder
    from segspeed.proof.ladder_table import terminal_table
    from segspeed.record.live import console, say, track
    from segspeed.record.run_folder import RunFolder

    check_ladder(cfg)
    device = build.device_from(cfg)
    cohort = build.cohort_from(cfg.data)
    start = begin(cfg, prepare(cfg, cohort, device.type, track))
    with RunFolder(start.folder).locked():
        found = climb(start)
    paths = write_ladder(found)
    console().print(terminal_table(found.rows, cfg.ladder))
    say(f"Report: {paths.page}. As Markdown: {paths.table}; the picture: {paths.picture}")
    failed = [f"{row.name} (seed {attempt.seed})" for row in found.rows for attempt in row.lost]
    if failed:
        say(f"Failed: {', '.join(failed)}. The same command tries them again")
    elif cfg.ladder.quick:
        say("Dice was not measured. The same command with quick=false and another ladder.name does it")
    return int(bool(failed))


if __name__ == "__main__":
    door(main, Frame(section="ladder"))()
