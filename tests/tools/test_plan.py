"""The command: models without weights, flags of step 3, and its errors."""

import json

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from dschat_ppo.tools.plan import main


@pytest.fixture
def models(tmp_path):
    """Folders that hold config.json alone."""
    folders = {}
    for role, kind in (("actor", "CausalLM"), ("critic", "SequenceClassification")):
        config = LlamaConfig(
            vocab_size=1000,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            num_labels=1,
            architectures=[f"LlamaFor{kind}"],
        )
        config.save_pretrained(tmp_path / role)
        folders[role] = str(tmp_path / role)
    return folders


def test_step_3_prints_its_phases_and_takes_all_flags(models, capsys):
    words = [
        "--actor",
        models["actor"],
        "--critic",
        models["critic"],
        "--devices",
        "8",
        "--device_memory",
        "80GiB",
    ]
    assert main([*words, "--host_memory", "1TiB", "--actor_zero_stage", "3"]) == 0
    printed = capsys.readouterr().out
    assert "Step 3 on 8 x GPU of 80 GiB, 1024 GiB of host memory for 8" in printed
    for name in ("rollout", "scoring", "actor update", "critic update", "checkpoint", "It fits."):
        assert name in printed


def test_what_does_not_fit_has_a_proposal(models, capsys):
    words = ["--actor", models["actor"], "--critic", models["critic"], "--device_memory", "1300MiB"]
    words += ["--per_device_training_batch_size", "64", "--per_device_generation_batch_size", "64"]
    assert main([*words, "--host_memory", "64GiB"]) == 0
    printed = capsys.readouterr().out
    assert "It does not fit: the phase " in printed
    flags = printed.partition("with these flags added:\n")[2].split()
    names = ("--per_device_training_batch_size", "--gradient_accumulation_steps")
    size, accumulation = (int(flags[flags.index(name) + 1]) for name in names)
    assert size < 64 and size * accumulation == 64, "an optimizer step has as many rows as before"


def test_json_has_the_plan_and_the_proposal_of_the_text(models, capsys):
    words = ["--actor", models["actor"], "--critic", models["critic"], "--device_memory", "1300MiB"]
    words += ["--per_device_training_batch_size", "64", "--per_device_generation_batch_size", "64"]
    words += ["--host_memory", "64GiB"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["fits"], plan["ranks"], plan["device_memory"]) == (False, 1, 1300 * 2**20)
    assert all(shortage in text for shortage in plan["shortages"])
    assert " ".join(plan["proposal"]["flags"]) in text and plan["proposal"]["fits"]
    assert plan["proposal"]["proposal"] is None
    for phase in plan["phases"]:
        needs = phase["needs"]
        of_device = sum(part["bytes"] for part in phase["held"] if not part["on_host"])
        assert of_device < needs["device"] and phase["phase"] in text
        assert f"{needs['device'] / 2**30:.2f} {needs['host'] / 2**30:9.2f}" in text
    fits = [*words[:4], "--host_memory", "64GiB", "--json"]
    assert main(fits) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["fits"], plan["shortages"], plan["proposal"]) == (True, [], None)
    assert main([*fits, "--dtype", "auto"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["fits"] and printed.err.startswith("dtype: ")


def test_a_model_that_the_planner_does_not_understand_is_an_error(models, capsys, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "get_output_embeddings", lambda self: None)
    assert main(["--step", "1", "--model", models["actor"], "--dtype", "fp32"]) == 2
    assert capsys.readouterr().err.startswith("error: LlamaConfig: its memory cannot be counted: ")
