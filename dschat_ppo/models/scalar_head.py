"""Reward model and critic: one scalar for every position."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.errors import UserError
from dschat_ppo.models.backbone import backbone_states


class ScalarModel(nn.Module):
    """A one-label sequence classifier whose head is read at every position.

    As a reward model its score is the value at the last real token; as a critic every value counts.
    """

    def __init__(self, classifier: PreTrainedModel):
        super().__init__()
        if not hasattr(classifier, "score"):
            raise UserError(f"{type(classifier).__name__} has no `score` head; use a decoder-only reward model")
        self.classifier: Any = classifier

    @property
    def config(self) -> PretrainedConfig:
        """The classifier's configuration (DeepSpeed and transformers look for it)."""
        return self.classifier.config

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass."""
        self.classifier.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) right-padded ids -> (B, T) fp32 values, those after a row's end meaningless."""
        hidden = backbone_states(self.classifier.base_model, input_ids)
        return self.classifier.score(hidden).squeeze(-1).float()
