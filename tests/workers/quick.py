"""What makes a worker quick that builds many engines in one process."""

import gc
from functools import cache

import cpuinfo


def be_quick() -> None:
    """After the imports: DeepSpeed collects garbage for each engine, and looks the processor up for each offloaded
    optimizer, a second each time."""
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    gc.collect()
    gc.freeze()
