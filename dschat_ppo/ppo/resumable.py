"""What a checkpoint holds of step 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dschat_ppo.checkpoint.manager import RankStates, load_saved, log_starts_from_scratch
from dschat_ppo.common import dist
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.writers import JsonLines
from dschat_ppo.ppo.components import PPOComponents
from dschat_ppo.ppo.evaluation import Evaluation
from dschat_ppo.types import Engine


@dataclass(eq=False)
class ResumablePPO:
    """Saves and restores step 3; a `Resumable`."""

    ppo: PPOComponents
    evaluation: Evaluation | None
    health: HealthWatch
    files: Sequence[JsonLines] = ()  # which grow during the run

    @property
    def engines_to_save(self) -> dict[str, Engine]:
        """The actor's engine and, if there is one, the critic's."""
        return self.ppo.engines.trained

    @property
    def position(self) -> tuple[int, int]:
        """Finished PPO steps, and optimizer steps of the one in flight."""
        return self.ppo.state.steps, self.ppo.state.updates

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation was made at this position and is the best so far."""
        best = None
        if self.evaluation is not None:
            best = self.evaluation.best
        return best is not None and self.position == (best[1], 0)

    def shared_state(self) -> dict[str, Any]:
        """The state that all ranks have in common."""
        ppo = self.ppo
        best = None
        early_stop = None
        if self.evaluation is not None:
            best = self.evaluation.best
            early_stop = self.evaluation.early_stop.state_dict()
        return {
            "progress": ppo.state.state_dict(),
            "collector": ppo.collection.state_dict(),
            "advantages": ppo.advantage_computation.state_dict(),
            "entropy_coef": ppo.entropy_coef.state_dict(),
            "health": self.health.state_dict(),
            "nonfinite": ppo.nonfinite.state_dict(),
            **{data.name: data.batches.state_dict() for data in ppo.further_data},
            "best": best,
            "early_stop": early_stop,
            "files": {file.path.name: file.saved_offset() for file in self.files},
        }

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank alone."""
        state: dict[str, Any] = {"sums": self.ppo.state.sums.state_dict()}
        for follower in self.ppo.followers:
            state[follower.state_name] = follower.weights.state_dict()
        return state

    def load_state(self, shared: dict[str, Any], ranks: RankStates) -> None:
        """Restore the `shared_state` of the saved run and the `rank_state` of its ranks."""
        ppo = self.ppo
        ppo.state.load_state_dict(shared["progress"], self._sums_of(ranks), ppo.device)
        for follower in ppo.followers:
            shards_of_ranks = (state.get(follower.state_name) or {} for state in ranks.read_all())
            if not follower.weights.restore(shards_of_ranks):
                log_starts_from_scratch(follower.flag)
        ppo.collection.load_state_dict(shared["collector"], ppo.device)
        ppo.advantage_computation.load_state_dict(shared["advantages"])
        if ppo.config.algorithm.entropy_target is not None:
            load_saved("--entropy_target", shared["entropy_coef"], ppo.entropy_coef.load_state_dict)
        self.health.load_state_dict(shared["health"])
        ppo.nonfinite.load_state_dict(shared["nonfinite"])
        for data in ppo.further_data:
            load_saved(data.flag, shared.get(data.name), data.batches.load_state_dict)
        if self.evaluation is not None and shared["best"] is not None:
            self.evaluation.best = tuple(shared["best"])
        if self.evaluation is not None and shared["early_stop"] is not None:
            self.evaluation.early_stop.load_state_dict(shared["early_stop"])
        for file in self.files:
            file.offset = shared["files"].get(file.path.name, 0)

    def _sums_of(self, ranks: RankStates) -> MetricSums:
        """The metric sums of this rank. On another number of ranks, rank 0 takes the sums of
        all ranks; the others take the same names with nothing counted, so that `reduce` is the same
        collective on every rank."""
        device = self.ppo.device
        if ranks.this_rank is not None:
            return MetricSums.restored([ranks.this_rank["sums"]], device)
        sums = MetricSums.restored([state["sums"] for state in ranks.read_all()], device)
        return sums.scaled(float(dist.is_main()))  # the maxima are those of all ranks on each
