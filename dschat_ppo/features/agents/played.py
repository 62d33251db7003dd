"""What is kept of an episode when its agent has ended: in the journal as JSON, and as a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.features.agents.forms import AgentResult
from dschat_ppo.features.agents.record import ContextTokens
from dschat_ppo.types import PromptBatch, Rollout, pad_rows, to_device


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode whose agent has ended. `contexts`: those with a reply that the agent took, in
    order. `finish_reason` and `tools`: of the last one's last call. `result`: None if the agent
    failed, as `problem` says. `counts`: metrics."""

    contexts: list[ContextTokens]
    finish_reason: int
    result: AgentResult | None
    problem: str
    tools: list[Any]
    counts: dict[str, float]

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> PlayedEpisode:
        """The inverse of `asdict`."""
        contexts = list[ContextTokens]()
        for context in value["contexts"]:
            ends = [(index, end) for index, end in context["call_ends"]]
            contexts.append(ContextTokens(**{**context, "call_ends": ends}))
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


def cause_of_failure(cause: str, refusal: str) -> str:
    """Why an agent failed, with the message to its last refused request, if there was one: clients
    often hide it behind a status."""
    if not refusal or refusal in cause:
        return cause
    return f"{cause}; the last request that was refused: {refusal}"


def rows_of_played(episodes: Sequence[PlayedEpisode], prompts: PromptBatch) -> Rollout:
    """The rows (B, R) of episodes. The contexts of an episode follow one another in its row: the
    prompt of the first one is that of the row, and prompts of the others are tokens that nobody
    chose. An episode without any has its prompt of `prompts` (B, P) and no token after it. On the
    device of the prompts, with `contexts` and `episode_lengths`."""
    device = prompts.prompt_ids.device
    own_prompts = to_device(prompts, "cpu")
    row_prompts = list[Tensor]()
    tokens = list[dict[str, Tensor]]()
    for row, episode in enumerate(episodes):
        prompt = own_prompts.prompt_ids[row][own_prompts.prompt_mask[row]]
        if episode.contexts:
            prompt = torch.tensor(episode.contexts[0].prompt_ids)
        row_prompts.append(prompt)
        tokens.append(_tokens_after_prompt(episode))
    masks = [torch.ones_like(prompt, dtype=torch.bool) for prompt in row_prompts]
    columns = dict[str, Tensor]()
    for name in tokens[0]:
        columns[name] = pad_sequence([of_row[name] for of_row in tokens], batch_first=True)
    rows = Rollout(
        prompt_ids=pad_sequence(row_prompts, batch_first=True, padding_side="left"),
        prompt_mask=pad_sequence(masks, batch_first=True, padding_side="left"),
        response_ids=columns["response_ids"],
        response_mask=columns["response_mask"],
        rollout_logprobs=columns["rollout_logprobs"],
        finish_reason=torch.tensor(
            [episode.finish_reason for episode in episodes], dtype=torch.int8
        ),
        contexts=columns["contexts"],
        episode_lengths=torch.tensor([len(of_row["response_ids"]) for of_row in tokens]),
    )
    rows = pad_rows(rows, rows.prompt_ids.shape[1], max(1, rows.response_ids.shape[1]))
    return to_device(rows, device)


def _tokens_after_prompt(episode: PlayedEpisode) -> dict[str, Tensor]:
    """The n tokens after the prompt of a row: columns (n,) of a `Rollout`."""
    ids = list[int]()
    is_chosen = list[bool]()
    logprobs = list[float]()
    contexts = list[int]()
    for context_index, context in enumerate(episode.contexts):
        prompt_ids = list[int]()
        if context_index > 0:
            prompt_ids = context.prompt_ids
        ids += prompt_ids + context.response_ids
        is_chosen += [False] * len(prompt_ids) + context.is_chosen
        logprobs += [0.0] * len(prompt_ids) + context.logprobs
        contexts += [context_index] * (len(prompt_ids) + len(context.response_ids))
    return {
        "response_ids": torch.tensor(ids, dtype=torch.int64),
        "response_mask": torch.tensor(is_chosen, dtype=torch.bool),
        "rollout_logprobs": torch.tensor(logprobs, dtype=torch.float32),
        "contexts": torch.tensor(contexts, dtype=torch.int16),
    }
