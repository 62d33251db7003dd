"""The printed program on records of two real ranks, ZeRO-3, also of ranks that share rows."""

import subprocess
import sys

import pytest
from launch import run_steps

from dschat_ppo.config.cli import parse
from dschat_ppo.features.explain.algorithm_program import algorithm_program
from dschat_ppo.features.explain.record_files import recorded_steps

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
PPO = (
    "--actor_model_name_or_path {a}/lm --critic_model_name_or_path {a}/reward --data_path"
    " {a}/prompts.jsonl --data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len 6"
    " --num_warmup_steps 0 --actor_learning_rate 0.003 --critic_learning_rate 0.003"
    " --enable_test_mode --test_stop_step 2 --record_steps 2 --dtype fp32"
    " --per_device_generation_batch_size 4 --actor_zero_stage 3 --critic_zero_stage 3"
)
RUNS = {
    "rows of each rank": (
        f"{PPO} --per_device_training_batch_size 2 --ppo_epochs 2 --entropy_coef 0.01"
        " --normalize_rewards running --kl_target 0.05"
    ),
    "shared rows": f"{PPO} --per_device_training_batch_size 8 --sequence_parallel_size 2",
}


@pytest.fixture(scope="module")
def folders(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("algorithm")
    cases = {}
    for name, flags in RUNS.items():
        output = folder / name.replace(" ", "_")
        cases[name] = ("ppo", f"{flags} --output_dir {output}".replace("{a}", str(assets)).split())
    run_steps(cases, folder, ranks=2)
    return {name: folder / name.replace(" ", "_") for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_the_program_gives_the_gradients_of_two_ranks(folders, name, tmp_path):
    config = parse("ppo", ["--config", str(folders[name] / "config.yaml")])
    (tmp_path / "step.py").write_text(algorithm_program(config))
    record = recorded_steps(folders[name])[2]
    command = [sys.executable, "-I", "step.py", str(record)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "gradient of the values" in ended.stdout
