"""Runs step 3 and records the calls of its first PPO step, on rank 0, with the shapes of their
results.

trace_step.py FLAGS... OUT_FILE     OUT_FILE: JSON, {"rows": [[depth, call, file, result], ...],
"updates": N}
"""

import json
import sys
from dataclasses import is_dataclass
from pathlib import Path

import deepspeed
import torch

from dschat_ppo.algorithms import step as formulas
from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.ppo import (
    advantages,
    collect,
    components,
    loop,
    rollout_sampler,
    score,
    token_losses,
    update,
)
from dschat_ppo.ppo.train_ppo import train_ppo
from dschat_ppo.rewards.learned_reward import ModelReward
from dschat_ppo.run.launch import leave
from dschat_ppo.run.session import join_ranks
from dschat_ppo.types import tensors_of
from workers.quick import be_quick

SHORT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int64: "int64",
    torch.bool: "bool",
    torch.int8: "int8",
}
NEW = {  # fields that a record shows: those that its call adds
    "Rollout": ("prompt_ids", "response_ids", "rollout_logprobs"),
    "ScoredRollout": ("old_logprobs", "ref_logprobs", "kl", "values"),
    "RewardedRollout": ("rewards", "values"),
    "Experience": ("rewards", "advantages", "returns"),
}
rows: list[list] = []
depth = updates = 0
recording = False


def described(value) -> str:
    """Shapes and dtypes of a result."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {SHORT[value.dtype]}" if value.shape else "scalar"
    if isinstance(value, tuple):
        return ", ".join(described(part) for part in value)
    name = type(value).__name__
    if name in NEW:
        return f"{name}: " + ", ".join(
            f"{key} {described(getattr(value, key))}" for key in NEW[name]
        )
    if name in ("Scores", "ResponseLogprobs"):
        return f"{name}: " + ", ".join(
            f"{key} {described(part)}"
            for key, part in tensors_of(value).items()
            if isinstance(part, torch.Tensor)
        )
    if name == "Prompts":
        return f"{len(value.rows)} row numbers"
    return name if is_dataclass(value) else ""


def role_of(engine) -> str:
    kind = (
        "policy"
        if type(engine.module if hasattr(engine, "module") else engine).__name__ == "PolicyModel"
        else "value"
    )
    trained = getattr(engine, "basic_optimizer", None) is not None
    return {
        ("policy", True): "actor",
        ("policy", False): "reference",
        ("value", True): "critic",
        ("value", False): "reward model",
    }[kind, trained]


def note(holder, name: str, label: str, file: str, with_role: bool = False) -> None:
    """Record the calls of `holder.name`, an attribute or, in a dict, an entry."""
    whole = holder[name] if isinstance(holder, dict) else getattr(holder, name)

    def noted(*words, **named):
        global depth
        if not recording:
            return whole(*words, **named)
        row = [depth, f"{label}, {role_of(words[0])}" if with_role else label, file, ""]
        rows.append(row)
        depth += 1
        result = whole(*words, **named)
        depth -= 1
        row[3] = described(result)
        return result

    if isinstance(holder, dict):
        holder[name] = noted
    else:
        setattr(holder, name, noted)


def note_everything() -> None:
    collection = collect.ExperienceCollection
    for name in ("next_prompts", "sample", "reward", "forward_passes", "add"):
        note(collection, name, name, "ppo/collect.py")
    note(HybridEngine, "generating", "HybridEngine.generating", "engine/hybrid_engine.py")
    note(rollout_sampler, "generate", "generate", "rollout/generator.py")
    note(ModelReward, "__call__", "ModelReward", "rewards/learned_reward.py")
    for module in (score, token_losses):
        note(
            module,
            "response_logprobs",
            "response_logprobs",
            "models/wrapped_models.py",
            with_role=True,
        )
        note(
            module, "response_values", "response_values", "models/wrapped_models.py", with_role=True
        )
    note(loop, "gather_rows", "gather_rows", "ppo/mini_dataset.py")
    note(advantages.AdvantageComputation, "with_rewards", "with_rewards", "ppo/advantages.py")
    note(formulas, "token_rewards", "token_rewards", "algorithms/token_rewards.py")
    note(components.PPOComponents, "critic_pass", "critic_pass", "ppo/components.py")
    note(advantages.AdvantageComputation, "advantages", "advantages", "ppo/advantages.py")
    note(advantages.ESTIMATORS, "gae", "gae", "algorithms/advantage_estimators.py")
    note(formulas, "masked_whiten", "masked_whiten", "algorithms/aggregation.py")
    for name in ("actor_objective", "critic_objective", "minimise"):
        note(update.PPOUpdate, name, name, "ppo/update.py")
    note(update, "accumulate", "accumulate", "engine/optimizer_step.py")
    note(update, "apply", "apply", "engine/optimizer_step.py")
    note(token_losses.ActorLoss, "__call__", "ActorLoss", "ppo/token_losses.py")
    note(update, "critic_loss", "critic_loss", "ppo/token_losses.py")
    note(deepspeed.DeepSpeedEngine, "backward", "engine.backward", "deepspeed", with_role=True)
    note(deepspeed.DeepSpeedEngine, "step", "engine.step", "deepspeed", with_role=True)


def record_the_first_step() -> None:
    """From `make_experience` to the end of the first update; later updates are only counted."""
    note(loop, "make_experience", "make_experience", "ppo/loop.py")
    note(loop, "update", "update", "ppo/loop.py")
    noted_make, noted_update = loop.make_experience, loop.update

    def make_experience(*words):
        global recording
        recording = True
        return noted_make(*words)

    def first_update(*words):
        global recording, updates
        updates += 1
        noted_update(*words)
        recording = False

    loop.make_experience, loop.update = make_experience, first_update


def main() -> None:
    be_quick()
    note_everything()
    record_the_first_step()
    config = parse("ppo", sys.argv[1:-1])
    join_ranks(config)
    train_ppo(config)
    if dist.is_main():
        Path(sys.argv[-1]).write_text(json.dumps({"rows": rows, "updates": updates}))
    dist.shutdown()
    leave(0)


main()
