"""The model card of a saved model: `README.md` in its folder, as the Hugging Face hub reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig, defaults_of, flatten
from dschat_ppo.config.supervised_config import PreferenceConfig

# flags about the machine and the run, which say nothing about the model
LEFT_OUT = (
    "output_dir", "overwrite_output_dir", "resume", "resume_force", "tensorboard_path", "local_rank", "verbose",
    "data_output_path", "preprocessing_num_workers", "deepspeed_config", "logging_steps", "save_steps", "save_minutes",
    "save_total_limit", "keep_final_checkpoint", "remote_reward_url",
)  # fmt: skip


def model_card(config: StepConfig, role: str) -> str:
    """The card of the model that `role` of `config.models` has become: what it started from, the step that trained it,
    its data, and the flags that differ from their defaults. Of paths it has the last part alone."""
    method = {"sft": "SFT", "reward": "reward model", "ppo": "PPO"}[config.kind]
    if isinstance(config, PreferenceConfig) and not config.reward.trains_classifier:
        method = config.reward.objective.upper()
    if isinstance(config, PPOConfig):
        method = f"{config.algorithm.advantage_estimator}, {config.algorithm.policy_loss}"
    _, base = config.models[role]
    known, given = defaults_of(type(config)), flatten(config)
    shown = {name: value for name, value in given.items() if name not in LEFT_OUT and value != known.get(name)}
    head = {"library_name": "transformers", "tags": ["dschat_ppo", config.kind]}
    if not os.path.exists(base):
        head["base_model"] = base  # a name on the hub
    data = ", ".join(f"`{_name(path)}`" for path in config.data.data_path)
    flags = "\n".join(f"| `--{name}` | `{json.dumps(_shown(value))}` |" for name, value in sorted(shown.items()))
    return (
        "---\n" + "".join(f"{name}: {json.dumps(value)}\n" for name, value in head.items()) + "---\n\n"
        f"# {_name(base)}, trained further\n\nThe {role} of a run of dschat_ppo ({method}). It started from "
        f"`{_name(base)}` and was trained on {data}.\n\n| flag | value |\n|---|---|\n{flags}\n"
    )


def _name(path: str) -> str:
    return Path(path).name if os.path.isabs(path) or os.path.exists(path) else path


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return _name(value) if isinstance(value, str) else value
