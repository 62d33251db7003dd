"""Reward model and critic: one scalar for every position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.models.packing import CHECKPOINTING, last_states


class ScalarModel(nn.Module):
    """A one-label sequence classifier whose head is read at every position.

    As a reward model its score is the value at the last real token; as a critic every value counts. `packed` runs rows
    end to end as one.
    """

    def __init__(self, classifier: PreTrainedModel, packed: bool = False):
        super().__init__()
        self.classifier: Any = classifier
        self.packed = packed

    @property
    def config(self) -> PretrainedConfig:
        """The classifier's configuration (DeepSpeed and transformers look for it)."""
        return self.classifier.config

    @property
    def backbone(self) -> PreTrainedModel:
        """The model without its head."""
        return self.classifier.base_model

    @property
    def device(self) -> torch.device:
        """Where the model is (a DeepSpeed engine has the same attribute)."""
        return self.classifier.device

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass."""
        self.classifier.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """(B, T) right-padded ids and (B,) lengths -> (B, T) fp32 values, those after a row's end meaningless."""
        states = last_states(self.backbone, input_ids, lengths, self.packed)
        head = self.classifier.score
        return head(states.to(head.weight.dtype)).squeeze(-1).float()  # Mamba's states are in fp32
