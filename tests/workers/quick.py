"""The beginning and the end of a worker, and what speeds up one that builds many engines in one
process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import cpuinfo
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.rewards import http_client
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Join the launched ranks; at the end leave them, and end the process."""
    be_quick()
    quiet_libraries()
    init_process_group()
    torch.set_num_threads(1)
    yield
    dist.shutdown()
    leave(0)


def be_quick() -> None:
    """After the imports: DeepSpeed looks the processor up for each offloaded optimizer, a second
    each time. Each ZeRO-3 engine keeps 2 GB of addresses for good; with those of eighteen a rank is
    larger than a machine of 24 GB, which then refuses to fork it. No test of these workers loses
    power."""
    os.fsync = lambda number: None
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    DeepSpeedZeroConfig.model_fields["reduce_bucket_size"].default = 10**6
    DeepSpeedZeroConfig.model_rebuild(force=True)
    http_client.FIRST_WAIT_SECONDS = 0.05  # between attempts
