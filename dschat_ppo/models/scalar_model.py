"""Reward model and critic: one scalar for every position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.models.packing import CHECKPOINTING, last_states


class ScalarModel(nn.Module):
    """A one-label sequence classifier whose head is applied at every position.

    The score of a reward model is the value at the last real token; a critic uses all values.

    Args:
        classifier: with a head named `score`.
        packed: run rows end to end as one row, without padding.
    """

    def __init__(self, classifier: PreTrainedModel, packed: bool = False):
        super().__init__()
        self.classifier: Any = classifier
        self.packed = packed

    @property
    def config(self) -> PretrainedConfig:
        """The classifier's configuration, which DeepSpeed and transformers look for."""
        return self.classifier.config

    @property
    def backbone(self) -> PreTrainedModel:
        """The model without its head."""
        return self.classifier.base_model

    @property
    def device(self) -> torch.device:
        """The model's device, as on a DeepSpeed engine."""
        return self.classifier.device

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass."""
        self.classifier.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """(B, T) right-padded ids and (B,) lengths -> (B, T) fp32 values; those after a row's end are meaningless."""
        states = last_states(self.backbone, input_ids, lengths, self.packed)
        head = self.classifier.score
        return head(states.to(head.weight.dtype)).squeeze(-1).float()  # Mamba's states are in fp32
