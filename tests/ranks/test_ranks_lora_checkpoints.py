"""Checkpoints of LoRA runs hold only what trains, and a run resumes from them exactly, or on other ranks and stages."""

import json

import numpy as np
import pytest
from launch import ROOT, forked, metrics_of, succeed

from dschat_ppo.checkpoint.engine_state import FROZEN, model_states
from dschat_ppo.checkpoint.store import CheckpointFolder

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

NOT_COMPARED = ("time", "time/", "memory/")
FIT = (
    "--data_split 1,0,0 --max_seq_len 48 --eval_interval 2 --eval_fraction 0.2 --save_minutes 0 --lora_dim 4 "
    "--lora_learning_rate 0.02 --learning_rate 0.02 --num_warmup_steps 1 --save_total_limit 9 "
    "--keep_final_checkpoint"
)
PPO = (
    "--data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len 4 --per_device_generation_batch_size 4 "
    "--per_device_training_batch_size 4 --num_warmup_steps 0 --actor_lora_dim 4 --critic_lora_dim 2 --share_base "
    "--only_optimize_lora --actor_lora_learning_rate 0.02 --critic_lora_learning_rate 0.02 --use_reward_model False "
    "--enable_test_mode --test_stop_step 3 --save_minutes 0 --enable_ema --ema_decay 0.5 --dtype bf16 "
    "--keep_final_checkpoint"
)
STEPS = 4  # optimizer steps of step 1


def fit(assets, ranks: int, stage: int, *more: str) -> str:
    batch = f"--per_device_train_batch_size {8 // ranks} --zero_stage {stage}"
    return f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl {FIT} {batch} {' '.join(more)}"


def launch(cases: dict, folder, ranks: int) -> dict:
    """Name -> what each start of the case gave; cases: name -> (step, flags, output, where it stops, to the end)."""
    words = {
        name: (step, [*flags.split(), "--output_dir", f"{folder}/{output}"], stops, to_the_end)
        for name, (step, flags, output, stops, to_the_end) in cases.items()
    }
    (folder / "cases.json").write_text(json.dumps(words))
    found = folder / "found.json"
    succeed(forked(ranks, "tests/workers/resumes.py", folder / "cases.json", found, timeout=900))
    return json.loads(found.read_text())


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """(folder, what each start gave): runs that stop and resume on the same ranks, and on others."""
    folder = tmp_path_factory.mktemp("lora")
    frozen = "--only_optimize_lora --dtype bf16 --lora_dropout 0.1 --metric_for_best perplexity --save_hf_steps 2"
    moved = "--only_optimize_lora --dtype fp32"
    reward = f"--use_reward_model False --reward_function {ROOT}/tests/reward_functions.py:lengths"
    models = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/lm"
    ppo = f"{models} --data_path {assets}/prompts.jsonl {PPO} {reward} --actor_zero_stage 3 --critic_zero_stage 3"
    same = {
        "adapter": ("sft", fit(assets, 2, 3, frozen)),
        "dora": ("sft", fit(assets, 2, 2, frozen, "--use_dora --lora_merge")),
        "beside": ("sft", fit(assets, 2, 1, "--dtype bf16")),  # weights without LoRA train too
        "shared": ("ppo", ppo),
    }
    cases = {}
    for name, (step, flags) in same.items():
        cases[f"{name} whole"] = (step, flags, f"{name}/whole", [], True)
        cases[f"{name} cut"] = (step, flags, f"{name}/cut", ["step_000002"], True)
    cases["moved whole"] = ("sft", fit(assets, 2, 3, moved), "moved/whole", [], True)
    cases["fewer"] = ("sft", fit(assets, 2, 3, moved), "moved/fewer", ["step_000002"], False)
    found = launch(cases, folder, ranks=2)
    alone = {
        "fewer": ("sft", fit(assets, 1, 2, moved), "moved/fewer", [], True),
        "more": ("sft", fit(assets, 1, 0, moved), "moved/more", ["step_000002"], False),
    }
    found |= {f"{name} alone": starts for name, starts in launch(alone, folder, ranks=1).items()}
    together = {"more": ("sft", fit(assets, 2, 1, moved), "moved/more", [], True)}
    found |= launch(together, folder, ranks=2)
    return folder, found


def compared(folder) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in metrics_of(folder)]


@pytest.mark.parametrize("name", ["adapter", "dora", "beside", "shared"])
def test_a_resumed_run_has_the_metrics_and_models_of_an_uninterrupted_one(runs, name):
    folder, found = runs
    stopped, resumed = found[f"{name} cut"]
    assert "saved as" in stopped["ended"] and "resuming from" in resumed["said"]
    whole, cut = folder / name / "whole", folder / name / "cut"
    assert compared(cut) == compared(whole)
    models = sorted(path.relative_to(whole) for path in whole.rglob("*.safetensors"))
    assert models == sorted(path.relative_to(cut) for path in cut.rglob("*.safetensors"))
    folders = {"adapter": {"best", "hf"}, "dora": {"best", "hf"}, "shared": {"actor", "actor_ema", "critic"}}
    assert {path.parts[0] for path in models if len(path.parts) > 1} == folders.get(name, set())
    if "hf" in folders.get(name, ()):
        saved = ["models of step 2:" in start["said"] for start in (stopped, resumed)]
        assert saved == [True, False] and "models of step 4:" in resumed["said"]
    for path in models:
        assert (whole / path).read_bytes() == (cut / path).read_bytes(), path


@pytest.mark.parametrize("name", ["adapter", "dora", "shared"])
def test_checkpoints_do_not_hold_the_frozen_base(runs, assets, name):
    folder, _ = runs
    for checkpoint in (folder / name / "whole/checkpoints").glob("step_*"):
        size = sum(path.stat().st_size for path in checkpoint.rglob("*_states.pt"))
        states = [model_states(role) for role in checkpoint.iterdir() if (role / "state").is_dir()]
        assert len(states) == (2 if name == "shared" else 1)
        for common in states:
            assert common["module"] and all(".lora_" in key or key.endswith("score.weight") for key in common["module"])
            assert len(common[FROZEN]) > 15 and not any(".lora_" in key for key in common[FROZEN])
        assert size < (assets / "lm/model.safetensors").stat().st_size


@pytest.mark.parametrize("name", ["fewer", "more"])
def test_resuming_on_other_ranks_and_another_stage_matches_within_rounding(runs, name):
    folder, found = runs
    starts = [*found["fewer"], *found["fewer alone"]] if name == "fewer" else [*found["more alone"], *found["more"]]
    assert "resharded" in starts[-1]["said"]
    whole, moved = compared(folder / "moved/whole"), compared(folder / "moved" / name)
    assert [line["step"] for line in moved] == list(range(STEPS + 1))
    for key in ("loss", "eval_loss", "grad_norm"):
        before, after = ([line[key] for line in lines if key in line] for lines in (whole, moved))
        np.testing.assert_allclose(after, before, rtol=1e-3, err_msg=key)
    assert abs(whole[1]["loss"] - whole[STEPS]["loss"]) > 0.05
    assert CheckpointFolder(folder / "moved" / name).newest_intact()[0] == f"step_{STEPS:06d}"
