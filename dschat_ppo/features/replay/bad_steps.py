"""Repro bundles: written at a bad optimizer step, and bounded in number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.state_files import save_state
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import remove_folder, storage_errors
from dschat_ppo.config.step_config import StepConfig, flatten
from dschat_ppo.engine.optimizer_step import loss_scale
from dschat_ppo.errors import StorageError
from dschat_ppo.models.backbone import unwrap
from dschat_ppo.models.saving import save_model
from dschat_ppo.monitor.writers import write_config
from dschat_ppo.nonfinite import BadStep
from dschat_ppo.types import tensors_of

# the content of a bundle, besides its flags
MODEL = "model"
BUNDLE = "bundle.pt"
_MORE_THAN_TEXT = "its rows hold more than text, such as images, which a replay does not have yet"


def recorder_of(config: StepConfig, tokenizer: PreTrainedTokenizerBase) -> Callable[[BadStep], str]:
    """Writes a bundle of each bad step, and names the command that replays it."""
    bundles = ReproBundles(config, tokenizer)

    def record(bad_step: BadStep) -> str:
        if getattr(unwrap(bad_step.engine), "given_source", None) is not None:
            return f" (no repro bundle: {_MORE_THAN_TEXT})"
        try:
            folder = bundles.write(bad_step)
        except StorageError as problem:  # it must not hide the number
            return f" (no repro bundle: {problem})"
        return f" Replay: python -m dschat_ppo.tools.replay {folder}"

    return record


@dataclass(frozen=True)
class ReproBundles:
    """Writes repro bundles and keeps the newest `--max_nonfinite_skips` + 1."""

    config: StepConfig
    tokenizer: PreTrainedTokenizerBase

    def write(self, bad_step: BadStep) -> Path:
        """Write a bundle of the micro-batches of the rank with the fault, and return its folder.
        Collective. `StorageError` on every rank if it fails."""
        fault = bad_step.fault
        folder = dist.on_main(lambda: self._new_folder(bad_step.step, fault.rank))
        save_model(bad_step.engine, self.tokenizer, folder / MODEL)
        layout = unwrap(bad_step.engine).layout
        state = {
            "step_name": self.config.kind,
            "role": bad_step.role,
            "step": bad_step.step,
            "fault": str(fault),
            "numbers": fault.losses_or_gradients,
            "world_size": dist.world_size(),
            "loss_scale": {self.config.run.dtype: loss_scale(bad_step.engine)},  # 1 otherwise
            "layout": {
                name: getattr(layout, name) for name in ("fused", "packed", "shares", "reads_few")
            },
            "records": [[type(record).__name__, tensors_of(record)] for record in bad_step.records],
            "constants": bad_step.constants,
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
