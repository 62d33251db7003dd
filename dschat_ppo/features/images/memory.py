"""Memory of the vision tower and of what it made of images, for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.images.flags import ImageFlags, trains_parts
from dschat_ppo.features.images.tower import trains_with_images
from dschat_ppo.models.loading import DTYPES
from dschat_ppo.planner.phase_memory import Phase
from dschat_ppo.planner.role_memory import Role

_ROLE = "images"
_TRAINED_ROLES = ("model", "actor", "critic")
_counted: dict[str, int] = {}  # configuration as JSON -> `tower_numbers`


def adjust(phase: Phase, config: StepConfig, roles: Sequence[Role]) -> None:
    """Add towers, whole on each rank in the number format of the run, and for each of them the most
    host memory that its features may take. Models with towers of one size share one, as those that
    come from one model do. A tower that trains is counted with its model; the pixels of such models
    are kept once, and in step 3 also the features of a rollout."""
    cache_bytes = config.of(ImageFlags).image_cache_gb * 10**9
    sizes_of_towers = set[int]()
    caches_of_pixels = 0
    for role in roles:
        if not trains_with_images(config, role.sizes.config):
            continue
        if trains_parts(config) and role.name in _TRAINED_ROLES:
            caches_of_pixels = 1
            if role.name != "model":
                caches_of_pixels = 2
        else:
            sizes_of_towers.add(tower_numbers(role.sizes.config))
    for tower_size in sizes_of_towers:
        phase.add(_ROLE, "weights", DTYPES[config.run.dtype].itemsize * tower_size)
    caches = len(sizes_of_towers) + caches_of_pixels
    if caches:
        phase.add(_ROLE, "buffers", caches * cache_bytes, on_host=True)


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
