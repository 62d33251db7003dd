"""DeepSpeed-Chat's training scripts start on tiny models, with small sizes, on one rank: so many of
them that each flag of each step is in one, with each ZeRO stage and each family of models. That all
parse is in tests/config.

If ranks divide the weights for generation, there are two.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from config.deepspeed_chat_scripts import GENERATION_BATCHES, REFUSED, SCRIPTS
from every_architecture import config_of, save_model_of
from launch import metrics_of, run_steps
from transformers import AutoModelForSequenceClassification

from dschat_ppo.tools import toy

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]

FAMILIES = {
    "meta-llama": "Llama 2",
    "facebook": "OPT",
    "bigscience": "BLOOM",
    "sberbank-ai": "GPT-2",
}
SUPERVISED = (
    "--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --max_seq_len 48"
    " --learning_rate 0.001 --weight_decay 0.1 --gradient_accumulation_steps 2"
)
PPO = (
    "--per_device_generation_batch_size 2 --per_device_training_batch_size 2 --max_prompt_seq_len"
    " 32 --max_answer_seq_len 6 --actor_learning_rate 0.001 --critic_learning_rate 0.001"
    " --actor_weight_decay 0.1 --critic_weight_decay 0.1 --enable_test_mode --test_stop_step 1"
)
BOTH = "--dtype fp32 --num_train_epochs 1 --num_warmup_steps 0 --data_split 2,4,4"


def started() -> list[str]:
    """Scripts that bring a flag, a ZeRO stage or a family that those before them have not; those
    with most first."""
    seen, chosen = set(), []
    for name in sorted(
        SCRIPTS.keys() - REFUSED.keys(), key=lambda name: (-len(set(SCRIPTS[name].words)), name)
    ):
        step, words = SCRIPTS[name].step, SCRIPTS[name].words
        has = {(step, word) for word in words if word.startswith("--")}
        has |= {
            (step, *pair)
            for pair in zip(words, words[1:], strict=False)
            if pair[0].endswith("zero_stage")
        }
        has |= {(step, word.split("/")[0]) for word in words if word.split("/")[0] in FAMILIES}
        if has - seen:
            chosen.append(name)
        seen |= has
    return chosen


STARTED = started()


def command_line(name: str, folder: Path) -> list[str]:
    """A script's flags with small sizes, and tiny models and data of `folder`; later flags override
    earlier ones."""
    script = SCRIPTS[name]
    words = [*script.words, "--data_path", f"{folder}/pairs.jsonl"]
    if script.step == "ppo":
        family = "Llama 2" if "llama2" in name else "OPT"
        models = {"actor": f"{folder}/{family}", "critic": f"{folder}/{family} reward"}
        for role, path in models.items():
            words += [f"--{role}_model_name_or_path", path]
        words += PPO.split()
        if "--inference_tp_size" in words:  # as many as there are ranks
            words += ["--inference_tp_size", "2"]
        if name in GENERATION_BATCHES:
            words += "--gradient_accumulation_steps 2 --generation_batches 2".split()
    else:
        family = FAMILIES[words[words.index("--model_name_or_path") + 1].split("/")[0]]
        words += ["--model_name_or_path", f"{folder}/{family}", *SUPERVISED.split()]
    if "--deepspeed_config" in words:
        words += ["--deepspeed_config", f"{folder}/ds_config.json"]
    return [*words, *BOTH.split(), "--output_dir", "output", "--tensorboard_path", "output"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name of a script -> its output folder."""
    folder = tmp_path_factory.mktemp("deepspeed_chat")
    tokenizer = toy.make_tokenizer(["a few words to merge"])
    for family in FAMILIES.values():
        save_model_of(family, tokenizer, folder / family)
    for family in ("Llama 2", "OPT"):
        torch.manual_seed(1)
        config = config_of(family, tokenizer)
        config.num_labels = 1
        AutoModelForSequenceClassification.from_config(config).save_pretrained(
            folder / f"{family} reward"
        )
        tokenizer.save_pretrained(folder / f"{family} reward")
    rows = [
        {"prompt": f"Where{'?' * (n % 5)}", "chosen": f" here {n}", "rejected": " there"}
        for n in range(30)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "ds_config.json").write_text(json.dumps({"wall_clock_breakdown": False}))

    cases = {}
    for name in STARTED:
        out, step = folder / name.replace("/", "_"), SCRIPTS[name].step
        words = [*command_line(name, folder), "--output_dir", out, "--tensorboard_path", out]
        if step == "dpo":  # as training/step2_dpo/main.py does
            words += ["--objective", "dpo"]
        cases[name] = ("reward" if step == "dpo" else step, words)
    split = {name: case for name, case in cases.items() if "--inference_tp_size" in case[1]}
    found = run_steps(split, folder, ranks=2)
    found |= run_steps(
        {name: case for name, case in cases.items() if name not in split}, folder, ranks=1
    )
    assert {name: run["error"] for name, run in found.items() if run["error"]} == {}
    return {name: folder / name.replace("/", "_") for name in STARTED}


@pytest.mark.parametrize("name", STARTED)
def test_a_script_trains_and_saves(runs, name):
    out = runs[name]
    lines = metrics_of(out)
    numbers = [value for line in lines for value in line.values() if isinstance(value, float)]
    assert numbers and all(map(math.isfinite, numbers))
    assert any(
        value > 0
        for line in lines
        for key, value in line.items()
        if key.startswith(("grad_norm", "optim/grad_norm"))
    )
    saved = [out / "actor", out / "critic"] if SCRIPTS[name].step == "ppo" else [out]
    if "--enable_ema" in SCRIPTS[name].flags:
        saved.append(out / "actor_ema")
    assert all(
        (folder / "model.safetensors").exists() or (folder / "adapter_model.safetensors").exists()
        for folder in saved
    )
    assert bool(list(out.rglob("events.out.tfevents*"))) == (
        "--enable_tensorboard" in SCRIPTS[name].flags
    )
