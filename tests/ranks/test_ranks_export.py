"""Exports of checkpoints, at every ZeRO stage and on one and two ranks, are byte for byte what the runs save."""

import filecmp
import json
from pathlib import Path

import pytest
from launch import ROOT, metrics_of, run_steps

from dschat_ppo.tools.export import main

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]

ALONE = ("sft-3-fp32", "ppo-3")  # cases on one rank; all run on two
FIT = (
    "--data_split 1,0,0 --max_seq_len 48 --learning_rate 0.01 --num_warmup_steps 0 --dropout 0.1 --eval_fraction 0.2 "
    "--keep_final_checkpoint --save_minutes 0 --save_steps 2 --save_hf_steps 2 --save_total_limit 9"
)
PPO = (
    "--data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len 4 --per_device_generation_batch_size 4 "
    "--per_device_training_batch_size 4 --num_warmup_steps 0 --actor_learning_rate 0.01 --critic_learning_rate 0.01 "
    "--keep_final_checkpoint "
    "--enable_test_mode --test_stop_step 2 --save_minutes 0 --save_steps 1 --save_hf_steps 1 --save_total_limit 9 "
    "--enable_ema --ema_decay 0.5"
)


def cases_of(assets, folder, ranks: int) -> dict[str, tuple[str, list[object]]]:
    """Name -> (step, words)."""
    cases, batch = {}, f"--per_device_train_batch_size {8 // ranks}"
    for stage, dtype in ((1, "bf16"), (3, "fp32")):
        cases[f"sft-{stage}-{dtype}"] = (
            "sft", f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl {FIT} {batch} "
            f"--zero_stage {stage} --dtype {dtype}",
        )  # fmt: skip
    pairs = f"{FIT} {batch}".replace("1,0,0", "0,1,0")
    cases["reward"] = (
        "reward", f"--model_name_or_path {assets}/lm --data_path {assets}/pairs.jsonl {pairs} --zero_stage 3 "
        "--metric_for_best accuracy --eval_interval 1",
    )  # fmt: skip
    lora = f"sft --model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl {FIT} {batch} --lora_dim 4"
    frozen = "--only_optimize_lora --lora_learning_rate 0.01"
    more = {
        "lora-merged": f"{lora} {frozen} --zero_stage 2 --lora_merge",
        "lora-all": f"{lora} --zero_stage 3 --dtype fp32 --lora_module_name q_proj,v_proj",
        "dora": f"{lora} {frozen} --zero_stage 1 --use_dora --offload",
    }
    cases |= {name: tuple(words.split(maxsplit=1)) for name, words in more.items()}
    models = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward"
    cases["ppo-3"] = (
        "ppo", f"{models} --data_path {assets}/prompts.jsonl {PPO} --dtype bf16 --actor_zero_stage 3 "
        "--critic_zero_stage 3",
    )  # fmt: skip
    cases["ppo-lora"] = (
        "ppo", f"{cases['ppo-3'][1]} --actor_lora_dim 4 --critic_lora_dim 2 {frozen.replace('--lora', '--actor_lora')}",
    )  # fmt: skip
    base = cases["ppo-lora"][1].replace(f"{assets}/reward", f"{assets}/lm")
    cases["ppo-shared"] = (
        "ppo",
        f"{base} --share_base --use_reward_model False --reward_function {ROOT}/tests/reward_functions.py:lengths",
    )
    wanted = ALONE if ranks == 1 else cases
    return {name: (cases[name][0], [*cases[name][1].split(), "--output_dir", folder / name]) for name in wanted}


@pytest.fixture(scope="module", params=[1, 2])
def folder(request, assets, tmp_path_factory):
    """The outputs of each case."""
    folder = tmp_path_factory.mktemp(f"exported_{request.param}")
    found = run_steps(cases_of(assets, folder, request.param), folder, request.param)
    assert {name: case["error"] for name, case in found.items()} == dict.fromkeys(found)
    return folder


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def same_files(left: Path, right: Path) -> list[str]:
    """Names of the files in `left`, each of which has the same bytes in `right`."""
    names = files_of(left)
    assert [name for name in names if not filecmp.cmp(left / name, right / name, shallow=False)] == []
    return names


def test_exports_are_byte_for_byte_what_the_run_saves(folder, tmp_path):
    for output in sorted(path for path in folder.iterdir() if path.is_dir()):
        checkpoints = sorted((output / "checkpoints").glob("step_*"))
        assert len(checkpoints) == 2
        for checkpoint in checkpoints:
            saved, out = output / "hf" / checkpoint.name, tmp_path / output.name / checkpoint.name
            assert main([str(checkpoint), str(out)]) == 0
            assert same_files(saved, out) == files_of(out) != []
        last = same_files(saved, output)
        if output.name.startswith("ppo"):
            assert {name.split("/")[0] for name in last} == {"actor", "actor_ema", "critic"}
        first = output / "hf" / checkpoints[0].name
        weights = [name for name in last if name.endswith(".safetensors")]
        assert not any(filecmp.cmp(first / name, saved / name, shallow=False) for name in weights)


def test_the_best_model_is_that_of_the_best_evaluation(folder):
    """It is evaluated after each step, so the best one is also among those of `hf/` if its step is even."""
    output = folder / "reward"
    if not output.exists():  # on one rank
        return
    result = json.loads((output / "result.json").read_text())
    accuracy = {line["step"]: line["eval_accuracy"] for line in metrics_of(output) if line["step"]}
    best = max(accuracy.values())
    assert result["best_eval_accuracy"] == best
    assert result["best_step"] == min(step for step in accuracy if accuracy[step] == best)
    kept = output / f"hf/step_{result['best_step']:06d}"
    if kept.exists():
        assert same_files(kept, output / "best") == files_of(output / "best") != []
