"""Generates and trains in turn under the flags of a launch: two PPO steps, whose numbers must not
depend on the flags, and what switches to generation and back leave behind.

hybrid.py ASSETS OUT_FILE      each rank writes OUT_FILE.RANK; ASSETS has `reward_adapter` and
`reward_dora` too
"""

import gc
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.runtime.zero import parameter_offload
from scripted_calls import SAMPLING, STOPPING, ScriptedCalls, reserved_for

from dschat_ppo.common import dist
from dschat_ppo.common.seeding import row_seeds, seed_everything
from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.batches import collate_prompts
from dschat_ppo.data.prepare import prepare
from dschat_ppo.models.adapters.layers import adapter_layers
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import PolicyModel, response_logprobs
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import StoppingCriteria
from workers.ppo_setup import experience_of, ppo_of, score_answers, train_on
from workers.quick import joined_ranks

TOGGLES, SETTLED = 8, 4
ROWS = 8  # prompts of a PPO step over all ranks
NUMBERS = ("policy/loss", "value/loss", "optim/grad_norm/actor", "optim/grad_norm/critic")
LORA = (
    "--actor_lora_dim",
    4,
    "--critic_lora_dim",
    4,
    "--only_optimize_lora",
    "--lora_alpha",
    8,
    "--share_base",
)
LORA += ("--actor_lora_learning_rate", 0.01, "--critic_lora_learning_rate", 0.01)
STEPS = {  # name -> (ZeRO stage, flags), beside "plain", which is stage 3
    "stage 2": (2, ()),
    "offload": (3, ("--offload_optimizer", "--offload_reference_model", "--offload_reward_model")),
    "layer by layer": (3, ("--unpin_actor_parameters",)),
    "toggled": (3, ()),
}


def ppo_with(assets: Path, stage: int, *words: object):
    """Step 3; under ZeRO-3 every weight is partitioned, the small ones of tiny models too."""
    seed_everything(1)
    mine = ROWS // dist.world_size()
    flags = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward "
    flags += (
        f"--data_path {assets}/prompts.jsonl --data_split 0,0,1 --output_dir unused --dtype fp32 "
    )
    flags += (
        "--num_warmup_steps 0 --max_prompt_seq_len 64 --max_answer_seq_len 8 --old_logprobs"
        " recompute "
    )
    flags += f"--per_device_generation_batch_size {mine} --per_device_training_batch_size {mine} "
    flags += (
        "--actor_learning_rate 0.01 --critic_learning_rate 0.01 --deepspeed_config"
        f" {assets}/partition_all.json "
    )
    flags += f"--actor_zero_stage {stage} --critic_zero_stage {stage}"
    config = parse("ppo", [*flags.split(), *map(str, words)])
    tokenizer = load_tokenizer(config.ppo.actor_model_name_or_path, "model")
    prompts = prepare(
        StepData("prompt", config.data, config.ppo.max_prompt_seq_len), tokenizer
    ).train
    return ppo_of(config, prompts, dist.device())


def my_prompts() -> list[int]:
    mine = ROWS // dist.world_size()
    return list(range(dist.rank() * mine, (dist.rank() + 1) * mine))


def two_steps(ppo, toggles: int = 0) -> dict:
    """Answers and metrics of two PPO steps: those of the second depend on the updates of the
    first."""
    answers, metrics = [], []
    for step in (1, 2):
        rollout = ppo.collection.sampler.sample(my_prompts(), step)
        for _ in range(toggles):
            generate_some(ppo, 2, 3)
        ids = torch.where(rollout.response_mask, rollout.response_ids, -1)
        answers.append(
            dist.gather_cat(torch.nn.functional.pad(ids, (0, 8 - ids.shape[1]), value=-1)).tolist()
        )
        found = train_on(ppo, experience_of(ppo, rollout, my_prompts()))
        metrics.append([found[name] for name in NUMBERS])
    partitioned = sum(weight.numel() == 0 for weight in ppo.engines.actor.module.parameters())
    return {"answers": answers, "metrics": metrics, "partitioned": partitioned}


