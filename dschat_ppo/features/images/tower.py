"""The parts of a model that see images, beside its decoder. Unless flags let them train
(`trained_tower.py`), they are taken out of the model that trains, and loaded whole on each rank, in
no engine. What they give is then a function of the data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PretrainedConfig

from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.model_folders import base_folder


@dataclass(frozen=True)
class Family:
    """What sets a family of models apart."""

    # how the names of the projector's weights begin, in the model without its head
    projector: tuple[str, ...] = ("multi_modal_projector.",)
    # the dimension of the tensors of pixels along which images, or their tiles, lie
    images_along: int = 0
    has_axes: bool = False  # positions have three axes: time, height, width
    in_one: bool = False  # the decoder takes features as one tensor, not as one for each image
    both_ways: bool = False  # the tokens of an image see each other, also later ones
    # transformers has a language model of text for it too, which a run trains unless a flag asks
    # for the images
    is_text_too: bool = False


FAMILIES = {  # by model type
    "idefics3": Family(projector=("connector.",), images_along=1),
    "smolvlm": Family(projector=("connector.",), images_along=1),
    "qwen2_5_vl": Family(projector=("visual.merger.",), has_axes=True),
    "qwen3_vl": Family(
        projector=("visual.merger.", "visual.deepstack_merger_list."), has_axes=True
    ),
    "qwen3_5": Family(projector=("visual.merger.",), has_axes=True, is_text_too=True),
    "llava": Family(),
    "internvl": Family(in_one=True),
    "gemma3": Family(in_one=True, both_ways=True, is_text_too=True),
    "lfm2_vl": Family(),
}
_FEW_TOKENS = 8  # rows of the embedding of a decoder that is built for its name alone


@dataclass(frozen=True)
class ImageFeatures:
    """What the decoder gets of the images of one row: for each of their M tokens, in order."""

    states: Tensor  # (M, H), in place of the embeddings
    # (M, H) each, added to the outputs of the decoder's first layers; most models have none
    deepstack: tuple[Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        """M."""
        return len(self.states)

    @property
    def bytes(self) -> int:
        """The memory that the numbers take."""
        return sum(tensor.nbytes for tensor in (self.states, *self.deepstack))

    def to(self, device: torch.device | str) -> ImageFeatures:
        """The same on another device."""
        layers = tuple(layer.to(device) for layer in self.deepstack)
        return ImageFeatures(self.states.to(device), layers)

    def encoded(self, model: Any) -> ImageFeatures:
        """These, whatever the model is: its tower has made them already."""
        return self


def joined_features(features: Sequence[ImageFeatures]) -> ImageFeatures:
    """Those of several rows, one after another."""
    states = torch.cat([of_row.states for of_row in features])
    layers = zip(*(of_row.deepstack for of_row in features), strict=True)
    return ImageFeatures(states, tuple(torch.cat(layer) for layer in layers))


def sees_images(config: PretrainedConfig, is_asked: bool = False) -> bool:
    """Whether a model of this configuration is used with images: it is of one of the families, and
    a flag asks for the images (`is_asked`) if it is a language model of text too."""
    family = FAMILIES.get(config.model_type)
    return family is not None and (is_asked or not family.is_text_too)


def trains_with_images(config: HasFeatures, model_config: PretrainedConfig) -> bool:
    """Whether a run or a tool with these flags uses a model of `model_config` with images."""
    return sees_images(model_config, bool(config.value("with_images")))


def reason_not_supported(config: PretrainedConfig) -> str | None:
    """Why a model is of none of the families, although it sees images; None for other models."""
    images_too: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if config.model_type in FAMILIES or type(config) not in images_too:
        return None
    return (
        f"{type(config).__name__} sees images in a way that is not supported; supported are"
        f" {', '.join(FAMILIES)}"
    )


class ImageTower:
    """The tower and the projector of a model, in eval mode and without gradients."""

    def __init__(self, model: Any, family: Family):
        self._model = model  # the model without its head, whose decoder is None
        self.family = family

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self._model.parameters()).device

    def weights(self) -> dict[str, Tensor]:
        """Its weights, under the names that they have in the whole model."""
        return {f"model.{name}": weight for name, weight in self._model.state_dict().items()}

    def has_bits_of(self, other: ImageTower) -> bool:
        """Whether another tower has the same weights, so that both give the same."""
        mine = self.weights()
        theirs = other.weights()
        if mine.keys() != theirs.keys():
            return False
        return all(torch.equal(mine[name], theirs[name]) for name in mine)

    def noise(self, tokens: int) -> ImageFeatures:
        """Features of so many tokens as the tower might give them, equal in all calls."""
        config = self._model.config
        generator = torch.Generator().manual_seed(0)
        width = config.get_text_config().hidden_size
        layers = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        states, *deepstack = torch.randn(1 + layers, tokens, width, generator=generator)
        return ImageFeatures(states, tuple(deepstack))

    @torch.no_grad()
    def features(self, pixels: Mapping[str, Tensor]) -> ImageFeatures:
        """What the decoder gets of the images of one row. `pixels`: of the family's processor, all
        images of the row."""
        return encoded_images(self._model, pixels)

    def positions(
        self, ids: Tensor, is_image: Tensor, pixels: Mapping[str, Tensor]
    ) -> Tensor | None:
        """(3, T) int64, the position of each token on three axes; None for models whose positions
        are the columns.

        Args:
            ids: (T,) int64, one row.
            is_image: (T,) bool, True on the tokens of images.
            pixels: of the images of the row.
        """
        if not self.family.has_axes:
            return None
        axes, _ = self._model.get_rope_index(
            input_ids=ids.unsqueeze(0),
            mm_token_type_ids=is_image.unsqueeze(0).int(),
            image_grid_thw=pixels["image_grid_thw"].cpu(),
        )
        return axes[:, 0]


def encoded_images(model: Any, pixels: Mapping[str, Tensor]) -> ImageFeatures:
    """What the decoder gets of images, by the tower and the projector in a model without its head.
    `pixels`: of the family's processor."""
    arguments = inspect.signature(model.get_image_features).parameters
    device = next(model.parameters()).device
    inputs = {}
    for name, value in pixels.items():
        if name in arguments:
            # some families do not give pixels the number format of their weights
            dtype = model.dtype if value.is_floating_point() else value.dtype
            inputs[name] = value.to(device, dtype)
    output = model.get_image_features(**inputs, return_dict=True)
    layers = getattr(output, "deepstack_features", None) or ()
    return ImageFeatures(_in_one(output.pooler_output), tuple(map(_in_one, layers)))


