"""Sampling answers: from the flags and the prompts to `rollout.generator.generate`."""

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
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.rollout.cuda_graphs import RolloutGraphs
from dschat_ppo.rollout.generator import GenerationConfig, engine_text, generate
from dschat_ppo.rollout.memory import rows_for_memory
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.rollout.self_check import choose_engine
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria
from dschat_ppo.runtime import stop_requests
from dschat_ppo.types import Rollout, select_rows, to_device

BUSY_ROWS = 64  # answers that a GPU generates in about the time of one


def check_stop_ids(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that `--stop_token_ids` are tokens."""
    for number in ids:
        if number >= len(tokenizer):
            raise UserError(f"--stop_token_ids {number}: the tokenizer has {len(tokenizer)} tokens, numbered from 0")


def end_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end an answer: those that training ends answers with, and the other end tokens of the model's
    generation config if it lists one of these (a config that lists none of them belongs to another tokenizer)."""
    trained = answer_ends(tokenizer)
    listed = model.generation_config.eos_token_id if model.generation_config else None
    others = listed if isinstance(listed, list) and set(trained) & set(listed) else []
    return tuple(dict.fromkeys((*trained, *others)))


def generation_config(flags: PPOFlags, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> GenerationConfig:
    """Sampling parameters, stopping criteria and engine that the flags ask for."""

    def decode(rows: list[list[int]]) -> list[str]:
        return list(tokenizer.batch_decode(rows))

    stopping = StoppingCriteria(
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
        stopping,
        flags.n_samples_per_prompt,
        flags.rollout_rows,
        engine="padded" if flags.rollout_engine == "padded" else "continuous",
    )


def note_few_answers(flags: PPOFlags, device: torch.device) -> None:
    """Log that a PPO step has too few answers to keep a GPU busy: a decode step reads the weights for any number."""
    answers = flags.per_device_generation_batch_size * flags.generation_batches * flags.n_samples_per_prompt
    if device.type == "cuda" and answers < BUSY_ROWS:
        logger().info(
            f"note: a PPO step generates {answers} answers per GPU, which is about as fast as {BUSY_ROWS}; "
            "raise --per_device_generation_batch_size or --generation_batches"
        )


def greedily(config: GenerationConfig) -> GenerationConfig:
    """The same configuration with greedy decoding; log-probs are still computed at the temperature."""
    return replace(config, sampling=replace(config.sampling, top_k=1))


class RolloutGenerator:
    """Samples answers of the actor to the prompts of this rank, which are token rows. Constructing it is collective: it
    checks the generation engine on the model."""

    def __init__(
        self, flags: PPOFlags, hybrid: HybridEngine, prompts: Dataset, tokenizer: PreTrainedTokenizerBase, seed: int,
        device: torch.device,
    ):  # fmt: skip
        self.hybrid = hybrid
        self.prompts = prompts
        self.pad_id = filler_id(tokenizer)
        self.seed = seed
        self.device = device
        self.graphs = RolloutGraphs()
        note_few_answers(flags, device)
        config = generation_config(flags, tokenizer, hybrid.model)
        if len(config.stopping.eos_ids) > 1:
            names = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in config.stopping.eos_ids)
            logger().info(f"rollout: an answer ends with any of {names}")
        if config.sampling.changes_distribution:
            logger().info("note: log-probs, KL and ratios are of the policy before truncation and penalty")
        hybrid.check_division()
        with hybrid.generating() as model:
            self.config = choose_engine(model, config, hybrid.max_over_ranks, self.graphs)
            self.engine_text = engine_text(model, self.config, hybrid.max_over_ranks)

    def generate(self, indices: list[int], step: int, round_number: int = 0, greedy: bool = False) -> Rollout:
        """Answer the prompts at `indices`, this rank's share of a round of a PPO step; as many on every rank.
        Collective.

        Once a stop is requested, this rank stops generating. The caller checks for that and discards the answers. With
        `greedy` each prompt gets one greedy answer instead of sampled ones; `round_number` is that of dynamic sampling.
        """
        config = replace(greedily(self.config), samples=1) if greedy else self.config
        path = (self.seed, step, round_number) if round_number else (self.seed, step)
        return self.answer(
            self.prompts, indices, config, dist.rank() * len(indices) * config.samples, *path,
            cancelled=never if greedy else stop_requests.flag_is_set,
        )  # fmt: skip

    def answer(self, prompts: Dataset, indices: list[int], config: GenerationConfig, first: int, *path: int,
        cancelled: Callable[[], bool] = never,
    ) -> Rollout:  # fmt: skip
        """Answer the prompts at `indices` (at least one). Collective. An answer's seed is derived from `path` (the
        run's seed, the step, ...) and the answer's number over all ranks, which starts at `first`, so the answer does
        not depend on the rank that generates it."""
        own, seeds = len(indices), row_seeds(first, len(indices) * config.samples, *path)
        place, parallel = 0, self.hybrid.parallel
        if parallel is not None:  # the ranks of a group answer the prompts of all of them together
            shares = dist.gather_objects((indices, seeds), parallel.group)
            indices = [index for share, _ in shares for index in share]
            seeds, place = torch.cat([seeds for _, seeds in shares]), parallel.rank
        batch = to_device(collate_prompts(prompts, indices, self.pad_id), self.device)
        with self.hybrid.generating() as model:
            largest = self.hybrid.max_over_ranks
            if parallel is not None and largest is not None and config.rows == 0:  # as many for each rank of a group
                length = batch.prompt_ids.shape[1] + config.stopping.max_new_tokens
                config = replace(config, rows=-largest(-rows_for_memory(model, length)))
            rollout = generate(
                model, batch, seeds.to(self.device), config, largest, cancelled=cancelled, graphs=self.graphs
            )
        if parallel is None:
            return rollout
        rows = torch.arange(own * config.samples, device=self.device)
        return select_rows(rollout, place * len(rows) + rows)
