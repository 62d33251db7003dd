"""What every step does before it loads a model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger, quiet_libraries, table
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.cli import notes, write_config
from dschat_ppo.config.schema import RunFlags
from dschat_ppo.errors import UserError


def begin(step: str, config: Any, run: RunFlags, models: list[str]) -> tuple[torch.device, Path]:
    """Check the output folder against the models that are read, join the ranks, seed, and say what changes nothing.

    Returns:
        This rank's device and the output folder.

    Raises:
        UserError: the folder holds earlier outputs or a model that is read, or the device lacks the number format.
    """
    folder = Path(run.folder)
    written = [(folder / part).resolve() for part in (".", "actor", "critic", "best/actor", "best/critic")]
    if any(Path(model).resolve() in written for model in models):
        raise UserError(f"--output_dir {folder} would be written over a model that is read; name another folder")
    _refuse_full_folder(folder, run)
    quiet_libraries()
    device = dist.init()
    seed_everything(run.seed)
    _check_dtype(run.dtype)
    for line in notes(step, config):
        logger().info(f"note: {line}")
    return device, folder


def _refuse_full_folder(folder: Path, run: RunFlags) -> None:
    if run.overwrite_output_dir or not folder.is_dir():
        return
    held = [name for name in ("result.json", "metrics.jsonl", "config.json") if (folder / name).exists()]
    held += [path.name for path in folder.glob("*.safetensors")]
    if held:
        raise UserError(
            f"--output_dir {folder} holds earlier outputs ({held[0]}); name another folder or add "
            "--overwrite_output_dir"
        )


def open_outputs(folder: Path, config: Any, run: RunFlags) -> None:
    """Make the output folder, take away what marks an earlier run, and save the resolved configuration. Collective.

    Raises:
        UserError: the folder cannot be written.
    """
    problem = dist.broadcast_object(_write_start(folder, config, run) if dist.is_main() else None)
    if problem:
        raise UserError(problem)


def _write_start(folder: Path, config: Any, run: RunFlags) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").unlink(missing_ok=True)
        for answers in (folder / "eval").glob("step_*.jsonl"):
            answers.unlink()
        for role in ("actor", "critic"):
            shutil.rmtree(folder / "best" / role, ignore_errors=True)
        board = folder / run.tensorboard_path
        if board.resolve().is_relative_to(folder.resolve()):  # a board elsewhere may hold other runs
            for events in board.glob("events.out.tfevents.*"):
                events.unlink()
        write_config(config, folder)
    except OSError as problem:
        return f"--output_dir {folder}: cannot be written ({problem.strerror})"
    return None


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """A `UserError` from inside gets the flag's name in front, and a hint where a score head is at fault."""
    try:
        yield
    except UserError as problem:
        hint = " (are actor and critic swapped?)" if "score.weight" in str(problem) else ""
        raise UserError(f"{flag} {problem}{hint}") from None


def _check_dtype(dtype: str) -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = {
        "bf16": accelerator.is_bf16_supported(),
        "fp16": accelerator.is_fp16_supported(),
        "fp32": True,
    }
    if not supported[dtype]:
        usable = ", ".join(name for name, usable in supported.items() if usable)
        raise UserError(f"--dtype {dtype}: this {accelerator.device_name()} does not support it; use one of {usable}")


def tensorboard_folder(run: RunFlags) -> Path | None:
    """Where TensorBoard files go, or None if they were not asked for."""
    return Path(run.folder) / run.tensorboard_path if run.enable_tensorboard else None


def show_plan(title: str, rows: list[tuple[str, str]], warmup_steps: int, total_steps: int) -> None:
    """Print the batch table; warn if the learning rate would never reach its peak."""
    logger().info(table(title, rows))
    if warmup_steps >= total_steps:
        logger().warning(
            f"--num_warmup_steps {warmup_steps} is not below the {total_steps} optimizer steps in all: the learning "
            "rate never reaches its peak"
        )
