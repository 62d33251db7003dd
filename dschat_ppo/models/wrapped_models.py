"""The models in engines: `PolicyModel` (actor, reference, SFT) gives log-probs and entropies of the
wanted tokens only, `ScalarModel` (reward model, critic) one scalar for every position. Their passes
over responses are those of rollout, scoring and training alike, so that the numbers agree."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.algorithms.divergence import Divergence, OutputLayer, fused_divergence
from dschat_ppo.algorithms.fused_logprobs import (
    Forbidden,
    Head,
    forbid_,
    fused_token_scores,
    token_entropy,
    token_logprobs,
)
from dschat_ppo.common.dist import is_partitioned
from dschat_ppo.models.activation_memory import activations_on_host
from dschat_ppo.models.architectures import backbone_of
from dschat_ppo.models.backbone import (
    Layout,
    forward_replaced,
    last_logits_argument,
    real_slots,
    slot_arguments,
    unwrap,
)
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.packing import CHECKPOINTING, DividedRows, padded_rows, token_states
from dschat_ppo.models.router_recorder import record_router, router_arguments
from dschat_ppo.types import MinimumLength, Model, Rollout, chosen_columns, full_sequences


@dataclass(frozen=True)
class Teaching:
    """A teacher's distributions at some of a student's N tokens, and how they are compared with the
    student's."""

    teacher: OutputLayer
    divergence: Divergence
    tokens: Tensor | None = None  # int64, the numbers of these tokens; None: all


