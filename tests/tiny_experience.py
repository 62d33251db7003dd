"""Records of three answers for tests."""

from dataclasses import fields

import torch

from dschat_ppo.types import Experience, ScoredRollout, record_of


def record(kind, mask: torch.Tensor, **changes):
    """A record of `kind` for rows with this response mask (B, R): prompts of one token, and 0 or
    None where `changes` says nothing."""
    rows, zeros = len(mask), torch.zeros(mask.shape)
    made = {field.name: zeros for field in fields(kind)}
    made |= {
        "prompt_ids": torch.ones(rows, 1).long(),
        "prompt_mask": torch.ones(rows, 1).bool(),
        "response_ids": torch.ones(mask.shape).long(),
        "response_mask": mask,
        "loss_mask": mask,
        "finish_reason": torch.zeros(rows, dtype=torch.int8),
        "source_scores": torch.zeros(rows, 1),
        "scores": torch.zeros(rows),
        "groups": torch.arange(rows),
    }
    absent = (
        "entropies selected baselines data_sources row_indices penalised_scores episode_lengths"
        " contexts left_group sampled_mask".split()
    )
    made |= dict.fromkeys(absent) | changes
    return record_of(kind, {name: column for name, column in made.items() if column is not None})


def experience(**changes) -> Experience:
    """Three answers of 3, 0 and 1 tokens."""
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, False]])
    made = {
        "prompt_ids": torch.tensor([[0, 7], [8, 9], [5, 6]]),
        "prompt_mask": torch.tensor([[False, True], [True, True], [True, True]]),
        "response_ids": torch.arange(9).view(3, 3),
        "source_scores": torch.zeros(3, 2),
        "scores": torch.tensor([1.0, 2.0, 3.0]),
    }
    return record(Experience, mask, **{**made, **changes})


def scored(**changes) -> ScoredRollout:
    made = experience(**changes)
    return ScoredRollout(
        **{field.name: getattr(made, field.name) for field in fields(ScoredRollout)}
    )


def with_bad(value: float, *places: tuple[int, ...], shape=(3, 3)) -> torch.Tensor:
    made = torch.zeros(shape)
    for place in places:
        made[place] = value
    return made