def held(ppo) -> list[torch.Tensor]:
    """Copies of the tensors that this rank holds of the actor."""
    return [
        getattr(p, "ds_tensor", p).detach().clone() for p in ppo.engines.actor.module.parameters()
    ]


def generate_some(ppo, count: int, max_new_tokens: int):
    batch = collate_prompts(ppo.collection.sampler.prompts, range(count), 0)
    config = replace(
        ppo.collection.sampler.config, stopping=StoppingCriteria(max_new_tokens, (1,)), rows=4
    )
    with ppo.engines.hybrid.generating() as model:
        seeds = row_seeds(count * dist.rank(), count, 0)
        request = RolloutRequest(batch, seeds)
        return generate(model, request, config, ppo.engines.hybrid.max_over_ranks)


def late_calls(ppo) -> dict:
    """What programs of rank 0 get that call the model whenever they like; rank 1 has none."""
    partner = ScriptedCalls(2 if dist.rank() == 0 else 0, plan=1, schedule=0)
    config = GenerationConfig(SAMPLING, STOPPING)
    rollout, numbers = ppo.collection.sampler.generate.answer_calls(
        reserved_for(2), config, never, partner
    )
    return {
        "numbers": numbers,
        "ids": [
            ids[mask].tolist()
            for ids, mask in zip(rollout.response_ids, rollout.real_mask, strict=True)
        ],
        "logprobs": rollout.rollout_logprobs[rollout.response_mask].tolist(),
    }


def toggle_many(ppo) -> dict:
    """Into generation and back: weights, hooks, statuses and number of tensors before and after;
    log-probs of both."""
    engine, alive = ppo.engines.actor, []
    parameters = list(engine.module.parameters())

    def state() -> list:
        modules = engine.module.modules()
        hooks = [
            (id(m._forward_hooks), list(m._forward_hooks), list(m._forward_pre_hooks))
            for m in modules
        ]
        return [hooks, [p.ds_status for p in parameters], len(parameter_offload.FWD_MODULE_STACK)]

    before, weights = state(), held(ppo)
    for _ in range(TOGGLES):
        generate_some(ppo, 2, 3)
        gc.collect()  # else the count falls where the collector runs in between
        alive.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    found = {"equal": state() == before, "training": engine.module.training}
    found["weights equal"] = all(torch.equal(a, b) for a, b in zip(weights, held(ppo), strict=True))
    # of each switch: a cache that fills once leaves fewer
    found["left tensors"] = (alive[-1] - alive[SETTLED]) // (TOGGLES - 1 - SETTLED)
    rollout = generate_some(ppo, 4, 6)
    with ppo.engines.hybrid.generating() as model:
        lent = response_logprobs(PolicyModel(model), rollout, 1.0).logprobs
    ppo.engines.eval()
    with torch.no_grad():
        trained = response_logprobs(engine, rollout, 1.0).logprobs
    return found | {"difference": float(((lent - trained).abs() * rollout.response_mask).max())}


def uneven(ppo, empty: bool) -> dict:
    """Rank 0 generates 1 token a row, rank 1 twelve (or nothing at all); all rows go through score
    and update."""
    rollout = generate_some(ppo, 4, 1 if dist.rank() == 0 else 12)
    if empty and dist.rank() == 1:
        rollout = replace(rollout, response_mask=torch.zeros_like(rollout.response_mask))
    experience = experience_of(ppo, rollout)
    metrics = train_on(ppo, experience)
    assert all(map(math.isfinite, metrics.values())) and metrics["optim/grad_norm/actor"] > 0
    return {
        "rows": experience.response_ids.shape[0],
        "tokens": int(experience.response_mask.sum()),
        **metrics,
    }


