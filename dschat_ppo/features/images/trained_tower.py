"""Towers and projectors that train: they stay in the model, in its engine, and encode images inside
its forward pass. What is served for a row is then its pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from dschat_ppo.errors import UserError
from dschat_ppo.features.images.tower import (
    FAMILIES,
    ImageFeatures,
    ImageTower,
    encoded_images,
    remove_decoder,
    with_small_decoder,
)
from dschat_ppo.models.lm_kinds import parts_beside_decoder


@dataclass(frozen=True)
class ImagePixels:
    """The images of some rows, for a model that encodes them itself."""

    pixels: Mapping[str, Tensor]  # of the family's processor
    tokens: int  # M, that stand for them in the rows; 0 for an image that stands nowhere
    along: int  # the dimension of the tensors along which images lie (`Family.images_along`)

    @property
    def bytes(self) -> int:
        """The memory that the numbers take."""
        return sum(tensor.nbytes for tensor in self.pixels.values())

    def to(self, device: torch.device | str) -> ImagePixels:
        """The same on another device."""
        pixels = {name: tensor.to(device) for name, tensor in self.pixels.items()}
        return ImagePixels(pixels, self.tokens, self.along)

    def smallest(self) -> ImagePixels:
        """The first tile of these images; all of them, where they have no tiles."""
        if "image_grid_thw" in self.pixels:
            return self
        pixels = {name: tensor.narrow(self.along, 0, 1) for name, tensor in self.pixels.items()}
        return ImagePixels(pixels, 0, self.along)

    def encoded(self, model: PreTrainedModel) -> ImageFeatures:
        """Their features, with gradients where its parts train, by the parts of `model`, which may
        have a head. One call takes all images: under ZeRO-3, ranks whose rows have more images than
        others call the tower as often as these."""
        features = encoded_images(model.base_model, self.pixels)
        if self.tokens not in (0, features.tokens):
            raise UserError(
                f"the vision tower gives {features.tokens} tokens for images of rows that have"
                f" {self.tokens}, by another processor"
            )
        return features


def joined_pixels(of_rows: Sequence[ImagePixels]) -> ImagePixels:
    """The images of several rows, one after another."""
    along = of_rows[0].along
    pixels = {}
    for name in of_rows[0].pixels:
        pixels[name] = torch.cat([row.pixels[name] for row in of_rows], dim=along)
    return ImagePixels(pixels, sum(row.tokens for row in of_rows), along)


class TowerInModel:
    """In place of an `ImageTower`, where the model that trains holds its own: it knows the family
    and the configuration, and has no weights."""

    def __init__(self, config: PretrainedConfig, device: torch.device):
        """`device`: of the model, to which pixels go."""
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(with_small_decoder(config))
        inner: Any = model.model
        remove_decoder(inner)
        self.device = device
        self.family = FAMILIES[config.model_type]
        self._without_weights = ImageTower(inner, self.family)

    def noise(self, tokens: int) -> ImageFeatures:
        """As `ImageTower.noise`."""
        return self._without_weights.noise(tokens)

    def positions(
        self, ids: Tensor, is_image: Tensor, pixels: Mapping[str, Tensor]
    ) -> Tensor | None:
        """As `ImageTower.positions`."""
        return self._without_weights.positions(ids, is_image, pixels)

    def of_model(self, model: PreTrainedModel) -> ImageTower:
        """The tower in a model whose weights are whole, such as while it generates."""
        return ImageTower(model.base_model, self.family)


def keep_parts(model: PreTrainedModel, trains_tower: bool, trains_projector: bool) -> None:
    """Leave the parts beside the decoder in a model, and freeze those that do not train."""
    projector = FAMILIES[model.config.model_type].projector
    for name, module in parts_beside_decoder(model).items():
        for weight_name, weight in module.named_parameters(prefix=name):
            if weight_name.startswith(projector):
                weight.requires_grad_(trains_projector)
            else:
                weight.requires_grad_(trains_tower)
