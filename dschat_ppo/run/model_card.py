"""The card of a saved model: `README.md` in its folder, as the Hugging Face hub reads it."""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from dschat_ppo.config.feature_flags import feature_notes
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig, defaults_of, flatten
from dschat_ppo.config.supervised_config import PreferenceConfig

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
    *chain.from_iterable(notes.not_on_cards for notes in feature_notes()),
)

_TAG = "dschat_ppo"

# How to use a model, by whether it is a language model and whether its folder holds an adapter.
_LOADED = {
    (True, False): ("transformers", "AutoModelForCausalLM", ""),
    (True, True): ("peft", "AutoPeftModelForCausalLM", ""),
    (False, False): ("transformers", "AutoModelForSequenceClassification", ""),
    (False, True): ("peft", "AutoPeftModelForSequenceClassification", ", num_labels=1"),
}
_GENERATES = """\
inputs = tokenizer(text, add_special_tokens={special}, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=100)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""
_SCORES = """\
inputs = tokenizer(text, add_special_tokens={special}, return_tensors="pt")
print(model(**inputs).logits[0, 0].item())
"""


def model_card(
    config: StepConfig,
    role: str,
    is_adapter: bool,
    has_template: bool,
    other_usage: str | None = None,
) -> str:
    """The card of the model that `role` of `config.models` has become: what it started from, the
    step that trained it, its data, how to use it, and the flags that differ from their defaults. Of
    paths it has the last part alone. `is_adapter`: its folder holds an adapter, not a whole model;
    `has_template`: its tokenizer has a chat template; `other_usage`: how it is used, if not as
    other models."""
    method, is_language_model = _method(config, role)
    _, base = config.models[role]
    library, _, _ = _LOADED[is_language_model, is_adapter]
    tags = [_TAG, config.kind]
    if is_adapter:
        tags.append("lora")
    metadata = {"base_model": _base_model(base), "library_name": library, "tags": tags}
    front_matter = "".join(f"{key}: {json.dumps(value)}\n" for key, value in metadata.items())
    data = ", ".join(f"`{_name(path)}`" for path in config.data.data_path)
    defaults = defaults_of(type(config))
    rows = []
    for name, value in sorted(flatten(config).items()):
        if name not in LEFT_OUT and value != defaults.get(name):
            rows.append(f"| `--{name}` | `{json.dumps(_without_folders(value))}` |")
    flags = "\n".join(rows)
    usage = other_usage or _usage(is_language_model, is_adapter, has_template)
    return (
        f"---\n{front_matter}---\n\n# {_name(base)}, trained further\n\nThe {role} of a run of"
        f" dschat_ppo ({method}). It started from `{_name(base)}` and was trained on {data}.\n\n"
        f"{usage}\n## Training\n\n| flag | value |\n|---|---|\n{flags}\n"
    )


def _method(config: StepConfig, role: str) -> tuple[str, bool]:
    """What trained a model, and whether it is a language model."""
    if isinstance(config, PPOConfig):
        algorithm = config.algorithm
        return f"{algorithm.advantage_estimator}, {algorithm.policy_loss}", role != "critic"
    if isinstance(config, PreferenceConfig):
        if config.reward.trains_classifier:
            return "reward model", False
        return config.reward.objective.upper(), True
    return "SFT", True


def _usage(is_language_model: bool, is_adapter: bool, has_template: bool) -> str:
    """A section with a code block that loads the model, or the adapter with its base, and uses it
    once: a language model (`is_language_model`) generates, another one scores. Text after a chat
    template has its special tokens already; other text ends with EOS if it is to be scored."""
    library, kind, settings = _LOADED[is_language_model, is_adapter]
    imports = ["from transformers import AutoTokenizer"]
    if library == "transformers":
        imports = [f"from transformers import {kind}, AutoTokenizer"]
    else:
        imports.insert(0, f"from {library} import {kind}")
    question = '{"role": "user", "content": "Where is the lamp?"}'
    response = '{"role": "assistant", "content": "In the hall."}'
    if has_template and is_language_model:
        text = f"messages = [{question}]\n"
        text += (
            "text = tokenizer.apply_chat_template("
            "messages, tokenize=False, add_generation_prompt=True)\n"
        )
    elif has_template:
        text = f"messages = [\n    {question},\n    {response},\n]\n"
        text += "text = tokenizer.apply_chat_template(messages, tokenize=False)\n"
    elif is_language_model:
        text = 'text = "Where is the lamp?"\n'
    else:
        text = 'text = "Where is the lamp? In the hall." + tokenizer.eos_token\n'
    use = _SCORES
    if is_language_model:
        use = _GENERATES
    code = [
        *imports,
        "",
        'folder = "."  # this folder, or its name on the hub',
        f"model = {kind}.from_pretrained(folder{settings})",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        text + use.format(special=not has_template),
    ]
    return "## How to use it\n\n```python\n" + "\n".join(code) + "```\n"


def _base_model(base: str) -> str:
    """The name on the hub of the model that a run started from, which the card of an earlier run
    passes on; else the last part of its folder."""
    if not os.path.exists(base):
        return base
    try:
        text = (Path(base) / "README.md").read_text(encoding="utf-8")
        metadata = yaml.safe_load(text.split("---")[1])
        if _TAG in metadata["tags"]:
            return str(metadata["base_model"])
    except (OSError, UnicodeError, IndexError, KeyError, TypeError, yaml.YAMLError):
        pass  # it has no card, or that of somebody else
    return _name(base)


def _name(path: str) -> str:
    """The last part of a path; another text, such as the name of a model on the hub, as it is."""
    if os.path.isabs(path) or os.path.exists(path):
        return Path(path).name
    return path


def _without_folders(value: Any) -> Any:
    """The value of a flag; of each path in it the last part alone."""
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    if isinstance(value, str):
        return _name(value)
    return value