def dropout_in_scoring(assets: Path) -> dict:
    """Scores one rollout twice with models that drop half of their attention in training."""
    ppo = ppo_with(assets, 3, "--actor_dropout", 0.5, "--critic_dropout", 0.5)
    # the default one of this rank, from which dropout draws
    found = {"stream": float(torch.rand(()))}
    rollout = ppo.collection.sampler.sample(my_prompts(), 1)
    first, second = (score_answers(ppo, rollout, my_prompts()) for _ in range(2))
    ppo.engines.train()
    with torch.no_grad():
        noisy = [response_logprobs(ppo.engines.actor, rollout, 1.0).logprobs for _ in range(2)]
    alike = torch.equal(first.old_logprobs, second.old_logprobs) and torch.equal(
        first.values, second.values
    )
    found |= {"alike": alike, "noise": float((noisy[0] - noisy[1]).abs().max())}
    return found | {
        "as in rollout": float((first.old_logprobs - first.rollout_logprobs).abs().max())
    }


def switch_adapters(assets: Path, stage: int, dtype: str) -> dict:
    """Into generation with merged adapters and back, after updates: what changed, and how log-probs
    differ."""
    critic, kind = ("reward_dora", ["--use_dora"]) if stage % 2 else ("reward_adapter", [])
    ppo = ppo_with(
        assets,
        stage,
        "--dtype",
        dtype,
        *LORA,
        *kind,
        "--critic_model_name_or_path",
        assets / critic,
    )
    two_steps(ppo)
    rows, engine = generate_some(ppo, 4, 6), ppo.engines.actor

    @torch.no_grad()
    def logprobs(engine) -> torch.Tensor:
        ppo.engines.eval()
        return response_logprobs(engine, rows, 1.0).logprobs

    def forwards() -> list[torch.Tensor]:
        return [logprobs(engine), logprobs(ppo.engines.reference)]

    before, layers, (trained, reference) = held(ppo), adapter_layers(engine.module), forwards()
    ppo.engines.train()
    for _ in range(4):
        with ppo.engines.hybrid.generating() as model:
            inside = {type(module).__name__ for module in model.modules()}
            whole = model.model.layers[0].self_attn.q_proj.weight.numel() > 0
            lent = response_logprobs(PolicyModel(model), rows, 1.0).logprobs
    real = rows.response_mask
    return {
        "weights equal": all(torch.equal(a, b) for a, b in zip(before, held(ppo), strict=True)),
        "layers equal": layers == adapter_layers(engine.module) and len(layers) > 0,
        "plain": "Linear" in inside and "ModuleDict" not in inside and whole,
        "same forwards": all(
            torch.equal(a, b) for a, b in zip([trained, reference], forwards(), strict=True)
        ),
        "difference": float((lent - trained)[real].abs().max()),
        "effect": float((reference - trained)[real].abs().max()),
    }


def main() -> None:
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    first = ppo_with(assets, 3)
    found: dict = {"steps": {"plain": two_steps(first)}}
    if dist.world_size() > 1:
        found |= {
            "toggles": toggle_many(first),
            "uneven": uneven(first, False),
            "empty": uneven(first, True),
            "calls": {},
        }
        found["dropout"] = dropout_in_scoring(assets)
        for name, (stage, words) in STEPS.items():
            ppo = ppo_with(assets, stage, *words)
            found["steps"][name] = two_steps(ppo, toggles=3 * (name == "toggled"))
            if name in ("layer by layer", "toggled"):
                found["calls"][name] = late_calls(ppo)
    layouts = [(2, "fp32"), (3, "fp32")]
    found["adapters"] = {  # on one rank ZeRO-3 does not copy what it gathers
        f"{stage} {dtype}": switch_adapters(assets, stage, dtype)
        for stage, dtype in layouts
        if dist.world_size() > 1 or (stage, dtype) == (3, "fp32")
    }
    Path(f"{out}.{dist.rank()}").write_text(json.dumps(found))


if __name__ == "__main__":
    with joined_ranks():
        main()
