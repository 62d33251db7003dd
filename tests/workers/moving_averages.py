"""Two ranks average the same whole weights, which change by hand; rank 0 prints what each held, and the result.

moving_averages.py
"""

import json

import torch
from torch import nn

from dschat_ppo.common import dist
from dschat_ppo.engine.averages import MovingAverage
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group

if __name__ == "__main__":
    init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(dist.device())
    by_hand = {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}
    average = MovingAverage(model, 0.75)
    for _ in range(3):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        average.update()
        by_hand = {name: by_hand[name].lerp(weight.detach().cpu(), 0.25) for name, weight in model.named_parameters()}
    held = dist.gather_objects(list(average.state_dict()))
    gathered = average.gathered()
    if dist.is_main():
        found = {"gathered": gathered, "by_hand": by_hand}
        lists = {kind: {name: part.tolist() for name, part in named.items()} for kind, named in found.items()}
        print(json.dumps(lists | {"held": held}), flush=True)
    else:
        assert gathered == {}
    dist.shutdown()
    leave(0)
