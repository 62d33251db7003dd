"""What a run does about NaN and infinity: stop, or skip the update (`--on_nonfinite`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from dschat_ppo.common.logging import logger
from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.engine.skip_update import StepResult
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.nonfinite.repro_bundle import FailureContext, ReproBundles


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
