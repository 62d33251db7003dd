"""Speed up a worker that builds many engines in one process."""

import os
from functools import cache

import cpuinfo
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from dschat_ppo.rewards import remote_reward


def be_quick() -> None:
    """After the imports: DeepSpeed looks the processor up for each offloaded optimizer, a second each time. Each ZeRO-3
    engine keeps 2 GB of addresses for good; with those of eighteen a rank is larger than a machine of 24 GB, which then
    refuses to fork it. No test of these workers loses power."""
    os.fsync = lambda number: None
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    DeepSpeedZeroConfig.model_fields["reduce_bucket_size"].default = 10**6
    DeepSpeedZeroConfig.model_rebuild(force=True)
    remote_reward.FIRST_WAIT_SECONDS = 0.05  # between attempts
