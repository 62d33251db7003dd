"""The loss of plain text as a term of the actor's loss over a whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.engine.step_loss import StepLoss, StepTerm
from dschat_ppo.features.ptx.flags import PtxFlags
from dschat_ppo.features.ptx.further_data import TEXTS
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.types import Engine, Model

TOKENS = "text_tokens"  # among the numbers of an optimizer step: the tokens of its texts


def step_term_of(
    config: StepConfig, engine: Engine, further_batches: Mapping[str, Any]
) -> StepTerm | None:
    """The term of a run with texts: each optimizer step takes the next of them, in micro-batches of
    their own."""
    texts = further_batches.get(TEXTS)
    if texts is None:
        return None
    coef = config.of(PtxFlags).unsup_coef

    def added_to(step_loss: StepLoss) -> StepLoss:
        text_batches, text_tokens = texts.take()

        def of_texts(batch: SFTBatch, sums: MetricSums) -> Tensor:
            return coef * ptx_loss(engine, batch, text_tokens, sums)

        return replace(
            step_loss,
            constants={**step_loss.constants, TOKENS: text_tokens},
            further_batches=[*step_loss.further_batches, *text_batches],
            of_further_batch={**step_loss.of_further_batch, SFTBatch: of_texts},
        )

    return StepTerm("ptx", coef, added_to)


def losses_of_batches(
    config: StepConfig, model: Model, constants: Mapping[str, Any], sums: MetricSums
) -> dict[type, Callable[[Any], Tensor]]:
    """The loss of a micro-batch of texts, from the numbers of its optimizer step."""

    def loss(batch: SFTBatch) -> Tensor:
        coef = config.of(PtxFlags).unsup_coef
        return coef * ptx_loss(model, batch, constants[TOKENS], sums)

    return {SFTBatch: loss}


def ptx_loss(actor: Model, batch: SFTBatch, num_tokens: Tensor, sums: MetricSums) -> Tensor:
    """Sum of `-log p(token)` of plain text, divided by `num_tokens` of the optimizer step; scalar
    with gradient."""
    logprobs = actor(batch.input_ids, batch.loss_mask)[0]
    sums.add_mean("policy/ptx_loss", -logprobs.detach())
    return -logprobs.sum() / num_tokens
