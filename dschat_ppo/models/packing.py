"""Packed rows: rows laid end to end as one row without padding, with attention inside each segment.

transformers knows the attention function as `dschat_packed`, for which it builds no mask;
`segment_attention.py` has its kernels. `ForwardPass.running` switches it on, and activation
checkpointing switches it on again when it runs layers again in the backward pass. `padded_rows`
does the same for padded rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from dschat_ppo.models.activation_memory import last_mlp_of_read_tokens
from dschat_ppo.models.architectures import MASK_IS_READ
from dschat_ppo.models.backbone import (
    Layout,
    attention_is_replaceable,
    backbone_states,
    check_attention_call,
    forward_replaced,
    position_arguments,
    real_slots,
)
from dschat_ppo.models.given_embeddings import given_arguments
from dschat_ppo.models.micro_batches import Segments
from dschat_ppo.models.pass_observers import observer_arguments, show_pass
from dschat_ppo.models.pass_rows import PassRows
from dschat_ppo.models.segment_attention import (
    blockwise_attention,
    segment_by_segment,
    suits_blocks,
    suits_varlen,
    varlen_attention,
)
from dschat_ppo.models.state_layers import StateRows, state_layers

NAME = "dschat_packed"


class AttentionExchange(Protocol):
    """What ranks that hold a part of the columns do around each attention."""

    def before(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """The arguments of a call of attention (b, heads, n, d), with all columns of some heads in
        place of some columns of all heads. Collective."""
        ...

    def after(self, mixed: Tensor) -> Tensor:
        """The outputs (b, T, heads, d), with some columns of all heads again. Collective."""
        ...


@dataclass(frozen=True)
class ForwardPass:
    """How forward passes of models of `config` differ from the models' own."""

    config: PretrainedConfig
    segments: Segments | None  # of the only row; None: rows are not packed
    # around each attention: the model gets a part of the columns; segments are those of whole rows
    exchange: AttentionExchange | None = None
    choice: str = "auto"  # the value of `--attn_implementation`
    attention: str | None = NAME  # its name in transformers; None: the model's own
    # layers, and what a call of each runs instead
    forwards: Sequence[tuple[nn.Module, Callable[..., Tensor]]] = ()

    @contextmanager
    def running(self) -> Iterator[None]:
        """In the block, the models run this way."""
        # of the decoder alone: of a configuration with several parts it would change all
        config: Any = self.config.get_text_config()
        original = config._attn_implementation
        with ExitStack() as stack:
            if self.attention is not None:
                stack.callback(setattr, config, "_attn_implementation", original)
                config._attn_implementation = self.attention
            for layer, forward in self.forwards:
                stack.enter_context(forward_replaced(layer, forward))
            stack.callback(_RUNNING.pop)
            _RUNNING.append(self)
            yield


@dataclass
class Recorded:
    """Of the calls of this module's attention: each layer's sliding window, and whether one call
    did all segments."""

    windows: dict[int, int | None] = field(default_factory=dict)
    in_one_call: bool = True


_RUNNING: list[ForwardPass] = []
_RECORDED: list[Recorded] = []


def padded_rows(model: PreTrainedModel, choice: str, is_replaceable: bool = False) -> ForwardPass:
    """Right-padded rows with the attention that `--attn_implementation` names, by transformers and
    with its masks. "auto": the attention in blocks where the model is on a CPU and is replaceable
    (`select_kernels` found that this module's attention gives the numbers of the model's own), else
    the model's own."""
    attention: str | None = choice
    if choice == "auto":
        attention = None
        if is_replaceable and model.device.type == "cpu":
            attention = NAME
    return ForwardPass(model.config, None, choice=choice, attention=attention)


@contextmanager
def recorded_attention() -> Iterator[Recorded]:
    """Record the calls of the attention of this module."""
    _RECORDED.append(Recorded())
    try:
        yield _RECORDED[-1]
    finally:
        _RECORDED.pop()


