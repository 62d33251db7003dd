"""Episodes with any engine: all actions of a turn are generated together, each after a prefill of
its whole history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.rollout.continuous_batching import MaxOverRanks, Turns
from dschat_ppo.rollout.generation_request import RolloutRequest
from dschat_ppo.types import FinishReason, PromptBatch, Rollout

# `generate` for one response to each prompt of a batch
SampleActions = Callable[[RolloutRequest], Rollout]


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
    sample: SampleActions,
    starts: RolloutRequest,
    max_over_ranks: MaxOverRanks,
    cancelled: Callable[[], bool],
    turns: Turns,
) -> Rollout:
    """Play the episodes that begin with the prompts of `starts`, a prompt for each seed, with
    limits of all tokens after the prompt. Collective if forward passes are."""
    episodes = _new_episodes(starts)
    acting = list(range(len(episodes)))
    while max_over_ranks(int(len(acting) > 0 and not cancelled())):
        if not acting:  # make the passes of the other ranks
            sample(_next_actions(episodes, [0], starts.seeds, limits=[1]))
            continue
        limits = [episodes[row].limit - episodes[row].length for row in acting]
        actions = sample(_next_actions(episodes, acting, starts.seeds, limits))
        if cancelled():
            continue
        asked = []
        for index, row in enumerate(acting):
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
        acting = _observe(episodes, asked, cancelled, turns)
    return _rollout_of(episodes, starts.prompts)


def _new_episodes(starts: RolloutRequest) -> list[Episode]:
    """The episodes before their first actions."""
    assert starts.limits is not None
    episodes = []
    for ids, mask, limit in zip(
        starts.prompts.prompt_ids,
        starts.prompts.prompt_mask,
        starts.limits.tolist(),
        strict=True,
    ):
        nothing = ids.new_empty(0)
        episodes.append(Episode(ids[mask], nothing.bool(), nothing.float(), limit))
    return episodes


def _next_actions(
    episodes: list[Episode], rows: list[int], seeds: Tensor, limits: list[int]
) -> RolloutRequest:
    """The next actions of the episodes in some rows, of at most `limits` tokens each. `seeds`: of
    all episodes."""
    drawn = [int(episodes[row].mask.sum()) for row in rows]
    return RolloutRequest(
        left_padded([episodes[row].history for row in rows]),
        seeds[rows],
        torch.tensor(limits, device=seeds.device),
        torch.tensor(drawn, device=seeds.device),
    )


def _observe(
    episodes: list[Episode], asked: list[int], cancelled: Callable[[], bool], turns: Turns
) -> list[int]:
    """Wait for the environments of the episodes in rows `asked`, which is emptied. Returns the rows
    that go on with another action, in the order of their observations."""
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
    return acting


def _rollout_of(episodes: list[Episode], prompts: PromptBatch) -> Rollout:
    """The episodes as a rollout, padded to the longest."""
    device = prompts.prompt_ids.device
    mask = pad_sequence([episode.mask for episode in episodes], batch_first=True)
    responses = [episode.history[len(episode.history) - episode.length :] for episode in episodes]
    lengths = torch.tensor([episode.length for episode in episodes], device=device)
    episode_lengths = None
    if bool((lengths != mask.sum(dim=1)).any()):  # some observed something
        episode_lengths = lengths
    reasons = [episode.finish_reason for episode in episodes]
    return Rollout(
        prompt_ids=prompts.prompt_ids,
        prompt_mask=prompts.prompt_mask,
        response_ids=pad_sequence(responses, batch_first=True),
        response_mask=mask,
        rollout_logprobs=pad_sequence([episode.logprobs for episode in episodes], batch_first=True),
        finish_reason=torch.tensor(reasons, dtype=torch.int8, device=device),
        episode_lengths=episode_lengths,
    )


def left_padded(rows: list[Tensor]) -> PromptBatch:
    """Rows of ids (length,) as a batch."""
    reversed_ids = [row.flip(0) for row in rows]
    reversed_masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    ids = pad_sequence(reversed_ids, batch_first=True).flip(1)
    mask = pad_sequence(reversed_masks, batch_first=True).flip(1)
    return PromptBatch(ids, mask)
