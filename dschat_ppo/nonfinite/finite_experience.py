"""Check scores, log-probs, values and advantages for NaN and infinity before any update uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from dschat_ppo.common import dist
from dschat_ppo.nonfinite.diagnostics import bad_places
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import FailureContext
from dschat_ppo.types import Experience, ScoredRollout, record_of, tensors_of

# The role that computes each field, in the order in which they are computed: the first bad field causes the others.
COMPUTED_BY = {
    "scores": "reward", "baselines": "reward", "rollout_logprobs": "actor", "old_logprobs": "actor",
    "entropies": "actor", "ref_logprobs": "reference", "kl": "reference", "values": "critic",
}  # fmt: skip


class Shaping(Protocol):
    """The advantage computation, which adapts to the rows of each PPO step."""

    before: dict[str, Any]  # its state before the last rows

    def undo(self) -> None:
        """Restore that state."""


class FiniteExperience:
    """Decides whether the numbers of an experience are finite: only then it reaches an update.

    Every rank holds the rows and values of all ranks, so all make the same decision without a collective. `models`:
    role -> its engine, or the folder or hub name of a frozen model, to be saved or named in a repro bundle.
    `in_rank_order`: whether rows are in the order of the ranks that generated them.
    """

    def __init__(self, shaping: Shaping, policy: NonFinitePolicy, models: dict[str, Any], in_rank_order: bool):
        self.shaping = shaping
        self.policy = policy
        self.models = models
        self.in_rank_order = in_rank_order

    def __call__(self, experience: Experience, step: int) -> bool:
        """Whether all numbers of an experience of all ranks are finite. Collective if not. Then the KL coefficient and
        the running scale keep their state, and the first bad field is reported with the rows and the model that
        computed it, or a `NonFiniteError` stops the run."""
        places = bad_places(experience)
        if not places:
            self.policy.reset("rows")
            return True
        self.shaping.undo()
        rows = record_of(ScoredRollout, tensors_of(experience))
        name = next((name for name in COMPUTED_BY if name in places), next(iter(places)))
        role = COMPUTED_BY.get(name, "shaping")
        numbers, count = sorted({place[0] for place in places[name]}), len(rows.scores)
        shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        problem = (
            f"PPO step {step}: {name} of {len(numbers)} of {count} answers are not finite (rows {shown}); "
            "its updates are skipped"
        )
        what = {"role": role, "fault": {"kind": name, "rows": numbers}}
        rank = numbers[0] * dist.world_size() // count if self.in_rank_order else 0
        model = self.models.get(role)
        engine = None if isinstance(model, str) else model
        folder = model if isinstance(model, str) else None
        if folder is not None and Path(folder).is_dir():
            folder = str(Path(folder).resolve())  # the bundle may be moved; a hub name stays as it is
        context = FailureContext([rows], {"shaping": self.shaping.before}, engine, folder)
        self.policy.report("rows", step, rank, problem, context, what)
        return False
