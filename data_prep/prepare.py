"""Build the cache of a cohort: python -m data_prep.prepare data=msd data.root=FOLDER

Reads, crops and resamples every case of the chosen fold once, in parallel. What is there already is not built again,
so a stopped build goes on. Training with the same data and plan settings then starts at once.

Several machines with a common disk: python -m data_prep.prepare data=... cache.shard=2/8 builds the second of eight shares. Shards
may run at the same time, one after the other, twice, or die: the same command without cache.shard builds what is missing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from segspeed.cli import door
from segspeed.config import Config
from segspeed.shards import Shard
from segspeed.types import SettingError


def main(cfg: Config) -> int:
    """Build what is missing; 0 when the whole cache is there."""
    from segspeed import build
    from segspeed.data.cache import old_entries
    from segspeed.jsonio import write_json
    from segspeed.preparation import prepare
    from segspeed.record.live import say, track

    device = build.device_from(cfg)
    if cfg.cache.shard is not None:
        return share(cfg, Shard.parse(cfg.cache.shard))
    prepared = prepare(cfg, build.cohort_from(cfg.data), device.type, track)
    plan, cases = prepared.plan, len(prepared.entries)
    say(f"{prepared.cohort.name}: {prepared.built} of {cases} cases built, {cases - prepared.built} were there")
    say(
        f"Spacing {' x '.join(f'{s:.3g}' for s in plan.spacing)} mm, patch {'x'.join(map(str, plan.patch))}, "
        f"normalisation {', '.join(plan.normalisation)}"
    )
    unused = old_entries(
        build.cache_root(cfg), prepared.cohort.folder_name, {e.path for e in prepared.entries.values()}
    )
    if unused and cfg.cache.prune:
        for path in unused:
            shutil.rmtree(path)
        say(f"Deleted {len(unused)} entries that these settings do not use")
    elif unused:
        say(f"{len(unused)} entries of this cohort belong to other settings or folds; cache.prune=true deletes them")
    folder = Path(cfg.run.root) / prepared.cohort.folder_name
    write_json(folder / "fingerprint.json", prepared.fingerprint)
    write_json(folder / "plan.json", plan)
    say(f"The Plan with the rule behind each value: {folder / 'plan.json'}; the fingerprint lies beside it")
    say(f"{prepared.bytes / 1e6:.0f} MB in {build.cache_root(cfg).absolute()}")
    say("Next: python -m segspeed.train with the same data settings")
    return 0


def share(cfg: Config, shard: Shard) -> int:
    """Build what is missing of one share of the cases; 0 when all of it is there."""
    from segspeed import build
    from segspeed.preparation import prepare
    from segspeed.record.live import say, track

    if cfg.cache.prune or cfg.cache.verify:
        raise SettingError(
            f"cache.shard={shard} knows only its own entries: give cache.prune and cache.verify to the last call, without it"
        )
    prepared = prepare(cfg, build.cohort_from(cfg.data), build.device_from(cfg).type, track, shard=shard)
    cases = len(prepared.entries)
    say(
        f"{prepared.cohort.name}, shard {shard}: {prepared.built} of {cases} cases built, {cases - prepared.built} were there, "
        f"{prepared.bytes / 1e6:.0f} MB in {build.cache_root(cfg).absolute()}"
    )
    say(
        "Next, when all shards are through: the same without cache.shard, or training; both build what a dead shard left"
    )
    return 0


if __name__ == "__main__":
    door(main)()
