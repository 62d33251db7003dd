"""NaN and infinity: the check of scores, log-probs, values and advantages before any update uses
them, and what a run does about a bad step (`--on_nonfinite`: stop, or skip the update)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.engine.optimizer_step import Fault, StepResult
from dschat_ppo.errors import NonFiniteError, UserError
from dschat_ppo.features import hooks
from dschat_ppo.monitor.metric_sums import read_scalars
from dschat_ppo.types import Engine, Experience, tensors_of

MOST_UNSCORED = 3  # PPO steps in a row without a score, the last of which ends the run


@dataclass(frozen=True)
class BadStep:
    """An optimizer step with a number that is not finite; its update is skipped."""

    role: str
    step: int
    fault: Fault
    engine: Engine
    records: Sequence[Any]  # the micro-batches of this rank
    constants: dict[str, Any]  # the other numbers that the loss needs


def recorders_of(
    config: StepConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Callable[[BadStep], str]]:
    """What the features record of bad steps. A feature offers `bad_steps.recorder_of` with these
    arguments: a function that every rank calls with a bad step, and that returns what the message
    about it says at its end."""
    return [recorder_of(config, tokenizer) for recorder_of in hooks("bad_steps.recorder_of")]


class NonFinitePolicy:
    """Stops the run at the first failure, or counts skipped updates; the same on every rank.
    `recorders`: those of `recorders_of`."""

    def __init__(self, flags: SafetyFlags, recorders: Sequence[Callable[[BadStep], str]] = ()):
        self.flags = flags
        self.recorders = recorders
        self._in_a_row = Counter[str]()
        self.skipped = 0  # updates of the run
        self._overflows = Counter[str]()

    def handle(
        self,
        role: str,
        step: int,
        result: StepResult,
        engine: Engine,
        records: Sequence[Any],
        constants: dict[str, Any],
    ) -> None:
        """Handle the outcome of an optimizer step of `role`, whose micro-batches on this rank are
        `records`; `constants` are the other numbers that the loss needs. Collective with a
        fault."""
        self._overflows[role] += result.overflow
        if result.applied:
            self._in_a_row[role] = 0
        if result.fault is None:
            return
        bad_step = BadStep(role, step, result.fault, engine, records, constants)
        recorded = "".join(record(bad_step) for record in self.recorders)
        self._fail(role, f"{role}, step {step}: {result.fault}; its update was skipped", recorded)

    def is_finite(self, experience: Experience, step: int) -> bool:
        """Whether all numbers of an experience of all ranks are finite: only then it reaches an
        update. Every rank holds the rows and values of all ranks, so all make the same decision
        without a collective."""
        bad = bad_rows(experience)
        if not bad:
            self._in_a_row["rows"] = 0
            return True
        name, rows = next(iter(bad.items()))  # columns are in the order in which they are computed
        problem = (
            f"PPO step {step}: {name} of {rows} of {len(experience.scores)} answers are not finite"
        )
        self._fail("rows", f"{problem}; its updates are skipped", "")
        return False

    def count_unscored(self, unscored: bool, step: int) -> None:
        """Count a PPO step whose answers all lack a score, or end the run at the third in a row."""
        if not unscored:
            self._in_a_row["scores"] = 0
            return
        self._in_a_row["scores"] += 1
        problem = f"PPO step {step}: no answer has a score, so it makes no update"
        if self._in_a_row["scores"] == MOST_UNSCORED:
            raise UserError(
                f"{problem}, the third step in a row: each answer failed, or no source scored it;"
                " correct what the warnings above name (also in logs/rank_R.log), and run the same"
                " command again to resume"
            )
        logger().warning(problem)

    def _fail(self, role: str, problem: str, recorded: str) -> None:
        """Count a failure of `role`, or stop the run. `recorded`: the end of the message."""
        self._in_a_row[role] += 1
        self.skipped += 1
        if self.flags.on_nonfinite == "stop":
            advice = "Lower the learning rate, use --dtype fp32, or --on_nonfinite skip."
            raise NonFiniteError(f"{problem}. {advice}{recorded}")
        in_a_row = self._in_a_row[role]
        if in_a_row > self.flags.max_nonfinite_skips:
            raise NonFiniteError(
                f"{problem}; that makes {in_a_row} in a row (--max_nonfinite_skips).{recorded}"
            )
        logger().warning(f"{problem}.{recorded}")

    def metrics(self, *roles: str) -> dict[str, float]:
        """Counts since the start of the run: skipped updates, and fp16 overflows of each role."""
        counts = {f"optim/overflow/{role}": float(self._overflows[role]) for role in roles}
        return {"optim/nonfinite_skipped": float(self.skipped), **counts}

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a resumed run."""
        return {
            "in_a_row": dict(self._in_a_row),
            "skipped": self.skipped,
            "overflows": dict(self._overflows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        self._in_a_row = Counter(state["in_a_row"])
        self.skipped = state["skipped"]
        self._overflows = Counter(state["overflows"])


def bad_rows(record: Any) -> dict[str, int]:
    """Field -> how many of its rows have a NaN or infinity, in a dataclass of tensors. If it has a
    `response_mask` (B, R), fields of that shape are checked only where the mask is True."""
    unchecked = ["source_scores"]  # a reward source of weight 0 may return anything
    if getattr(record, "old_logprobs", None) is not None:
        # what a loss uses of them is in `old_logprobs`, or in weights of importance correction
        unchecked.append("rollout_logprobs")
    mask = getattr(record, "response_mask", None)
    bad: dict[str, Tensor] = {}
    for name, value in tensors_of(record).items():
        if value.is_floating_point() and name not in unchecked:
            places = ~value.isfinite()
            if mask is not None and value.shape == mask.shape:
                places &= mask
            if places.dim() > 1:
                bad[name] = places.flatten(1).any(dim=1).sum()
            else:
                bad[name] = places.sum()
    counts = read_scalars(bad)  # one read for all fields
    return {name: int(rows) for name, rows in counts.items() if rows}
