"""LoRA in step 3, beside full training: what is learned on the toy task, and peak memory.

    python benchmarks/lora.py [--work DIR] [--json FILE] [--docs FILE] [--ranks N] [--seeds N]

*Learned*: PPO with a learned reward on the quickstart's conversations, as in `learning.py`. The result is the share of
sampled answers to held-out questions that follow the true rule, which training never sees. All runs start from one SFT
model and one reward model, an adapter over it. The exit code is 1 if LoRA ends more than `MARGIN` below full training
(mean over seeds).

*Memory*: one PPO step of a larger model with random weights at ZeRO-3; the peak memory of a rank (resident memory on a
CPU), less that of the same run with a model of almost no weights.

Finished runs are kept in the work folder, so an interrupted benchmark resumes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from learning import ROOT, arguments_of, call, flags_of, free_port, prepare, start_and_end
from measure import markdown, write_docs

MARGIN = 0.05
MARKS = ("<!-- lora -->", "<!-- /lora -->")
RANK = 16

LORA = {
    "--actor_lora_dim": RANK, "--critic_lora_dim": RANK, "--only_optimize_lora": True, "--lora_merge": True,
    "--actor_lora_learning_rate": 2e-3, "--critic_lora_learning_rate": 2e-3,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "full training": {},
    "LoRA": LORA,
    "LoRA, one base": {**LORA, "--share_base": True},
}
REWARD = ["--lora_dim", RANK, "--only_optimize_lora", True, "--lora_learning_rate", 5e-3]

# of the model whose memory is measured
SHAPE = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 12, "max_position_embeddings": 256,
}  # fmt: skip
SMALL = {**SHAPE, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1}
ONE_STEP = {
    "--data_split": "0,0,1", "--dtype": "bf16", "--actor_zero_stage": 3, "--critic_zero_stage": 3,
    "--max_prompt_seq_len": 64, "--max_answer_seq_len": 16, "--per_device_generation_batch_size": 4,
    "--per_device_training_batch_size": 2, "--enable_test_mode": True, "--test_stop_step": 1,
}  # fmt: skip


def reward_adapter(made: Path) -> Path:
    """The reward model of the toy task, trained as an adapter over its SFT model; an existing one is kept."""
    folder = made / "reward_adapter"
    if not (folder / "result.json").exists():
        script = ROOT / "training_scripts/toy/run_step2_reward.sh"
        command = ["bash", script, made / "toy", made / "sft", folder, *REWARD, "--overwrite_output_dir"]
        print(f"reward model in {call(command, made / 'reward_adapter.log'):.0f} s", flush=True)
    return folder


def ppo(folder: Path, flags: list[str], ranks: int) -> Path:
    """One run of step 3, unless it is finished with the same flags; returns its output folder."""
    output, kept, wanted = folder / "output", folder / "flags.json", json.dumps(flags)
    if (output / "result.json").exists() and kept.exists() and kept.read_text(encoding="utf-8") == wanted:
        return output
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kept.write_text(wanted, encoding="utf-8")
    launch = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", ranks]
    launch += ["--master_port", free_port(), ROOT / "training/step3_ppo/main.py"]
    seconds = call([*launch, *flags, "--output_dir", output], folder / "log", ranks)
    print(f"{folder}: {seconds:.0f} s", flush=True)
    return output


def folder_name(setting: str) -> str:
    """The name of a setting without spaces."""
    return setting.lower().replace(", ", "_").replace(" ", "_")


def rule_rates(work: Path, seeds: int, ranks: int) -> dict[str, dict[str, float]]:
    """Setting -> share of answers that follow the rule before and after PPO, means over the seeds."""
    made = prepare("preference", work)
    reward, rates = reward_adapter(made), {}
    for name, setting in SETTINGS.items():
        changed, shares = arguments_of({"--critic_model_name_or_path": reward, **setting}), []
        for seed in range(1, seeds + 1):
            flags = [*flags_of("preference", "gae", seed, made, ranks), *changed]
            output = ppo(work / "lora" / folder_name(name) / f"seed_{seed}", flags, ranks)
            shares.append(start_and_end("preference", output, made, seed))
        starts, ends = zip(*shares, strict=True)
        rates[name] = {"start": statistics.mean(starts), "end": statistics.mean(ends)}
    return rates


def random_models(folder: Path, toy: Path, shape: dict[str, int]) -> int:
    """Write a language model with random weights and a reward adapter over it; returns its number of weights."""
    import torch
    from models import save_reward_adapter
    from transformers import AutoTokenizer

    from dschat_ppo.tools.toy_model import untrained_llama

    tokenizer = AutoTokenizer.from_pretrained(toy / "model")
    model = untrained_llama(tokenizer, 1, **shape).to(torch.bfloat16)
    model.save_pretrained(folder / "lm")
    tokenizer.save_pretrained(folder / "lm")
    save_reward_adapter(folder / "lm", folder / "reward", RANK)
    tokenizer.save_pretrained(folder / "reward")
    return model.num_parameters()


def peak_memory(work: Path, ranks: int) -> tuple[dict[str, float], int]:
    """Setting -> peak memory of a rank in MiB that the weights cost, and the number of weights of a model."""
    toy, peaks, weights = prepare("preference", work) / "toy", {}, 0
    for size, shape in (("small", SMALL), ("large", SHAPE)):
        folder = work / "lora" / "memory" / size
        weights = random_models(folder, toy, shape)
        models = {"--actor_model_name_or_path": folder / "lm", "--critic_model_name_or_path": folder / "reward"}
        for name, setting in SETTINGS.items():
            flags = {**ONE_STEP, **models, "--data_path": toy / "data/prompts.jsonl", **setting}
            if setting:
                flags["--lora_merge"] = False
            output = ppo(folder / folder_name(name), arguments_of(flags), ranks)
            lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            found = [value for line in lines for key, value in line.items() if key.endswith("_peak_gib")]
            peaks[size, name] = 1024 * max(found)
    return {name: peaks["large", name] - peaks["small", name] for name in SETTINGS}, weights


def table(rates: dict[str, dict[str, float]], memory: dict[str, float], weights: int, ranks: int) -> str:
    """Markdown: a row for each setting."""
    size = f"{weights / 1e6:.0f} M weights, ZeRO-3, {ranks} ranks"
    header = ["step 3", "answers that follow the true rule, before -> after", f"peak memory of a rank, MiB ({size})"]
    rows = [
        [name, f"{rates[name]['start']:.2f} -> {rates[name]['end']:.2f}", f"{memory[name]:.0f}"] for name in SETTINGS
    ]
    return markdown(header, rows)


def failures(rates: dict[str, dict[str, float]]) -> list[str]:
    """One line for each setting of LoRA that learned less than full training by more than the margin."""
    full = rates["full training"]["end"]
    return [
        f"{name} ends at {found['end']:.3f}, more than {MARGIN} below full training ({full:.3f})"
        for name, found in rates.items()
        if not found["end"] >= full - MARGIN
    ]


def main() -> int:
    """Execute the missing runs and print the table; returns 1 if LoRA learned too little."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "output/learning", help="folder for models and runs, kept")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4), help="ranks of each run")
    parser.add_argument("--seeds", type=int, default=1, choices=(1, 2, 3), help="number of seeds")
    chosen = parser.parse_args()
    work = chosen.work.resolve()
    memory, weights = peak_memory(work, chosen.ranks)
    rates = rule_rates(work, chosen.seeds, chosen.ranks)
    text = table(rates, memory, weights, chosen.ranks)
    print(text)
    if chosen.json:
        found = {"rates": rates, "memory_mib": memory, "weights": weights, "ranks": chosen.ranks}
        chosen.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if chosen.docs:
        write_docs(chosen.docs, text, MARKS)
    missed = failures(rates)
    for line in missed:
        print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
