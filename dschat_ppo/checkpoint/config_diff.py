"""The diff between the configuration of a checkpoint and that of the run that resumes from it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from dschat_ppo.config.retired_flags import NOW_FIXED, RETIRED
from dschat_ppo.config.schema import WITHOUT_EFFECT
from dschat_ppo.config.steps import STEPS
from dschat_ppo.errors import UserError

# A flag that is in none of these tables matters: a new flag stops a resumed run until its author adds it to a table.
WHERE_AND_WHEN = frozenset({
    "output_dir", "overwrite_output_dir", "local_rank", "config", "dry_run", "dry_run_ranks",
    "save_steps", "save_minutes", "save_total_limit", "keep_final_checkpoint", "save_best", "resume", "resume_force",
    "save_hf_steps", "metric_for_best", "lora_merge",
    "collective_timeout", "on_nonfinite", "max_nonfinite_skips",
    "report_to", "run_name", "project",
    "enable_tensorboard", "tensorboard_path", "print_loss", "print_answers", "print_answers_interval",
    "sample_interval", "validate_only",
    "logging_steps", "verbose", "metrics",
    "profile",
    "data_output_path", "preprocessing_num_workers",
    "reward_workers", "reward_timeout", "allow_weak_sandbox",
    "remote_reward_timeout",
    "stop_on_health", "health",
})  # fmt: skip

# The result is the same up to rounding: these flags choose how the work is laid out on the machine.
# (`--per_device_eval_batch_size` also decides where an evaluation bounded by `--eval_iters` ends, but no training.)
HOW_IT_IS_COMPUTED = frozenset({
    "zero_stage", "actor_zero_stage", "critic_zero_stage",
    "offload", "offload_reference_model", "offload_reward_model", "offload_optimizer", "zero_hpz_partition_size",
    "gradient_checkpointing", "actor_gradient_checkpointing", "critic_gradient_checkpointing",
    "micro_batch_tokens", "per_device_eval_batch_size", "eval_batch_size",
    "rollout_rows", "rollout_engine", "unpin_actor_parameters",
    "sleep_in_rollout", "experience_on_host", "inference_tp_size", "tp_gather_partition_size", "deterministic",
    "sequence_parallel_size", "tiled_mlp", "offload_activations", "attn_implementation",
    "resize_vocabulary",  # a model that needs it is refused without it; for others it has no effect
})  # fmt: skip

HARMLESS = WHERE_AND_WHEN | HOW_IT_IS_COMPUTED | set(WITHOUT_EFFECT)

# Flag -> derived batch size of which it is a factor. If both configurations hold the derived batch size, it is compared
# instead of the flag: with twice the ranks, half the rows on each give the same step.
PRODUCTS = {
    "per_device_train_batch_size": "rows_per_update",
    "per_device_training_batch_size": "rows_per_update",
    "gradient_accumulation_steps": "rows_per_update",
    "per_device_generation_batch_size": "rows_per_step",
    "generation_batches": "rows_per_step",
}

# How long a run is. With rates that do not depend on it, the steps so far are those of the longer run.
LENGTH = frozenset({"num_train_epochs", "max_steps", "enable_test_mode", "test_stop_step"})
_CONSTANT = ("constant", "constant_with_warmup", None)  # None: the critic's, which is then that of the actor


def _defaults() -> dict[str, list[Any]]:
    """Every flag -> its defaults in the steps that have it."""
    found: dict[str, list[Any]] = {}
    for step in STEPS.values():
        for group in get_type_hints(step.config).values():
            for field in fields(group):
                own = field.default if field.default_factory is MISSING else field.default_factory()
                found.setdefault(field.name, []).append(step.defaults.get(field.name, own))
    return found


DEFAULTS = _defaults()
# Flags that name files and folders: values that lead to the same place are the same.
PATHS = frozenset({
    "data_path", "eval_data_path", "sft_only_data_path", "unsupervised_dataset_name", "chat_template",
    "model_name_or_path", "actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path",
    "ref_model_name_or_path", "deepspeed_config", "reward_function", "eval_reward_function",
    "advantage_estimator", "policy_loss", "data_format",
})  # fmt: skip
MOST_LINES, MOST_CHARACTERS = 12, 100  # of a diff: changes, and characters of a value
CONTENTS = "contents of "  # before the flag that names a model or a file, in the names of fingerprints
FLAGS = frozenset(DEFAULTS)

_ABSENT = object()


@dataclass(frozen=True)
class ConfigChange:
    """A setting (flag, derived batch size or input) that differs. `before` and `after` are texts, None without one.
    `matters`: whether the run would compute something else, or in another order."""

    name: str
    before: str | None
    after: str | None
    matters: bool


def compare_configs(saved: dict[str, Any], now: dict[str, Any]) -> list[ConfigChange]:
    """The differences between the configurations of a checkpoint and of this run, those that matter first.

    They hold flags, fingerprints of the inputs, and the derived batch sizes `rows_per_update` (rows of an optimizer
    step over all ranks), in step 3 `rows_per_step` (prompts of a PPO step over all ranks) and, where it affects more
    than rounding, `ranks`.
    """
    now = json.loads(json.dumps(now))  # tuples become lists, as they did in the manifest
    saved, now = ({_with_place(name): value for name, value in config.items()} for config in (saved, now))
    saved = {name: value for name, value in saved.items() if name not in RETIRED or value != NOW_FIXED.get(name, value)}
    names = [*now, *(name for name in saved if name not in now)]
    changes = []
    for name in names:
        before, after = saved.get(name, _ABSENT), now.get(name, NOW_FIXED.get(name, _ABSENT))
        if before != after and not (name in PATHS and _resolved(before) == _resolved(after)):
            product = PRODUCTS.get(name)
            matters = name not in HARMLESS and not (product in saved and product in now)
            matters = matters and not (name in LENGTH and _rates_ignore_length(saved) and _rates_ignore_length(now))
            if before is _ABSENT and after in DEFAULTS.get(name, []):  # the checkpoint is older than the flag
                matters = False
            changes.append(ConfigChange(name, _as_text(before), _as_text(after), matters))
    return sorted(changes, key=lambda change: not change.matters)


def _rates_ignore_length(config: dict[str, Any]) -> bool:
    """Whether no learning rate depends on the number of steps of the run."""
    kinds = [config.get(name) for name in ("lr_scheduler_type", "critic_lr_scheduler_type")]
    return kinds[0] is not None and all(kind in _CONSTANT for kind in kinds) and not config.get("warmup_ratio")


def _with_place(name: str) -> str:
    """The name of a setting; a file after the flag, as in `contents of --reward_function FILE`, as an absolute path."""
    flag, _, path = name.removeprefix(CONTENTS).partition(" ")
    return f"{CONTENTS}{flag} {_resolved(path)}" if name.startswith(CONTENTS) and path else name


def _resolved(value: Any) -> Any:
    """The value of a flag in `PATHS`, its files and folders that exist as absolute paths; what follows a path stays."""
    if isinstance(value, list):
        return [_resolved(item) for item in value]
    if not isinstance(value, str):
        return value
    text = os.path.expanduser(value)
    ends = [len(text), *(place for place in reversed(range(1, len(text))) if text[place] in ":@[?")]
    end = next((end for end in ends if os.path.lexists(text[:end])), 0)
    return os.path.realpath(text[:end]) + text[end:] if end else value


def format_diff(changes: Sequence[ConfigChange]) -> str:
    """The changes, one per line: `  --flag: before -> after`. Of many, the first `MOST_LINES` and how many follow."""
    lines = []
    for change in changes[:MOST_LINES]:
        name = f"--{change.name}" if change.name in FLAGS or change.name in RETIRED else change.name
        left = ", always: this version has no such flag" if change.name in RETIRED else ""
        lines.append(f"  {name}: {_short(change.before)} -> {_short(change.after)}{left}")
    if len(changes) > MOST_LINES:
        lines.append(f"  and {len(changes) - MOST_LINES} more")
    return "\n".join(lines)


def _short(value: str | None) -> str:
    if value is None:
        return "(absent)"
    return value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}..."


def refuse_changes(folder: Path, changes: Sequence[ConfigChange], force: bool) -> None:
    """Refuse, without `--resume_force`, to resume under a configuration that computes something else. The message shows
    the changes that matter, and flags that are factors of a changed batch size."""
    matter = {change.name for change in changes if change.matters}
    if matter and not force:
        shown = [change for change in changes if change.matters or PRODUCTS.get(change.name) in matter]
        back = "" if matter <= set(RETIRED) else "use the saved settings to resume, or "
        raise UserError(
            f"{folder} was saved under settings that compute something else; {back}"
            "--resume_force to resume under the new ones, or start from scratch with --overwrite_output_dir or another "
            f"--output_dir. What changed:\n{format_diff(shown)}"
        )


def _as_text(value: Any) -> str | None:
    """A value as one would type it; a list in JSON, so that its items are separated."""
    if value is _ABSENT:
        return None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) or value == "" else str(value)
