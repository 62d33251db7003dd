"""Memory of the vision tower and of what it made of images, for the planner."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.images.flags import ImageFlags, trains_parts
from dschat_ppo.features.images.tower import trains_with_images
from dschat_ppo.models.loading import DTYPES
from dschat_ppo.models.model_folders import base_folder, model_folder
from dschat_ppo.planner.phase_memory import Phase
from dschat_ppo.planner.role_memory import Role

_ROLE = "images"
_TRAINED_ROLES = ("model", "actor", "critic")
_counted: dict[str, int] = {}  # configuration as JSON -> `tower_numbers`


def adjust(phase: Phase, config: StepConfig, roles: Sequence[Role]) -> None:
    """Add towers, whole on each rank in the number format of the run, and for each of them the most
    host memory that its features may take. Models of one base folder share a tower; those of other
    folders have others at worst, since weights are not read. A tower that trains is counted with
    its model; the pixels of such models are kept once, and in step 3 also the features of a
    rollout. Where the first of the `roles` reads text alone, no tower is loaded."""
    if not trains_with_images(config, roles[0].sizes.config):
        return
    cache_bytes = config.of(ImageFlags).image_cache_gb * 10**9
    tower_sizes = dict[str, int]()  # folder of a model -> numbers of its tower
    caches_of_pixels = 0
    for role in roles:
        if not trains_with_images(config, role.sizes.config):
            continue
        if trains_parts(config) and role.name in _TRAINED_ROLES:
            caches_of_pixels = 1
            if role.name != "model":
                caches_of_pixels = 2
        else:
            flag, name = config.models[role.name]
            tower_sizes[_base_of(name, flag)] = tower_numbers(role.sizes.config)
    for tower_size in tower_sizes.values():
        phase.add(_ROLE, "weights", DTYPES[config.run.dtype].itemsize * tower_size)
    caches = len(tower_sizes) + caches_of_pixels
    if caches:
        phase.add(_ROLE, "buffers", caches * cache_bytes, on_host=True)


@cache
def _base_of(name: str, flag: str) -> str:
    """The folder that the tower of a model comes from."""
    return os.path.realpath(base_folder(model_folder(name, flag), flag))


def tower_numbers(model_config: PretrainedConfig) -> int:
    """How many numbers the tower and the projector of a model have, without reading its weights."""
    key = model_config.to_json_string(use_diff=False)
    if key not in _counted:
        with torch.device("meta"):
            model: Any = AutoModelForImageTextToText.from_config(deepcopy(model_config))
        inner = model.model
        decoder = inner.get_decoder()
        weights = set(inner.parameters(recurse=False))
        for child in inner.children():
            if child is not decoder:
                weights.update(child.parameters())
        _counted[key] = sum(weight.numel() for weight in weights)
    return _counted[key]
