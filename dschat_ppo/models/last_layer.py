"""The MLP of the last decoder layer, only for the tokens whose last hidden states are read.

Log-probs read the states of answers, and a reward model reads one state of each row. What the last MLP computes at
other tokens reaches nothing: later operations (norms, the head) do not mix tokens. Its output there is 0 instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dschat_ppo.models.activation_memory import decoder_layers, mlp_of
from dschat_ppo.models.backbone import forward_replaced


@dataclass(frozen=True)
class _Read:
    """The MLP of a running forward pass, and the tokens (n,) int64 whose states are read: their columns and rows."""

    mlp: Any
    columns: Tensor
    rows: Tensor | int

    @contextmanager
    def entered(self) -> Iterator[None]:
        whole = self.mlp.forward

        def of_read_tokens(*values: Tensor) -> Tensor:
            rows, width, _ = values[0].shape  # (B, T, H); T may be padded
            # Also if all tokens are read: a rank that saves other tensors for the backward pass would end the
            # recomputation of activation checkpointing elsewhere, and under ZeRO-3 that recomputation gathers weights.
            places = self.rows * width + self.columns
            flat = (x.reshape(rows * width, -1) for x in values)
            found: Tensor = whole(*(x.index_select(0, places).unsqueeze(0) for x in flat)).squeeze(0)
            return found.new_zeros(rows * width, found.shape[-1]).index_copy(0, places, found).view(rows, width, -1)

        with forward_replaced(self.mlp, of_read_tokens):
            _RUNNING.append(self)
            try:
                yield
            finally:
                _RUNNING.pop()


_RUNNING: list[_Read] = []


def last_mlp(backbone: nn.Module) -> nn.Module | None:
    """The MLP of the last decoder layer; None if it has none, or a mixture of experts, whose router sees all tokens."""
    layers = decoder_layers(backbone)
    mlp, has_experts = mlp_of(layers[-1]) if layers else (None, False)
    return None if has_experts else mlp


def read_tokens_only(
    backbone: nn.Module, enabled: bool, columns: Tensor, rows: Tensor | int = 0
) -> AbstractContextManager[None]:
    """Make forward passes of `backbone` run the last MLP for some tokens only, if `enabled` by `select_kernels`.
    `columns` (n,) int64 are theirs in the backbone's input, `rows` likewise, or one for all. A token twice would get
    its gradient twice."""
    mlp = last_mlp(backbone) if enabled else None
    return nullcontext() if mlp is None else _Read(mlp, columns, rows).entered()


def read_tokens_again() -> AbstractContextManager[None]:
    """The state of the running forward pass, for activation checkpointing, which runs layers again."""
    return _RUNNING[-1].entered() if _RUNNING else nullcontext()
