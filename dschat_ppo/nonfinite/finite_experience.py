"""Check scores, log-probs, values and advantages for NaN and infinity before any update uses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dschat_ppo.common import dist
from dschat_ppo.common.phases import block
from dschat_ppo.nonfinite.diagnostics import bad_places
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy, shown_places
from dschat_ppo.nonfinite.repro_bundle import FailureContext
from dschat_ppo.types import Experience, ScoredRollout

# The role that computes each field, in the order in which they are computed: the first bad field causes the others.
COMPUTED_BY = {
    "scores": "reward", "baselines": "reward", "rollout_logprobs": "actor", "old_logprobs": "actor",
    "entropies": "actor", "ref_logprobs": "reference", "kl": "reference", "values": "critic",
}  # fmt: skip


class Computation(Protocol):
    """The advantage computation, with the state that it adapts."""

    def __call__(self, rows: ScoredRollout, step: int) -> Experience:
        """Experience of the rows."""

    def state_dict(self) -> dict[str, Any]:
        """The adapted state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""


class FiniteExperience:
    """Wraps the advantage computation: experience with a number that is not finite reaches no update.

    Every rank holds the rows and values of all ranks, so every rank makes the same decision without a collective.

    Args:
        compute: the advantage computation.
        policy: handles numbers that are not finite.
        models: role -> its engine, or the folder or hub name of a frozen model; saved or named in a repro bundle.
        in_rank_order: whether rows are in the order of the ranks that generated them.
    """

    def __init__(self, compute: Computation, policy: NonFinitePolicy, models: dict[str, Any], in_rank_order: bool):
        self.compute = compute
        self.policy = policy
        self.models = models
        self.in_rank_order = in_rank_order

    def __call__(self, rows: ScoredRollout, step: int) -> Experience | None:
        """Experience of all ranks; None if the updates of the PPO step are skipped.

        If a number is not finite, the KL coefficient and the running scale keep their state. Collective in that case,
        and if the rows have no values yet.

        Raises:
            NonFiniteError: a number is not finite, and the run is to stop.
        """
        if places := bad_places(rows):
            self._report(rows, places, step, {})
            return None
        before = self.compute.state_dict()
        with block("advantages"):
            experience = self.compute(rows, step)
        if places := bad_places(experience):
            self.compute.load_state_dict(before)
            self._report(replace(rows, values=experience.values), places, step, before)
            return None
        self.policy.reset("rows")
        return experience

    def _report(
        self, rows: ScoredRollout, places: dict[str, list[list[int]]], step: int, state: dict[str, Any]
    ) -> None:
        """Report the first bad field, with the rows and the model that computed it."""
        name = next((name for name in COMPUTED_BY if name in places), next(iter(places)))
        role = COMPUTED_BY.get(name, "shaping")
        numbers, count = sorted({place[0] for place in places[name]}), len(rows.scores)
        shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        problem = (
            f"PPO step {step}: {name} of {len(numbers)} of {count} answers are not finite (rows {shown}); "
            "its updates are skipped"
        )
        what = {"role": role, "fault": {"kind": name, "rows": numbers}, "bad_places": shown_places(places)}
        rank = numbers[0] * dist.world_size() // count if self.in_rank_order else 0
        model = self.models.get(role)
        engine = None if isinstance(model, str) else model
        folder = model if isinstance(model, str) else None
        if folder is not None and Path(folder).is_dir():
            folder = str(Path(folder).resolve())  # the bundle may be moved; a hub name stays as it is
        context = FailureContext([rows], {"shaping": state}, engine, folder)
        self.policy.report("rows", step, rank, problem, context, what)
