"""Episodes with any engine: all actions of a turn are generated together, each after a prefill of
its whole history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.rollout.continuous_batching import MaxOverRanks, Turns
from dschat_ppo.types import FinishReason, PromptBatch, Rollout


class Sample(Protocol):
    """`generate` for one response to each prompt of a batch."""

    def __call__(
        self, prompts: PromptBatch, seeds: Tensor, limits: Tensor, drawn: Tensor
    ) -> Rollout: ...


@dataclass(eq=False)
class Episode:
    """What an episode has so far."""

    history: Tensor  # (tokens,) int64, prompt, actions and observations
    mask: Tensor  # (R,) bool, True for tokens of the policy
    logprobs: Tensor  # (R,) fp32; 0 for observations
    limit: int  # most tokens after the prompt
    finish_reason: int = FinishReason.LENGTH

    @property
    def length(self) -> int:
        """Tokens after the prompt."""
        return len(self.mask)

    def act(self, ids: Tensor, logprobs: Tensor) -> None:
        """Append an action, (tokens,) each."""
        self.history = torch.cat([self.history, ids])
        self.mask = torch.cat([self.mask, torch.ones_like(ids, dtype=torch.bool)])
        self.logprobs = torch.cat([self.logprobs, logprobs])

    def observe(self, ids: list[int]) -> None:
        """Append an observation."""
        self.history = torch.cat([self.history, self.history.new_tensor(ids)])
        self.mask = torch.cat([self.mask, self.mask.new_zeros(len(ids))])
        self.logprobs = torch.cat([self.logprobs, self.logprobs.new_zeros(len(ids))])


def generate_turn_by_turn(
    sample: Sample,
    starts: PromptBatch,
    seeds: Tensor,
    limits: list[int],
    max_over_ranks: MaxOverRanks,
    cancelled: Callable[[], bool],
    turns: Turns,
) -> Rollout:
    """Play the episodes that begin with `starts` (n, P), with `seeds` (n,) and at most `limits`
    (n) tokens each after the prompt. Collective if forward passes are."""
    episodes = []
    for ids, mask, limit in zip(starts.prompt_ids, starts.prompt_mask, limits, strict=True):
        nothing = ids.new_empty(0)
        episodes.append(Episode(ids[mask], nothing.bool(), nothing.float(), limit))
    prompt_lengths = [len(episode.history) for episode in episodes]

    acting = list(range(len(episodes)))
    while max_over_ranks(int(len(acting) > 0 and not cancelled())):
        rows = acting or [0]  # a rank without episodes makes the passes of the others
        left = [episodes[row].limit - episodes[row].length for row in rows]
        if not acting:
            left = [1]
        drawn = [int(episodes[row].mask.sum()) for row in rows]
        actions = sample(
            left_padded([episodes[row].history for row in rows]),
            seeds[rows],
            torch.tensor(left, device=seeds.device),
            torch.tensor(drawn, device=seeds.device),
        )
        if not acting or cancelled():
            continue
        asked = []
        for index, row in enumerate(rows):
            episode = episodes[row]
            mask = actions.response_mask[index]
            ids = actions.response_ids[index][mask]
            episode.act(ids, actions.rollout_logprobs[index][mask])
            episode.finish_reason = int(actions.finish_reason[index])
            if episode.finish_reason == FinishReason.LENGTH:
                turns.cut(row, episode.length - 1)
            else:
                turns.end_turn(row, ids.tolist(), episode.length - 1)
                asked.append(row)
        acting = []
        while asked and not cancelled():
            for row, observation in turns.observed(True):
                asked.remove(row)
                episode = episodes[row]
                if observation and episode.length + len(observation) < episode.limit:
                    episode.observe(observation)
                    acting.append(row)
                elif observation:
                    episode.finish_reason = FinishReason.LENGTH
                    turns.stop(row)

    mask = pad_sequence([episode.mask for episode in episodes], batch_first=True)
    responses = [
        episode.history[length:] for episode, length in zip(episodes, prompt_lengths, strict=True)
    ]
    lengths = torch.tensor([episode.length for episode in episodes], device=seeds.device)
    has_observations = bool((lengths != mask.sum(dim=1)).any())
    reasons = [episode.finish_reason for episode in episodes]
    return Rollout(
        prompt_ids=starts.prompt_ids,
        prompt_mask=starts.prompt_mask,
        response_ids=pad_sequence(responses, batch_first=True),
        response_mask=mask,
        rollout_logprobs=pad_sequence([episode.logprobs for episode in episodes], batch_first=True),
        finish_reason=torch.tensor(reasons, dtype=torch.int8, device=seeds.device),
        episode_lengths=lengths if has_observations else None,
    )


def left_padded(rows: list[Tensor]) -> PromptBatch:
    """Rows of ids (length,) as a batch."""
    reversed_ids = [row.flip(0) for row in rows]
    reversed_masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    ids = pad_sequence(reversed_ids, batch_first=True).flip(1)
    mask = pad_sequence(reversed_masks, batch_first=True).flip(1)
    return PromptBatch(ids, mask)
