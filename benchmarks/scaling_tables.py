"""The tables of `scaling.py`: bytes and time of a PPO step, predicted and measured."""

from __future__ import annotations

from typing import Any

from measure import markdown
from scaling_model import PHASES, Bytes, Shape, Work, flops, gathered, reduced, sent

MARKS = ("<!-- scaling -->", "<!-- /scaling -->")
MIB = 2**20


def work_of(found: dict[str, Any]) -> Work:
    """What a run did, from its settings, the lengths and the numbers of forward passes."""
    run, passes = found["run"], found["passes"]
    return Work(
        run["ranks"], run["rows"], round(found["prompt"]), run["answer"], updates=run["updates"],
        micro_batches=passes["train actor"] // run["updates"], scoring_passes=passes["score reference"],
        reward_passes=passes["reward reward"], recompute=run["updates"] > 1,
    )  # fmt: skip


def predicted(found: dict[str, Any]) -> dict[str, int]:
    """ "PHASE KIND" -> bytes of weights and gradients; {} for one rank, which moves nothing."""
    work, weights = work_of(found), Bytes(**found["weights"])
    if work.ranks == 1:
        return {}
    parts = {f"{phase} allgather": number for phase, number in gathered(weights, work).items()}
    return parts | {"train reduce_scatter": reduced(weights, work)}


def tables(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: a table of bytes, and one of time if the file has its runs."""
    parts = [bytes_table({name: one for name, one in found.items() if "rank" in name})]
    if "base" in found:
        parts.append(time_table({name: one for name, one in found.items() if "rank" not in name}))
    return "\n\n".join(parts)


def bytes_table(found: dict[str, dict[str, Any]]) -> str:
    """Payloads by phase, predicted / measured, and what a rank sends."""
    rows = []
    for name, one in found.items():
        expected, seen = predicted(one), one["measured"]
        cells = [f"{expected.get(key, 0) / MIB:.2f} / {seen.get(key, 0) / MIB:.2f}" for key in columns()]
        others = sum(size for key, size in seen.items() if key not in columns())
        rows.append(
            [name, *cells, f"{others / MIB:.3f}", f"{sent(sum(expected.values()), one['run']['ranks']) / MIB:.2f}"]
        )
    return markdown(["MiB per rank and PPO step", *columns(), "other", "sent by a rank"], rows)


def columns() -> list[str]:
    """Collectives that move weights and gradients."""
    return [*(f"{phase} allgather" for phase in PHASES), "train reduce_scatter"]


def time_table(found: dict[str, dict[str, Any]]) -> str:
    """Work and CPU seconds, relative to the base."""
    totals = {name: sum(flops(Shape(**one["shape"]), work_of(one)).values()) for name, one in found.items()}
    rows = [
        [name, f"{totals[name] / 1e9:.2f}", f"{one['seconds']:.2f}", f"{totals[name] / totals['base']:.2f}",
         f"{one['seconds'] / found['base']['seconds']:.2f}"]
        for name, one in found.items()
    ]  # fmt: skip
    return markdown(["run", "GFLOP", "CPU seconds", "GFLOP / base", "seconds / base"], rows)
