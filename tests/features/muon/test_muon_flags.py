"""What `--optimizer muon` excludes, what a DeepSpeed file must not change, and what the planner and
the line of a step make of it."""

import json

import pytest
from command_lines import config_of
from planned_runs import held, plan_ppo

from dschat_ppo.config.cli import parse
from dschat_ppo.config.flag_parser import flag_parser
from dschat_ppo.config.run_flags import RunFlags
from dschat_ppo.engine.ds_config import require_agreement
from dschat_ppo.errors import UserError
from dschat_ppo.features.muon.flags import NOTES
from dschat_ppo.features.muon.optimizers import OPTIMIZER
from dschat_ppo.monitor.step_line import supervised_columns
from dschat_ppo.planner import number_format
from dschat_ppo.planner.number_format import with_dtype

MUON = "--optimizer muon --muon_learning_rate 0.1"
LORA = "--actor_lora_dim 4 --critic_lora_dim 4 --only_optimize_lora"
BOTH = "--optimizer muon and --muon_learning_rate need each other"


@pytest.mark.parametrize(
    ("step", "words", "message"),
    [
        ("sft", "--optimizer muon", BOTH),
        ("ppo", "--muon_learning_rate 0.1", BOTH),
        *[
            ("ppo", f"{MUON} {words}", "in place of the gradient")
            for words in (
                "--dtype fp32 --critic_zero_stage 1",
                "--actor_zero_stage 2",
                "--dtype fp16",
                "--actor_zero_stage 1 --critic_zero_stage 1 --offload",
                "--actor_zero_stage 1 --critic_zero_stage 1 --offload_optimizer",
            )
        ],
        ("ppo", f"{MUON} {LORA}", "omit --actor_lora_dim or --critic_lora_dim, or use"),
    ],
)
def test_what_muon_does_not_go_with_is_refused(step, words, message):
    with pytest.raises(UserError, match=message):
        config_of(step, *words.split())


def test_in_bf16_stage_1_is_accepted():
    assert config_of("ppo", *f"{MUON} --actor_zero_stage 1".split()).run.optimizer == "muon"


def test_the_help_lists_the_choice_and_its_meaning():
    assert [*NOTES.choices["optimizer"]] == [OPTIMIZER.name]
    [flag] = [flag for flag in flag_parser([RunFlags]).flags if flag.dest == "optimizer"]
    assert [*flag.choices] == ["adamw", "muon"] and "matrices of the decoder layers" in flag.help


@pytest.mark.parametrize(
    ("setting", "value", "flag", "ours"),
    [
        ("optimizer.params.muon_lr", 0.2, "muon_learning_rate", "0.1"),
        ("optimizer.params.momentum", 0.9, "optimizer muon's momentum", "0.95"),
        ("zero_optimization.stage", 3, "zero_stage", "0"),
        ("data_types.grad_accum_dtype", "bf16", "optimizer muon's sums of gradients", "fp32"),
        ("zero_optimization.offload_optimizer.device", "cpu", "optimizer muon's device", "none"),
    ],
)
def test_a_deepspeed_file_cannot_change_what_muon_needs(tmp_path, setting, value, flag, ours):
    settings = {"optimizer": {"type": "Muon", "params": {}}}
    *sections, key = setting.split(".")
    inner = settings
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    words = [*MUON.split(), "--deepspeed_config", str(tmp_path / "mine.json")]
    with pytest.raises(UserError) as problem:
        require_agreement(config_of("sft", *words), ranks=2)
    said = str(problem.value)
    assert f"mine.json: {setting} is {json.dumps(value)}, but --{flag}" in said
    assert ours in said.split(", but ")[1]
    assert ("take it out of the file" in said) and ("change one of the two" in said) is (
        "muon's" not in flag
    )


def test_a_matrix_has_one_state_in_place_of_two():
    total = 8030261248  # as transformers counts Llama 3 8B
    matrices = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    plan = plan_ppo(MUON)
    assert plan.roles[0].sizes.taken == {"muon": matrices}
    assert held(plan, "checkpoint", "actor", "optimizer") == (12 * total - 4 * matrices) // 8
    assert held(plan, "checkpoint", "reference", "optimizer") == 0


@pytest.mark.parametrize(
    ("stage", "dtype", "reason"), [(1, "bf16", "the other flags"), (0, "fp32", "1.5 times as fast")]
)
def test_the_number_format_that_muon_needs_is_chosen(
    assets, tmp_path, monkeypatch, said, stage, dtype, reason
):
    monkeypatch.setattr(number_format, "time_products", lambda *_: {"bf16": 1.5, "fp32": 1.0})
    monkeypatch.setattr(number_format, "_multiplies_bf16", lambda: True)
    words = (
        f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --output_dir {tmp_path}"
    )
    words += f" --dtype auto {MUON} --zero_stage {stage}"
    assert with_dtype(parse("sft", words.split())).run.dtype == dtype
    assert reason in said[0]


def test_the_line_of_a_step_has_the_second_rate():
    labels = [column.label for column in supervised_columns(["margin"])]
    assert labels == ["margin", "lr", "LoRA lr", "Muon lr", "grad norm"]
