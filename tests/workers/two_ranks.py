"""What a few collective lines do on two ranks: `two_ranks.py FUNCTION [WORDS]`."""

import sys
from dataclasses import replace

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.utils import groups, safe_get_full_fp32_param
from torch import nn

from dschat_ppo.common import dist
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.engine.optimizer_step import accumulate, apply
from dschat_ppo.engine.optimizers import further_optimizers
from workers.quick import joined_ranks

SETTINGS = OptimizerSettings(0.01, 0.0, "linear", 0, 20, (0.9, 0.95), 1e-8)


def summed_gradients(out: str, name: str = "") -> None:
    """Two optimizer steps of four micro-batches, dealt to the ranks: rank 0 saves the last sums of
    gradients in fp32, and how the matrices moved. `name`: of an optimizer other than AdamW."""
    torch.manual_seed(0)
    original_muon.ns_compute_dtype = lambda *_: torch.float32
    model = nn.Sequential(nn.Sequential(nn.Linear(40, 90), nn.Tanh(), nn.Linear(90, 30))).bfloat16()
    rows = torch.randn(4, 2, 40).bfloat16()
    settings = SETTINGS
    for optimizer in further_optimizers():
        if optimizer.name == name:
            settings = replace(SETTINGS, optimizer=optimizer, taken_learning_rate=0.1)
    engine = train_engine(model, train_config(1, "bf16", False, dist.world_size(), 1.0), settings)
    own = list(rows[dist.rank() :: dist.world_size()])
    before = [weight.detach().float() for weight in engine.module.parameters() if weight.dim() == 2]
    for _ in range(2):
        gradients = accumulate(engine, own, lambda x: engine(x).float().pow(2).sum() / 240)
        sums = [part.clone() for part in engine.optimizer.fp32_groups_actual_gradients_flat]
        apply(gradients)
    after = [
        safe_get_full_fp32_param(weight)
        for weight in engine.module.parameters()
        if weight.dim() == 2
    ]
    matrices = [new - old for new, old in zip(after, before, strict=True)]
    if dist.is_main():
        torch.save((sums, matrices), out)


def group_timeouts() -> None:
    """Rank 0 prints how long a collective of each group may wait, in hours."""
    dist.share_rows(2)
    used = {
        "zero": groups._get_data_parallel_group(),
        "rows": dist.row_group(),
        "all": torch_dist.group.WORLD,
    }
    get_accelerator().device_count = dist.world_size  # as on a machine with a GPU for each rank
    groups._create_zero_param_parallel_group(2)
    used["hpz"] = groups._get_zero_param_intra_parallel_group()
    used |= groups._get_local_all_to_all_group()
    total = torch.ones(1)
    torch_dist.all_reduce(total, group=used["zero"])
    backends = {name: group._get_backend(torch.device("cpu")) for name, group in used.items()}
    hours = {
        name: backend.options._timeout.total_seconds() / 3600 for name, backend in backends.items()
    }
    if dist.is_main():
        print(
            *(f"{name} {number:g}" for name, number in hours.items()),
            f"sum {total.item():g}",
            flush=True,
        )


if __name__ == "__main__":
    with joined_ranks():
        name, *words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
        globals()[name](*words)
