"""The features that can be deleted: each is a folder here, and one line of `FEATURES`.

The rest of the package knows a feature by this table alone. Where a feature may take part, it asks
for a hook, such as `hooks("refusals.refuse")`: the function `refuse` in the module `refusals.py` of
each feature that has one. docs/architecture.md lists the hooks, with their callers.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

FEATURES = (
    "agents",
    "averages",
    "cuda_graphs",
    "distillation",
    "dynamic_sampling",
    "environments",
    "exact_rollout",
    "explain",
    "images",
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
    Modules are imported here, so that the flags of a feature are read without torch."""
    module_name, _, attribute = name.partition(".")
    offered = []
    for feature in FEATURES:
        if module_name not in _modules_of(feature):
            continue
        module = import_module(f"{__name__}.{feature}.{module_name}")
        if hasattr(module, attribute):
            offered.append(getattr(module, attribute))
    return tuple(offered)


@cache
def _modules_of(feature: str) -> frozenset[str]:
    """The names of the modules in a feature's folder."""
    folder = Path(__file__).parent / feature
    modules = frozenset(path.stem for path in folder.glob("*.py"))
    if "__init__" not in modules:
        raise ModuleNotFoundError(
            f"dschat_ppo/features/{feature} is gone, but FEATURES in dschat_ppo/features/"
            "__init__.py still has its line: delete that too"
        )
    return modules
