"""The door to the planner: a Plan that fits into ``memory.limit``, recalled where the same question was answered before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from segspeed.config import Config
from segspeed.memory.limit import bytes_allowed, free_bytes, shown_bytes
from segspeed.memory.planner import Option, Planning, find_plan
from segspeed.memory.probe import probing
from segspeed.memory.report import key_of, load_plan, save_planning
from segspeed.memory.settings import Subject
from segspeed.speed.precision import choose_precision
from segspeed.types import Cohort, Fingerprint, Plan

NAME = "planning.json"


def planning_file(cfg: Config, cohort: Cohort) -> Path:
    """Where the planning of a cohort is kept."""
    return Path(cfg.run.root) / cohort.folder_name / NAME


def plan_anew(
    cfg: Config, cohort: Cohort, fp: Fingerprint, device: torch.device, tell: Callable[[str], None]
) -> Planning:
    """Plan, and write planning.json. Raises SettingError when nothing fits."""
    precision, _ = choose_precision(cfg.precision, device)
    return _plan(Subject.of(cfg, cohort, device, precision), cohort, fp, tell)


def plan_within(
    cfg: Config, cohort: Cohort, fp: Fingerprint, device: torch.device, tell: Callable[[str], None]
) -> Plan:
    """The Plan for ``cfg.memory.limit``: that of planning.json if nothing it depends on has changed, else a new one."""
    precision, _ = choose_precision(cfg.precision, device)
    subject = Subject.of(cfg, cohort, device, precision)
    known = load_plan(planning_file(cfg, cohort), key_of(subject, fp), bytes_allowed(cfg.memory.limit, device))
    if known is not None:
        tell(f"memory.limit: as planned before, {shown_bytes(known[1])} ({planning_file(cfg, cohort)})")
        return known[0]
    return _plan(subject, cohort, fp, tell).chosen.plan


def _plan(subject: Subject, cohort: Cohort, fp: Fingerprint, tell: Callable[[str], None]) -> Planning:
    device = torch.device(subject.device)
    limit, free = bytes_allowed(subject.cfg.memory.limit, device), free_bytes(device)
    if limit > free:
        tell(f"memory.limit is {shown_bytes(limit)} and only {shown_bytes(free)} are free here; probes may be killed")
    with probing() as prober:
        found = find_plan(subject, fp, limit, prober, tell)
    found = dataclasses.replace(found, chosen=dataclasses.replace(found.chosen, plan=finished(found.chosen)))
    save_planning(planning_file(subject.cfg, cohort), found, key_of(subject, fp))
    return found


def finished(option: Option) -> Plan:
    """The chosen Plan with the reasons behind what the limit decided."""
    plan = option.plan
    why = {
        "patch": f"{option.why.removeprefix('chosen: ')} ({plan.reasons.get('patch', '')})",
        "batch": f"of the micro-batches that fit the fastest a patch; the batch of a step: {plan.reasons.get('batch', '')}",
        "accumulate": f"{plan.accumulate} micro-batches make the batch of a step, {plan.batch * plan.accumulate}",
        "checkpointing": (
            "the fewest blocks that make it fit, those first that save most for their time"
            if plan.checkpointing
            else "it fits without"
        ),
    }
    return dataclasses.replace(plan, reasons={**plan.reasons, **why})
