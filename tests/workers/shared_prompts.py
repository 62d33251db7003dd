"""PPO updates on answers to a few prompts, with shared prompts and without; writes losses, norms and tokens run.

shared_prompts.py ASSETS OUT_FILE
"""

import json
import sys
from pathlib import Path

import torch

from dschat_ppo.common import dist
from dschat_ppo.models import kernel_selection
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.runtime.launch import leave
from dschat_ppo.types import Rollout, select_rows
from workers.ppo_setup import experience_of, make_ppo, update_once
from workers.quick import be_quick

PROMPTS, SAMPLES, STEPS = 4, 4, 3
KERNELS = kernel_selection._select_shared


def rollout() -> Rollout:
    """Uneven answers to prompts of uneven lengths; no token of them ends an answer."""
    generator = torch.Generator().manual_seed(2)
    count = PROMPTS * SAMPLES
    prompts = torch.randint(5, 60, (PROMPTS, 24), generator=generator).repeat_interleave(SAMPLES, dim=0)
    starts = torch.arange(PROMPTS).repeat_interleave(SAMPLES).unsqueeze(1)
    mask = torch.arange(10) < torch.randint(1, 11, (count, 1), generator=generator)
    answers = torch.randint(5, 60, mask.shape, generator=generator)
    kind = torch.zeros(count, dtype=torch.int8)
    return Rollout(prompts, torch.arange(24) >= starts, answers, mask, torch.where(mask, -1.0, 0.0), kind)


def trajectory(assets: Path, shares: bool) -> dict[str, object]:
    """Losses and gradient norms of the first updates, and the tokens that all passes of all ranks run."""
    kernel_selection._select_shared = KERNELS if shares else lambda *_: None
    ranks = dist.world_size()
    ppo = make_ppo(
        assets, "--critic_model_name_or_path", assets / "reward", "--actor_zero_stage", 3, "--critic_zero_stage", 3,
        "--n_samples_per_prompt", SAMPLES, "--per_device_generation_batch_size", PROMPTS // ranks,
        "--per_device_training_batch_size", 8 // ranks, "--micro_batch_tokens", 90, "--ppo_epochs", 2,
        "--old_logprobs", "recompute", "--actor_gradient_checkpointing", "--entropy_coef", 0.01,
        "--actor_learning_rate", 0.01, "--critic_learning_rate", 0.01,
    )  # fmt: skip
    counted = [0]

    def count(_module, _args, named):
        counted[0] += named["input_ids"].numel()

    for engine in (ppo.engines.actor, ppo.engines.reference, ppo.engines.critic):
        assert engine.module.layout.shares is shares
        engine.module.backbone.register_forward_pre_hook(count, with_kwargs=True)
    mine = torch.arange(PROMPTS * SAMPLES).view(ranks, -1)[dist.rank()]
    prompts = list(range(PROMPTS // ranks))
    experience = experience_of(ppo, select_rows(rollout(), mine), prompts)
    ppo.engines.train()
    numbers = []
    for minibatch, _ in zip(ppo.mini_dataset.minibatches(experience, 2, step=1), range(STEPS), strict=False):
        sums = MetricSums()
        norms = update_once(ppo, minibatch, sums).grad_norms
        metrics = sums.reduce()
        numbers.append([*(metrics[name] for name in ("policy/loss", "value/loss", "policy/entropy")), *norms.values()])
    return {"numbers": numbers, "tokens": int(dist.all_reduce(torch.tensor(counted[0])))}


def main() -> None:
    be_quick()
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    found = {str(shares): trajectory(assets, shares) for shares in (True, False)}
    if dist.is_main():
        out.write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
