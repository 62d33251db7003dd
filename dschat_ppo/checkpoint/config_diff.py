"""What changed between the configuration of a checkpoint and that of the run that goes on from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from dschat_ppo.config.steps import STEPS
from dschat_ppo.errors import UserError

# Whoever is not in these tables matters: a flag that is added later stops a resumed run until somebody decides.
WHERE_AND_WHEN = frozenset({
    "output_dir", "overwrite_output_dir", "local_rank", "config",
    "save_steps", "save_minutes", "save_total_limit", "save_best", "resume", "resume_force",
    "collective_timeout", "on_nonfinite", "max_nonfinite_skips",
    "enable_tensorboard", "tensorboard_path", "print_loss", "print_answers", "print_answers_interval",
    "data_output_path", "preprocessing_num_workers",
    "reward_workers", "reward_timeout",
    "remote_reward_timeout", "remote_reward_retries", "remote_reward_batch_size",
})  # fmt: skip

# The same numbers, but for rounding: how the work is laid out on the machine. (`--per_device_eval_batch_size` also
# decides where an evaluation bounded by `--eval_iters` ends, but nothing of what is trained.)
HOW_IT_IS_COMPUTED = frozenset({
    "zero_stage", "actor_zero_stage", "critic_zero_stage",
    "offload", "offload_reference_model", "offload_reward_model",
    "gradient_checkpointing", "actor_gradient_checkpointing", "critic_gradient_checkpointing",
    "micro_batch_tokens", "per_device_eval_batch_size", "eval_batch_size",
    "rollout_rows", "rollout_engine", "rollout_graphs", "prepack_weights", "unpin_actor_parameters",
    "sleep_in_rollout", "deterministic",
    "resize_vocabulary",  # without it a model that needs it is refused; for others it does nothing
})  # fmt: skip

# Kept for old scripts: they change nothing at all.
WITHOUT_EFFECT = frozenset({
    "deepspeed", "compute_fp32_loss", "add_eot_token", "eot_token", "num_padding_at_beginning",
    "enable_hybrid_engine", "release_inference_cache",
})  # fmt: skip

HARMLESS = WHERE_AND_WHEN | HOW_IT_IS_COMPUTED | WITHOUT_EFFECT

# Factors of a number that is compared itself, where both configurations hold it: with twice the ranks, half the rows
# of each give the same step. Whoever makes the configuration of a checkpoint puts these numbers in, from the plan.
FACTORS_OF = {
    "per_device_train_batch_size": "rows_per_update",
    "per_device_training_batch_size": "rows_per_update",
    "gradient_accumulation_steps": "rows_per_update",
    "per_device_generation_batch_size": "rows_per_step",
    "generation_batches": "rows_per_step",
}

FLAGS = frozenset(
    field.name for step in STEPS.values() for group in get_type_hints(step.config).values() for field in fields(group)
)

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A setting that differs. `name`: of a flag, or of a number that the flags amount to; `before` and `after`: as
    words of a diff, None where that side does not know the setting; `matters`: whether the run would compute something
    else, or in another order."""

    name: str
    before: str | None
    after: str | None
    matters: bool


def compare(saved: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """What differs between the configuration of a checkpoint and that of this run.

    Args:
        saved: `Manifest.config`.
        now: the same of this run: `config.cli.flatten(config)`, with `rows_per_update` (rows of an optimizer step over
            all ranks), in step 3 `rows_per_step` (prompts of a PPO step over all ranks) and, where their number decides
            more than rounding, `ranks`, and with digests of what the flags name (`checkpoint/run_identity.py`).

    Returns:
        The changes, those that matter first, each part in the order of `now`.
    """
    now = json.loads(json.dumps(now))  # tuples become lists, as they did in the manifest
    names = [*now, *(name for name in saved if name not in now)]
    changes = []
    for name in names:
        before, after = saved.get(name, _ABSENT), now.get(name, _ABSENT)
        if before != after:
            changes.append(Change(name, _words(before), _words(after), _matters(name, saved, now)))
    return sorted(changes, key=lambda change: not change.matters)


def report(changes: Sequence[Change]) -> str:
    """A diff: for each change a line `- --flag before` and a line `+ --flag after`."""
    lines = []
    for change in changes:
        name = f"--{change.name}" if change.name in FLAGS else change.name
        lines += [f"{sign} {name} {value}" for sign, value in (("-", change.before), ("+", change.after)) if value]
    return "\n".join(lines)


def refuse(folder: Path, changes: Sequence[Change], force: bool) -> None:
    """Let no run go on under a configuration that means something else.

    Args:
        folder: of the checkpoint.
        changes: of `compare`.
        force: `--resume_force`.

    Raises:
        UserError: something that matters changed, and `force` is False; with the diff of that and of its factors.
    """
    matter = {change.name for change in changes if change.matters}
    if matter and not force:
        shown = [change for change in changes if change.matters or FACTORS_OF.get(change.name) in matter]
        raise UserError(
            f"{folder} was saved under settings that compute something else:\n{report(shown)}\nGive the former "
            "settings to go on, or --resume_force to go on under the new ones, or begin anew with "
            "--overwrite_output_dir or another --output_dir"
        )


def _matters(name: str, saved: dict[str, Any], now: dict[str, Any]) -> bool:
    product = FACTORS_OF.get(name)
    return name not in HARMLESS and not (product in saved and product in now)


def _words(value: Any) -> str | None:
    """A value as one would type it; a list in JSON, so that its parts can be told apart."""
    if value is _ABSENT:
        return None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) or value == "" else str(value)
