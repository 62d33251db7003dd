"""NaN and infinity: the check of scores, log-probs, values and advantages before any update uses
them; what a run does about a bad step (`--on_nonfinite`: stop, or skip the update); and the repro
bundle that reproduces it in one process.

A bundle lies in `OUTPUT/nonfinite/step_*_rank_*/`: `config.yaml` holds the flags, `model/` the
weights before the update, and `bundle.pt`, which is written last, the rank's micro-batches with
everything else that the loss needs: tensors and plain values, no code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.state_files import save_state
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import remove_folder, storage_errors
from dschat_ppo.common.logging import logger
from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.config.step_config import StepConfig, flatten
from dschat_ppo.engine.optimizer_step import Fault, StepResult, loss_scale
from dschat_ppo.errors import NonFiniteError, StorageError, UserError
from dschat_ppo.models.backbone import unwrap
from dschat_ppo.models.saving import save_model
from dschat_ppo.monitor.metric_sums import read_scalars
from dschat_ppo.monitor.writers import write_config
from dschat_ppo.types import Engine, Experience, tensors_of

MOST_UNSCORED = 3  # PPO steps in a row without a score, the last of which ends the run


class NonFinitePolicy:
    """Stops the run at the first failure, or counts skipped updates; the same on every rank.
    `bundles` writes a repro bundle for each bad optimizer step, unless it is None."""

    def __init__(self, flags: SafetyFlags, bundles: ReproBundles | None = None):
        self.flags = flags
        self.bundles = bundles
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
        """Handle the outcome of an optimizer step of `role`. Collective with a fault, which writes
        a repro bundle of the micro-batches `records`; `constants` are the other numbers that the
        loss needs."""
        self._overflows[role] += result.overflow
        if result.applied:
            self._in_a_row[role] = 0
        if result.fault is None:
            return
        replay = ""
        if self.bundles is not None:
            try:
                folder = self.bundles.write(role, step, result.fault, engine, records, constants)
                replay = f" Replay: python -m dschat_ppo.tools.replay {folder}"
            except StorageError as problem:  # it must not hide the number
                replay = f" (no repro bundle: {problem})"
        self._fail(role, f"{role}, step {step}: {result.fault}; its update was skipped", replay)

    def is_finite(self, experience: Experience, step: int) -> bool:
        """Whether all numbers of an experience of all ranks are finite: only then it reaches an
        update. Every rank holds the rows and values of all ranks, so all make the same decision
        without a collective."""
        bad = bad_rows(experience)
        if not bad:
            self._in_a_row["rows"] = 0
            return True
        name, rows = next(iter(bad.items()))  # fields are in the order in which they are computed
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
                f"{problem}, the third step in a row: a reward source or the environment failed on"
                " every answer; correct what the warnings above name (also in logs/rank_R.log), and"
                " run the same command again to resume"
            )
        logger().warning(problem)

    def _fail(self, role: str, problem: str, replay: str) -> None:
        """Count a failure of `role`, or stop the run."""
        self._in_a_row[role] += 1
        self.skipped += 1
        if self.flags.on_nonfinite == "stop":
            advice = "Lower the learning rate, use --dtype fp32, or --on_nonfinite skip."
            raise NonFiniteError(f"{problem}. {advice}{replay}")
        in_a_row = self._in_a_row[role]
        if in_a_row > self.flags.max_nonfinite_skips:
            raise NonFiniteError(
                f"{problem}; that makes {in_a_row} in a row (--max_nonfinite_skips).{replay}"
            )
        logger().warning(f"{problem}.{replay}")

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


# the content of a bundle, besides its flags
MODEL = "model"
BUNDLE = "bundle.pt"


@dataclass(frozen=True)
class ReproBundles:
    """Writes repro bundles and keeps the newest `--max_nonfinite_skips` + 1."""

    config: StepConfig
    tokenizer: PreTrainedTokenizerBase

    def write(
        self,
        role: str,
        step: int,
        fault: Fault,
        engine: Engine,
        records: Sequence[Any],
        constants: dict[str, Any],
    ) -> Path:
        """Write a bundle of the micro-batches of `fault.rank`, and return its folder. Collective:
        `records` are each rank's own, `constants` the other numbers that the loss needs.
        `StorageError` on every rank if it fails."""
        folder = dist.on_main(lambda: self._new_folder(step, fault.rank))
        save_model(engine, self.tokenizer, folder / MODEL)
        layout = unwrap(engine).layout
        state = {
            "step_name": self.config.kind,
            "role": role,
            "step": step,
            "fault": str(fault),
            "numbers": fault.losses_or_gradients,
            "world_size": dist.world_size(),
            "loss_scale": {self.config.run.dtype: loss_scale(engine)},  # 1 in another number format
            "layout": {
                name: getattr(layout, name) for name in ("fused", "packed", "shares", "reads_few")
            },
            "records": [[type(record).__name__, tensors_of(record)] for record in records],
            "constants": constants,
            "random_state": fault.random_state,
        }
        save = storage_errors(folder / BUNDLE)(save_state)
        dist.on_rank(fault.rank, lambda: save(folder / BUNDLE, state))
        return folder

    def _new_folder(self, step: int, rank: int) -> Path:
        """Make the new folder and remove old bundles, on rank 0."""
        name = f"step_{step:06d}_rank_{rank}"
        root = Path(self.config.run.folder) / "nonfinite"
        most = self.config.safety.max_nonfinite_skips + 1
        with storage_errors(root):
            folder = root / name
            count = 1
            while folder.exists():
                count += 1
                folder = root / f"{name}_{count}"
            folder.mkdir(parents=True)
            for old in sorted(root.glob("step_*"), key=lambda path: path.stat().st_mtime)[:-most]:
                remove_folder(old)
            write_config(flatten(self.config), folder)
        return folder
