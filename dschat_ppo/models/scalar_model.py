"""Reward model and critic: one scalar for every position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.models.activation_memory import activations_on_host
from dschat_ppo.models.backbone import backbone_states
from dschat_ppo.models.packing import CHECKPOINTING, DividedRows, are_uneven, last_states, token_states


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
        self.divided = False  # ranks share the rows (`--sequence_parallel_size`), and each runs its part of the columns
        self.offload_activations = False  # keep what the backward pass needs in host memory

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

    def forward(
        self, input_ids: Tensor, lengths: Tensor, last_only: bool = False, wanted: Tensor | None = None
    ) -> Tensor:
        """(B, T) right-padded ids and (B,) lengths -> (B, T) fp32 values; those after a row's end are meaningless.

        With `last_only` (B,), the values of the last tokens; with `wanted` (B, T) bool (N,), those of the real tokens
        where it is True, row after row. Packed rows then need no memory for padding.
        """
        with activations_on_host(self.offload_activations):
            return self._values(input_ids, lengths, last_only, wanted)

    def _values(self, input_ids: Tensor, lengths: Tensor, last_only: bool, wanted: Tensor | None) -> Tensor:
        head = self.classifier.score
        if self.divided:
            rows = DividedRows.of(input_ids, lengths, self.packed)
            states = rows.run(self.backbone, input_ids).last_hidden_state  # (b, n, H)
            values = rows.values(head(states.to(head.weight.dtype)).squeeze(-1).float())  # (B, T)
            if wanted is not None:
                return values[wanted]
            return values.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1) if last_only else values
        if wanted is not None:
            if self.packed and are_uneven(lengths):
                of_tokens, real = token_states(self.backbone, input_ids, lengths)
                chosen = of_tokens[wanted[real]]  # (N, H)
            else:
                chosen = backbone_states(self.backbone, input_ids, lengths)[wanted]
            return head(chosen.to(head.weight.dtype)).squeeze(-1).float()
        if last_only:
            ends = lengths - 1  # (B,)
            if self.packed and are_uneven(lengths):
                states, _ = token_states(self.backbone, input_ids, lengths)
                last = states[lengths.cumsum(0) - 1]  # (B, H)
            else:
                states = backbone_states(self.backbone, input_ids, lengths)
                last = states[torch.arange(len(ends), device=ends.device), ends]
            return head(last.to(head.weight.dtype)).squeeze(-1).float()
        states = last_states(self.backbone, input_ids, lengths, self.packed)
        return head(states.to(head.weight.dtype)).squeeze(-1).float()  # Mamba's states are in fp32