class WrappedModel(nn.Module):
    """A transformers model, its only child, and the layout of the rows that it runs."""

    layout: Layout

    @property
    def pretrained(self) -> Any:
        """The transformers model."""
        return next(self.children())

    @property
    def config(self) -> PretrainedConfig:
        """Its configuration, which DeepSpeed and transformers look for."""
        config: PretrainedConfig = self.pretrained.config
        return config

    @property
    def device(self) -> torch.device:
        """Its device, as on a DeepSpeed engine."""
        device: torch.device = self.pretrained.device
        return device

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass."""
        self.pretrained.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)


class PolicyModel(WrappedModel):
    """A causal language model whose outputs are log-probs of tokens instead of logits. Fused, it
    selects the hidden states that predict wanted tokens, and goes through the vocabulary in blocks.
    Otherwise, for heads that are more than a matrix product with a known scale and soft cap, it
    computes the logits from the first wanted position on."""

    def __init__(self, lm: PreTrainedModel, layout: Layout = Layout()):  # noqa: B008  it is immutable
        super().__init__()
        self.lm: Any = lm
        use_fast_layers(lm)
        is_linear = type(lm.get_output_embeddings()).forward is nn.Linear.forward
        self.layout = replace(layout, fused=layout.fused and is_linear)
        text = lm.config.get_text_config()
        scale = getattr(text, "logit_scale", None) or 1.0
        divisor = getattr(text, "logits_scaling", None) or 1.0
        self._head = Head(scale / divisor, getattr(text, "final_logit_softcapping", None))

    @property
    def backbone(self) -> PreTrainedModel:
        """The model without its head."""
        return backbone_of(self.lm)

    def forward(
        self,
        input_ids: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        forbidden: Forbidden | None = None,
        states: bool = False,
        teachings: Sequence[Teaching] = (),
    ) -> tuple[Tensor, ...]:
        """Log-probs of the N wanted tokens, and entropies of the distributions that they are drawn
        from, (N) fp32, row after row; then, where they are asked for, the N hidden states that the
        head takes, and the divergence from each teacher, (N) fp32.

        Args:
            input_ids: (B, T) int64, right-padded.
            wanted: (B, T) bool, True on tokens whose log-prob is wanted; the first column is
                ignored.
            entropy_grad: keep the gradient of the entropies.
            forbidden: (B, T) bool, True on tokens that were drawn without some others, and the ids
                of these.
            states: give the hidden states (N, H), if `compares_distributions`.
            teachings: give the divergence from each of these at its tokens, and 0 elsewhere, if
                `compares_distributions`.
        """
        # (B,) int64: the tokens of each row up to the one whose state predicts the last wanted
        # token, at least 1
        lengths = (
            torch.where(wanted, torch.arange(wanted.shape[1], device=wanted.device), 0)
            .amax(dim=1)
            .clamp_min(1)
        )
        with activations_on_host(self.layout.offload_activations):
            if self.layout.divided:
                return self._divided_scores(
                    input_ids, wanted, lengths, temperature, entropy_grad, forbidden
                )
            if not self.layout.fused:
                return self._plain_scores(
                    input_ids, wanted, lengths, temperature, entropy_grad, forbidden
                )
            # (N,) each: the places of the wanted tokens, found before the forward pass because the
            # host waits for them
            row, column = wanted[:, 1:].nonzero(as_tuple=True)
            tokens = input_ids[row, column + 1]
            places = row * input_ids.shape[1] + column
            if forbidden is not None:
                forbidden = forbidden[0][row, column + 1], forbidden[1]
            found, places = token_states(
                self.backbone, self.layout, input_ids, lengths, places, self.layout.reads_few
            )
            hidden = found[places]  # (N, H)
            scores = self._head_scores(
                hidden, tokens, temperature, entropy_grad, forbidden, teachings
            )
            if states:
                return (*scores[:2], hidden, *scores[2:])
            return scores

    @property
    def compares_distributions(self) -> bool:
        """Whether divergences between whole distributions can be computed: the head is a matrix
        product, and each rank has whole rows."""
        return self.layout.fused and not self.layout.divided

    def output_layer(self, hidden: Tensor) -> OutputLayer:
        """The head, and hidden states (N, H) that it takes."""
        head = self.lm.get_output_embeddings()

        def whole() -> AbstractContextManager[Any]:
            parts = [
                part
                for part in (head.weight, head.bias)
                if part is not None and is_partitioned(part)
            ]
            # a student over the same base may hold them whole already
            missing = [part for part in parts if part.ds_status == ZeroParamStatus.NOT_AVAILABLE]
            if missing:
                return deepspeed.zero.GatheredParameters(missing)
            return nullcontext()

        return OutputLayer(hidden.to(head.weight.dtype), head.weight, head.bias, self._head, whole)

    def _plain_scores(
        self,
        input_ids: Tensor,
        wanted: Tensor,
        lengths: Tensor,
        temperature: float,
        entropy_grad: bool,
        forbidden: Forbidden | None,
    ) -> tuple[Tensor, Tensor]:
        places = wanted[:, 1:]
        tokens = input_ids[:, 1:][wanted[:, 1:]]
        if places.numel():
            first = int(places.any(dim=0).int().argmax())
        else:
            first = 0
        count = input_ids.shape[1] - first  # columns whose logits are computed
        with padded_rows(self.lm, self.layout.attention).running():
            output = self.lm(
                input_ids=input_ids,
                attention_mask=None,
                use_cache=False,
                **slot_arguments(self.lm, input_ids),
                **last_logits_argument(self.lm, count),
                **router_arguments(),
            )
        record_router(output, real_slots(input_ids, lengths))
        logits = output.logits[:, -count:-1][places[:, first:]]  # (N, V)
        if forbidden is not None:
            logits = logits.float()
            forbid_(logits, (forbidden[0][:, 1:][places], forbidden[1]))
        return _scores(logits, tokens, temperature, entropy_grad)

    def _divided_scores(
        self,
        input_ids: Tensor,
        wanted: Tensor,
        lengths: Tensor,
        temperature: float,
        entropy_grad: bool,
        forbidden: Forbidden | None,
    ) -> tuple[Tensor, Tensor]:
        # (B, T): the token before a wanted one
        predicts = torch.nn.functional.pad(wanted[:, 1:], (0, 1))
        rows = DividedRows.of(input_ids, lengths, self.layout.packed)
        own = rows.own(predicts)  # (b, n)
        # the token after each of this rank
        tokens = rows.own(torch.nn.functional.pad(input_ids[:, 1:], (0, 1)))[own]
        if forbidden is not None:
            forbidden = (
                rows.own(torch.nn.functional.pad(forbidden[0][:, 1:], (0, 1)))[own],
                forbidden[1],
            )
        if self.layout.fused:
            states = rows.run(self.backbone, input_ids, self.layout.attention).last_hidden_state[
                own
            ]
            scores = self._head_scores(states, tokens, temperature, entropy_grad, forbidden)
        else:
            logits = rows.run(self.lm, input_ids, self.layout.attention).logits[own].float()
            forbid_(logits, forbidden)
            scores = _scores(logits, tokens, temperature, entropy_grad)
        both = torch.stack(scores, dim=-1)  # (own tokens, 2)
        spread = both.new_zeros((*own.shape, 2)).masked_scatter(own.unsqueeze(-1), both)
        logprobs, entropy = rows.gathered(spread)[rows.laid_out(predicts)].unbind(dim=-1)
        return logprobs, entropy if entropy_grad else entropy.detach()

    def _head_scores(
        self,
        states: Tensor,
        tokens: Tensor,
        temperature: float,
        entropy_grad: bool,
        forbidden: Forbidden | None,
        teachings: Sequence[Teaching] = (),
    ) -> tuple[Tensor, ...]:
        """Log-probs of `tokens` (N,) after hidden states (N, H), entropies, and the divergence from
        each teacher, from the fused head."""
        head = self.lm.get_output_embeddings()

        def scores(hidden: Tensor) -> tuple[Tensor, ...]:
            layer = head.weight, head.bias
            found = fused_token_scores(
                hidden, *layer, tokens, temperature, self._head, entropy_grad, forbidden=forbidden
            )
            divergences = []  # (N,) each
            for teaching in teachings:
                at = slice(None) if teaching.tokens is None else teaching.tokens
                part = fused_divergence(
                    hidden[at],
                    *layer,
                    teaching.teacher,
                    teaching.divergence,
                    temperature,
                    self._head,
                    forbidden=forbidden and (forbidden[0][at], forbidden[1]),
                )
                elsewhere = part.new_zeros(len(hidden))
                divergences.append(
                    part
                    if teaching.tokens is None
                    else elsewhere.index_add(0, teaching.tokens, part)
                )
            return *found, *divergences

        # Call the head as a module, so that ZeRO-3 gathers its weight, with another function
        # inside.
        with forward_replaced(head, scores):
            return head(states.to(head.weight.dtype))  # Mamba's states are in fp32


def _scores(
    logits: Tensor, tokens: Tensor, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    entropy = token_entropy(logits if entropy_grad else logits.detach(), temperature)
    return token_logprobs(logits, tokens, temperature), entropy


class ScalarModel(WrappedModel):
    """A one-label classifier whose head, `score`, is applied at every position: the last is a
    reward model's score."""

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
        self,
        input_ids: Tensor,
        lengths: Tensor,
        last_only: bool = False,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """(B, T) right-padded ids and (B,) lengths -> (B, T) fp32 values; those after a row's end
        are meaningless. With `last_only` (B,), the values of the last tokens; with `wanted` (B, T)
        bool (N,), those of the real tokens where it is True, row after row. Packed rows then need
        no memory for padding."""
        with activations_on_host(self.layout.offload_activations):
            places = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape)
            if wanted is not None:
                places = places[wanted]
            elif last_only:
                places = places.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
            if self.layout.divided:
                rows = DividedRows.of(input_ids, lengths, self.layout.packed)
                states = rows.run(self.backbone, input_ids, self.layout.attention).last_hidden_state
                return rows.values(self._head(states)).flatten()[places]
            few = self.layout.reads_few and (wanted is not None or last_only)
            states, places = token_states(
                self.backbone, self.layout, input_ids, lengths, places, few
            )
            if places.dim() == 1:
                return self._head(states[places])
            return self._head(states)[places]

    def _head(self, states: Tensor) -> Tensor:
        """(..., H) -> (...) fp32."""
        head = self.classifier.score
        return head(states.to(head.weight.dtype)).squeeze(-1).float()  # Mamba's states are in fp32


