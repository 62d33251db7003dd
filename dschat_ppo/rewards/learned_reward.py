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
    """How scores of an answer's steps, which `separator` divides, become one, by
    `aggregate_steps`."""

    tokenizer: PreTrainedTokenizerBase
    separator: str
    how: StepAggregation

    def mask(self, answers: Sequence[list[int]], input_ids: Tensor, lengths: Tensor) -> Tensor:
        """(B, T) bool, True at the token that ends each step; for an empty answer at the last token
        of its prompt.

        `input_ids` (B, T), right-padded, end with the answers after `lengths` (B,) tokens.
        `answers` are their ids; a row that lost its start may hold only the end of its answer.
        """
        found = torch.zeros(input_ids.shape, dtype=torch.bool)
        for row, (answer, length) in enumerate(zip(answers, lengths.tolist(), strict=True)):
            start = length - len(answer)
            ends = [start + end for end in step_ends(self.tokenizer, answer, self.separator)]
            found[row, [end for end in ends if end >= 0] or [length - 1]] = True
        return found.to(input_ids.device)


@dataclass(eq=False)
class ModelReward:
    """Scores with a reward model."""

    engine: Model  # around a `ScalarModel`, or the model itself
    batch_tokens: int = BATCH_TOKENS  # most tokens of a forward pass when called as a reward source
    steps: StepScoring | None = None  # of an answer's steps; None takes the score at the last token
    # encodes texts again, for another vocabulary than the actor's
    own: PreTrainedTokenizerBase | None = None
    max_length: int = sys.maxsize  # with `own`, longer sequences lose their start
    # mean and standard deviation by which scores are standardised
    moments: tuple[float, float] | None = None
    name = "model"

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32. Collective: all ranks run equally many passes, and raise `RewardServiceError`
        if the tokenizer or the template of the reward model rejects a row of one."""
        if self.own is None:
            (input_ids, lengths), answers = full_sequences(rollout), list[list[int]]()
            if self.steps is not None:
                rows = zip(rollout.response_ids, rollout.real_mask, strict=True)
                answers = [ids[mask].tolist() for ids, mask in rows]
        else:
            sequences, answers = self._encoded_again(self.own, request, rollout)
            input_ids, lengths = right_padded(sequences, filler_id(self.own))
            device = rollout.response_ids.device
            input_ids, lengths = input_ids.to(device), lengths.to(device)
        scores = scores_in_batches(
            self.engine, input_ids, lengths, self.batch_tokens, self.steps, answers
        )
        return scores if self.moments is None else (scores - self.moments[0]) / self.moments[1]

    def _encoded_again(
        self, own: PreTrainedTokenizerBase, request: RewardRequest, rollout: Rollout
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The token ids of each prompt with its response, and of the response alone, without a
        final token if the length limit cut it. Chat messages of the row (`_messages`, which data
        preparation adds) are rendered by the template of the reward model's tokenizer, if it has
        one; otherwise the prompt's text is used."""
        episodes = [text.episode for text in request.texts]
        rows = zip(request.prompts, episodes, request.rows, strict=True)
        sequences, answers, too_long, problem = list[list[int]](), list[list[int]](), 0, None
        for (prompt, response, row), ended in zip(rows, rollout.ended.tolist(), strict=True):
            try:
                encoded = encode_example(own, _example(own, prompt, response, row))
            except UserError as reason:
                problem = f"--reward_model_name_or_path: {reason} (prompt: {prompt[:60]!r})"
                break
            (answer,) = encoded.answers
            answers.append(answer if ended else answer[:-1])
            sequence = encoded.prompt + answers[-1]
            too_long += len(sequence) > self.max_length
            sequences.append(sequence[-self.max_length :])
        raise_on_any_rank(problem)  # otherwise the other ranks would wait in the forward passes
        if too_long:
            print_line(
                f"warning: rank {dist.rank()}: {too_long} of {len(sequences)} sequences exceed the"
                f" reward model's {self.max_length} tokens (its max_position_embeddings); their"
                " start was cut off"
            )
        return sequences, answers


def _example(
    own: PreTrainedTokenizerBase, prompt: str, response: str, row: dict[str, Any]
) -> Example:
    """What the reward model reads: the row's chat messages, if it has a template for them, or the
    prompt's text."""
    messages = row.get(MESSAGES)
    if messages is None or own.chat_template is None:
        return Example(prompt, [response])
    # The space that some templates write before an answer is not a part of it; thinking that they
    # open is.
    opened = "<think>\n" if prompt.rstrip().endswith("<think>") else ""
    answer = opened + response.removeprefix(" ")
    return Example(messages, [answer], tools=row.get(TOOLS), variables=row.get(VARIABLES))


def model_reward(
    engine: Model,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    own: PreTrainedTokenizerBase | None,
    how: StepAggregation | None,
    batch_tokens: int,
    standardise: bool = False,
) -> ModelReward:
    """The reward model in `folder` as a reward source. `tokenizer` is the actor's; `own` is the
    reward model's if its vocabulary differs. `how`: of a process reward model. `standardise`: by
    the moments of its scores on the evaluation data of step 2."""
    config = load_config(folder, "--reward_model_name_or_path")
    steps = (
        None if how is None else StepScoring(own or tokenizer, saved_separator(config, folder), how)
    )
    moments = saved_statistics(config, folder) if standardise else None
    return ModelReward(engine, batch_tokens, steps, own, most_tokens(config), moments)


@torch.no_grad()
def scores_in_batches(
    engine: Model,
    input_ids: Tensor,
    lengths: Tensor,
    batch_tokens: int,
    steps: StepScoring | None = None,
    answers: Sequence[list[int]] = (),
) -> Tensor:
    """Scores at the last tokens, or those of `steps`, (B,) fp32, in passes over right-padded rows
    of similar length. Collective: all ranks run equally many passes. `input_ids` (B, T), B above 0;
    `batch_tokens` counts padding, and a longer sequence gets its own pass; `steps` needs the B
    answers."""
    step_mask = None if steps is None else steps.mask(answers, input_ids, lengths)  # (B, T)
    if dist.sequence_ranks() > 1:  # these ranks score their rows together
        longest = int(dist.all_reduce(lengths.max(), "max"))

        def joined(part: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(
                part[:, :longest], (0, max(0, longest - part.shape[1]))
            )
            return dist.gather_sequence_cat(padded)

        input_ids, lengths = joined(input_ids), dist.gather_sequence_cat(lengths)
        step_mask = None if step_mask is None else joined(step_mask)
    scores = torch.empty(len(lengths), device=input_ids.device)
    prompts = common_beginnings(input_ids, lengths)[1] if share_prompts(engine) else None
    for part in even_passes(lengths, batch_tokens, prompts)[0]:
        heartbeat()
        width = int(lengths[part].max())
        if steps is None or step_mask is None:
            scores[part] = engine(input_ids[part, :width], lengths[part], last_only=True).float()
        else:
            values = engine(input_ids[part, :width], lengths[part])  # (b, width)
            scores[part] = aggregate_steps(values, step_mask[part, :width], steps.how)
    return scores.chunk(dist.sequence_ranks())[dist.sequence_rank()]


def most_tokens(config: PretrainedConfig) -> int:
    """Tokens of the longest row that a model reads: its positions; any number if it names none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def saved_statistics(config: PretrainedConfig, folder: str) -> tuple[float, float]:
    """Mean and standard deviation (not 0) that step 2 saved with the reward model in `folder`."""
    mean, std = (config.to_dict().get(name) for name in STATISTICS)
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
