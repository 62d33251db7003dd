"""Bad numbers on one of two ranks: engines of every stage and format, then whole updates of PPO.

nonfinite.py ASSETS OUT_FOLDER
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import deepspeed
import torch
from datasets import Dataset
from deepspeed.accelerator import get_accelerator
from torch import nn

from dschat_ppo.common import dist
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.engine.optimizer_step import accumulate, apply
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.models.loading import DTYPES
from dschat_ppo.models.saving import require_finite_weights
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.types import Rollout, select_rows
from workers.ppo_setup import ppo_of, scored_of, update_once
from workers.quick import joined_ranks

CASES = [
    (0, "fp32", False),
    (2, "fp32", False),
    (1, "bf16", False),
    (3, "bf16", False),
    (2, "bf16", True),
]
CASES += [(3, "bf16", True), (2, "fp16", False), (3, "fp16", False)]
SETTINGS = OptimizerSettings(0.01, 0.0, "linear", 0, 20, (0.9, 0.95), 1e-8)
PLAN = (
    "good",
    "good",
    "loss",
    "good",
    "infinite loss",
    "good",
    "gradient",
    "good",
    "refused",
    "good",
)


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.first, self.second = nn.Linear(4, 9, dtype=dtype), nn.Linear(9, 3, dtype=dtype)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).float()


def engine_of(stage: int, dtype: str, offload: bool):
    config = train_config(stage, dtype, offload, dist.world_size(), 1.0)
    config["fp16"]["initial_scale_power"] = 8
    config["fp16"]["hysteresis"] = 1
    torch.manual_seed(0)
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            return train_engine(Small(DTYPES[dtype]), config, SETTINGS)
    return train_engine(Small(DTYPES[dtype]), config, SETTINGS)


def weights(engine) -> torch.Tensor:
    parts = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            parts.append(parameter.detach().float().flatten().clone())
    return torch.cat(parts)


def micro_batches(step: int, kind: str, dtype: str):
    """Three of this rank's own; the second of rank 1 is of the given kind."""
    generator = torch.Generator().manual_seed(100 * step + dist.rank())
    rows = [torch.randn(5, 4, generator=generator).to(DTYPES[dtype]) for _ in range(3)]
    return [
        (x, kind if (number, dist.rank()) == (1, 1) else "good") for number, x in enumerate(rows)
    ]


def loss_of(engine):
    def loss(batch):
        x, kind = batch
        y = engine(x)
        made = y.pow(2).mean()
        if kind == "loss":
            return made * math.nan
        if kind == "infinite loss":  # its gradients are finite
            return made + math.inf
        if kind == "gradient":  # the slope of the root at 0, times 0; the loss stays what it is
            return (
                made
                + torch.where(
                    torch.zeros_like(y, dtype=torch.bool), (y - y.detach()).abs().sqrt(), 0.0
                ).sum()
            )
        return made

    return loss


def said(result) -> list:
    fault = result.fault
    place = None if fault is None else [fault.kind, fault.rank, fault.micro_batch]
    return [result.applied, result.overflow, place]


def engine_case(stage: int, dtype: str, offload: bool) -> dict:
    """One engine sees bad steps between the good ones, another only the good ones."""
    seen, spared = engine_of(stage, dtype, offload), engine_of(stage, dtype, offload)
    results, equal, same_rate, norms, scales, start = [], [], [], [], [], weights(spared)
    for step, kind in enumerate(PLAN):
        batches = micro_batches(step, kind, dtype)
        if kind == "refused":
            result = apply(accumulate(seen, batches, loss_of(seen)), refused=True)
        else:
            result = apply(accumulate(seen, batches, loss_of(seen)))
        results.append(said(result))
        if kind == "good":
            norms.append(
                [result.grad_norm, apply(accumulate(spared, batches, loss_of(spared))).grad_norm]
            )
        equal.append(torch.equal(weights(seen), weights(spared)))
        same_rate.append(seen.get_lr() == spared.get_lr())
        scales.append(seen.optimizer.loss_scaler.cur_scale if dtype == "fp16" else 1)
    moved = not torch.equal(weights(seen), start)
    found = {
        "results": results,
        "equal": equal,
        "same_rate": same_rate,
        "norms": norms,
        "scales": scales,
    }
    return {**found, "moved": moved, "bad weights": bad_weights(seen, dtype)}


