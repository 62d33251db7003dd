"""What the processor of LFM2-VL makes of images, by hand; transformers needs torchvision for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PATCH = 8  # pixels, of the tower
JOINED = 2  # patches in each direction, of a token


class ProcessorByHand:
    """In place of an `ImageProcessor`. An image is cut to whole tokens, of 16 x 16 pixels."""

    placeholder = "<image>"
    reserved_texts = ("<image>",)
    identity = "by hand"

    def __init__(self, config: Any):
        self.config = config
        self.placeholder_id = config.image_token_id
        self.image_id = config.image_token_id
        self.placeholder_ids = (config.image_token_id,)

    def joined(self, left: int, right: int) -> None:
        """Its tokens are as they are."""

    def tokens(self, image: Any) -> list[int]:
        """The ids that stand for an image."""
        rows, columns = patches_of(image)
        return [self.image_id] * (rows * columns // JOINED**2)

    def pixels(self, images: list[Any]) -> dict[str, Tensor]:
        """Patches of all images, filled up to the largest, with their numbers of rows and
        columns."""
        shapes = [patches_of(image) for image in images]
        most = max(rows * columns for rows, columns in shapes)
        values = torch.zeros(len(images), most, PATCH * PATCH * 3)
        mask = torch.zeros(len(images), most, dtype=torch.int64)
        for index, (image, (rows, columns)) in enumerate(zip(images, shapes, strict=True)):
            pixels = torch.from_numpy(np.asarray(image) / 127.5 - 1).float()
            pixels = pixels[: rows * PATCH, : columns * PATCH]
            patches = pixels.view(rows, PATCH, columns, PATCH, 3).transpose(1, 2)
            values[index, : rows * columns] = patches.reshape(rows * columns, -1)
            mask[index, : rows * columns] = 1
        shapes_of_all = torch.tensor(shapes)
        return {
            "pixel_values": values,
            "spatial_shapes": shapes_of_all,
            "pixel_attention_mask": mask,
        }

    def save_settings(self, folder: Path) -> None:
        """It has none."""


def patches_of(image: Any) -> tuple[int, int]:
    """Rows and columns of the patches of an image."""
    step = PATCH * JOINED
    return image.height // step * JOINED, image.width // step * JOINED


def by_hand(config: Any, *_: Any) -> ProcessorByHand:
    """In place of `load_processor`."""
    return ProcessorByHand(config)
