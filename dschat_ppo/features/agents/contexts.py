"""The sequences that the engine generates for an episode become one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.types import FinishReason, PromptBatch, Rollout, pad_rows, to_device


def rows_of_episodes(
    sequences: Rollout, episodes: Sequence[int], places: Sequence[int], prompts: PromptBatch
) -> Rollout:
    """The rows of B episodes: the sequences of an episode are the contexts of its row.

    The prompt of the first one is that of the row; prompts of the others are tokens that nobody
    chose. A sequence without a chosen token is left out. The row ends for the reason of its last
    context. An episode without any has its prompt of `prompts`, no token after it, and is cut.

    Args:
        sequences: S of them, each with its prompt. Columns of features are not kept.
        episodes: of each sequence the index of its row; -1 for one that is in no row.
        places: of each sequence its place in the episode: contexts stand in ascending order.
        prompts: of the B rows.

    Returns:
        B rows with `contexts` and `episode_lengths`, on the device of the sequences.
    """
    host = to_device(sequences, "cpu")
    default_prompts = to_device(prompts, "cpu")
    sequences_of_rows: list[list[int]] = [[] for _ in default_prompts.prompt_ids]
    for sequence in sorted(range(len(places)), key=places.__getitem__):
        if episodes[sequence] >= 0 and host.response_mask[sequence].any():
            sequences_of_rows[episodes[sequence]].append(sequence)

    row_prompts = []
    reasons = []
    tokens = []
    for row, of_row in enumerate(sequences_of_rows):
        if of_row:
            row_prompts.append(_unpadded_prompt(host, of_row[0]))
            reasons.append(int(host.finish_reason[of_row[-1]]))
        else:
            row_prompts.append(_unpadded_prompt(default_prompts, row))
            reasons.append(int(FinishReason.LENGTH))
        tokens.append(_joined_contexts(host, of_row))
    masks = [torch.ones_like(prompt, dtype=torch.bool) for prompt in row_prompts]
    rows = Rollout(
        prompt_ids=pad_sequence(row_prompts, batch_first=True, padding_side="left"),
        prompt_mask=pad_sequence(masks, batch_first=True, padding_side="left"),
        response_ids=pad_sequence([of_row.ids for of_row in tokens], batch_first=True),
        response_mask=pad_sequence([of_row.is_chosen for of_row in tokens], batch_first=True),
        rollout_logprobs=pad_sequence([of_row.logprobs for of_row in tokens], batch_first=True),
        finish_reason=torch.tensor(reasons, dtype=torch.int8),
        contexts=pad_sequence([of_row.contexts for of_row in tokens], batch_first=True),
        episode_lengths=torch.tensor([len(of_row.ids) for of_row in tokens]),
    )
    rows = pad_rows(rows, rows.prompt_ids.shape[1], max(1, rows.response_ids.shape[1]))
    return to_device(rows, sequences.response_ids.device)


@dataclass(frozen=True)
class _RowTokens:
    """The n tokens after the prompt of a row: columns (n,) of a `Rollout`."""

    ids: Tensor
    is_chosen: Tensor
    logprobs: Tensor
    contexts: Tensor


def _joined_contexts(sequences: Rollout, of_row: list[int]) -> _RowTokens:
    """The tokens of a row whose contexts are the sequences `of_row`."""
    ids = [torch.zeros(0, dtype=torch.int64)]
    is_chosen = [torch.zeros(0, dtype=torch.bool)]
    logprobs = [torch.zeros(0)]
    contexts = [torch.zeros(0, dtype=torch.int16)]
    for context, sequence in enumerate(of_row):
        if context > 0:
            prompt = _unpadded_prompt(sequences, sequence)
            ids.append(prompt)
            is_chosen.append(torch.zeros(len(prompt), dtype=torch.bool))
            logprobs.append(torch.zeros(len(prompt)))
            contexts.append(torch.full((len(prompt),), context, dtype=torch.int16))
        length = int(sequences.response_lengths[sequence])
        mask = sequences.response_mask[sequence, :length]
        ids.append(sequences.response_ids[sequence, :length])
        is_chosen.append(mask)
        logprobs.append(sequences.rollout_logprobs[sequence, :length].where(mask, 0.0))
        contexts.append(torch.full((length,), context, dtype=torch.int16))
    return _RowTokens(
        torch.cat(ids), torch.cat(is_chosen), torch.cat(logprobs), torch.cat(contexts)
    )


def _unpadded_prompt(batch: PromptBatch | Rollout, row: int) -> Tensor:
    """The ids (n,) of a prompt, without padding."""
    return batch.prompt_ids[row][batch.prompt_mask[row]]
