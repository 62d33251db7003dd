"""Generation with divided layers: two PPO steps with and without, and models of several
architectures.

divided_ranks.py ASSETS OUT_FILE      each rank writes OUT_FILE.RANK
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from tiny_models import VOCABULARY, new_model
from workers.hybrid import ppo_with, two_steps
from workers.quick import joined_ranks

from dschat_ppo.common import dist
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.features.tensor_parallel.generation import division_of
from dschat_ppo.features.tensor_parallel.layers import TensorParallel, check_tensor_parallel


@torch.no_grad()
def divided_models() -> dict:
    """For each architecture: the largest difference of logits to the whole model, and the share of
    weights held."""
    parallel = TensorParallel(dist.group_of(2), dist.rank() % 2, 2, layers=1)
    found = {}
    for name in ("llama", "qwen2", "qwen3", "gpt-neox", "phi3", "gemma2", "gemma3"):
        torch.distributed.barrier()
        model, ids = (
            new_model(name),
            torch.randint(2, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(3)),
        )
        before = {key: value.clone() for key, value in model.state_dict().items()}
        whole, count = model(ids).logits, sum(weight.numel() for weight in model.parameters())
        check_tensor_parallel(model.config.get_text_config(), 2, 2)
        hybrid = HybridEngine(SimpleNamespace(module=model), division=division_of(parallel))
        with hybrid.generating() as lent:
            difference = float((lent(ids).logits - whole).abs().max())
            freed = count - sum(weight.numel() for weight in lent.parameters())
        layers = model.gpt_neox.layers if name == "gpt-neox" else model.model.layers
        linear = sum(
            layer.weight.numel() for layer in layers.modules() if isinstance(layer, torch.nn.Linear)
        )
        restored = all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        restored &= not any("forward" in vars(module) for module in model.modules())
        found[name] = {"difference": difference, "freed": freed / linear, "restored": restored}
    return found


def main() -> None:
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    words = ("--inference_tp_size", 2, "--tp_gather_partition_size", 1)
    found = {
        "whole": two_steps(ppo_with(assets, 3)),
        "divided": two_steps(ppo_with(assets, 3, *words)),
        "models": divided_models(),
    }
    Path(f"{out}.{dist.rank()}").write_text(json.dumps(found))


if __name__ == "__main__":
    with joined_ranks():
        main()
