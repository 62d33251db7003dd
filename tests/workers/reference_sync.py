"""Moves references of many layouts towards their actors and writes what came out; then gives each state to the others.

reference_sync.py ASSETS OUT_FILE
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from dschat_ppo.common import dist
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.models.saving import gather_state
from dschat_ppo.runtime.launch import leave
from dschat_ppo.runtime.process_group import init_process_group
from workers.quick import be_quick

MIXUP = 0.3
# name -> (dtype, --actor_zero_stage, which the reference has too, stage of the actor in --deepspeed_config, flags)
LAYOUTS = {
    "whole": ("fp32", 0, None, ""),
    "whole bf16": ("bf16", 2, None, ""),
    "partitioned": ("fp32", 3, None, ""),
    "partitioned bf16": ("bf16", 3, None, ""),
    "partitioned actor": ("fp32", 1, 3, ""),
    "partitioned reference": ("fp32", 3, 2, ""),
    "offloaded": ("fp32", 3, None, "--offload --offload_reference_model"),
}
IDS = [[5, 6, 7, 8, 9], [30, 31, 2, 1, 4]]


def engines_of(assets: Path, layout: str) -> RLHFEngine:
    dtype, stage, overlay, flags = LAYOUTS[layout]
    words = f"--actor_model_name_or_path {assets}/lm --ref_model_name_or_path {assets}/uniform_lm --data_path d"
    words += f" --output_dir o --dtype {dtype} --actor_zero_stage {stage} --advantage_estimator grpo"
    words += f" --n_samples_per_prompt 2 --kl_coef 0.1 --use_reward_model False --reward_function exact_match {flags}"
    words += f" --ref_sync_interval 1 --ref_sync_mixup {MIXUP}"
    if overlay is not None:
        settings = assets / f"stage_{overlay}.json"
        if dist.is_main():
            settings.write_text(json.dumps({"zero_optimization": {"stage": overlay}}))
        dist.barrier()
        words += f" --deepspeed_config {settings}"
    config = parse("ppo", words.split())
    folders = ModelFolders(str(assets / "lm"), None, None, str(assets / "uniform_lm"))
    return RLHFEngine(config, plan_ppo(config.ppo, 64, dist.world_size()), folders)


def logprobs(engine) -> torch.Tensor:
    ids = torch.tensor(IDS, device=dist.device())
    return engine(ids, torch.ones_like(ids, dtype=torch.bool))[0].cpu()


def expected_reference(assets: Path, dtype: torch.dtype, times: int) -> dict[str, torch.Tensor]:
    """The reference after so many syncs, with plain transformers; the actor does not change."""
    actor, reference = (LlamaForCausalLM.from_pretrained(assets / name, dtype=dtype) for name in ("lm", "uniform_lm"))
    weights, sources = dict(reference.named_parameters()), dict(actor.named_parameters())
    for _ in range(times):
        for name, weight in weights.items():
            weight.data = (MIXUP * sources[name].data.float() + (1 - MIXUP) * weight.data.float()).to(dtype)
    return {name: weight.data for name, weight in weights.items()}


def equal(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def partitioned(engine) -> bool:
    return hasattr(next(engine.module.parameters()), "ds_id")


@torch.no_grad()
def main() -> None:
    be_quick()
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    device = init_process_group()
    assert device.type == dist.device().type
    torch.set_num_threads(1)
    found, states, engines = {}, {}, {}
    for name, (dtype, *_) in LAYOUTS.items():
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        engines[name] = held = engines_of(assets, name)
        sync, before = held.reference_sync, logprobs(held.reference)
        moved = [sync.update(), sync.update()]
        weights = gather_state(held.reference.module.lm)
        plain = LlamaForCausalLM.from_pretrained(assets / "lm", dtype=kind)
        plain.load_state_dict(expected_reference(assets, kind, 2), strict=False)
        logits = plain(input_ids=torch.tensor(IDS)).logits[:, :-1].float().log_softmax(dim=-1)
        again = logits.gather(2, torch.tensor(IDS)[:, 1:, None]).flatten()
        states[name] = dist.gather_objects({key: part.clone().cpu() for key, part in sync.state_dict().items()})
        found[name] = {
            "partitioned": [partitioned(held.actor), partitioned(held.reference)],
            "moved": moved,
            "equal": not dist.is_main() or equal(weights, expected_reference(assets, kind, 2)),
            "forward": float((logprobs(held.reference) - again).abs().max()),
            "changed": float((logprobs(held.reference) - before).abs().max()),
            "held": sum(part.numel() for part in states[name][dist.rank()].values()),
        }
    # every state into a reference of every other layout, which has moved once more
    for name, (dtype, *_) in LAYOUTS.items():
        sync, reference = engines[name].reference_sync, engines[name].reference
        mine, results = logprobs(reference), []
        for other, parts in states.items():
            if LAYOUTS[other][0] != dtype:
                continue
            sync.update()
            assert not torch.equal(logprobs(reference), mine)
            assert sync.restore(iter(parts))
            results.append(torch.equal(logprobs(reference), mine))
        found[name]["restored"] = results
    every = dist.gather_objects(found)
    if dist.is_main():
        out.write_text(json.dumps(every))
    dist.shutdown()
    leave(0)


main()
