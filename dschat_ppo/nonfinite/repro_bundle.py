"""Repro bundles: everything that reproduces a NaN or infinity in one process, in `OUTPUT/nonfinite/step_*_rank_*/`.

`config.yaml` holds the flags, `model/` the weights before the update, and `bundle.pt` the rank's micro-batches (or the
rows of all ranks) with everything else that the loss needs: tensors and plain values, no code. `bundle.pt` is written
last, so a bundle that has one is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.state_files import load_state, save_state
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import remove_folder
from dschat_ppo.config.cli import flatten
from dschat_ppo.config.steps import PPOConfig, PreferenceConfig, SFTConfig
from dschat_ppo.data.batches import LabelledBatch, PairBatch, SFTBatch, StepBatch
from dschat_ppo.engine.optimizer_step import loss_scale
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.models.backbone import Layout, unwrap
from dschat_ppo.models.saving import save_model
from dschat_ppo.monitor.writers import CONFIG, write_config
from dschat_ppo.types import Engine, Experience, RewardedRollout, ScoredRollout, record_of, tensors_of

_KINDS: tuple[Any, ...] = (
    SFTBatch, PairBatch, LabelledBatch, StepBatch, Experience, RewardedRollout, ScoredRollout,
)  # fmt: skip
RECORDS = {kind.__name__: kind for kind in _KINDS}
MODEL, BUNDLE = "model", "bundle.pt"


@dataclass(frozen=True)
class FailureContext:
    """The inputs of the computation that gave a NaN or infinity. Of `engine`, the weights are saved;
    `model` is the folder or hub name of a frozen model. Without both, no model computed the number."""

    records: Sequence[Any]  # this rank's micro-batches in order, or one record with the rows of all ranks
    constants: dict[str, Any]  # other numbers that the loss needs
    engine: Engine | None = None
    model: str | None = None
    random_state: list[Tensor] = field(default_factory=list)  # of this rank at the start of the step


class ReproBundles:
    """Writes repro bundles and keeps the newest `--max_nonfinite_skips` + 1."""

    def __init__(
        self, step_name: str, config: SFTConfig | PreferenceConfig | PPOConfig, tokenizer: PreTrainedTokenizerBase
    ):
        self.step_name = step_name
        self.config = config
        self.tokenizer = tokenizer
        self.root = Path(config.run.folder) / "nonfinite"
        self.most = config.safety.max_nonfinite_skips + 1

    def write(self, step: int, rank: int, context: FailureContext, details: dict[str, Any]) -> str:
        """Write a bundle of the records of `rank`; returns its folder, or in parentheses why there is none. Collective.
        `details`: the role, and where the bad number is."""
        name, problem = dist.broadcast_object(self._make_folder(step, rank) if dist.is_main() else None)
        folder = self.root / name
        if problem is None and context.engine is not None:
            try:
                save_model(context.engine, self.tokenizer, folder / MODEL)
            except StorageError as failure:  # on every rank; it must not hide the number
                problem = str(failure)
        if problem is None:
            details = {"step": step, "rank": rank, **details}
            problem = dist.first_problem(self._write_state(folder, context, details) if dist.rank() == rank else None)
        return f"(no repro bundle: {problem})" if problem else str(folder)

    def _make_folder(self, step: int, rank: int) -> tuple[str, str | None]:
        """Remove old bundles and make the new folder, on rank 0. Returns its name, and an error message or None."""
        first = f"step_{step:06d}_rank_{rank}"
        names = chain([first], (f"{first}_{number}" for number in count(2)))
        name = first
        try:
            name = next(name for name in names if not (self.root / name).exists())
            (self.root / name).mkdir(parents=True)
            for old in sorted(self.root.glob("step_*"), key=lambda path: path.stat().st_mtime)[: -self.most]:
                remove_folder(old)
            write_config(flatten(self.config), self.root / name)
        except OSError as problem:
            return name, f"{self.root} cannot be written, {problem.strerror}"
        return name, None

    def _write_state(self, folder: Path, context: FailureContext, details: dict[str, Any]) -> str | None:
        """Write `bundle.pt`; an error message or None."""
        module = None if context.engine is None else unwrap(context.engine)
        layout: Any = Layout() if module is None else module.layout
        state = {
            "step_name": self.step_name,
            **details,
            "world_size": dist.world_size(),
            "dtype": self.config.run.dtype,
            "loss_scale": 1.0 if context.engine is None else loss_scale(context.engine),
            "model": context.model if module is None else MODEL,
            "layout": {name: getattr(layout, name) for name in ("fused", "packed", "shares", "reads_few")},
            "records": [[type(record).__name__, tensors_of(record)] for record in context.records],
            "constants": context.constants,
            "random_state": context.random_state,
            "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)  # rank 0 of another machine has made its own
            save_state(folder / BUNDLE, state)
        except OSError as problem:
            return f"{folder / BUNDLE} cannot be written, {problem.strerror}"
        return None


def read_bundle(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Read a bundle: what it holds by name, and the records."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; a run keeps its newest repro bundles, --max_nonfinite_skips + 1")
    for name in (BUNDLE, CONFIG):
        if not (folder / name).is_file():  # reading a pipe would wait forever
            raise UserError(f"{folder}: is not a complete repro bundle ({name} is missing or not a file)")
    what = load_state(folder / BUNDLE)
    if unknown := [name for name, _ in what["records"] if name not in RECORDS]:
        raise UserError(f"{folder}: cannot be replayed: another version of this package wrote it, with {unknown[0]}")
    return what, [record_of(RECORDS[name], held) for name, held in what["records"]]
