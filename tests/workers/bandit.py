"""PPO on a bandit: one answer token, a reward of 1 for one of 320 tokens and 0.3 for another.

bandit.py ASSETS OUT_FILE
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from dschat_ppo.common import dist
from dschat_ppo.models.forward import response_logprobs
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.rewards.reward_source import RewardMixture
from dschat_ppo.runtime.launch import leave
from workers.ppo_setup import make_ppo, run_all

BEST, SECOND = 42, 17


class Arms:
    """The reward of the one token of an answer."""

    name = "arms"

    def __call__(self, request, rollout):
        token = rollout.response_ids[:, 0]
        return (token == BEST).float() + 0.3 * (token == SECOND).float()


def main() -> None:
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    flags = (
        "--actor_zero_stage",
        3,
        "--critic_zero_stage",
        3,
        "--old_logprobs",
        "rollout",
        "--max_answer_seq_len",
        1,
        "--kl_coef",
        0,
    )
    flags += ("--per_device_generation_batch_size", 128, "--per_device_training_batch_size", 64, "--ppo_epochs", 2)
    flags += (
        "--actor_learning_rate",
        0.003,
        "--critic_learning_rate",
        0.003,
        "--entropy_coef",
        0.01,
        "--num_train_epochs",
        200,
    )
    flags += ("--lr_scheduler_type", "constant", "--enable_test_mode", "--test_stop_step", 40)
    ppo = make_ppo(assets, *flags, lm="uniform_lm")

    ppo.collection.requests.mixture = RewardMixture([(Arms(), 1.0)])
    with MetricsWriter(out.parent, None) as writer:
        result = run_all(ppo, writer)
    rollout = ppo.collection.generator.answer([0, 1, 2, 3], 1)
    forced = rollout.response_ids.new_full((4, 1), BEST)
    with torch.no_grad(), ppo.engines.hybrid.generating() as model:
        probability = response_logprobs(model, replace(rollout, response_ids=forced), 1.0).logprobs.exp()
    if dist.is_main():
        found = {"probability": probability.squeeze(1).tolist(), "first": result["reward/score_mean_before"]}
        out.write_text(json.dumps({**found, "last": result["reward/score_mean_after"]}))
    dist.shutdown()
    leave(0)


main()
