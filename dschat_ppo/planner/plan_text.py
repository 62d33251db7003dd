"""A plan as a table, and as JSON."""

from __future__ import annotations

from typing import Any

from dschat_ppo.errors import counted
from dschat_ppo.planner.hardware import GIB
from dschat_ppo.planner.phase import PARTS, Phase
from dschat_ppo.planner.plan_step import Plan

_MINUTE = 60


def memory_table(plan: Plan) -> str:
    """GiB of a rank by phase, role and part; a line "all" for each phase, with what a device and a host need. A role
    has no line if all its cells would be empty."""
    header = ["phase", "role", *PARTS, "device", "host"]
    rows = []
    for phase in plan.phases:
        for role in phase.roles:
            parts = [phase.total(role, part) for part in PARTS]
            total = phase.total(role)
            sizes = [*(_shown(each.device + each.host) for each in parts), _shown(total.device), _shown(total.host)]
            if any(sizes):
                rows.append([phase.name, role, *sizes])
        needs = plan.needs(phase)
        rows.append([phase.name, "all", *(_shown(_both(phase, part)) for part in PARTS), _shown(needs.device),
                     _shown(needs.host)])  # fmt: skip
    return _aligned(header, rows)


def _both(phase: Phase, part: str) -> int:
    total = phase.total(part=part)
    return total.device + total.host


def _shown(size: float) -> str:
    return f"{size / GIB:.2f}" if abs(size) >= 0.005 * GIB else ""


def _aligned(header: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their longest entry; the first two to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: list[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(cells)
        )

    lines, before = [line(header), "  ".join("-" * width for width in widths)], ""
    for row in rows:
        lines.append(line([row[0] if row[0] != before else "", *row[1:]]).rstrip())
        before = row[0]
    return "\n".join(lines)


def full_text(plan: Plan, title: str) -> str:
    """The table of a plan, whether it fits, and its time."""
    hardware, nodes = plan.hardware, -(-plan.ranks // plan.ranks_per_node)
    where = f"{plan.ranks} x {hardware.name}"
    where += f" of {plan.device_memory / GIB:.0f} GiB" if hardware.on_gpu else ""
    each_machine = f" on each of {nodes} machines" if nodes > 1 else ""
    lines = [f"{title} on {where}, {plan.host_memory / GIB:.0f} GiB of host memory{each_machine}", ""]
    lines += ["GiB of one rank at the peak of each phase; 'all': what a device and a host need, libraries included;"]
    lines += ["a model that holds less than 0.005 GiB in a phase has no line there"]
    lines += [memory_table(plan), ""]
    lines += [f"It does not fit: {each}." for each in plan.shortages()] or ["It fits."]
    if plan.rows:
        lines.append(f"A rank decodes {counted(plan.rows, 'sequence')} at a time.")
    lines += ["", time_text(plan)]
    uncounted = [role.name for role in plan.roles if not role.parts.saved.counted]
    if uncounted:
        lines.append(
            f"The activations of {', '.join(uncounted)} are estimated from hidden and intermediate sizes: the model "
            "cannot run without data."
        )
    return "\n".join(lines)


def time_text(plan: Plan) -> str:
    """Seconds of a step by part, and what they are computed from."""
    time, hardware = plan.time, plan.hardware
    parts = ", ".join(f"{name} {seconds_text(each)}" for name, each in time.seconds.items())
    rate = time.tokens / time.total
    several = plan.ranks > plan.ranks_per_node
    link = f"; {8e-9 * hardware.link:g} Gbit/s of each device between machines are assumed" if several else ""
    kind = "measured" if hardware.measured else "assumed, not measured with this project"
    return (
        f"Time of a step with rows of the maximum length: {seconds_text(time.total)} ({parts}), {rate:.0f} tokens per "
        f"second in all. Constants of {hardware.name} are {kind} ({hardware.source}){link}."
    )


def seconds_text(seconds: float) -> str:
    """Such as "0.42 s", "13 s" or "5.2 min"."""
    if seconds >= 10 * _MINUTE:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds >= _MINUTE:
        return f"{seconds / _MINUTE:.1f} min"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def json_of(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; sizes in bytes, of one rank unless the name says otherwise."""
    phases = []
    for phase in plan.phases:
        held = [
            {"role": role, "part": part, "device": memory.device, "host": memory.host}
            for (role, part), memory in phase.held.items()
        ]
        needs = plan.needs(phase)
        phases.append({"phase": phase.name, "held": held, "needs_of_device": needs.device, "needs_of_host": needs.host})
    return {
        "fits": plan.fits,
        "shortages": plan.shortages(),
        "phases": phases,
        "ranks": plan.ranks,
        "ranks_per_node": plan.ranks_per_node,
        "device_kind": plan.hardware.name,
        "device_memory": plan.device_memory,
        "host_memory": plan.host_memory,
        "running_rows": plan.rows,
        "seconds": plan.time.seconds,
        "seconds_of_a_step": plan.time.total,
        "constants_are_measured": plan.hardware.measured,
    }