def _segment_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment: (b, heads, T, d) -> (b, T, heads, d). See
    `check_attention_call`."""
    check_attention_call(module, attention_mask, options)
    if _RECORDED:
        _RECORDED[-1].windows[module.layer_idx] = sliding_window
    forward_pass = _RUNNING[-1]
    exchange = forward_pass.exchange
    if exchange is not None:
        module, query, key, value, options = exchange.before(module, query, key, value, options)
    is_packed = forward_pass.segments is not None
    segments = forward_pass.segments or Segments([query.shape[2]])  # a padded row is one segment
    in_blocks = False
    by_varlen = False
    if forward_pass.choice == "auto":
        in_blocks = suits_blocks(module, query, key, value, segments, options)
        by_varlen = not in_blocks and is_packed and suits_varlen(query, key, value, options)
    if _RECORDED:
        _RECORDED[-1].in_one_call &= in_blocks or by_varlen
    scale = options.get("scaling")
    if in_blocks:
        mixed = blockwise_attention(query, key, value, segments, sliding_window, scale)
        mixed = mixed.transpose(1, 2)
    elif by_varlen:
        mixed = varlen_attention(query, key, value, segments, sliding_window, scale)
    else:
        mixed = segment_by_segment(
            module,
            (query, key, value),
            forward_pass.segments,
            sliding_window,
            options,
            eager=forward_pass.choice == "eager",
        )
    if exchange is not None:
        mixed = exchange.after(mixed)
    return mixed, None


AttentionInterface.register(NAME, _segment_attention)


def reason_not_to_pack(model: PreTrainedModel, choice: str = "auto") -> str | None:
    """Why packed rows' attention cannot replace the model's; other layers are tried
    (`select_kernels`)."""
    if not attention_is_replaceable(model):
        return "transformers does not let its attention be replaced"
    # packed rows have soft caps and sinks too, which are eager
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager") or (attention == "eager" and choice == "sdpa"):
        return f"its attention is '{attention}' and not 'sdpa'"
    if model.config.model_type in MASK_IS_READ:
        return "its attention reads the mask, which packed rows do not have"
    return None


def token_states(backbone: Any, layout: Layout, rows: PassRows) -> tuple[Tensor, Tensor]:
    """Run the rows of a forward pass.

    Args:
        backbone: the model without its head.
        layout: how it may run rows. With `reads_few` and slots (n,), only the states there are
            read, so the last MLP runs for these tokens alone.
        rows: laid out for this layout.

    Returns:
        Last hidden states (N, H), and where in them those of the read tokens are, in the shape of
        their slots.
    """
    packed = rows.packed
    if packed is None:
        width = rows.input_ids.shape[1]
        padded = padded_rows(backbone, layout.attention, layout.packed)
        if layout.reads_few and rows.slots.dim() == 1:
            forwards = last_mlp_of_read_tokens(backbone, rows.slots % width, rows.slots // width)
            padded = replace(padded, forwards=forwards)
        with padded.running():
            states = backbone_states(backbone, rows.input_ids, rows.lengths, rows.given)
        return states.flatten(0, 1), rows.slots
    forwards = _layer_forwards(backbone, packed.segments, rows)
    forward_pass = ForwardPass(
        backbone.config, packed.segments, choice=layout.attention, forwards=forwards
    )
    with forward_pass.running():
        positions = position_arguments(backbone, packed.positions.unsqueeze(0))
        output = backbone(
            input_ids=rows.input_ids.flatten()[packed.slots].unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            **given_arguments(rows.given, packed.slots.unsqueeze(0), backbone, positions),
            **observer_arguments(),
        )

    def occurrences(mask: Tensor) -> Tensor:
        """A token that several rows share counts for each of them."""
        counts = mask.new_zeros(len(packed.slots), dtype=torch.int64)
        return counts.scatter_add_(0, packed.offsets.flatten(), mask.flatten().long())

    show_pass(output, real_slots(rows.input_ids, rows.lengths), occurrences)
    return output.last_hidden_state[0], packed.offsets.flatten()[rows.slots]


def _layer_forwards(
    backbone: Any, segments: Segments, rows: PassRows
) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
    """Layers that run a packed row in another way than the tokens of a row: those that carry a
    state, and the last MLP, where it runs the tokens that are read alone."""
    forwards = []
    layers = state_layers(backbone)
    if layers:
        state_rows = StateRows.of(segments.lengths, segments.seen, rows.input_ids.device)
        forwards = [(layer, state_rows.around(layer.forward)) for layer in layers]
    if rows.read_offsets is not None:
        forwards += last_mlp_of_read_tokens(backbone, rows.read_offsets)
    return forwards


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint`: layers run again as in the forward pass."""
    if _RUNNING:
        return nullcontext(), _RUNNING[-1].running()
    return nullcontext(), nullcontext()


CHECKPOINTING = {"use_reentrant": False, "context_fn": checkpoint_contexts}