def vocabulary_size(model: Any) -> int:
    """Width of the logits, V, which may be more than the number of the tokenizer's tokens."""
    return int(model.get_output_embeddings().out_features)


@dataclass(frozen=True)
class ResponseLogprobs:
    """Of the response tokens: `logprobs`, `entropy` and the `divergences` from teachers are (B, R)
    fp32, 0 outside `response_mask`; `layer` is what the model computes the distributions at the N
    tokens from, row after row."""

    logprobs: Tensor
    entropy: Tensor
    divergences: Sequence[Tensor] = ()
    layer: OutputLayer | None = None


def response_logprobs(
    engine: Model,
    rows: Rollout,
    temperature: float,
    entropy_grad: bool = False,
    minimum_length: MinimumLength | None = None,
    keeps_layer: bool = False,
    teachings: Sequence[Teaching] = (),
) -> ResponseLogprobs:
    """Log-probs of the response tokens under a `PolicyModel`, or the one in an engine, and
    entropies of what they are drawn from. `minimum_length`: tokens that could not be drawn at the
    beginning of an answer. `keeps_layer`: give the `layer`. `teachings`: give the `divergences`
    from teachers on the same tokens."""
    input_ids, _ = full_sequences(rows)
    wanted = chosen_columns(rows, input_ids.shape[1])
    forbidden = None
    if minimum_length is not None:
        slots = torch.arange(input_ids.shape[1], device=input_ids.device)
        early = slots < rows.prompt_mask.sum(dim=1, keepdim=True) + minimum_length.minimum
        forbidden = wanted & early, minimum_length.ids
    logprobs, entropy, *extras = engine(
        input_ids, wanted, temperature, entropy_grad, forbidden, keeps_layer, teachings
    )

    def in_rows(numbers: Tensor) -> Tensor:
        return numbers.new_zeros(rows.response_mask.shape).masked_scatter(
            rows.response_mask, numbers
        )

    policy: Any = unwrap(engine)
    if keeps_layer:
        layer = policy.output_layer(extras.pop(0))
    else:
        layer = None
    return ResponseLogprobs(
        in_rows(logprobs), in_rows(entropy), [in_rows(each) for each in extras], layer
    )


def response_values(engine: Model, rows: Rollout) -> Tensor:
    """The critic's value before each response token, (B, R) fp32, 0 outside `response_mask`."""
    input_ids, lengths = full_sequences(rows)
    before = chosen_columns(rows, input_ids.shape[1], shift=1)
    values = engine(input_ids, lengths, wanted=before)  # (N,)
    return torch.zeros(rows.response_mask.shape, device=input_ids.device).masked_scatter(
        rows.response_mask, values
    )
