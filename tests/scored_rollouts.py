"""Rollouts to score, and the scores of sequences one at a time."""

import torch

from dschat_ppo.rewards.reward_source import RewardRequest
from dschat_ppo.types import Rollout


@torch.no_grad()
def alone(engine, rows: list[list[int]]) -> list[float]:
    """The head's output at the last token of each sequence, one at a time without padding."""
    states = [engine.backbone(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
    return [float(engine.classifier.score(state)) for state in states]


def request(*rows) -> RewardRequest:
    """Rows of (prompt, response, data row)."""
    return RewardRequest.of(*map(list, zip(*rows, strict=True)))


def rollout_of(prompts: list[list[int]], answers: list[list[int]]) -> Rollout:
    """Prompts with padding 99 before them, and answers with padding 98 after them."""
    left, right = (max(map(len, rows)) for rows in (prompts, answers))
    return Rollout(
        prompt_ids=torch.tensor([[99] * (left - len(row)) + row for row in prompts]),
        prompt_mask=torch.tensor(
            [[False] * (left - len(row)) + [True] * len(row) for row in prompts]
        ),
        response_ids=torch.tensor([row + [98] * (right - len(row)) for row in answers]),
        response_mask=torch.tensor(
            [[True] * len(row) + [False] * (right - len(row)) for row in answers]
        ),
        rollout_logprobs=torch.zeros(len(answers), right),
        finish_reason=torch.zeros(len(answers)),
    )
