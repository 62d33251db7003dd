"""The batch plan of steps 1 and 2 for prepared rows, and its table."""

from __future__ import annotations

from datasets import Dataset

from dschat_ppo.common import dist
from dschat_ppo.config.batch_plan import PackedRows, SupervisedPlan, plan_supervised
from dschat_ppo.config.schedule_flags import ScheduleFlags, fit_schedules
from dschat_ppo.config.supervised_flags import SupervisedFlags
from dschat_ppo.data.packing_plan import PackingPlan, sample_tokens
from dschat_ppo.session.begin_run import show_plan


def plan_batches(
    fit: SupervisedFlags, rows: Dataset, packing: PackingPlan | None, max_steps: int, shared: int
) -> SupervisedPlan:
    """The batch plan for the ranks of this launch; with `packing`, over packed rows.

    Args:
        fit: flags of the training.
        rows: for training.
        packing: of these rows; None without `--packing`.
        max_steps: `--max_steps`.
        shared: ranks that share their rows.
    """
    ranks = dist.world_size()
    if packing is None:
        tokens = int(sample_tokens(rows).sum()) if isinstance(rows, Dataset) else None  # None: --streaming
        return plan_supervised(fit, len(rows), ranks, tokens, shared=shared, max_steps=max_steps)
    held = PackedRows(len(rows), packing.capacity)
    return plan_supervised(fit, packing.rows, ranks, int(packing.tokens.sum()), held, shared, max_steps)


def show_batches(title: str, plan: SupervisedPlan, fit: SupervisedFlags, schedule: ScheduleFlags) -> None:
    """Log the table of batches and the warm-up of a step."""
    total = plan.total_steps
    [model] = fit_schedules(fit)
    warmup = (schedule.warmup_of(model, fit.num_warmup_steps, total), total)
    show_plan(f"{title}: batches", [*plan.table(), *schedule.warmup_shown(total)], warmup)
