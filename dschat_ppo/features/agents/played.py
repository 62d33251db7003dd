"""What is kept of an episode when its agent has ended: in the journal as JSON, and as a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.features.agents.contexts import rows_of_episodes
from dschat_ppo.features.agents.forms import AgentResult
from dschat_ppo.rollout.sequence_buffers import left_padded
from dschat_ppo.types import FinishReason, PromptBatch, Rollout


@dataclass(frozen=True)
class PlayedContext:
    """A context: its prompt, and the n tokens after it, with True on those that the model chose.
    `call_ends`: (index of a call in the episode, index of its last token after the prompt)."""

    prompt_ids: list[int]
    response_ids: list[int]
    is_chosen: list[bool]
    logprobs: list[float]
    call_ends: list[tuple[int, int]]


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode whose agent has ended. `contexts`: those with a reply that the agent took, in
    order. `finish_reason`: of its last call. `result`: None if the agent failed, as `problem` says.
    `tools`: of its last context. `counts`: metrics."""

    contexts: list[PlayedContext]
    finish_reason: int
    result: AgentResult | None
    problem: str
    tools: list[Any]
    counts: dict[str, float]

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> PlayedEpisode:
        """The inverse of `asdict`."""
        contexts = list[PlayedContext]()
        for context in value["contexts"]:
            ends = [(index, end) for index, end in context["call_ends"]]
            contexts.append(PlayedContext(**{**context, "call_ends": ends}))
        result = None
        if value["result"] is not None:
            result = AgentResult(**value["result"])
        return cls(**{**value, "contexts": contexts, "result": result})

    @property
    def json(self) -> dict[str, Any]:
        """The episode as JSON."""
        return asdict(self)

    @property
    def score(self) -> float:
        """The reward of the episode: of its end and of its calls; NaN if there is none."""
        result = self.result
        if result is None or (result.reward is None and result.call_rewards is None):
            return math.nan
        return math.fsum([result.reward or 0.0, *(result.call_rewards or ())])

    def place_rewards(self, rewards: Tensor) -> None:
        """Put the rewards into the episode's row of `rewards` (R,): those of calls on their last
        tokens, the rest on the last token that the model chose."""
        ends = dict[int, int]()  # index of a call -> of its last token in the row
        offset = 0
        for context in self.contexts:
            if context is not self.contexts[0]:
                offset += len(context.prompt_ids)
            for call, end in context.call_ends:
                ends[call] = offset + end
            offset += len(context.response_ids)
        if self.result is None or not ends:
            return
        rewards_of_calls = self.result.call_rewards or []
        for call, reward in zip(sorted(ends), rewards_of_calls, strict=False):
            rewards[ends[call]] += reward
        rewards[max(ends.values())] += self.result.reward or 0.0


def rows_of_played(episodes: Sequence[PlayedEpisode], prompts: PromptBatch) -> Rollout:
    """The rows (B, R) of episodes; `prompts` (B, P) are those of episodes without a reply. On the
    device of the prompts."""
    device = prompts.prompt_ids.device
    contexts = list[PlayedContext]()
    row_indices = list[int]()
    reasons = list[int]()
    for row, episode in enumerate(episodes):
        for context in episode.contexts:
            contexts.append(context)
            row_indices.append(row)
            reasons.append(episode.finish_reason)
    if not contexts:  # a sequence that is in no row
        contexts.append(PlayedContext([0], [0], [False], [0.0], []))
        row_indices.append(-1)
        reasons.append(int(FinishReason.LENGTH))
    batch = left_padded([torch.tensor(context.prompt_ids) for context in contexts])
    chosen = [torch.tensor(context.is_chosen) for context in contexts]
    ids = [torch.tensor(context.response_ids) for context in contexts]
    logprobs = [torch.tensor(context.logprobs) for context in contexts]
    sequences = Rollout(
        prompt_ids=batch.prompt_ids.to(device),
        prompt_mask=batch.prompt_mask.to(device),
        response_ids=pad_sequence(ids, batch_first=True).to(device),
        response_mask=pad_sequence(chosen, batch_first=True).to(device),
        rollout_logprobs=pad_sequence(logprobs, batch_first=True).to(device),
        finish_reason=torch.tensor(reasons, dtype=torch.int8, device=device),
        episode_lengths=torch.tensor([len(each) for each in ids], device=device),
    )
    return rows_of_episodes(sequences, row_indices, range(len(contexts)), prompts)
