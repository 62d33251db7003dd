"""The features that can be deleted: each is a folder here, and one line of `FEATURES`.

The rest of the package knows a feature by this table alone. Where a feature may take part, it asks
for a hook, such as `hooks("checks.check_model")`: the function `check_model` in the module
`checks.py` of each feature that has one. docs/architecture.md lists the hooks, with their callers.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

FEATURES = (
    "distillation",
    "environments",
    "process_rewards",
    "router",
    "sequence_parallel",
)


@cache
def hooks(name: str) -> tuple[Any, ...]:
    """What the features offer under `MODULE.NAME`, in the order of the table: `NAME` in the file
    `MODULE.py` of each feature's folder that has it. Modules are imported here, so that the flags
    of a feature are read without torch."""
    module_name, _, attribute = name.partition(".")
    offered = []
    for feature in FEATURES:
        path = f"{__name__}.{feature}.{module_name}"
        if find_spec(path) is None:
            continue
        module = import_module(path)
        if hasattr(module, attribute):
            offered.append(getattr(module, attribute))
    return tuple(offered)
