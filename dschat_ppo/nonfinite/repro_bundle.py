"""What is kept of numbers that are not finite, so that one command replays them: `OUTPUT/nonfinite/step_*_rank_*/`.

`batch.safetensors` holds the rank's micro-batches (or the rows of all ranks), `what.json` everything else that the loss
needs, `config.yaml` the flags, `model/` the weights as they were. `what.json` comes last: with it a dump is whole.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.run_files import write_config
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import remove_folder
from dschat_ppo.data.collators import PairBatch, PreferenceBatch, SFTBatch
from dschat_ppo.engine.skip_update import loss_scale
from dschat_ppo.errors import UserError
from dschat_ppo.models.backbone import unwrap
from dschat_ppo.models.saving import save_model
from dschat_ppo.types import Experience, ScoredRollout, record_of, tensors_of

FORMAT = 1
_KINDS: tuple[Any, ...] = (SFTBatch, PairBatch, PreferenceBatch, Experience, ScoredRollout)
RECORDS = {kind.__name__: kind for kind in _KINDS}
MODEL, BATCH, WHAT, CONFIG = "model", "batch.safetensors", "what.json", "config.yaml"


@dataclass(frozen=True)
class FailureContext:
    """What a bad number was made from.

    Attributes:
        records: this rank's micro-batches in order, or one record with the rows of all ranks.
        constants: plain numbers that the loss needs besides.
        engine: whose weights are saved with it; None where `model` names a folder that has them, or none are needed.
        model: that folder.
        random_state: of this rank as the step began; [] where nothing is drawn.
    """

    records: Sequence[Any]
    constants: dict[str, Any]
    engine: Any | None = None
    model: str | None = None
    random_state: list[Tensor] = field(default_factory=list)


class ReproBundles:
    """Writes dumps and keeps the newest `--max_nonfinite_skips` + 1.

    Args:
        step_name: "sft", "reward" or "ppo".
        config: of that step.
        tokenizer: saved beside the weights.
    """

    def __init__(self, step_name: str, config: Any, tokenizer: PreTrainedTokenizerBase):
        self.step_name = step_name
        self.config = config
        self.tokenizer = tokenizer
        self.root = Path(config.run.folder) / "nonfinite"
        self.most = config.safety.max_nonfinite_skips + 1

    def write(self, step: int, rank: int, scene: FailureContext, what: dict[str, Any]) -> str:
        """Write one; collective.

        Args:
            step: optimizer step, or PPO step.
            rank: whose records are written.
            scene: of this rank.
            what: what is known of the bad number.

        Returns:
            The folder, or in parentheses why there is none.
        """
        name, problem = dist.broadcast_object(self._begin(step, rank, scene) if dist.is_main() else None)
        if problem is None:
            folder = self.root / name
            problem = dist.first_problem(self._write_batch(folder, scene) if dist.rank() == rank else None)
        if problem is None and scene.engine is not None:
            save_model(scene.engine, self.tokenizer, folder / MODEL)
        if problem is None:
            described = {"step": step, "rank": rank, **what}
            problem = dist.first_problem(self._describe(folder, scene, described) if dist.rank() == rank else None)
        return f"(no dump: {problem})" if problem else str(folder)

    def _begin(self, step: int, rank: int, scene: FailureContext) -> tuple[str, str | None]:
        """Make the folder; rank 0 alone. (its name, why it cannot be made)"""
        name = first = f"step_{step:06d}_rank_{rank}"
        number = 1
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            while (self.root / name).exists():
                number += 1
                name = f"{first}_{number}"
            earlier = sorted(self.root.glob("step_*"), key=lambda path: path.stat().st_mtime)
            for old in earlier[: max(0, len(earlier) - self.most + 1)]:
                remove_folder(old)
            free, needed = shutil.disk_usage(self.root).free, _bytes_of(scene)
            if free < needed:
                return name, f"{self.root} has {free} bytes left and it takes {needed}"
            (self.root / name).mkdir()
            write_config(self.config, self.root / name)
        except OSError as problem:
            return name, f"{self.root} cannot be written, {problem.strerror}"
        return name, None

    def _write_batch(self, folder: Path, scene: FailureContext) -> str | None:
        tensors = {f"random_state.{number}": state for number, state in enumerate(scene.random_state)}
        for number, record in enumerate(scene.records):
            tensors |= {f"{number}.{name}": value for name, value in tensors_of(record).items()}
        apart = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
        try:
            save_file(apart, folder / BATCH)  # which refuses tensors that share memory
        except (OSError, SafetensorError) as problem:
            return f"{folder / BATCH} cannot be written, {problem}"
        return None

    def _describe(self, folder: Path, scene: FailureContext, what: dict[str, Any]) -> str | None:
        module = None if scene.engine is None else unwrap(scene.engine)
        what = {
            "format": FORMAT,
            "step_name": self.step_name,
            **what,
            "world_size": dist.world_size(),
            "dtype": self.config.run.dtype,
            "loss_scale": 1.0 if scene.engine is None else loss_scale(scene.engine),
            "model": scene.model if module is None else MODEL,
            "fused": getattr(module, "fused", True),
            "packed": getattr(module, "packed", False),
            "records": [type(record).__name__ for record in scene.records],
            "constants": scene.constants,
            "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        }
        try:
            (folder / WHAT).write_text(json.dumps(_strict(what), indent=2) + "\n", encoding="utf-8")
        except OSError as problem:
            return f"{folder / WHAT} cannot be written, {problem.strerror}"
        return None


def _bytes_of(scene: FailureContext) -> int:
    """Space that a dump takes, with a little to spare."""
    tensors = [value for record in scene.records for value in tensors_of(record).values()]
    numbers = sum(value.numel() * value.element_size() for value in tensors)
    if scene.engine is not None:
        for parameter in unwrap(scene.engine).parameters():
            whole = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 empties the parameter itself
            numbers += whole * parameter.element_size()
    return int(1.1 * numbers) + 2**24


def _strict(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {name: _strict(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_bundle(folder: Path) -> tuple[dict[str, Any], list[Any], list[Tensor]]:
    """`what.json`, the records, and the random state of a dump.

    Raises:
        UserError: the folder is no whole dump, or one of a newer version.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such folder; of the dumps the newest are kept, --max_nonfinite_skips + 1"
        )
    try:
        what = json.loads((folder / WHAT).read_text(encoding="utf-8"))
        tensors = load_file(folder / BATCH)
    except (OSError, ValueError, SafetensorError) as problem:
        raise UserError(f"{folder}: is no whole dump of numbers that are not finite ({problem})") from None
    if what["format"] > FORMAT:
        raise UserError(f"{folder}: was written by a newer version of this program (format {what['format']})")
    records = [_record(name, number, tensors) for number, name in enumerate(what["records"])]
    states = [tensors[name] for name in sorted(tensors) if name.startswith("random_state.")]
    return what, records, states


def _record(name: str, number: int, tensors: dict[str, Tensor]) -> Any:
    start = f"{number}."
    held = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
    return record_of(RECORDS[name], held)
