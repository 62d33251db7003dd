"""The vision tower and the processor beside a trained decoder, in the folder of the saved model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.config.supervised_config import SFTConfig
from dschat_ppo.features.images.step_data import processor_of
from dschat_ppo.features.images.tower import load_tower, sees_images
from dschat_ppo.models.saving import SavedBeside
from dschat_ppo.models.tokenizers import read_tokenizer


def beside_of(config: StepConfig) -> SavedBeside | None:
    """What is written beside the decoder of a model that sees images."""
    if not isinstance(config, SFTConfig):
        return None

    def tower_and_processor(model: PreTrainedModel, folder: Path) -> Mapping[str, Tensor]:
        if not sees_images(model.config):
            return {}
        source = str(model.name_or_path)
        tokenizer = read_tokenizer(source, "--model_name_or_path")
        processor_of(config, model.config, source, tokenizer).save_settings(folder)
        dtype: Any = model.config.dtype  # that of the weights that are written
        return load_tower(source, dtype, torch.device("cpu")).weights()

    return tower_and_processor
