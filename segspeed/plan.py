"""What fits into a memory, and what it costs: python -m segspeed.plan data=msd data.root=FOLDER memory.limit=8GB

Measures a few training steps in processes of their own, and chooses patch, micro-batch, accumulation and the blocks to recompute
for memory.limit (auto: most of what is free). Prints the alternatives, and writes plan.json and planning.json beside the
cohort's check.json. segspeed.train with the same settings takes the choice from there.
"""

from __future__ import annotations

from segspeed.cli import door
from segspeed.config import Config
from segspeed.types import SettingError


def main(cfg: Config) -> int:
    """Plan for ``cfg``; 0 when something fits."""
    from segspeed import build
    from segspeed.jsonio import write_json
    from segspeed.memory.limit import shown_bytes
    from segspeed.memory.report import needs, table
    from segspeed.memory.within import plan_anew, planning_file
    from segspeed.preparation import inspect_cohort, plan_for, refuse, split_for
    from segspeed.record.live import console, say, track

    if cfg.init.run is not None:
        raise SettingError(
            "this chooses a network for a memory, which the weights of init.run do not fit; leave it out"
        )
    if cfg.memory.limit is None:
        cfg = cfg.model_copy(update={"memory": cfg.memory.model_copy(update={"limit": "auto"})})
    device = build.device_from(cfg)
    cohort = build.cohort_from(cfg.data)
    facts, problems = inspect_cohort(cfg, cohort, track)
    refuse(problems, "python -m data_prep.check with the same data settings")
    measured, _ = plan_for(cfg, cohort, facts, split_for(cfg, cohort, facts), device.type)
    found = plan_anew(cfg, cohort, measured, device, say)
    console().print(table(found))
    plan, path = found.chosen.plan, planning_file(cfg, cohort)
    write_json(path.with_name("plan.json"), plan)
    kind = (
        "allocated on the GPU"
        if device.type == "cuda"
        else "resident memory of the training process, files not counted"
    )
    known = "measured" if found.chosen.done else "predicted"
    say(
        f"Chosen: patch {'x'.join(map(str, plan.patch))}, batch {plan.batch} x {plan.accumulate}, "
        f"{len(plan.checkpointing) or 'no'} blocks recomputed, {found.precision}: {shown_bytes(needs(found.chosen))} {known} "
        f"of {shown_bytes(found.limit)} ({kind})"
    )
    if plan.checkpointing:
        say(f"Recomputed: {', '.join(plan.checkpointing)}")
    say(f"{found.probes} probes, {found.seconds:.0f} s in all. All alternatives: {path}; the Plan lies beside it")
    limit = f"{cfg.memory.limit / 1e9:g}GB" if isinstance(cfg.memory.limit, int) else "auto"
    say(f"Next: python -m segspeed.train with the same settings and memory.limit={limit}")
    return 0


if __name__ == "__main__":
    door(main)()
