"""Weights that follow those of the actor while it trains. Features keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.features import hooks


class FollowingWeights(Protocol):
    """Weights that each rank holds a shard of."""

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's shards for a checkpoint, by the name of the weight; {} if it holds none."""

    def restore(self, ranks: Iterable[dict[str, Tensor]]) -> bool:
        """Restore from the shards of all ranks of a saved run, which are read one after another.
        If there are none, start from the weights of now, and return False. Collective."""


@dataclass(frozen=True)
class FollowingModel:
    """A model of following weights that a run saves beside the actor.

    Attributes:
        role: the name of its folder; `saved_roles` of the feature's `FlagNotes` has it too.
        state_name: the entry of a checkpoint that holds its shards.
        whole_weights: joins the shards of all ranks to whole fp32 weights, by the shapes of those
            of the actor.
    """

    role: str
    state_name: str
    whole_weights: Callable[
        [Iterable[dict[str, Tensor]], Mapping[str, torch.Size]], dict[str, Tensor]
    ]


@dataclass(frozen=True)
class Follower:
    """Weights that a feature moves after those of the actor.

    Attributes:
        flag: asks for it; for the log.
        state_name: the entry of a checkpoint that holds this rank's shards.
        weights: are saved and restored.
        after_update: called after each update of the actor.
        after_step: called with the number of a PPO step after its updates; returns metrics of that
            step. Collective.
        saved: the model that a run saves of them, and a function that gives its whole weights on
            rank 0, {} on other ranks; collective. None: they are not saved.
    """

    flag: str
    state_name: str
    weights: FollowingWeights
    after_update: Callable[[], None] | None = None
    after_step: Callable[[int], dict[str, float]] | None = None
    saved: tuple[FollowingModel, Callable[[], dict[str, Tensor]]] | None = None


def followers_of_run(config: PPOConfig, engines: RLHFEngine, clock: PhaseClock) -> list[Follower]:
    """What follows the actor of `engines` in a run with these flags; it starts from the weights of
    now. `clock` measures phases. A feature offers followers as
    `followers.followers_of(config, engines, clock)`."""
    followers = []
    for of_feature in hooks("followers.followers_of"):
        followers += of_feature(config, engines, clock)
    return followers


def following_models() -> dict[str, FollowingModel]:
    """Role -> model that a run may save beside the actor. A feature offers them as
    `followers.FOLLOWING_MODELS`."""
    models = {}
    for of_feature in hooks("followers.FOLLOWING_MODELS"):
        for model in of_feature:
            models[model.role] = model
    return models
