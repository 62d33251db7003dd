"""Rewards from a reward model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat_ppo.algorithms.aggregation import StepAggregation, aggregate_steps
from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import print_line
from dschat_ppo.data.batches import right_padded
from dschat_ppo.data.encode import encode_example, step_ends
from dschat_ppo.data.examples import MESSAGES, TOOLS, VARIABLES, Example
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.micro_batches import common_beginnings, even_passes, share_prompts
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.rewards.reward_source import RewardRequest, raise_on_any_rank
from dschat_ppo.types import Model, Rollout, full_sequences

BATCH_TOKENS = 16384
STATISTICS = ("reward_mean", "reward_std")  # keys of the model's config, written by step 2
SEPARATOR = "step_separator"  # key of the config of a process reward model, written by step 2


@dataclass(frozen=True)
class StepScoring:
    """How scores of a response's steps, which `separator` divides, become one, by
    `aggregate_steps`."""

    tokenizer: PreTrainedTokenizerBase
    separator: str
    how: StepAggregation

    def mask(self, responses: Sequence[list[int]], input_ids: Tensor, lengths: Tensor) -> Tensor:
        """(B, T) bool, True at the token that ends each step; for an empty response at the last
        token of its prompt.

        `input_ids` (B, T), right-padded, end with the responses after `lengths` (B,) tokens.
        `responses` are their ids; a row that lost its start may hold only the end of its response.
        """
        mask = torch.zeros(input_ids.shape, dtype=torch.bool)
        for row, (response, length) in enumerate(zip(responses, lengths.tolist(), strict=True)):
            start = length - len(response)  # below 0 if the row lost its start
            ends = [start + end for end in step_ends(self.tokenizer, response, self.separator)]
            ends_in_row = [end for end in ends if end >= 0]
            mask[row, ends_in_row or [length - 1]] = True
        return mask.to(input_ids.device)


@dataclass(eq=False)
class ModelReward:
    """Scores with a reward model."""

    engine: Model  # around a `ScalarModel`, or the model itself
    batch_tokens: int = BATCH_TOKENS  # most tokens of a forward pass when called as a reward source
    # of a response's steps; None takes the score at the last token
    steps: StepScoring | None = None
    # encodes texts again, for another vocabulary than the actor's
    reward_tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int = sys.maxsize  # with `reward_tokenizer`, longer sequences lose their start
    # mean and standard deviation by which scores are standardised
    moments: tuple[float, float] | None = None
    name = "model"

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32. Collective: all ranks run equally many passes, and raise `RewardServiceError`
        if the tokenizer or the template of the reward model rejects a row of one."""
        responses = list[list[int]]()
        if self.reward_tokenizer is None:
            input_ids, lengths = full_sequences(rollout)
            if self.steps is not None:
                rows = zip(rollout.response_ids, rollout.real_mask, strict=True)
                responses = [ids[mask].tolist() for ids, mask in rows]
        else:
            sequences, responses = self._encoded_again(self.reward_tokenizer, request, rollout)
            input_ids, lengths = right_padded(sequences, filler_id(self.reward_tokenizer))
            device = rollout.response_ids.device
            input_ids = input_ids.to(device)
            lengths = lengths.to(device)
        scores = scores_in_batches(
            self.engine, input_ids, lengths, self.batch_tokens, self.steps, responses
        )
        if self.moments is None:
            return scores
        mean, std = self.moments
        return (scores - mean) / std

    def _encoded_again(
        self, tokenizer: PreTrainedTokenizerBase, request: RewardRequest, rollout: Rollout
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The token ids of each prompt with its response, and of the response alone, without a
        final token if the length limit cut it. Chat messages of the row (`_messages`, which data
        preparation adds) are rendered by the template of the reward model's tokenizer, if it has
        one; otherwise the prompt's text is used."""
        episodes = [text.episode for text in request.texts]
        rows = zip(request.prompts, episodes, request.rows, strict=True)
        sequences = list[list[int]]()
        responses = list[list[int]]()
        too_long = 0
        problem = None
        for (prompt, text, row), has_ended in zip(rows, rollout.ended.tolist(), strict=True):
            try:
                encoded = encode_example(tokenizer, _example_to_score(tokenizer, prompt, text, row))
            except UserError as reason:
                problem = f"--reward_model_name_or_path: {reason} (prompt: {prompt[:60]!r})"
                break
            [response] = encoded.answers
            if not has_ended:
                response = response[:-1]
            responses.append(response)
            sequence = encoded.prompt + response
            if len(sequence) > self.max_length:
                too_long += 1
            sequences.append(sequence[-self.max_length :])
        raise_on_any_rank(problem)  # otherwise the other ranks would wait in the forward passes
        if too_long:
            print_line(
                f"warning: rank {dist.rank()}: {too_long} of {len(sequences)} sequences exceed the"
                f" reward model's {self.max_length} tokens (its max_position_embeddings); their"
                " start was cut off"
            )
        return sequences, responses


def _example_to_score(
    tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, row: dict[str, Any]
) -> Example:
    """What the reward model reads: the row's chat messages, if it has a template for them, or the
    prompt's text."""
    messages = row.get(MESSAGES)
    if messages is None or tokenizer.chat_template is None:
        return Example(prompt, [response])
    # The space that some templates write before an answer is not a part of it; thinking that they
    # open is.
    answer = response.removeprefix(" ")
    if prompt.rstrip().endswith("<think>"):
        answer = "<think>\n" + answer
    return Example(messages, [answer], tools=row.get(TOOLS), variables=row.get(VARIABLES))


def model_reward(
    engine: Model,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    reward_tokenizer: PreTrainedTokenizerBase | None,
    how: StepAggregation | None,
    batch_tokens: int,
    standardise: bool = False,
) -> ModelReward:
    """The reward model in `folder` as a reward source. `tokenizer` is the actor's;
    `reward_tokenizer` the reward model's if its vocabulary differs. `how`: of a process reward
    model. `standardise`: by the moments of its scores on the evaluation data of step 2."""
    config = load_config(folder, "--reward_model_name_or_path")
    steps = None
    if how is not None:
        separator = saved_separator(config, folder)
        steps = StepScoring(reward_tokenizer or tokenizer, separator, how)
    moments = None
    if standardise:
        moments = saved_statistics(config, folder)
    return ModelReward(engine, batch_tokens, steps, reward_tokenizer, most_tokens(config), moments)


@torch.no_grad()
def scores_in_batches(
    engine: Model,
    input_ids: Tensor,
    lengths: Tensor,
    batch_tokens: int,
    steps: StepScoring | None = None,
    responses: Sequence[list[int]] = (),
) -> Tensor:
    """Scores at the last tokens, or those of `steps`, (B,) fp32, in passes over right-padded rows
    of similar length. Collective: all ranks run equally many passes. `input_ids` (B, T), B above 0;
    `batch_tokens` counts padding, and a longer sequence gets its own pass; `steps` needs the ids
    of the B responses."""
    step_mask = None  # (B, T)
    if steps is not None:
        step_mask = steps.mask(responses, input_ids, lengths)
    if dist.sequence_ranks() > 1:  # these ranks score their rows together
        longest = int(dist.all_reduce(lengths.max(), "max"))

        def rows_of_all_ranks(rows: Tensor) -> Tensor:
            rows = rows[:, :longest]
            padded = torch.nn.functional.pad(rows, (0, longest - rows.shape[1]))
            return dist.gather_sequence_cat(padded)

        input_ids = rows_of_all_ranks(input_ids)
        lengths = dist.gather_sequence_cat(lengths)
        if step_mask is not None:
            step_mask = rows_of_all_ranks(step_mask)
    scores = torch.empty(len(lengths), device=input_ids.device)
    prompts = None
    if share_prompts(engine):
        prompts = common_beginnings(input_ids, lengths)[1]
    for rows in even_passes(lengths, batch_tokens, prompts)[0]:
        heartbeat()
        width = int(lengths[rows].max())
        if steps is None or step_mask is None:
            scores[rows] = engine(input_ids[rows, :width], lengths[rows], last_only=True).float()
        else:
            values = engine(input_ids[rows, :width], lengths[rows])  # (b, width)
            scores[rows] = aggregate_steps(values, step_mask[rows, :width], steps.how)
    return scores.chunk(dist.sequence_ranks())[dist.sequence_rank()]


def most_tokens(config: PretrainedConfig) -> int:
    """Tokens of the longest row that a model reads: its positions; any number if it names none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def saved_statistics(config: PretrainedConfig, folder: str) -> tuple[float, float]:
    """Mean and standard deviation (not 0) that step 2 saved with the reward model in `folder`."""
    mean, std = map(config.to_dict().get, STATISTICS)
    if mean is None or std is None or not std > 0:
        raise UserError(
            f"--normalize_rewards model: {folder}/config.json has no {' and '.join(STATISTICS)}"
            " above 0; train the reward model with step 2, or use --normalize_rewards running"
        )
    return float(mean), float(std)


def saved_separator(config: PretrainedConfig, folder: str) -> str:
    """Text between the steps of answers that step 2 saved with the process reward model in
    `folder`."""
    separator = config.to_dict().get(SEPARATOR)
    if not separator or not isinstance(separator, str):
        raise UserError(
            f"--process_reward: {folder}/config.json has no {SEPARATOR}; train the reward model"
            " with step 2, --objective process, or omit the flag"
        )
    return separator
