"""The gradients of one optimizer step of four micro-batches, dealt to the ranks: rank 0 saves their sums in fp32.

summed_gradients.py OUT
"""

import sys

import torch
from torch import nn

from dschat_ppo.common import dist
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.engine.optimizer_step import accumulate
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group

SETTINGS = OptimizerSettings(0.01, 0.0, "linear", 0, 20, (0.9, 0.95), 1e-8)

if __name__ == "__main__":
    init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 90), nn.Tanh(), nn.Linear(90, 30)).bfloat16()
    rows = torch.randn(4, 2, 40).bfloat16()
    engine = train_engine(model, train_config(1, "bf16", False, dist.world_size(), 1.0), SETTINGS)
    own = list(rows[dist.rank() :: dist.world_size()])
    accumulate(engine, own, lambda x: engine(x).float().pow(2).sum() / 240)
    if dist.is_main():
        torch.save([part.clone() for part in engine.optimizer.fp32_groups_actual_gradients_flat], sys.argv[-1])
    dist.shutdown()
    leave(0)
