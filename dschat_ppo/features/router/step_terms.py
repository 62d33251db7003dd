"""The load-balancing loss of a mixture of experts as a term of an optimizer step's loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common.dist import all_reduce
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.engine.optimizer_step import random_state, set_random_state
from dschat_ppo.engine.step_loss import StepLoss, StepTerm
from dschat_ppo.features.router.checks import router_top_k
from dschat_ppo.features.router.flags import RouterFlags
from dschat_ppo.features.router.load import RouterLoad, RouterRecorder, load_balancing_loss
from dschat_ppo.models.pass_observers import observed
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.types import Engine


def step_term_of(
    config: StepConfig, engine: Engine, further_batches: Mapping[str, Any]
) -> StepTerm | None:
    """The term of a run with `--router_loss_coef`."""
    coef = config.of(RouterFlags).router_loss_coef
    if coef == 0:
        return None
    top_k = router_top_k(engine.module.config, "the model")
    return StepTerm("router", coef, RouterTerm(coef, top_k))


@dataclass(frozen=True)
class RouterTerm:
    """Adds the load-balancing loss over all real tokens of an optimizer step, of all ranks.

    That loss multiplies shares of tokens by mean probabilities, so a mean over micro-batches would
    depend on how the step is divided. So the load of all micro-batches is counted first, by forward
    passes without gradients, which draw the random numbers (dropout) that the training passes draw
    again.
    """

    coef: float
    top_k: int  # experts of each token

    def __call__(self, step_loss: StepLoss) -> StepLoss:
        """The loss with the term, whose metric is `router_loss`. Collective."""
        state = random_state()
        counts = []
        with torch.no_grad():
            for batch in step_loss.batches:
                _, load = self._loss_and_load(step_loss, batch, MetricSums(step_loss.sums.sources))
                counts.append(torch.cat([load.chosen, load.count.view(1)]))
                heartbeat()
        set_random_state(state)
        totals = all_reduce(torch.stack(counts).sum(dim=0).double()).float()
        # (E,) and scalar, of the whole step (see `RouterLoad`)
        chosen = totals[:-1]
        count = totals[-1].clamp_min(1)

        def of_batch(batch: Any, sums: MetricSums) -> Tensor:
            loss, load = self._loss_and_load(step_loss, batch, sums)
            router_loss = load_balancing_loss(load.probability, chosen, count)
            metric = f"{step_loss.metric_prefix}router_loss"
            sums.add_sum(metric, router_loss, load.count / count)
            return loss + self.coef * router_loss

        return replace(step_loss, of_batch=of_batch)

    def _loss_and_load(
        self, step_loss: StepLoss, batch: Any, sums: MetricSums
    ) -> tuple[Tensor, RouterLoad]:
        """The loss of a micro-batch without the term, and the load of its forward pass."""
        recorder = RouterRecorder(step_loss.rows_of(batch), self.top_k)
        with observed(recorder):
            loss = step_loss.of_batch(batch, sums)
        [load] = recorder.loads
        return loss, load
