"""The images of the rows of a forward pass, as the decoder gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from dschat_ppo.features.images.tower import Family, ImageFeatures
from dschat_ppo.features.images.trained_tower import ImagePixels


@dataclass
class _EncoderOutput(ModelOutput):
    """What a model of transformers takes in place of the output of its vision encoder."""

    pooler_output: Any = None
    deepstack_features: Any = None


@dataclass(frozen=True)
class ImageInputs:
    """Of rows (B, T), right-padded; `GivenEmbeddings`."""

    # of the distinct images of the rows, M tokens; their pixels, where the model encodes them
    features: ImageFeatures | ImagePixels
    index: Tensor  # (B, T) int64, which of the M tokens stands there; -1 where text does
    # (3, B, T) int64, for models whose positions have three axes; None: the columns
    positions: Tensor | None = None
    # (B,) int64, what a token after the images adds to its column; None: the positions are columns
    offsets: Tensor | None = None
    family: Family = Family()
    # images of a row -> their tokens, for the distinct rows in the order of their features
    tokens_of_images: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> ImageInputs:
        """The same on another device."""
        features = self.features.to(device)
        positions = self.positions
        if positions is not None:
            positions = positions.to(device)
        offsets = self.offsets
        if offsets is not None:
            offsets = offsets.to(device)
        index = self.index.to(device)
        return replace(self, features=features, index=index, positions=positions, offsets=offsets)

    def of_rows(self, rows: Tensor, width: int) -> ImageInputs:
        """That of some rows, and of their first `width` columns."""
        positions = self.positions
        if positions is not None:
            positions = positions[:, rows, :width]
        offsets = self.offsets
        if offsets is not None:
            offsets = offsets[rows]
        index = self.index[rows, :width]
        return replace(self, index=index, positions=positions, offsets=offsets)

    def widened(self, width: int) -> ImageInputs:
        """The same with tokens of text after the rows, if they have fewer than `width` columns."""
        missing = width - self.index.shape[1]
        if missing <= 0:
            return self
        index = torch.nn.functional.pad(self.index, (0, missing), value=-1)
        if self.positions is None or self.offsets is None:
            return replace(self, index=index)
        columns = torch.arange(width - missing, width, device=index.device)
        further = columns + self.offsets.unsqueeze(1)  # (B, missing)
        positions = torch.cat([self.positions, further.expand(3, -1, -1)], dim=2)
        return replace(self, index=index, positions=positions)

    def keys(self, input_ids: Tensor) -> Tensor:
        """(B, T) int64: the ids, and below 0 what stands for the tokens of images."""
        index = self.index.to(input_ids.device)  # rows are laid out on the host
        return torch.where(index < 0, input_ids, -1 - index)

    def arguments(self, slots: Tensor, model: PreTrainedModel) -> dict[str, Any]:
        """Arguments of the model for the tokens at `slots` (b, n) of the rows, flattened. Where its
        tower trains, the model encodes the images now."""
        arguments = dict[str, Any]()
        if self.positions is not None:
            arguments["position_ids"] = self.positions.flatten(1)[:, slots]
        chosen = self.index.flatten()[slots]
        if self.family.both_ways:
            arguments["token_type_ids"] = (chosen >= 0).long()
        chosen = chosen[chosen >= 0]  # in the order in which the model finds their ids
        features = self.features.encoded(model)
        # no token's features, in a pass without images, give the tower gradients of 0
        if len(chosen) or features.states.requires_grad:
            deepstack = [[layer[chosen]] for layer in features.deepstack]
            states: Any = features.states[chosen]
            if not self.family.in_one:
                states = [states]
            output = _EncoderOutput(states, deepstack or None)
            arguments["mm_encoder_outputs"] = {"image": output}
        return arguments
