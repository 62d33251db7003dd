"""A reference that moves, on two ranks, in runs that are stopped and resumed.

`tests/engine/test_rlhf_engine.py` has the formula at each ZeRO stage.
"""

import json

import pytest
import torch
from launch import numbers_of, run_resumes
from safetensors.torch import load_file

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

RUN = (
    "--data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len 5 --dtype fp32 --ppo_epochs 2 --max_steps 4 "
    "--num_warmup_steps 0 --actor_learning_rate 0.01 --critic_learning_rate 0.01 --min_lr_ratio 0.2 --save_minutes 0 "
    "--ref_sync_interval 2 --ref_sync_mixup 0.5 --keep_final_checkpoint"
)
INSIDE = "step_000002_update_0001"  # after the first sync; `step_000002` is saved right after it


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """(folder with a run for each name, name -> what each start of it gave)."""
    folder = tmp_path_factory.mktemp("synced")
    models = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward"
    ppo = f"{models} --data_path {assets}/prompts.jsonl {RUN} --ref_model_name_or_path {assets}/uniform_lm"
    two = f"{ppo} --actor_zero_stage 3 --critic_zero_stage 2 --per_device_generation_batch_size 8"
    two += " --per_device_training_batch_size 4"
    one = f"{ppo} --actor_zero_stage 2 --critic_zero_stage 2 --per_device_generation_batch_size 16"
    one += " --per_device_training_batch_size 8"

    def case(name: str, words: str, stops: list, to_the_end: bool = True) -> tuple:
        return "ppo", [*words.split(), "--output_dir", f"{folder}/{name}"], stops, to_the_end

    together = {
        "whole": case("whole", two, []),
        "cut": case("cut", two, ["step_000002", INSIDE]),
        "fewer": case("fewer", two, [INSIDE], to_the_end=False),
        "fixed": case("fixed", two.replace("--ref_sync_interval 2 --ref_sync_mixup 0.5", ""), []),
    }
    found = run_resumes(together, folder, ranks=2)
    found["fewer"] += run_resumes({"fewer": case("fewer", one, [])}, folder, ranks=1)["fewer"]
    return folder, found


def test_the_reference_moves_after_every_second_step_and_the_kl_is_to_the_new_one(runs):
    folder, found = runs
    moved, fixed = numbers_of(folder / "whole"), numbers_of(folder / "fixed")
    assert ["kl/reference_moved" in line for line in moved] == [False, True, False, True] and len(fixed) == 4
    assert all(line["kl/reference_moved"] > 0 for line in moved[1::2])
    for step in (0, 1):
        same = {name: value for name, value in moved[step].items() if name != "kl/reference_moved"}
        assert same == fixed[step], "before the first sync"
    assert moved[2]["kl/ref_k1"] < 0.8 * fixed[2]["kl/ref_k1"]
    assert "PPO step 2: reference = 0.5 x actor + 0.5 x reference; it moved by " in found["whole"][0]["said"]
    result = json.loads((folder / "whole/result.json").read_text())
    assert result["ppo_steps"] == 4, "40 prompts, 16 in a step: more than an epoch"


def test_a_resumed_run_has_the_reference_of_an_uninterrupted_one(runs):
    folder, found = runs
    assert [start["ended"].startswith("stopped") for start in found["cut"]] == [True, True, False]
    assert numbers_of(folder / "cut") == numbers_of(folder / "whole")
    for role in ("actor", "critic"):
        one, other = (load_file(folder / name / role / "model.safetensors") for name in ("whole", "cut"))
        assert all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())


def test_a_run_resumed_on_fewer_ranks_and_another_stage_has_it_within_rounding(runs):
    folder, found = runs
    assert found["fewer"][-1]["ended"] == "done" and "resharded" in found["fewer"][-1]["said"]
    for expected, line in zip(numbers_of(folder / "whole"), numbers_of(folder / "fewer"), strict=True):
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_checkpoints_hold_the_reference_only_if_it_moves(runs):
    from dschat_ppo.checkpoint.state_files import load_state

    folder, _ = runs
    held = {}
    for name in ("whole", "fixed"):
        state = load_state(folder / name / "checkpoints/step_000004/rank_1.pt")
        held[name] = state["reference"]
    assert held["fixed"] is None and len(held["whole"]) > 10
