"""Scores, log-probs, values and advantages that are not finite are met before anything learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dschat_ppo.common import dist
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.nonfinite.diagnostics import bad_places
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy, shown_places
from dschat_ppo.nonfinite.repro_bundle import FailureContext
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.types import Experience, ScoredRollout

# Who makes a field, in the order in which they are made: the first bad one is the cause of the others.
MADE_BY = {
    "scores": "reward", "baselines": "reward", "old_logprobs": "actor", "entropies": "actor",
    "ref_logprobs": "reference", "kl": "reference", "values": "critic",
}  # fmt: skip


class FiniteCheck:
    """Makes the experience of a PPO step, unless a number in it is not finite.

    Every rank holds the rows of all ranks, so every rank comes to the same decision without a word.

    Args:
        config: the resolved flags.
        engines: the roles.
        shaping: makes the experience.
        guard: what happens to numbers that are not finite.
    """

    def __init__(self, config: PPOConfig, engines: RLHFEngine, shaping: AdvantageComputation, guard: NonFinitePolicy):
        self.config = config
        self.engines = engines
        self.shaping = shaping
        self.guard = guard

    def experience(self, rows: ScoredRollout, step: int) -> Experience | None:
        """The shaped rows of all ranks; None where the updates of the PPO step are left out, and then nothing that
        adapts has seen them. Collective where a number is bad.

        Raises:
            NonFiniteError: a number is not finite, and the run is to stop.
        """
        places = bad_places(rows)
        if places:
            self._met(rows, places, step, {})
            return None
        before = self.shaping.state_dict()
        made = self.shaping.experience(rows, step)
        places = bad_places(made)
        if places:
            self.shaping.load_state_dict(before)
            self._met(rows, places, step, before)
            return None
        self.guard.reset("rows")
        return made

    def _met(self, rows: ScoredRollout, places: dict[str, list[list[int]]], step: int, shaping: dict[str, Any]) -> None:
        name = next((name for name in MADE_BY if name in places), next(iter(places)))
        numbers = sorted({place[0] for place in places[name]})
        shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        problem = (
            f"PPO step {step}: {name} of {len(numbers)} of {len(rows.scores)} answers are not finite (rows {shown}); "
            "its updates were left out"
        )
        what = {
            "role": MADE_BY.get(name, "shaping"),
            "fault": {"kind": name, "rows": numbers},
            "bad_places": shown_places(places),
        }
        self.guard.report(
            "rows", step, self._rank_of(numbers[0], rows), problem, self._scene(rows, name, shaping), what
        )

    def _rank_of(self, row: int, rows: ScoredRollout) -> int:
        """Who generated a row: they stand in rank order, unless the step was filled in several rounds."""
        return 0 if self.config.algorithm.dynamic_sampling else row * dist.world_size() // len(rows.scores)

    def _scene(self, rows: ScoredRollout, name: str, shaping: dict[str, Any]) -> FailureContext:
        """The rows, and the model that made the field called `name`."""
        maker = MADE_BY.get(name, "shaping")
        engine = {"actor": self.engines.actor, "critic": self.engines.critic}.get(maker)
        frozen = {"reference": self.config.ppo.actor_model_name_or_path, "reward": self.config.reward_folder}
        return FailureContext([rows], {"shaping": shaping}, engine, _absolute(frozen.get(maker)))


def _absolute(model: str | None) -> str | None:
    """A local folder from anywhere; a hub name as it is."""
    return str(Path(model).resolve()) if model is not None and Path(model).is_dir() else model
