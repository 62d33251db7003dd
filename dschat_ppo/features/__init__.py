"""The features that can be deleted: each is a folder here, and one line of `FEATURES`.

The rest of the package knows a feature by this table alone. Where a feature may take part, it asks
for a hook, such as `hooks("refusals.refuse")`: the function `refuse` in the module `refusals.py` of
each feature that has one. docs/architecture.md lists the hooks, with their callers.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

FEATURES = (
    "averages",
    "cuda_graphs",
    "distillation",
    "dynamic_sampling",
    "environments",
    "judges",
    "lora",
    "muon",
    "process_rewards",
    "ptx",
    "push_to_hub",
    "replay",
    "router",
    "sequence_parallel",
    "sleep",
    "streaming",
    "tensor_parallel",
)


@cache
def hooks(name: str) -> tuple[Any, ...]:
    """What the features offer under `MODULE.NAME`, in the order of the table: `NAME` in the file
    `MODULE.py` of each feature's folder that has it. The order must not matter: where a run can
    have one answer alone, the first one is taken, and the flags of the features refuse each other.
    Modules are imported here, so that the flags
    of a feature are read without torch."""
    module_name, _, attribute = name.partition(".")
    offered = []
    for feature in FEATURES:
        folder = f"{__name__}.{feature}"
        spec = find_spec(folder)
        if spec is None or spec.origin is None:  # None too for a folder without files
            raise ModuleNotFoundError(
                f"dschat_ppo/features/{feature} is gone, but FEATURES in dschat_ppo/features/"
                "__init__.py still has its line: delete that too"
            )
        if find_spec(f"{folder}.{module_name}") is None:
            continue
        module = import_module(f"{folder}.{module_name}")
        if hasattr(module, attribute):
            offered.append(getattr(module, attribute))
    return tuple(offered)
