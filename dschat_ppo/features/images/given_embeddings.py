"""What stands in place of the embeddings of images, for the rows of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.features.images.flags import ImageFlags, trains_parts
from dschat_ppo.features.images.step_data import model_flag, processor_of
from dschat_ppo.features.images.tower import ImageTower, load_tower, trains_with_images
from dschat_ppo.features.images.trained_tower import TowerInModel
from dschat_ppo.models.loading import DTYPES, load_config
from dschat_ppo.models.model_folders import base_folder

if TYPE_CHECKING:
    from dschat_ppo.features.images.image_store import ImageStore

_TRAINED_ROLES = ("model", "actor", "critic")


def store_of(
    config: HasFeatures,
    folder: str,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> ImageStore | None:
    """The images of a run or of a tool, with the tower of the model in `folder`, which the model
    itself holds if it trains; None if it sees none. `dtype`: of the tower."""
    model_config = load_config(folder, model_flag(config))
    if not trains_with_images(config, model_config):
        return None
    # not at the top: it imports Pillow
    from dschat_ppo.features.images.image_store import ImageStore

    flags = config.of(ImageFlags)
    processor = processor_of(config, model_config, folder, tokenizer)
    tower: ImageTower | TowerInModel
    if trains_parts(config):
        tower = TowerInModel(model_config, device)
    else:
        tower = load_tower(folder, DTYPES[dtype], device)
    most_bytes = int(flags.image_cache_gb * 10**9)
    return ImageStore(processor, tower, flags.image_max_source_pixels, most_bytes)


def sources_of_roles(
    config: HasFeatures,
    folders: Mapping[str, str],
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> dict[str, ImageStore]:
    """The images of a run, or of a tool, for each model that sees them, by role; {} if the first
    model sees none. Frozen towers whose weights have equal bits are one.

    Args:
        config: the flags.
        folders: role -> folder, the model that trains first, in step 3 and in tools the one that
            answers the prompts.
        dtype: of the towers.
        tokenizer: of the first model.
        device: where towers run.
    """
    first_role, *_ = folders
    first = store_of(config, folders[first_role], dtype, tokenizer, device)
    if first is None:
        return {}
    sources = {first_role: first}
    stores = [first]
    store_of_folder: dict[str, ImageStore] = {}  # with a frozen tower
    trained_roles = list[str]()  # of models that hold their towers
    if isinstance(first.tower, TowerInModel):
        trained_roles = [role for role in _TRAINED_ROLES if role in folders]
    else:
        store_of_folder[base_folder(folders[first_role], "model")] = first
    for role, folder in folders.items():
        base = base_folder(folder, "model")
        sees = trains_with_images(config, load_config(folder, "model"))
        if role in trained_roles and sees:
            sources[role] = first  # which serves pixels, whatever model encodes them
        elif base in store_of_folder:
            sources[role] = store_of_folder[base]
        elif sees:
            tower = load_tower(base, DTYPES[dtype], device)
            sources[role] = _store_with(tower, stores)
            store_of_folder[base] = sources[role]
            stores.append(sources[role])
    if len(folders) == 1:
        return sources
    if trained_roles:
        logger().info(f"images: vision towers that train: {', '.join(trained_roles)}")
    for store in dict.fromkeys(store_of_folder.values()):
        roles = [role for role, source in sources.items() if source is store]
        logger().info(f"images: one vision tower for {', '.join(roles)}")
    return sources


def _store_with(tower: ImageTower, stores: Sequence[ImageStore]) -> ImageStore:
    """The store with an equal frozen tower, or a new one for the prompts of the others."""
    for store in stores:
        if isinstance(store.tower, ImageTower) and store.tower.has_bits_of(tower):
            return store
    return stores[0].with_tower(tower)
