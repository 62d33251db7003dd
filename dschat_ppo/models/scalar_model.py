"""Reward model and critic: one scalar for every position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.models.activation_memory import activations_on_host
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.packing import DividedRows, token_states
from dschat_ppo.models.policy_model import WrappedModel


class ScalarModel(WrappedModel):
    """A one-label sequence classifier whose head, named `score`, is applied at every position. The score of a reward
    model is the value at the last real token; a critic uses all values."""

    def __init__(self, classifier: PreTrainedModel, layout: Layout = Layout()):  # noqa: B008  it is immutable
        super().__init__()
        self.classifier: Any = classifier
        self.layout = layout
        use_fast_layers(classifier)

    @property
    def backbone(self) -> PreTrainedModel:
        """The model without its head."""
        return self.classifier.base_model

    def forward(
        self, input_ids: Tensor, lengths: Tensor, last_only: bool = False, wanted: Tensor | None = None
    ) -> Tensor:
        """(B, T) right-padded ids and (B,) lengths -> (B, T) fp32 values; those after a row's end are meaningless. With
        `last_only` (B,), the values of the last tokens; with `wanted` (B, T) bool (N,), those of the real tokens where
        it is True, row after row. Packed rows then need no memory for padding."""
        with activations_on_host(self.layout.offload_activations):
            if self.layout.divided:
                rows = DividedRows.of(input_ids, lengths, self.layout.packed)
                states = rows.run(self.backbone, input_ids, self.layout.attention).last_hidden_state
                values = rows.values(self._head(states))  # (B, T)
                if wanted is not None:
                    return values[wanted]
                return values.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1) if last_only else values
            places = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape)
            if wanted is not None:
                places = places[wanted]
            elif last_only:
                places = places.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
            few = self.layout.reads_few and (wanted is not None or last_only)
            states, places = token_states(self.backbone, self.layout, input_ids, lengths, places, few)
            return self._head(states[places]) if places.dim() == 1 else self._head(states)[places]

    def _head(self, states: Tensor) -> Tensor:
        """(..., H) -> (...) fp32."""
        head = self.classifier.score
        return head(states.to(head.weight.dtype)).squeeze(-1).float()  # Mamba's states are in fp32
