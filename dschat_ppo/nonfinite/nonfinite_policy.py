"""What a run does about NaN and infinity: stop, or skip the update (`--on_nonfinite`); and the check of scores,
log-probs, values and advantages before any update uses them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.engine.optimizer_step import StepResult
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.nonfinite.diagnostics import bad_places
from dschat_ppo.nonfinite.repro_bundle import FailureContext, ReproBundles
from dschat_ppo.types import Experience, ScoredRollout, record_of, tensors_of


class NonFinitePolicy:
    """Stops the run at the first failure, or counts skipped updates; the same on every rank. `bundles` writes a repro
    bundle for each failure, unless it is None."""

    def __init__(self, flags: SafetyFlags, bundles: ReproBundles | None = None):
        self.flags = flags
        self.bundles = bundles
        self._in_a_row = Counter[str]()
        self._skipped = 0
        self._overflows = Counter[str]()

    def handle(self, role: str, step: int, result: StepResult, context: Callable[[], FailureContext]) -> None:
        """Handle the outcome of an optimizer step of `role`. With a fault, collective and with a call of `context`."""
        self._overflows[role] += result.overflow
        if result.applied:
            self.reset(role)
        if result.fault is None:
            return
        fault, failure = result.fault, context()
        details = {
            "role": role,
            "fault": {"kind": fault.kind, "micro_batch": fault.micro_batch, "numbers": fault.numbers},
        }
        problem = f"{role}, step {step}: {fault}; its update was skipped"
        self.report(role, step, fault.rank, problem, failure, details)

    def report(
        self, role: str, step: int, rank: int, problem: str, context: FailureContext, details: dict[str, Any]
    ) -> None:
        """Write a repro bundle of `rank` and count the failure of `role`, or stop the run. Collective. `problem` is the
        message, one line; `context` is this rank's; `details` are further entries of `bundle.pt`."""
        folder = self.bundles.write(step, rank, context, details) if self.bundles else "(no repro bundle)"
        self._in_a_row[role] += 1
        self._skipped += 1
        replay = folder if folder.startswith("(") else f"Replay: python -m dschat_ppo.tools.replay {folder}"
        if self.flags.on_nonfinite == "stop":
            advice = "Lower the learning rate, use --dtype fp32, or --on_nonfinite skip."
            raise NonFiniteError(f"{problem}. {advice} {replay}")
        in_a_row = self._in_a_row[role]
        if in_a_row > self.flags.max_nonfinite_skips:
            raise NonFiniteError(f"{problem}; that makes {in_a_row} in a row (--max_nonfinite_skips). {replay}")
        logger().warning(f"{problem}. {replay}")

    def reset(self, role: str) -> None:
        """Reset the count of consecutive failures of `role`: all its numbers were finite."""
        self._in_a_row[role] = 0

    def metrics(self, *roles: str) -> dict[str, float]:
        """Counts since the start of the run: skipped updates, and fp16 overflows of each role."""
        counts = {f"optim/overflow/{role}": float(self._overflows[role]) for role in roles}
        return {"optim/nonfinite_skipped": float(self._skipped), **counts}

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a resumed run."""
        return {"in_a_row": dict(self._in_a_row), "skipped": self._skipped, "overflows": dict(self._overflows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        self._in_a_row, self._skipped = Counter(state["in_a_row"]), state["skipped"]
        self._overflows = Counter(state["overflows"])


# The role that computes each field, in the order in which they are computed: the first bad field causes the others.
COMPUTED_BY = {
    "scores": "reward", "baselines": "reward", "rollout_logprobs": "actor", "old_logprobs": "actor",
    "entropies": "actor", "ref_logprobs": "reference", "kl": "reference", "values": "critic",
}  # fmt: skip


class FiniteExperience:
    """Decides whether the numbers of an experience are finite: only then it reaches an update.

    Every rank holds the rows and values of all ranks, so all make the same decision without a collective. `models`:
    role -> its engine, or the folder or hub name of a frozen model, to be saved or named in a repro bundle. `undo`
    restores the KL coefficient and the running scale. `in_rank_order`: whether rows are in the order of the ranks that
    generated them.
    """

    def __init__(self, undo: Callable[[], None], policy: NonFinitePolicy, models: dict[str, Any], in_rank_order: bool):
        self.undo = undo
        self.policy = policy
        self.models = models
        self.in_rank_order = in_rank_order

    def __call__(self, experience: Experience, step: int) -> bool:
        """Whether all numbers of an experience of all ranks are finite. Collective if not: the first bad field is then
        reported with the rows and the model that computed it, or a `NonFiniteError` stops the run."""
        places = bad_places(experience)
        if not places:
            self.policy.reset("rows")
            return True
        self.undo()
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
        if isinstance(model, str):  # a hub name stays as it is
            context = FailureContext([rows], {}, model=os.path.abspath(model) if os.path.isdir(model) else model)
        else:
            context = FailureContext([rows], {}, model)
        self.policy.report("rows", step, rank, problem, context, what)
        return False
