"""Flags that do not fit `--sequence_parallel_size`."""

from __future__ import annotations

from typing import Any

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.sequence_parallel.flags import SequenceParallelFlags


def sharing_ranks(config: StepConfig) -> int:
    """Ranks that share the rows of a micro-batch."""
    return config.of(SequenceParallelFlags).sequence_parallel_size


def refuse(config: Any) -> None:
    """Refuse what needs whole rows where ranks share rows."""
    size = sharing_ranks(config)
    if size == 1:
        return
    in_need = [needs.whole_rows for needs in config.needs if needs.whole_rows is not None]
    if config.kind == "ppo" and config.algorithm.kl_estimator == "full":
        in_need.append("--kl_estimator full")
    if config.kind == "ppo" and config.algorithm.kl_loss_estimator == "full":
        in_need.append("--kl_loss_estimator full")
    if in_need:
        raise UserError(
            f"--sequence_parallel_size {size}: {in_need[0]} needs whole rows on a rank; use 1"
        )


def reason_not_exact(config: StepConfig) -> str | None:
    """Why rollouts are not exact where ranks share rows."""
    if sharing_ranks(config) > 1:
        return "ranks that share rows add in another order; omit --sequence_parallel_size"
    return None


def check_ranks(config: StepConfig, ranks: int) -> None:
    """Refuse groups of ranks that do not make up all `ranks`."""
    size = sharing_ranks(config)
    if ranks % size:
        raise UserError(
            f"--sequence_parallel_size {size} does not divide the {ranks} ranks of this run; use"
            f" {possible_sizes(ranks)}"
        )


def possible_sizes(ranks: int, heads: int | None = None) -> str:
    """The values of `--sequence_parallel_size` that divide both numbers, as text; `heads` None: not
    known yet."""
    sizes = [
        str(size)
        for size in range(1, ranks + 1)
        if ranks % size == 0 and (heads is None or heads % size == 0)
    ]
    if len(sizes) == 1:
        return sizes[0]
    return f"{', '.join(sizes[:-1])} or {sizes[-1]}"
