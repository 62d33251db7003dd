"""Updates by several estimators and losses from one stored rollout.

algorithms.py ASSETS OUT_FILE ZERO_STAGE MICRO_BATCH_SIZE
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
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo import advantages
from dschat_ppo.rewards.reward_source import RewardMixture
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.types import Rollout, select_rows
from workers.ppo_setup import experience_of, ppo_of, update_once
from workers.quick import be_quick

SAMPLES, GLOBAL_BATCH, EPOCHS = 4, 8, 2
CASES = {
    "gae": "--entropy_coef 0.01",
    "gae clip_cov entropy": "--policy_loss clip_cov --covariance_share 0.3 "
    "--high_entropy_share 0.5 --loss_aggregation seq_mean_token_sum",
    "grpo gspo kl": "--advantage_estimator grpo --policy_loss gspo --kl_loss_coef 0.1",
    "dr_grpo full kl": "--advantage_estimator dr_grpo --kl_loss_coef 0.1 --kl_loss_estimator full",
    "rloo cispo importance": "--advantage_estimator rloo --policy_loss cispo --importance_correction token "
    "--kl_coef 0.1",
    "reinforce_plus_plus kl_cov": "--advantage_estimator reinforce_plus_plus --policy_loss kl_cov "
    "--covariance_share 0.2 --kl_estimator k3",
    "baseline gmpo": "--advantage_estimator reinforce_plus_plus_baseline --policy_loss gmpo --kl_coef 0.1 "
    "--kl_estimator full",
    "opo sapo off policy": "--advantage_estimator opo --policy_loss sapo --off_policy_delta 0.01",
    "gpg reinforce truncated": "--advantage_estimator gpg --policy_loss reinforce --mask_truncated_answers",
    "pass_at_k dual": "--advantage_estimator grpo_pass_at_k --dual_clip 3 --entropy_coef 0.01 --entropy_target 9 "
    "--kl_coef 0.1",
    "grpo ptx": "--advantage_estimator grpo --unsup_coef 0.5",
}


class TokenSum:
    """A reward that is a function of the tokens alone."""

    name = "token_sum"

    def __call__(self, request, rollout):
        return torch.where(rollout.response_mask, rollout.response_ids, 0).sum(dim=1) % 5 / 2.0


def numbers_of(assets: Path, stage: int, micro: int, case: str, device) -> list[list[float]]:
    """Loss, entropy and gradient norms of each update."""
    words = ["--actor_model_name_or_path", assets / "lm", "--critic_model_name_or_path", assets / "reward"]
    words += ["--data_path", "unused", "--output_dir", "unused", "--dtype", "fp32"]
    words += ["--actor_zero_stage", stage, "--critic_zero_stage", stage]
    words += ["--per_device_training_batch_size", micro, "--micro_batch_tokens", micro * 14]
    words += ["--gradient_accumulation_steps", GLOBAL_BATCH // (micro * dist.world_size())]
    words += ["--per_device_generation_batch_size", 4 // dist.world_size(), "--n_samples_per_prompt", SAMPLES]
    words += ["--num_warmup_steps", 0, "--actor_learning_rate", 0.01, "--critic_learning_rate", 0.01]
    words += ["--old_logprobs", "recompute", "--max_answer_seq_len", 8, "--max_prompt_seq_len", 8]
    words += ["--ppo_epochs", EPOCHS, *CASES[case].split()]
    if "ptx" in case:
        words += ["--unsupervised_dataset_name", assets / "texts.jsonl"]
    config = parse("ppo", [str(word) for word in words])
    seed_everything(1)
    ppo = ppo_of(config, Dataset.from_dict({"row": ["{}"] * 40}), device)
    ppo.collection.requests.mixture = RewardMixture([(TokenSum(), 1.0)])
    rollout = Rollout(**torch.load(assets / "rollout.pt", weights_only=True))
    mine = torch.arange(16).view(dist.world_size(), -1)[dist.rank()]
    prompts = list(range(4 // dist.world_size()))
    experience = experience_of(ppo, select_rows(rollout, mine), prompts)
    assert torch.unique(experience.groups, return_counts=True)[1].tolist() == [SAMPLES] * 4
    ppo.engines.train()
    found = []
    for minibatch in ppo.mini_dataset.minibatches(experience, EPOCHS, step=1):
        sums = MetricSums()
        norms = update_once(ppo, minibatch, sums).grad_norms
        metrics = sums.reduce()
        names = ["policy/loss", "policy/entropy", *(n for n in ("policy/kl_loss", "policy/ptx_loss") if n in metrics)]
        found.append([*(metrics[name] for name in names), *norms.values()])
    return found


def main() -> None:
    be_quick()
    advantages.CLIP_COV_BOUNDS = (-9.0, 9.0)  # few tokens of this batch are within those of the paper
    assets, out, stage, micro = Path(sys.argv[-4]), Path(sys.argv[-3]), int(sys.argv[-2]), int(sys.argv[-1])
    quiet_libraries()
    device = init_process_group()
    torch.set_num_threads(1)
    found = {case: numbers_of(assets, stage, micro, case, device) for case in CASES}
    if dist.is_main():
        out.write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


if __name__ == "__main__":
    main()
