"""What stands in place of the embeddings of images, for the rows of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.images.flags import ImageFlags
from dschat_ppo.features.images.step_data import model_flag, processor_of
from dschat_ppo.features.images.tower import load_tower, sees_images
from dschat_ppo.models.loading import DTYPES, load_config

if TYPE_CHECKING:
    from dschat_ppo.features.images.image_store import ImageStore


def source_of(
    config: StepConfig, folder: str, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> ImageStore | None:
    """The images of a run, with the tower of the model in `folder`; None if it sees none."""
    model_config = load_config(folder, model_flag(config))
    if not sees_images(model_config):
        return None
    # not at the top: it imports Pillow
    from dschat_ppo.features.images.image_store import ImageStore

    flags = config.of(ImageFlags)
    processor = processor_of(config, model_config, folder, tokenizer)
    tower = load_tower(folder, DTYPES[config.run.dtype], device)
    most_bytes = int(flags.image_cache_gb * 10**9)
    return ImageStore(processor, tower, flags.image_max_source_pixels, most_bytes)
