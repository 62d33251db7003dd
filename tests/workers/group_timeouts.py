"""Two ranks join, and build nothing: rank 0 prints the timeouts of the groups, in hours.

group_timeouts.py
"""

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

from dschat_ppo.common import dist
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group


def hours(group) -> float:
    """How long a collective of the group may wait."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 3600


if __name__ == "__main__":
    init_process_group()
    dist.share_rows(2)
    used = {"zero": groups._get_data_parallel_group(), "rows": dist.sequence_group(), "all": torch_dist.group.WORLD}
    get_accelerator().device_count = dist.world_size  # as on a machine with a GPU for each rank
    groups._create_zero_param_parallel_group(2)
    used["hpz"] = groups._get_zero_param_intra_parallel_group()
    used |= groups._get_local_all_to_all_group()
    total = torch.ones(1)
    torch_dist.all_reduce(total, group=used["zero"])
    if dist.is_main():
        print(*(f"{name} {hours(group):g}" for name, group in used.items()), f"sum {total.item():g}", flush=True)
    dist.shutdown()
    leave(0)
