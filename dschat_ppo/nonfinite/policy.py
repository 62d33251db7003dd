"""What is done about numbers that are not finite: `--on_nonfinite`, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from dschat_ppo.common.logging import logger
from dschat_ppo.config.safety_flags import SafetyFlags
from dschat_ppo.engine.skip_update import StepResult
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.nonfinite.find import bad_places
from dschat_ppo.nonfinite.repro_bundle import FailureContext, ReproBundles

SHOWN_PLACES = 100  # of each field


class NonFinitePolicy:
    """Stops, or counts what is skipped; the same on every rank.

    Args:
        flags: `--on_nonfinite` and `--max_nonfinite_skips`.
        dumps: where what was bad is written; None: nowhere.
    """

    def __init__(self, flags: SafetyFlags, dumps: ReproBundles | None = None):
        self.flags = flags
        self.dumps = dumps
        self._in_a_row = Counter[str]()
        self._skipped = 0
        self._overflows = Counter[str]()

    def judge(self, role: str, step: int, result: StepResult, scene: Callable[[], FailureContext]) -> None:
        """Heed the outcome of an optimizer step. Collective where it has a fault.

        Args:
            role: of the engine.
            step: optimizer step, or PPO step.
            result: what became of it.
            scene: made where something is dumped.

        Raises:
            NonFiniteError: it has a fault, and the run is to stop.
        """
        self._overflows[role] += result.overflow
        if result.applied:
            self.passed(role)
        if result.fault is None:
            return
        fault, made = result.fault, scene()
        what = {
            "role": role,
            "fault": {"kind": fault.kind, "micro_batch": fault.micro_batch, "numbers": fault.numbers},
            "bad_inputs": [shown_places(bad_places(record)) for record in made.records],
        }
        self.met(role, step, fault.rank, f"{role}, step {step}: {fault}; its update was left out", made, what)

    def passed(self, role: str) -> None:
        """Everything was finite."""
        self._in_a_row[role] = 0

    def met(self, role: str, step: int, rank: int, problem: str, scene: FailureContext, what: dict[str, Any]) -> None:
        """Dump and count bad numbers. Collective.

        Args:
            role: whose row of skips it belongs to.
            step: optimizer step, or PPO step.
            rank: whose records are dumped.
            problem: one line for a person.
            scene: of this rank.
            what: for `what.json`.

        Raises:
            NonFiniteError: the run is to stop.
        """
        folder = self.dumps.write(step, rank, scene, what) if self.dumps else "(no dump)"
        self._in_a_row[role] += 1
        self._skipped += 1
        replay = folder if folder.startswith("(") else f"Replay: python -m dschat_ppo.tools.replay {folder}"
        if self.flags.on_nonfinite == "stop":
            advice = "Lower the learning rate, use --dtype fp32, or --on_nonfinite skip."
            raise NonFiniteError(f"{problem}. {advice} {replay}")
        in_a_row = self._in_a_row[role]
        if in_a_row > self.flags.max_nonfinite_skips:
            raise NonFiniteError(f"{problem}; {in_a_row} were left out in a row (--max_nonfinite_skips). {replay}")
        logger().warning(f"{problem}. {replay}")

    def metrics(self, *roles: str) -> dict[str, float]:
        """What was left out so far in the run: for bad numbers, and for fp16 overflows of each role."""
        counts = {f"overflow/{role}": float(self._overflows[role]) for role in roles}
        return {"nonfinite/skipped": float(self._skipped), **counts}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on counting from."""
        return {"in_a_row": dict(self._in_a_row), "skipped": self._skipped, "overflows": dict(self._overflows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._in_a_row, self._skipped = Counter(state["in_a_row"]), state["skipped"]
        self._overflows = Counter(state["overflows"])


def shown_places(places: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """The first places of each field, for `what.json`."""
    return {name: found[:SHOWN_PLACES] for name, found in places.items()}
