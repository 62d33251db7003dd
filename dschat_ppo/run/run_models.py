"""The models of a run: checks before any of them is loaded, and the card of a saved one:
`README.md` in its folder, as the Hugging Face hub reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.distillation_flags import TEACHER
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig, defaults_of, flatten
from dschat_ppo.config.supervised_config import PreferenceConfig
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters import AdapterSettings
from dschat_ppo.models.kernel_selection import check_long_sequences
from dschat_ppo.models.loading import check_causal_lm, check_vocabulary, load_config, require_length
from dschat_ppo.models.tokenizers import read_tokenizer
from dschat_ppo.run.session import naming

# flags about the machine and the run, which say nothing about the model
LEFT_OUT = (
    "output_dir",
    "overwrite_output_dir",
    "resume",
    "resume_force",
    "tensorboard_path",
    "local_rank",
    "verbose",
    "data_output_path",
    "preprocessing_num_workers",
    "deepspeed_config",
    "logging_steps",
    "save_steps",
    "save_minutes",
    "save_total_limit",
    "keep_final_checkpoint",
    "remote_reward_url",
    "push_to_hub",
)


def check_language_model(
    config: StepConfig,
    flag: str,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    limits: str,
    adapter: AdapterSettings | None = None,
) -> PretrainedConfig:
    """Check that `folder`, which `flag` names, holds a language model that can read the tokenizer's
    ids in rows of up to `longest` tokens, a number that the flags `limits` set; returns its
    configuration."""
    model_config = load_config(folder, flag)
    check_vocabulary(tokenizer, model_config, flag, folder, resize=config.run.resize_vocabulary)
    with naming(flag):
        check_causal_lm(folder, adapter)
    require_length(folder, longest, limits)
    check_long_sequences(config.memory, flag, folder, scalar=False)
    return model_config


def check_same_tokens(
    config: StepConfig,
    flag: str,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    limits: str,
) -> None:
    """Check a reference or teacher, which reads the ids of the model that trains."""
    own = read_tokenizer(folder, flag)
    if own.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{flag} {folder}: its tokenizer differs from that of the model that trains, so it"
            " would read other text; use a model with the same tokenizer"
        )
    if flag == TEACHER and answer_ends(own) != answer_ends(tokenizer):
        theirs, ours = (
            tokenizer.convert_ids_to_tokens(list(answer_ends(each))) for each in (own, tokenizer)
        )
        logger().warning(
            f"{flag} {folder}: ends its answers with {theirs}, but the model that trains with"
            f" {ours}, so it learns to go on where it should end; use models with the same chat"
            " template and EOS"
        )
    check_language_model(config, flag, folder, tokenizer, longest, limits)


def model_card(config: StepConfig, role: str) -> str:
    """The card of the model that `role` of `config.models` has become: what it started from, the
    step that trained it, its data, and the flags that differ from their defaults. Of paths it has
    the last part alone."""
    method = {"sft": "SFT", "reward": "reward model", "ppo": "PPO"}[config.kind]
    if isinstance(config, PreferenceConfig) and not config.reward.trains_classifier:
        method = config.reward.objective.upper()
    if isinstance(config, PPOConfig):
        method = f"{config.algorithm.advantage_estimator}, {config.algorithm.policy_loss}"
    _, base = config.models[role]
    known, given = defaults_of(type(config)), flatten(config)
    shown = {
        name: value
        for name, value in given.items()
        if name not in LEFT_OUT and value != known.get(name)
    }
    head = {"library_name": "transformers", "tags": ["dschat_ppo", config.kind]}
    if not os.path.exists(base):
        head["base_model"] = base  # a name on the hub
    data = ", ".join(f"`{_name(path)}`" for path in config.data.data_path)
    flags = "\n".join(
        f"| `--{name}` | `{json.dumps(_shown(value))}` |" for name, value in sorted(shown.items())
    )
    return (
        "---\n"
        + "".join(f"{name}: {json.dumps(value)}\n" for name, value in head.items())
        + f"---\n\n# {_name(base)}, trained further\n\nThe {role} of a run of dschat_ppo"
        f" ({method}). It started from `{_name(base)}` and was trained on {data}.\n\n| flag |"
        f" value |\n|---|---|\n{flags}\n"
    )


def _name(path: str) -> str:
    return Path(path).name if os.path.isabs(path) or os.path.exists(path) else path


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return _name(value) if isinstance(value, str) else value
