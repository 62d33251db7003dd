"""Saved adapters: settings outside of a closed list, and those that peft refuses."""

import json

import pytest

from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters import AdapterSettings, ignored_flags
from dschat_ppo.models.model_folders import lora_settings

GOOD = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"a": 2}, "alpha_pattern": {"a": 0.5},
    "target_modules": ["q"], "modules_to_save": None, "layers_to_transform": [0, 1], "lora_dropout": 0.1,
}  # fmt: skip


def test_settings_that_do_not_go_together_are_refused_in_one_line(tmp_path):
    saved = {**GOOD, "layers_pattern": "h", "layers_to_transform": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    settings = AdapterSettings(4, 8, 0.0, None, rslora=False, dora=False, freeze_base=True)
    with pytest.raises(UserError, match=rf"^{tmp_path}: its adapter_config.json cannot be used: .*layers_to_transform"):
        ignored_flags(str(tmp_path), settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [("megatron_config", {"a": 1}), ("layer_replication", [[0, 1]]), ("use_qalora", True), ("of_a_later_peft", "x")],
)
def test_settings_outside_of_the_closed_list_are_refused(tmp_path, name, value):
    saved = {"peft_type": "LORA", "r": 4, "megatron_core": "own.code", "auto_mapping": {"parent_library": "own"}}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**saved, name: None}))
    assert lora_settings(str(tmp_path), "--model") == {"r": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**saved, name: value}))
    with pytest.raises(UserError, match=f"holds LoRA with {name}; merge it into its base"):
        lora_settings(str(tmp_path), "--model")
