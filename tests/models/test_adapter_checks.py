"""Saved adapters: values that peft accepts and fails on, hostile patterns, settings outside of a closed list."""

import json
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from peft import LoraConfig

from dschat_ppo.errors import UserError
from dschat_ppo.models import model_folders
from dschat_ppo.models.adapters import AdapterSettings, ignored_flags
from dschat_ppo.models.model_folders import check_adapter_values, check_patterns, lora_settings, read_adapter_config

GOOD = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"a": 2}, "alpha_pattern": {"a": 0.5},
    "target_modules": ["q"], "modules_to_save": None, "layers_to_transform": [0, 1], "lora_dropout": 0.1,
}  # fmt: skip
NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"]
FOREVER = "(([a-z._0-9]+)+)+!"


def test_what_peft_itself_writes_passes(tmp_path):
    for more in ({}, {"target_modules": "all-linear"}, {"use_dora": True}, {"layers_to_transform": 1}):
        LoraConfig(r=2, **{"target_modules": ["q", "v"], **more}).save_pretrained(tmp_path)
        check_adapter_values(json.loads((tmp_path / "adapter_config.json").read_text()), "--model")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("r", "4", "an integer above 0"),
        ("r", 0, "an integer above 0"),
        ("r", True, "an integer above 0"),
        ("r", None, "an integer above 0"),
        ("lora_alpha", float("nan"), "a finite number"),
        ("lora_alpha", [8], "a finite number"),
        ("lora_dropout", 1.0, "a number from 0 to below 1"),
        ("rank_pattern", "{}", "an object of integers above 0"),
        ("rank_pattern", {"a": "4"}, "an object of integers above 0"),
        ("alpha_pattern", [1], "an object of numbers"),
        ("target_modules", [1], "text or a list of texts"),
        ("layers_to_transform", ["0"], "a number or a list of numbers"),
        ("modules_to_save", "score", "a list of texts"),
        ("use_dora", "true", "true or false"),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path, name, value, kind):
    (tmp_path / "adapter_config.json").write_text(json.dumps(GOOD))
    assert read_adapter_config(str(tmp_path), "--model") == GOOD
    (tmp_path / "adapter_config.json").write_text(json.dumps({**GOOD, name: value}))
    with pytest.raises(UserError, match=f"adapter_config.json: '{name}' must be {kind}; it is "):
        read_adapter_config(str(tmp_path), "--model")


def test_settings_that_do_not_go_together_are_refused_in_one_line(tmp_path):
    saved = {**GOOD, "layers_pattern": "h", "layers_to_transform": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    settings = AdapterSettings(4, 8, 0.0, None, rslora=False, dora=False, freeze_base=True)
    with pytest.raises(UserError, match=rf"^{tmp_path}: its adapter_config.json cannot be used: .*layers_to_transform"):
        ignored_flags(str(tmp_path), settings)


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
    monkeypatch.setattr(model_folders, "PATTERN_SECONDS", 0.3)
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


def test_all_patterns_share_one_limit(monkeypatch):
    given = []

    @contextmanager
    def limit(seconds):
        given.append(seconds)
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        yield

    monkeypatch.setattr(model_folders, "processor_time_limit", limit)
    monkeypatch.setattr(model_folders, "PATTERN_SECONDS", 0.12)
    check_patterns(["q_proj"], config(rank_pattern=dict.fromkeys("abcd", 4)), "out")
    assert given == pytest.approx([0.12, 0.07, 0.02, 0.01], abs=0.015)
