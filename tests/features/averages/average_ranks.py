"""Average the same whole weights on several ranks, which change by hand; rank 0 prints what each
rank held, and the result."""

import json

import torch
from torch import nn
from workers.quick import joined_ranks

from dschat_ppo.common import dist
from dschat_ppo.features.averages.averages import MovingAverage


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(dist.device())
    by_hand = {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}
    average = MovingAverage(model, 0.75)
    for _ in range(3):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        average.update()
        by_hand = {
            name: by_hand[name].lerp(weight.detach().cpu(), 0.25)
            for name, weight in model.named_parameters()
        }
    held = dist.gather_objects(list(average.state_dict()))
    gathered = average.gathered()
    if dist.is_main():
        found = {"gathered": gathered, "by_hand": by_hand}
        lists = {
            kind: {name: part.tolist() for name, part in named.items()}
            for kind, named in found.items()
        }
        print(json.dumps(lists | {"held": held}), flush=True)
    else:
        assert gathered == {}


if __name__ == "__main__":
    with joined_ranks():
        main()
