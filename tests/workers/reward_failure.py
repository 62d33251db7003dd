"""A problem that rank 1 alone has: each rank writes into OUT/RANK what it was told, and a function's scores."""

import sys
from pathlib import Path

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.launch import leave
from dschat_ppo.rewards.failure import RewardServiceError, agree_on_failure
from dschat_ppo.rewards.functions import FunctionReward, parse_function
from dschat_ppo.rewards.mixture import RewardMixture
from dschat_ppo.rewards.request import RewardRequest
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
        agree_on_failure(problem)
    except RewardServiceError as failure:
        return str(failure)
    return "none"


def mixed() -> str:
    mixture = RewardMixture([(AwayOnOneRank(), 1.0), (Collective(), 1.0)])
    try:
        return str(mixture(RewardRequest([""], [""], [{}]), Rollout(*torch.zeros(6, 1, 1))))
    except RewardServiceError as failure:
        return str(failure)


if __name__ == "__main__":
    dist.init()
    first = told(None)
    second = told("the service é is away" if dist.rank() == 1 else None)
    function = FunctionReward(parse_function("exact_match"), 2, 20.0, 0.0)
    scores = function(RewardRequest(["", ""], ["no", "yes"], [{"answer": "yes"}] * 2), None)
    function.close()
    lines = [first, second, mixed(), str(scores.tolist())]
    (Path(sys.argv[-1]) / str(dist.rank())).write_text(" / ".join(lines), encoding="utf-8")
    dist.shutdown()
    leave(0)