def _in_one(parts: Any) -> Tensor:
    """The features of the images of a row, which families give as one tensor or as one for each
    image."""
    if isinstance(parts, Tensor):
        return parts.reshape(-1, parts.shape[-1])
    return torch.cat(list(parts))


def load_tower(folder: str, dtype: torch.dtype, device: torch.device) -> ImageTower:
    """The tower of the model in `folder`. The decoder is built with one layer and a few embeddings,
    and given up, so that no rank reads its weights. Call it outside of transformers' ZeRO-3 mode.

    Args:
        folder: of a model, or of an adapter, whose base it then is.
        dtype: of its weights.
        device: where it runs.
    """
    base = base_folder(folder, "model")
    config = load_config(base, "model")
    small = with_small_decoder(config)
    verbosity = transformers.logging.get_verbosity()
    # it names the weights of the decoder, which are not asked for
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with reading(f"{folder}: its vision tower cannot be loaded"):
            model = AutoModelForImageTextToText.from_pretrained(
                base, config=small, dtype=dtype, ignore_mismatched_sizes=True
            )
    finally:
        transformers.logging.set_verbosity(verbosity)
    inner: Any = model.model
    remove_decoder(inner)
    inner.requires_grad_(False)
    inner.eval().to(device)
    return ImageTower(inner, FAMILIES[config.model_type])


def with_small_decoder(config: PretrainedConfig) -> PretrainedConfig:
    """A configuration whose decoder has one layer and a few embeddings."""
    small = deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    text.vocab_size = _FEW_TOKENS
    text.pad_token_id = None
    return small


def remove_decoder(inner: nn.Module) -> None:
    """Leave everything in a model without its head but the decoder."""
    decoder = inner.get_decoder()  # type: ignore[operator]
    for name, child in list(inner.named_children()):
        if child is decoder:
            setattr(inner, name, None)
            return
    raise UserError(f"{type(inner).__name__}: its decoder is none of its parts")
