"""Repro bundles: everything that reproduces a NaN or infinity of an optimizer step in one process, in
`OUTPUT/nonfinite/step_*_rank_*/`.

`config.yaml` holds the flags, `model/` the weights before the update, and `bundle.pt` the rank's micro-batches with
everything else that the loss needs: tensors and plain values, no code. `bundle.pt` is written last, so a bundle that
has one is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.state_files import load_state, save_state
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import remove_folder
from dschat_ppo.config.cli import flatten
from dschat_ppo.config.steps import StepConfig
from dschat_ppo.data.batches import LabelledBatch, PairBatch, SFTBatch, StepBatch
from dschat_ppo.engine.optimizer_step import Fault, loss_scale
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.models.backbone import unwrap
from dschat_ppo.models.saving import save_model
from dschat_ppo.monitor.writers import CONFIG, write_config
from dschat_ppo.types import Engine, Experience, RewardedRollout, record_of, tensors_of

_KINDS: tuple[Any, ...] = (SFTBatch, PairBatch, LabelledBatch, StepBatch, Experience, RewardedRollout)
RECORDS = {kind.__name__: kind for kind in _KINDS}
MODEL, BUNDLE = "model", "bundle.pt"


class ReproBundles:
    """Writes repro bundles and keeps the newest `--max_nonfinite_skips` + 1."""

    def __init__(self, step_name: str, config: StepConfig, tokenizer: PreTrainedTokenizerBase):
        self.step_name = step_name
        self.config = config
        self.tokenizer = tokenizer
        self.root = Path(config.run.folder) / "nonfinite"
        self.most = config.safety.max_nonfinite_skips + 1

    def write(
        self, role: str, step: int, fault: Fault, engine: Engine, records: Sequence[Any], constants: dict[str, Any]
    ) -> Path:
        """Write a bundle of the micro-batches of `fault.rank`, and return its folder. Collective: `records` are each
        rank's own, `constants` the other numbers that the loss needs. `StorageError` on every rank if it fails."""
        folder = dist.on_main(lambda: self._new_folder(step, fault.rank))
        save_model(engine, self.tokenizer, folder / MODEL)
        problem = None
        if dist.rank() == fault.rank:
            layout = unwrap(engine).layout
            state = {
                "step_name": self.step_name,
                "role": role,
                "step": step,
                "rank": fault.rank,
                "fault": {"kind": fault.kind, "micro_batch": fault.micro_batch, "numbers": fault.numbers},
                "world_size": dist.world_size(),
                "dtype": self.config.run.dtype,
                "loss_scale": loss_scale(engine),
                "layout": {name: getattr(layout, name) for name in ("fused", "packed", "shares", "reads_few")},
                "records": [[type(record).__name__, tensors_of(record)] for record in records],
                "constants": constants,
                "random_state": fault.random_state,
            }
            try:
                save_state(folder / BUNDLE, state)
            except OSError as failure:
                problem = f"{folder / BUNDLE} cannot be written, {failure.strerror}"
        if (first := dist.first_problem(problem)) is not None:
            raise StorageError(first)
        return folder

    def _new_folder(self, step: int, rank: int) -> Path:
        """Make the new folder and remove old bundles, on rank 0."""
        first = f"step_{step:06d}_rank_{rank}"
        names = chain([first], (f"{first}_{number}" for number in count(2)))
        try:
            folder = next(self.root / name for name in names if not (self.root / name).exists())
            folder.mkdir(parents=True)
            for old in sorted(self.root.glob("step_*"), key=lambda path: path.stat().st_mtime)[: -self.most]:
                remove_folder(old)
            write_config(flatten(self.config), folder)
        except OSError as problem:
            raise StorageError(f"{self.root} cannot be written, {problem.strerror}") from None
        return folder


def read_bundle(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Read a bundle: what it holds by name, and the micro-batches."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; a run keeps its newest repro bundles, --max_nonfinite_skips + 1")
    for name in (BUNDLE, CONFIG):
        if not (folder / name).is_file():  # reading a pipe would wait forever
            raise UserError(f"{folder}: is not a complete repro bundle ({name} is missing or not a file)")
    what = load_state(folder / BUNDLE)
    if unknown := [name for name, _ in what["records"] if name not in RECORDS]:
        raise UserError(f"{folder}: cannot be replayed: another version of this package wrote it, with {unknown[0]}")
    return what, [record_of(RECORDS[name], held) for name, held in what["records"]]
