"""A failure on rank 1 only: each rank writes the error and a function's scores to OUT/RANK; then failures of a function
on rank 1 only, and on both ranks."""

import sys
from pathlib import Path

import torch

from dschat_ppo.common import dist
from dschat_ppo.rewards.function_reward import FunctionReward, parse_function
from dschat_ppo.rewards.reward_source import (
    CallCounts,
    RewardFunctionError,
    RewardMixture,
    RewardRequest,
    RewardServiceError,
    raise_on_any_rank,
)
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.types import Rollout


class AwayOnOneRank:
    name = "away"

    def __call__(self, request, rollout):
        if dist.rank() == 1:
            raise RewardServiceError("the service é is away")
        return torch.zeros(1)


class Collective:
    name = "collective"

    def __call__(self, request, rollout):
        return dist.all_reduce(torch.ones(1))


def told(problem: str | None) -> str:
    try:
        raise_on_any_rank(problem)
    except RewardServiceError as failure:
        return str(failure)
    return "none"


def mixed() -> str:
    mixture = RewardMixture([(AwayOnOneRank(), 1.0), (Collective(), 1.0)])
    try:
        return str(mixture(RewardRequest.of([""], [""], [{}]), Rollout(*torch.zeros(6, 1, 1))))
    except RewardServiceError as failure:
        return str(failure)


def faults(function: FunctionReward) -> list[str]:
    """No row has the column: on rank 1, then on both ranks."""
    mixture = RewardMixture([(function, 1.0)])
    found, rollout = [], Rollout(*torch.zeros(6, 2, 1))
    function.counts = CallCounts()
    for good_rank in (0, None):
        row = {"answer": "yes"} if dist.rank() == good_rank else {}
        mixture(RewardRequest.of(["", ""], ["no", "yes"], [row] * 2), rollout)
        try:
            found.append(str(mixture.count_failed_rows(refuse_all=True)))
        except RewardFunctionError as failure:
            found.append(str(failure))
    return found


if __name__ == "__main__":
    init_process_group()
    first = told(None)
    second = told("the service é is away" if dist.rank() == 1 else None)
    function = FunctionReward(parse_function("exact_match"), 2, 20.0, 0.0)
    scores = function(RewardRequest.of(["", ""], ["no", "yes"], [{"answer": "yes"}] * 2), None)
    lines = [first, second, mixed(), str(scores.tolist()), *faults(function)]
    function.close()
    (Path(sys.argv[-1]) / str(dist.rank())).write_text(" / ".join(lines), encoding="utf-8")
    dist.shutdown()
    leave(0)
