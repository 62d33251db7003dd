"""PPO steps of one optimizer step, with log-probs and values of the update and of scoring, on DeepSpeed engines.

on_policy.py ASSETS FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.cli import parse
from dschat_ppo.models.micro_batches import share_prompts
from dschat_ppo.models.saving import gather_state
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.ppo.state import PPOComponents
from dschat_ppo.rewards.reward_source import RewardMixture
from dschat_ppo.runtime.launch import leave
from dschat_ppo.runtime.process_group import init_process_group
from workers.algorithms import TokenSum
from workers.ppo_setup import ppo_of, run_all
from workers.quick import be_quick

ROWS, STEPS = 8, 3
CASES = {
    "gae": "--kl_target 0.05 --entropy_coef 0.01 --enable_ema --n_samples_per_prompt 2",
    "grpo": "--advantage_estimator grpo --n_samples_per_prompt 2 --kl_loss_coef 0.1",
    "rloo": "--advantage_estimator rloo --n_samples_per_prompt 2 --kl_coef 0.1 --kl_estimator k3",
    "gae bf16": "--dtype bf16",
    "gae shared": "--sequence_parallel_size 2",
}
SOURCES = ("auto", "recompute")


def ppo_with(assets: Path, case: str, source: str, device) -> PPOComponents:
    shared = 2 if "shared" in case else 1
    samples = 2 if "n_samples" in CASES[case] else 1
    words = ["--actor_model_name_or_path", assets / "lm", "--critic_model_name_or_path", assets / "reward"]
    words += ["--data_path", "unused", "--output_dir", "unused", "--dtype", "fp32", "--old_logprobs", source]
    words += ["--actor_zero_stage", 3, "--critic_zero_stage", 3]
    words += ["--per_device_generation_batch_size", ROWS // samples // dist.world_size()]
    words += ["--per_device_training_batch_size", ROWS * shared // dist.world_size(), "--micro_batch_tokens", 40]
    words += ["--max_prompt_seq_len", 16, "--max_answer_seq_len", 6, "--num_warmup_steps", 0]
    words += ["--actor_learning_rate", 0.003, "--critic_learning_rate", 0.003, "--lr_scheduler_type", "constant"]
    words += ["--adam_epsilon", 1e-4]  # Adam divides by |gradient| + epsilon: 1e-8 magnifies rounding near 0
    words += ["--enable_test_mode", "--test_stop_step", STEPS, *CASES[case].split()]
    config = parse("ppo", [str(word) for word in words])
    dist.share_rows(shared)
    seed_everything(1)
    ids = [[5 + row, *range(20, 30 + row % 5)] for row in range(40)]  # long enough to be shared by several answers
    prompts = Dataset.from_dict({"prompt_ids": ids, "row": ["{}"] * 40})
    ppo = ppo_of(config, prompts, device)
    ppo.collection.requests.mixture = RewardMixture([(TokenSum(), 1.0)])
    return ppo


def count_passes(ppo: PPOComponents) -> dict[str, int]:
    """Forward passes of each model from now on, on this rank; not those of generation."""
    engines = {"actor": ppo.engines.actor, "critic": ppo.engines.critic, "reference": ppo.engines.reference}
    passes = {}
    for role, engine in engines.items():
        if engine is not None:
            passes[role] = 0
            engine.module.register_forward_hook(lambda *_, role=role: passes.update({role: passes[role] + 1}))
    return passes


def main() -> None:
    be_quick()
    assets, folder = Path(sys.argv[-2]), Path(sys.argv[-1])
    quiet_libraries()
    device = init_process_group()
    torch.set_num_threads(1)
    for case in CASES:
        for source in SOURCES:
            out = folder / f"{case} {source}"
            out.mkdir(exist_ok=True)
            ppo = ppo_with(assets, case, source, device)
            passes = count_passes(ppo)
            with MetricsWriter(out, None) as writer:
                run_all(ppo, writer)
            weights = {}
            for role, engine in ppo.engines.trained.items():
                weights |= {f"{role}.{name}": weight for name, weight in gather_state(engine.module).items()}
            shares = share_prompts(ppo.engines.actor, ppo.engines.critic)
            found = {"source": ppo.old_logprobs, "passes": passes, "shares": shares}
            if dist.is_main():
                torch.save(weights, out / "weights.pt")
                (out / "found.json").write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


if __name__ == "__main__":
    main()
