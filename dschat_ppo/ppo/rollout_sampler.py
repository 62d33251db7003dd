"""Responses to prompts: sampled by the actor, or what features give in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.engine.hybrid_engine import Division, HybridEngine
from dschat_ppo.models.given_embeddings import GivenSource
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.ppo.generation_settings import generation_config
from dschat_ppo.ppo.rollouts import (
    RolloutExtension,
    RolloutTask,
    any_observes,
    extended,
    own_rollouts,
    prompt_batch,
)
from dschat_ppo.rollout.cache_memory import rows_for_memory
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import engine_text, generate, generate_calls
from dschat_ppo.rollout.partners import CallPartner, Partner, ReservedSequences
from dschat_ppo.rollout.self_check import choose_engine
from dschat_ppo.rollout.static_steps import StepRecorder, new_recorder
from dschat_ppo.types import PromptBatch, Rollout, select_rows, to_device


@dataclass(frozen=True, eq=False)
class ActorGeneration:
    """Generation with the weights of the actor; `recorder`: of its decode steps. Collective."""

    hybrid: HybridEngine
    recorder: StepRecorder | None

    @property
    def source(self) -> GivenSource | None:
        """Of what the actor gets in place of the embeddings of some ids; or None."""
        return self.hybrid.given_source

    def __call__(
        self,
        batch: PromptBatch,
        seeds: Tensor,
        config: GenerationConfig,
        cancelled: Callable[[], bool],
        partner: Partner | None = None,
    ) -> Rollout:
        """Responses to prompts; see `generate`."""
        device = dist.device()
        batch = to_device(batch, device)
        with self.hybrid.generating() as model:
            max_over_ranks = self.hybrid.max_over_ranks
            if self.hybrid.division is not None and max_over_ranks is not None and config.rows == 0:
                # the ranks of a group run as many rows: the fewest that fit on one of them
                length = batch.prompt_ids.shape[1] + config.stopping.max_new_tokens
                fewest = -max_over_ranks(-rows_for_memory(model, length))
                config = replace(config, rows=fewest)
            given_prompts = None
            if self.source is not None:
                given_prompts = self.source.for_prompts(batch, model)
            request = RolloutRequest(batch, seeds.to(device), given=given_prompts)
            return generate(
                model, request, config, max_over_ranks, cancelled, self.recorder, partner
            )

    def answer_calls(
        self,
        reserved: ReservedSequences,
        config: GenerationConfig,
        cancelled: Callable[[], bool],
        partner: CallPartner,
    ) -> tuple[Rollout, list[int]]:
        """The sequences that a partner opens late; see `generate_calls`."""
        with self.hybrid.generating() as model:
            max_over_ranks = self.hybrid.max_over_ranks
            return generate_calls(
                model, reserved, config, partner, max_over_ranks, cancelled, self.recorder
            )


class RolloutSampler:
    """Samples responses of the actor to the prompts of this rank, which are token rows.

    Attributes:
        prompts: the prompts of training.
        config: how responses to them are generated.
        pad_id: any id; padding is masked.
        generate: generation with the weights of the actor.
        given_source: of what the actor gets in place of the embeddings of some ids; or None.
        engine_text: the generation engine, for the log.
        sample_rollout: gives the responses of a task; features wrap it.
    """

    def __init__(
        self,
        flags: PPOFlags,
        hybrid: HybridEngine,
        prompts: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        extensions: Sequence[RolloutExtension] = (),
    ):
        """Choose the generation engine, and check it on the model. This draws random numbers, so
        seeds are set after it. Collective.

        Args:
            flags: how responses are generated.
            hybrid: switches the actor to generation.
            prompts: token rows of training.
            tokenizer: the actor's.
            seed: of the run.
            extensions: what features put around the rollouts.
        """
        self.extensions = extensions
        self.hybrid = hybrid
        self.prompts = prompts
        self.pad_id = filler_id(tokenizer)
        self.seed = seed
        self.device = dist.device()
        self.recorder = new_recorder()
        self.generate = ActorGeneration(hybrid, self.recorder)
        self.given_source = hybrid.given_source
        if self.given_source is not None:
            self.given_source.number_prompts(prompts)
        config = generation_config(flags, tokenizer, hybrid.model, self.given_source)
        if len(config.stopping.eos_ids) > 1:
            names = ", ".join(
                f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in config.stopping.eos_ids
            )
            logger().info(f"rollout: an answer ends with any of {names}")
        if config.sampling.changes_distribution:
            logger().info(
                "note: log-probs, KL and ratios are of the policy before truncation and penalty"
            )
        hybrid.check_division()
        with hybrid.generating() as model:
            self.config = choose_engine(
                model,
                config,
                hybrid.max_over_ranks,
                self.recorder,
                has_partner=any_observes(extensions),
                source=self.given_source,
            )
            self.engine_text = engine_text(model, self.config, hybrid.max_over_ranks)
        sample = own_rollouts(self.generate, self.pad_id, self.given_source)
        if hybrid.division is not None:
            sample = partial(self._sample_together, hybrid.division)
        self.sample_rollout = extended(sample, self.generate, extensions)

    def sample(
        self,
        indices: list[int],
        *path: int,
        purpose: str = "sampled",
        prompts: Dataset | None = None,
        config: GenerationConfig | None = None,
        first: int | None = None,
        cancelled: Callable[[], bool] = never,
        step: int | None = None,
    ) -> Rollout:
        """Sample responses to the prompts at `indices`. Collective.

        Args:
            indices: rows of `prompts`, at least one and as many on every rank.
            path: the PPO step, and what else tells this rollout from others.
            purpose: see `RolloutTask`.
            prompts: token rows; None: those of training.
            config: None: that of training.
            first: index of the first response over all ranks; None: after those of the ranks
                before.
            cancelled: once it returns True, this rank stops generating, and its responses are to be
                discarded.
            step: the PPO step; None: the first of `path`.

        Returns:
            A row for each response, those of one prompt one after another.
        """
        if prompts is None:
            prompts = self.prompts
        if config is None:
            config = self.config
        if first is None:
            first = dist.rank() * len(indices) * config.samples
        if step is None:
            step = path[0]
        task = RolloutTask(
            prompts, indices, config, self.seed, path, first, step, purpose, cancelled
        )
        return self.sample_rollout(task)

    def _sample_together(self, division: Division, task: RolloutTask) -> Rollout:
        """The ranks of a group that divides its layers generate the responses of all of them; each
        rank gets its own."""
        of_ranks = dist.gather_objects((task.indices, task.seeds), division.group)
        group_indices = [index for rank_indices, _ in of_ranks for index in rank_indices]
        group_seeds = torch.cat([rank_seeds for _, rank_seeds in of_ranks])
        batch = prompt_batch(task.prompts, group_indices, self.pad_id, self.given_source)
        rollout = self.generate(batch, group_seeds, task.config, task.cancelled)
        rows = torch.arange(len(task.indices) * task.config.samples, device=self.device)
        return select_rows(rollout, division.rank * len(rows) + rows)