def bad_weights(engine, dtype: str) -> list:
    """What is said of good weights, of one bad weight on rank 1, and of those that the optimizer
    makes bad."""
    role = "actor"
    said_of = [outcome_of(lambda: require_finite_weights(role, engine))]
    weight = engine.module.second.weight
    part = getattr(weight, "ds_tensor", weight).data.view(-1)
    kept = part[0].clone()
    if dist.rank() == 1:
        part[0] = -math.inf
    said_of.append(outcome_of(lambda: require_finite_weights(role, engine)))
    part[0] = kept
    update_too_far(engine, 1e6 if dtype == "fp16" else 1e39)  # an fp32 master holds 1e6
    result = apply(accumulate(engine, micro_batches(0, "good", dtype), loss_of(engine)))
    return [*said_of, said(result), outcome_of(lambda: require_finite_weights(role, engine))]


def update_too_far(engine, rate: float) -> None:
    """Let the next update be made with a learning rate that no flag permits."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def stored_rollout(assets: Path) -> Rollout:
    """This rank's rows."""
    rollout = Rollout(**torch.load(assets / "rollout.pt", weights_only=True))
    return select_rows(rollout, torch.arange(16).view(dist.world_size(), -1)[dist.rank()])


def ppo_for(assets: Path, out: Path, stages: tuple[int, int], *words: object):
    flags = (
        f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward"
        " --data_path unused "
    )
    flags += (
        f"--output_dir {out} --dtype fp32 --old_logprobs recompute --num_warmup_steps 0"
        " --ppo_epochs 3 "
    )
    flags += (
        f"--actor_zero_stage {stages[0]} --critic_zero_stage {stages[1]} --micro_batch_tokens 28 "
    )
    flags += (
        "--per_device_training_batch_size 2 --gradient_accumulation_steps 2"
        " --per_device_generation_batch_size 8 "
    )
    flags += "--actor_learning_rate 0.01 --critic_learning_rate 0.01"
    config = parse("ppo", [*flags.split(), *map(str, words)])
    seed_everything(1)
    ppo = ppo_of(config, Dataset.from_dict({"row": ["{}"] * 40}), dist.device())
    scored = scored_of(ppo, stored_rollout(assets))
    ppo.engines.train()
    return ppo, scored


def outcome_of(call) -> str:
    try:
        call()
    except NonFiniteError as problem:
        return str(problem)
    return ""


def skip_case(assets: Path, out: Path) -> dict:
    """Advantages and values that are not finite, with --on_nonfinite skip and at most one in a
    row."""
    ppo, scored = ppo_for(
        assets, out / "skip", (3, 2), "--on_nonfinite", "skip", "--max_nonfinite_skips", 1
    )
    experience = ppo.advantage_computation.advantages(
        ppo.advantage_computation.with_rewards(scored), 1
    )
    advantages = experience.advantages.clone()
    advantages[5, 0] = math.nan
    parts = list(
        ppo.mini_dataset.minibatches(replace(experience, advantages=advantages), 1, step=4)
    )
    bad = [
        any(bool(rows.advantages.isnan().any()) for rows in part.micro_batches) for part in parts
    ]
    [number] = [
        n for n, values in enumerate(zip(*dist.gather_objects(bad), strict=True)) if any(values)
    ]
    sums = MetricSums()
    before = weights(ppo.engines.actor)
    first = update_once(ppo, parts[number], sums, 4)
    found = {
        "bad_ranks": [values[number] for values in dist.gather_objects(bad)],
        "norms": sorted(first.grad_norms),
    }
    found |= {
        "unmoved": torch.equal(weights(ppo.engines.actor), before),
        "names": sorted(sums.reduce()),
    }
    found["state"] = ppo.nonfinite.state_dict()
    found["after a good one"] = sorted(update_once(ppo, parts[1 - number], sums, 4).grad_norms)
    found["in a row"] = ppo.nonfinite.state_dict()["in_a_row"]
    update_once(ppo, parts[number], sums, 5)
    found["stopped"] = outcome_of(lambda: update_once(ppo, parts[number], sums, 6))
    values = scored.values.clone()
    values[12, 0] = math.inf
    state = ppo.advantage_computation.state_dict()
    bad = ppo.advantage_computation.advantages(
        ppo.advantage_computation.with_rewards(replace(scored, values=values)), 7
    )
    found["rows"] = ppo.keep_if_finite(bad, 7) is None
    found["nothing adapted"] = ppo.advantage_computation.state_dict() == state
    return found


def main() -> None:
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    type(get_accelerator()).is_fp16_supported = lambda self: True  # slow on a CPU, but it works
    found = {
        f"{dtype} stage {stage}{' offload' * offload}": engine_case(stage, dtype, offload)
        for stage, dtype, offload in CASES
    }
    found["skip"] = skip_case(assets, out)
    (out / f"{dist.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with joined_ranks():
        main()
