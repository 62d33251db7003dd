"""Rewards from a reward model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import print_line
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.data.batches import right_padded
from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import MESSAGES, TOOLS, VARIABLES, Example
from dschat_ppo.errors import UserError
from dschat_ppo.features import hooks
from dschat_ppo.models.given_embeddings import GivenEmbeddings, compared_keys
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.micro_batches import common_beginnings, even_passes, share_prompts
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.models.wrapped_models import given_for
from dschat_ppo.rewards.reward_source import RewardRequest, raise_on_any_rank
from dschat_ppo.types import Model, Rollout, full_sequences, last_contexts

BATCH_TOKENS = 16384
# keys of the model's config, written by step 2
STATISTICS: tuple[str, ...] = ("reward_mean", "reward_std")


@dataclass(frozen=True)
class TokenScoring:
    """How the score of a response comes from the scores of some of its tokens, in place of that at
    the last token. A feature offers one as `scoring.scoring_of`, with the arguments of
    `token_scoring`; the entries of the model's config that it needs are its
    `scoring.SAVED_ENTRIES`.

    Attributes:
        mask: (responses, input_ids, lengths) -> (B, T) bool, True at the tokens that count, at
            least one of each row. `input_ids` (B, T), right-padded, end with the responses after
            `lengths` (B,) tokens. `responses` are their ids; a row that lost its start may hold
            only the end of its response.
        reduce: (scores (B, T), mask) -> (B,) fp32.
    """

    mask: Callable[[Sequence[list[int]], Tensor, Tensor], Tensor]
    reduce: Callable[[Tensor, Tensor], Tensor]


@dataclass(eq=False)
class ModelReward:
    """Scores with a reward model."""

    engine: Model  # around a `ScalarModel`, or the model itself
    batch_tokens: int = BATCH_TOKENS  # most tokens of a forward pass when called as a reward source
    scoring: TokenScoring | None = None  # None takes the score at the last token
    # encodes texts again, for another vocabulary than the actor's
    reward_tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int = sys.maxsize  # with `reward_tokenizer`, longer sequences lose their start
    # mean and standard deviation by which scores are standardised
    moments: tuple[float, float] | None = None
    name = "model"

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32. Collective: all ranks run equally many passes, and raise `RewardServiceError`
        if the tokenizer or the template of the reward model rejects a row of one. Of a row with
        several contexts, the last one is scored."""
        rollout = last_contexts(rollout)
        responses = list[list[int]]()
        if self.reward_tokenizer is None:
            input_ids, lengths = full_sequences(rollout)
            if self.scoring is not None:
                rows = zip(rollout.response_ids, rollout.real_mask, strict=True)
                responses = [ids[mask].tolist() for ids, mask in rows]
        else:
            sequences, responses = self._encoded_again(self.reward_tokenizer, request, rollout)
            input_ids, lengths = right_padded(sequences, filler_id(self.reward_tokenizer))
            device = rollout.response_ids.device
            input_ids = input_ids.to(device)
            lengths = lengths.to(device)
        given_embeddings = None
        if self.reward_tokenizer is None:
            given_embeddings = given_for(self.engine, rollout)
        scores = scores_in_batches(
            self.engine,
            input_ids,
            lengths,
            self.batch_tokens,
            self.scoring,
            responses,
            given_embeddings,
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
    flags: HasFeatures,
    batch_tokens: int,
    standardise: bool = False,
) -> ModelReward:
    """The reward model in `folder` as a reward source. `tokenizer` is the actor's;
    `reward_tokenizer` the reward model's if its vocabulary differs. `flags`: by which features may
    change how a response is scored. `standardise`: by the moments of its scores on the evaluation
    data of step 2."""
    config = load_config(folder, "--reward_model_name_or_path")
    scoring = token_scoring(flags, config, folder, reward_tokenizer or tokenizer)
    moments = None
    if standardise:
        moments = saved_statistics(config, folder)
    max_length = most_tokens(config)
    return ModelReward(engine, batch_tokens, scoring, reward_tokenizer, max_length, moments)


def token_scoring(
    flags: HasFeatures,
    model_config: PretrainedConfig,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
) -> TokenScoring | None:
    """How a feature scores responses by the reward model in `folder`, whose rows `tokenizer`
    encodes; None if no flag of one asks for it. `UserError` if the model does not fit."""
    for scoring_of in hooks("scoring.scoring_of"):
        scoring: TokenScoring | None = scoring_of(flags, model_config, folder, tokenizer)
        if scoring is not None:
            return scoring
    return None


@torch.no_grad()
def scores_in_batches(
    engine: Model,
    input_ids: Tensor,
    lengths: Tensor,
    batch_tokens: int,
    scoring: TokenScoring | None = None,
    responses: Sequence[list[int]] = (),
    given: GivenEmbeddings | None = None,
) -> Tensor:
    """Scores at the last tokens, or those of `scoring`, (B,) fp32, in passes over right-padded rows
    of similar length. Collective: all ranks run equally many passes. `input_ids` (B, T), B above 0;
    `batch_tokens` counts padding, and a longer sequence gets its own pass; `scoring` needs the ids
    of the B responses; `given` is in place of the embeddings of some ids, and does not go with rows
    that ranks share."""
    mask = None  # (B, T)
    if scoring is not None:
        mask = scoring.mask(responses, input_ids, lengths)
    if dist.ranks_of_row() > 1:  # these ranks score their rows together
        longest = int(dist.all_reduce(lengths.max(), "max"))

        def rows_of_all_ranks(rows: Tensor) -> Tensor:
            rows = rows[:, :longest]
            padded = torch.nn.functional.pad(rows, (0, longest - rows.shape[1]))
            return dist.gather_row_cat(padded)

        input_ids = rows_of_all_ranks(input_ids)
        lengths = dist.gather_row_cat(lengths)
        if mask is not None:
            mask = rows_of_all_ranks(mask)
    scores = torch.empty(len(lengths), device=input_ids.device)
    prompts = None
    if share_prompts(engine):
        prompts = common_beginnings(compared_keys(input_ids, given), lengths)[1]
    for rows in even_passes(lengths, batch_tokens, prompts)[0]:
        heartbeat()
        width = int(lengths[rows].max())
        ids_of_pass = input_ids[rows, :width]
        given_of_pass = None
        if given is not None:
            given_of_pass = given.of_rows(rows, width)
        if scoring is None or mask is None:
            last = engine(ids_of_pass, lengths[rows], last_only=True, given=given_of_pass)
            scores[rows] = last.float()
        else:
            values = engine(ids_of_pass, lengths[rows], given=given_of_pass)  # (b, width)
            scores[rows] = scoring.reduce(values, mask[rows, :width])
    return scores.chunk(dist.ranks_of_row())[dist.rank_in_row()]


def saved_entries() -> tuple[str, ...]:
    """Keys of the config of a reward model that describe its scores, which step 2 writes."""
    entries = STATISTICS
    for of_feature in hooks("scoring.SAVED_ENTRIES"):
        entries += of_feature
    return entries


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
