"""What a rollout gets before its update: scores of the reward sources, log-probs of actor and
reference, values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.divergence import Divergence
from dschat_ppo.algorithms.kl import KL_ESTIMATORS
from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.common.progress import report_phase
from dschat_ppo.config.on_policy import OldLogprobs
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.prompt_contents import (
    TEXT_ALONE,
    PromptContent,
    prompt_content,
    readable_prompts,
    shown_prompts,
    shown_row,
    unpadded_ids,
)
from dschat_ppo.features import hooks
from dschat_ppo.models.micro_batches import (
    even_passes,
    pack_rows,
    padded_contexts,
    share_prompts,
)
from dschat_ppo.models.step_passes import StepPasses, on_host
from dschat_ppo.models.wrapped_models import Teaching, response_logprobs, response_values
from dschat_ppo.ppo.mini_dataset import gather_rows, prompts_of
from dschat_ppo.ppo.response_texts import response_texts
from dschat_ppo.ppo.rollouts import RolloutExtension
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.rewards.reward_source import FailedRows, RewardMixture, RewardRequest
from dschat_ppo.types import (
    ForbiddenTokens,
    ForwardedRollout,
    Model,
    Rollout,
    concat_rows,
    last_contexts,
    row_lengths,
    row_sequences,
    select_rows,
    with_columns,
)


@dataclass(eq=False)
class RewardRequests:
    """What the reward sources score: responses as text, with the data rows of their prompts."""

    mixture: RewardMixture  # scores them
    prompts: Dataset  # token rows, with the data row of each as JSON
    tokenizer: PreTrainedTokenizerBase
    extensions: Sequence[RolloutExtension] = ()  # of the features
    _has_counted: bool = False  # whether `count_failed_rows` was called

    def request(self, rollout: Rollout, indices: list[int], steps_done: int) -> RewardRequest:
        """The request that the sources receive, for responses to the prompts at `indices`: equally
        many to each, one prompt after another. `steps_done`: finished PPO steps.

        Prompts keep the special tokens of a chat template, but not the actor's BOS. Responses lose
        the EOS that ended them. Of a row with several contexts, they see the last one.
        """
        samples = len(rollout.response_ids) // len(indices)
        rows = list[dict[str, Any]]()
        contents = list[PromptContent]()
        for index in indices:
            record = self.prompts[index]
            content = prompt_content(record)
            contents += [content] * samples
            rows += [shown_row(json.loads(record["row"]), content)] * samples
        groups = [group for group in range(len(indices)) for _ in range(samples)]

        def decode() -> tuple[list[str], list[ResponseText]]:
            scored = last_contexts(rollout)
            contents_of_prompts = contents
            if scored is not rollout:  # the prompts of later contexts hold text alone
                counts = row_sequences(rollout).rows.bincount().tolist()
                contents_of_prompts = [
                    content if count == 1 else TEXT_ALONE
                    for content, count in zip(contents, counts, strict=True)
                ]
            prompts = shown_prompts(
                self.tokenizer, scored.prompt_ids, scored.prompt_mask, contents_of_prompts
            )
            for extension in self.extensions:
                if extension.texts is not None:
                    return prompts, extension.texts(scored, rows)
            return prompts, response_texts(self.tokenizer, scored)

        arguments = [content.arguments for content in contents]
        return RewardRequest(rows, groups, decode, steps_done, arguments)

    def readable_prompts(self, rollout: Rollout, indices: Sequence[int]) -> list[str]:
        """The prompts of a rollout, which are those at `indices`, without special tokens."""
        each = slice(None, None, len(rollout.prompt_ids) // len(indices))
        contents = [prompt_content(self.prompts[index]) for index in indices]
        prompts = unpadded_ids(rollout.prompt_ids[each], rollout.prompt_mask[each])
        return readable_prompts(self.tokenizer, prompts, contents)

    def count_failed_rows(self) -> FailedRows:
        """Responses of all ranks since the last count that a function failed on or that no source
        scored. Collective.

        The first count raises `RewardFunctionError` if a function failed on every response or no
        source scored any: then the function itself or its route is wrong.
        """
        is_first_count = not self._has_counted
        self._has_counted = True
        return self.mixture.count_failed_rows(is_first_count)


@dataclass(frozen=True)
class ScoringPass:
    """A forward pass that a feature adds to those of scoring."""

    name: str  # as the times of a run name it
    # (micro-batch) -> columns of the feature (`FEATURE_COLUMNS`), by name; collective
    columns_of: Callable[[ForwardedRollout], dict[str, Tensor]]


def further_passes(
    config: PPOConfig, frozen: Callable[[str], Model], forbidden_tokens: ForbiddenTokens | None
) -> list[ScoringPass]:
    """The forward passes that features add. A feature offers `passes.pass_of` with these arguments,
    a `ScoringPass` or None.

    Args:
        config: the flags.
        frozen: role -> the model of that role, which does not train.
        forbidden_tokens: of sampling.
    """
    passes = [pass_of(config, frozen, forbidden_tokens) for pass_of in hooks("passes.pass_of")]
    return [each for each in passes if each is not None]


@dataclass(frozen=True)
class ForwardPasses:
    """Adds log-probs, KL and values to rollouts, in micro-batches."""

    actor: Model
    reference: Model | None  # None: no KL is needed
    critic: Model | None  # None: scoring computes no values
    temperature: float  # of sampling; log-probs are computed at it
    micro_batch_tokens: int  # budget of one forward pass
    # "recompute" also gives entropies; with "update", rows have no old log-probs
    old_logprobs: OldLogprobs
    kl_estimator: str  # form of the KL in the reward; "full" needs "recompute"
    forbidden_tokens: ForbiddenTokens | None = None  # of sampling
    further: Sequence[ScoringPass] = ()  # of features
    clock: PhaseClock = field(default_factory=PhaseClock)

    @torch.no_grad()
    def __call__(self, rollout: Rollout, groups: Tensor) -> ForwardedRollout:
        """B rows with the numbers of one forward pass of each model, in eval mode from here on.

        Collective; ranks with fewer micro-batches run their last one again. Ranks that share rows
        run those of all of them together.

        Args:
            rollout: B rows.
            groups: (B,) int64, index of each row's prompt.
        """
        for model in (self.actor, self.reference, self.critic):
            if model is not None:
                model.eval()
        columns = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
        batch = ForwardedRollout(
            **columns,
            old_logprobs=None,
            entropies=None,
            ref_logprobs=None,
            kl=None,
            values=None,
            groups=groups,
        )
        if dist.ranks_of_row() > 1:
            batch = gather_rows(batch, of_group=True)
        prompts = None
        if share_prompts(self.actor, self.reference, self.critic):
            prompts = prompts_of(batch)
        contexts = None
        if not pack_rows(self.actor, self.reference, self.critic):
            contexts = padded_contexts(batch)
        # the last pass may be repeated, so that all ranks run as many
        row_indices, count = even_passes(
            row_lengths(batch), self.micro_batch_tokens, prompts, contexts
        )
        host_batch = on_host(batch)
        micro_batches = [select_rows(batch, indices) for indices in row_indices]
        host_copies = [select_rows(host_batch, indices.cpu()) for indices in row_indices]
        passes = StepPasses(micro_batches, host_copies)
        results: list[ForwardedRollout] = []
        for micro_batch in micro_batches:
            heartbeat()
            results.append(self._forwarded(micro_batch, passes))
            report_phase(len(results), len(micro_batches), "batches")
        order = torch.argsort(torch.cat(row_indices[:count]))  # the order of the rollout
        rank_rows = order.chunk(dist.ranks_of_row())[dist.rank_in_row()]
        return select_rows(concat_rows(results[:count]), rank_rows)

    def _forwarded(self, micro_batch: ForwardedRollout, passes: StepPasses) -> ForwardedRollout:
        """The rows of a micro-batch with what one forward pass of each model gives; every tensor
        is (b, R). The models are in eval mode already."""
        rows = micro_batch
        has_full_kl = self.kl_estimator == "full" and self.reference is not None
        reference = None
        if self.reference is not None:
            with self.clock.part("reference"):
                reference = response_logprobs(
                    self.reference,
                    rows,
                    self.temperature,
                    forbidden_tokens=self.forbidden_tokens,
                    keeps_layer=has_full_kl,
                    pass_rows=passes.pass_rows(self.reference, micro_batch),
                )
        if self.old_logprobs == "recompute":
            teachings = []
            if reference is not None and reference.layer is not None:
                teachings.append(Teaching(reference.layer, Divergence("reverse_kl")))
            with self.clock.part("actor"):
                actor = response_logprobs(
                    self.actor,
                    rows,
                    self.temperature,
                    forbidden_tokens=self.forbidden_tokens,
                    teachings=teachings,
                    pass_rows=passes.pass_rows(self.actor, micro_batch),
                )
            rows = replace(rows, old_logprobs=actor.logprobs, entropies=actor.entropy)
            if has_full_kl:
                rows = replace(rows, kl=actor.divergences[0])
        elif self.old_logprobs == "rollout":
            old_logprobs = torch.where(rows.response_mask, rows.rollout_logprobs, 0.0)
            rows = replace(rows, old_logprobs=old_logprobs)
        if reference is not None:
            rows = replace(rows, ref_logprobs=reference.logprobs)
            if not has_full_kl:
                estimator = KL_ESTIMATORS[self.kl_estimator]
                rows = replace(rows, kl=estimator(rows.policy_logprobs, reference.logprobs))
        for further_pass in self.further:
            with self.clock.part(further_pass.name):
                rows = with_columns(rows, further_pass.columns_of(rows))
        if self.critic is not None:
            with self.clock.part("critic"):
                pass_rows = passes.pass_rows(self.critic, micro_batch)
                rows = replace(rows, values=response_values(self.critic, rows, pass_rows))
        return rows
