"""Step 1: supervised fine-tuning on answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.config.supervised_config import SFTConfig
from dschat_ppo.data.batches import SFTBatch, collate_sft
from dschat_ppo.engine.build_engine import eval_engine, frozen_policy, require_whole_distributions
from dschat_ppo.features import hooks
from dschat_ppo.models.given_embeddings import GivenSource
from dschat_ppo.models.kernel_selection import apply_memory_flags, select_kernels
from dschat_ppo.models.loading import changes_to_train, load_causal_lm
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.models.wrapped_models import PolicyModel, Teaching
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.run.start_and_end import tool_command, words_of_features
from dschat_ppo.supervised.objective import Objective, collator_on_device
from dschat_ppo.supervised.supervised_run import (
    begin_supervised_run,
    given_sources_of_run,
    train_and_save,
)
from dschat_ppo.supervised.trainer import SupervisedTrainer
from dschat_ppo.types import Engine, Model


@dataclass(frozen=True)
class SFTTerm:
    """A divergence from other distributions as a term of the loss of step 1."""

    metric: str  # under which its mean over the tokens is recorded
    share: float  # of the loss; that of the cross entropy is what the terms leave of 1
    # (micro-batch) -> distributions that the model is compared with at the tokens of the loss
    distribution: Callable[[SFTBatch], Teaching]


def sft_terms(config: SFTConfig, frozen: Callable[[str], Model]) -> list[SFTTerm]:
    """The terms that features add. A feature offers `sft_terms.sft_term_of` with these arguments,
    an `SFTTerm` or None. `frozen`: role -> the model of that role, which does not train."""
    terms = [sft_term_of(config, frozen) for sft_term_of in hooks("sft_terms.sft_term_of")]
    return [term for term in terms if term is not None]


def sft_loss(
    model: Model,
    batch: SFTBatch,
    num_tokens: Tensor,
    sums: MetricSums,
    terms: Sequence[SFTTerm] = (),
) -> Tensor:
    """Sum of `-log p(token)` over the batch's `loss_mask`, divided by `num_tokens` of the whole
    optimizer step. With `terms`, the weighted sum of that and of their divergences."""
    teachings = [term.distribution(batch) for term in terms]
    # (N,) tokens of the mask
    logprobs, _, *divergences = model(
        batch.input_ids, batch.loss_mask, teachings=teachings, given=batch.given
    )
    sums.add_mean("loss", -logprobs.detach())
    if len(sums.sources) > 1:
        assert batch.data_sources is not None
        of_tokens = batch.data_sources.repeat_interleave(batch.loss_mask.sum(dim=1))  # (N,)
        sums.add_by_source("loss", -logprobs, of_tokens)
    share_of_cross_entropy = 1 - sum(term.share for term in terms)
    loss = -share_of_cross_entropy * logprobs.sum()
    for term, divergence in zip(terms, divergences, strict=True):
        sums.add_mean(term.metric, divergence.detach())
        loss = loss + term.share * divergence.sum()
    return loss / num_tokens


def with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Add `perplexity = exp(loss)`."""
    return {**metrics, "perplexity": math.exp(min(metrics["loss"], 700.0))}


def sft_objective(
    pad_id: int,
    train_on_prompt: bool,
    device: torch.device,
    terms: Sequence[SFTTerm] = (),
    given_source: GivenSource | None = None,
) -> Objective[SFTBatch]:
    """Mean cross entropy over the tokens of the answers, with the `terms` of features.
    `given_source`: of what stands in place of the embeddings of some ids."""
    given_for = None
    if given_source is not None:
        given_for = given_source.for_rows
    headline = (*(term.metric for term in terms), "loss")
    return Objective(
        collator_on_device(collate_sft, device, pad_id, train_on_prompt, given_for),
        lambda batch: batch.loss_mask,
        partial(sft_loss, terms=terms),
        headline,
        summary=with_perplexity,
    )


def further_engines(
    config: SFTConfig, folders: Mapping[str, str], given_sources: Mapping[str, GivenSource]
) -> dict[str, Engine]:
    """The engines of the models that features add, by role.

    Args:
        config: the flags.
        folders: role -> folder of the model.
        given_sources: role -> where that comes from which the model gets in place of the embeddings
            of some ids.
    """
    engines = {}
    for model in config.further_models:
        folder = folders[model.role]
        policy, ds_config = frozen_policy(config, model, folder, config.fit.zero_stage)
        policy.given_source = given_sources.get(model.role)
        apply_memory_flags(policy, config.memory)
        engine = eval_engine(policy, ds_config)
        select_kernels(engine)
        engines[model.role] = engine
    return engines


def train_sft(config: SFTConfig) -> dict[str, Any]:
    """Run step 1; returns the contents of `result.json`."""
    fit = config.fit
    run_flags = config.run
    run = begin_supervised_run(config, "SFT", "step 1: supervised fine-tuning")
    changes = changes_to_train(config, dropout=fit.dropout)
    model = PolicyModel(load_causal_lm(run.model_folder, run_flags.dtype, run.ds_config, changes))
    apply_memory_flags(model, config.memory, fit.gradient_checkpointing)
    given_sources = given_sources_of_run(run)
    model.given_source = given_sources.get("model")
    further = further_engines(config, run.further_folders, given_sources)
    terms = sft_terms(config, further.__getitem__)
    objective = sft_objective(
        filler_id(run.tokenizer),
        config.sft.train_on_prompt,
        run.device,
        terms,
        model.given_source,
    )
    trainer = SupervisedTrainer(model, run.ds_config, run.rows, objective, config, run.nonfinite)
    if terms:
        require_whole_distributions([trainer.engine, *further.values()])
    words = ["--model", str(run.output), *words_of_features(config, "chat")]
    next_command = tool_command("chat", words)
    return train_and_save(trainer, run, next_command, further)
