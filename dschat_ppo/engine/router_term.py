"""The load-balancing loss of a mixture of experts as a term of an optimizer step's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from dschat_ppo.common.dist import all_reduce
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.engine.optimizer_step import random_state, set_random_state
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.architectures import lm_without_weights
from dschat_ppo.models.router_recorder import RouterLoad, load_balancing_loss, recorded_router
from dschat_ppo.monitor.metric_sums import MetricSums


def router_top_k(config: PretrainedConfig, model: str) -> int:
    """Experts per token of an architecture with a load-balancing loss in transformers. `config` of
    a reward model is that of its language model; `model` is flag and folder, for the message."""
    refused = f"--router_loss_coef: {model}: {type(config).__name__}"
    with reading(f"{refused} cannot be built"):
        lm: Any = lm_without_weights(config)
    # pairs of keys; Granite 4 without experts
    unfit = config.model_type == "doge" or not getattr(lm, "num_experts", 1)
    if unfit or not hasattr(lm, "router_aux_loss_coef"):
        raise UserError(
            f"{refused} has no router loss that this project can compute; omit the flag"
        )
    return int(lm.num_experts_per_tok)


Batch = TypeVar("Batch")
Loss = Callable[[Batch, MetricSums], Tensor]


@dataclass(frozen=True)
class RouterSettings:
    """Weight of the load-balancing loss, and experts per token of the model."""

    coef: float
    top_k: int


def router_settings(coef: float, model: Any) -> RouterSettings | None:
    """The settings of a `PolicyModel` or `ScalarModel`; None if `coef` is 0."""
    if coef > 0:
        return RouterSettings(coef, router_top_k(model.config, "the model"))
    return None


def with_router_term(
    settings: RouterSettings,
    metric: str,
    batches: Sequence[Batch],
    loss_of: Loss[Batch],
    rows_of: Callable[[Batch], Tensor],
    sums: MetricSums,
) -> Callable[[Batch], Tensor]:
    """`loss_of` for this rank's micro-batches of an optimizer step, with the load-balancing loss
    over all real tokens of the step, of all ranks. Collective.

    That loss multiplies shares of tokens by mean probabilities, so a mean over micro-batches would
    depend on how the step is divided. So the load of all micro-batches is counted first, by forward
    passes without gradients, which draw the random numbers (dropout) that the training passes draw
    again.

    `settings`: coefficient, and experts for each token. `batches`: all micro-batches of this rank.
    `loss_of`: (micro-batch, metrics to add to) -> its loss, by one forward pass. `rows_of`: rows
    that count, (B,) bool, and do not only fill the micro-batch. `sums` receives the metrics of the
    training passes, the load-balancing loss under the name `metric`.
    """

    def loss_and_load(batch: Batch, metrics: MetricSums) -> tuple[Tensor, RouterLoad]:
        with recorded_router(rows_of(batch), settings.top_k) as loads:
            loss = loss_of(batch, metrics)
        [load] = loads
        return loss, load

    state = random_state()
    counts = []
    with torch.no_grad():
        for batch in batches:
            _, load = loss_and_load(batch, MetricSums(sums.sources))
            counts.append(torch.cat([load.chosen, load.count.view(1)]))
            heartbeat()
    set_random_state(state)
    totals = all_reduce(torch.stack(counts).sum(dim=0).double()).float()
    # (E,) and scalar, of the whole step (see `RouterLoad`)
    chosen = totals[:-1]
    count = totals[-1].clamp_min(1)

    def with_term(batch: Batch) -> Tensor:
        loss, load = loss_and_load(batch, sums)
        router_loss = load_balancing_loss(load.probability, chosen, count)
        sums.add_sum(metric, router_loss, load.count / count)
        return loss + settings.coef * router_loss

    return with_term
