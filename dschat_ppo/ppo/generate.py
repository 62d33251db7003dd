"""Where step 3 gets its answers from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.data.collators import collate_prompts
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import filler_id
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.rollout.self_check import choose_engine
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria
from dschat_ppo.runtime import stop_requests
from dschat_ppo.types import Rollout, to_device


def greedily(how: GenerationConfig) -> GenerationConfig:
    """The same with the likeliest token each time; log-probs stay those under the temperature."""
    return replace(how, sampling=replace(how.sampling, top_k=1))


def end_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end an answer: those that answers are trained to end with, and all others of the model's
    generation config if that lists one of them beside others (a config that does not is another tokenizer's)."""
    trained = answer_ends(tokenizer)
    listed = model.generation_config.eos_token_id if model.generation_config else None
    others = listed if isinstance(listed, list) and set(trained) & set(listed) else []
    return tuple(dict.fromkeys((*trained, *others)))


def check_stop_ids(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """`--stop_token_ids` must be tokens.

    Raises:
        UserError: one is not.
    """
    for number in ids:
        if number >= len(tokenizer):
            raise UserError(f"--stop_token_ids {number}: the tokenizer has {len(tokenizer)} tokens, numbered from 0")


def generation_of(flags: PPOFlags, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> GenerationConfig:
    """The flags' sampling, stopping and rows."""

    def decode(rows: list[list[int]]) -> list[str]:
        return list(tokenizer.batch_decode(rows))

    ends = StoppingCriteria(
        flags.max_answer_seq_len,
        end_ids(tokenizer, model),
        tuple(flags.stop_token_ids),
        tuple(flags.stop_strings),
        flags.min_answer_seq_len,
        decode if flags.stop_strings else None,
    )
    sampling = SamplingParameters(flags.temperature, flags.top_p, flags.top_k, flags.min_p, flags.repetition_penalty)
    return GenerationConfig(
        sampling,
        ends,
        flags.n_samples_per_prompt,
        flags.rollout_rows,
        flags.prepack_weights,
        static=None if flags.rollout_graphs else False,
        engine="padded" if flags.rollout_engine == "padded" else "continuous",
    )


class Rollouts:
    """Answers of the actor to prompts of this rank.

    Collective to make: the engine of generation is checked on the model.

    Args:
        flags: of step 3.
        hybrid: the actor.
        prompts: token rows.
        tokenizer: of the actor.
        seed: of the run.
        device: of this rank.
    """

    def __init__(
        self, flags: PPOFlags, hybrid: HybridEngine, prompts: Dataset, tokenizer: PreTrainedTokenizerBase, seed: int,
        device: torch.device,
    ):  # fmt: skip
        self.hybrid = hybrid
        self.prompts = prompts
        self.filler = filler_id(tokenizer)
        self.seed = seed
        self.device = device
        how = generation_of(flags, tokenizer, hybrid.model)
        if len(how.stopping.eos_ids) > 1:
            names = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in how.stopping.eos_ids)
            logger().info(f"rollout: an answer ends with any of {names}")
        if how.sampling.changes_distribution or how.stopping.min_new_tokens:
            logger().info(
                "note: log-probs, KL and ratios are of the policy before truncation, penalty and minimum length"
            )
        with hybrid.generating() as model:
            self.how = choose_engine(model, how, hybrid.max_over_ranks)

    def make(self, indices: list[int], step: int, number: int = 0, greedy: bool = False) -> Rollout:
        """Answer the prompts at `indices`, this rank's share of round `number` of PPO step `step`; collective.

        Once the run is to stop this rank generates no more: who calls this asks whether the run is to stop, and throws
        the answers away then. `greedy` gives one greedy answer to each prompt.
        """
        how = replace(greedily(self.how), samples=1) if greedy else self.how
        path = (self.seed, step, number) if number else (self.seed, step)
        return self.answer(
            self.prompts, indices, how, dist.rank() * len(indices) * how.samples, *path,
            cancelled=never if greedy else stop_requests.noticed,
        )  # fmt: skip

    def answer(self, prompts: Dataset, indices: list[int], how: GenerationConfig, first: int, *path: int,
        cancelled: Callable[[], bool] = never,
    ) -> Rollout:  # fmt: skip
        """Answers to some prompts; collective.

        An answer's seed is made of `path` and its number over all ranks, so that it does not matter which rank
        generates it.

        Args:
            prompts: token rows.
            indices: row numbers, at least one.
            how: sampling and number of answers.
            first: number of the first answer over all ranks.
            path: the run's seed, the step, ...
            given_up: see `generate`.
        """
        batch = to_device(collate_prompts(prompts, indices, self.filler), self.device)
        seeds = row_seeds(first, len(indices) * how.samples, *path)
        with self.hybrid.generating() as model:
            return generate(model, batch, seeds.to(self.device), how, self.hybrid.max_over_ranks, cancelled=cancelled)
