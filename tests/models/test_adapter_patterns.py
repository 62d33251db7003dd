"""Adapter folders: hostile patterns end within seconds, and settings outside of a closed list are refused."""

import json
import time
from types import SimpleNamespace

import pytest

from dschat_ppo.errors import UserError
from dschat_ppo.models import adapter_patterns
from dschat_ppo.models.adapter_patterns import check_patterns
from dschat_ppo.models.model_folders import lora_settings

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"]
FOREVER = "(([a-z._0-9]+)+)+!"


def config(**changes):
    given = {"target_modules": ["q_proj"], "exclude_modules": None, "rank_pattern": {}, "alpha_pattern": {}}
    return SimpleNamespace(**{**given, "layers_pattern": None, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"target_modules": FOREVER}, {"exclude_modules": FOREVER}, {"rank_pattern": {FOREVER: 4}},
     {"alpha_pattern": {FOREVER: 4}}, {"layers_pattern": [FOREVER]}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_a_pattern_that_takes_forever_is_refused_within_seconds(monkeypatch, changes):
    monkeypatch.setattr(adapter_patterns, "PATTERN_SECONDS", 0.3)
    start = time.process_time()
    with pytest.raises(UserError, match="^out: the pattern .* takes too long to match; name the layers instead"):
        check_patterns(NAMES, config(**changes), "out")
    assert time.process_time() - start < 3


def test_a_pattern_with_a_syntax_error_is_named(tmp_path):
    with pytest.raises(UserError, match=r"out: the pattern '\(' of its adapter_config.json: missing \)"):
        check_patterns(NAMES, config(target_modules="("), "out")


def test_ordinary_patterns_pass():
    check_patterns(NAMES, config(target_modules=r".*\.(q|v)_proj", rank_pattern={"layers.0.*": 4}), "out")


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
