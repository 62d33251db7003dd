"""The models in engines: `PolicyModel` (actor, reference, SFT) gives log-probs and entropies of the
target tokens only, `ScalarModel` (reward model, critic) one scalar for every position. Their passes
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

from dschat_ppo.algorithms.divergence import Divergence, fused_divergence
from dschat_ppo.algorithms.fused_logprobs import (
    Forbidden,
    Head,
    OutputLayer,
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
    row_arguments,
    unwrap,
)
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.given_embeddings import GivenEmbeddings, GivenSource
from dschat_ppo.models.head_kernels import head_kernels_for
from dschat_ppo.models.packing import CHECKPOINTING, padded_rows, token_states
from dschat_ppo.models.pass_observers import observer_arguments, show_pass
from dschat_ppo.models.pass_rows import PassRows, lengths_read
from dschat_ppo.types import (
    ForbiddenTokens,
    Model,
    Rollout,
    chosen_columns,
    full_sequences,
    row_sequences,
)


@dataclass(frozen=True)
class Teaching:
    """A teacher's distributions at some of a student's N tokens, and how they are compared with the
    student's."""

    teacher: OutputLayer
    divergence: Divergence
    tokens: Tensor | None = None  # int64, the indices of these tokens; None: all


class WrappedModel(nn.Module):
    """A transformers model, its only child, and the layout of the rows that it runs."""

    layout: Layout
    # of what stands in place of the embeddings of some ids in rows of data; None: of none
    given_source: GivenSource | None = None

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
    selects the hidden states that predict targets, and goes through the vocabulary in blocks.
    Otherwise, for heads that are more than a matrix product with a known scale and soft cap, it
    computes the logits from the first such position on."""

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
        targets: Tensor | PassRows,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        forbidden: Forbidden | None = None,
        states: bool = False,
        teachings: Sequence[Teaching] = (),
        given: GivenEmbeddings | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probs of the N target tokens, and entropies of the distributions that they are drawn
        from, (N) fp32, row after row; then, where they are asked for, the N hidden states that the
        head takes, and the divergence from each teacher, (N) fp32.

        Args:
            input_ids: (B, T) int64, right-padded.
            targets: (B, T) bool, True on tokens whose log-prob is computed; the first column is
                ignored. Or these rows as they are laid out already, if the model is fused and
                runs its rows itself; the tokens before the targets are those that are read.
            temperature: divides the logits.
            entropy_grad: keep the gradient of the entropies.
            forbidden: tokens that cannot be drawn, with positions (B, T): the targets that were
                drawn without them.
            states: give the hidden states (N, H), if `compares_distributions`.
            teachings: give the divergence from each of these at its tokens, and 0 elsewhere, if
                `compares_distributions`.
            given: what takes the place of the embeddings of some ids; with `PassRows` it is theirs.
        """
        with activations_on_host(self.layout.offload_activations):
            if isinstance(targets, PassRows):
                return self._fused_scores(
                    targets, temperature, entropy_grad, forbidden, states, teachings
                )
            if self.layout.runner is not None:
                return self.layout.runner.token_scores(
                    self, input_ids, targets, temperature, entropy_grad, forbidden
                )
            if not self.layout.fused:
                return self._plain_scores(
                    input_ids, targets, temperature, entropy_grad, forbidden, given
                )
            rows = PassRows.of_targets(input_ids, targets, self.layout, given)
            return self._fused_scores(rows, temperature, entropy_grad, forbidden, states, teachings)

    @property
    def compares_distributions(self) -> bool:
        """Whether divergences between whole distributions can be computed: the head is a matrix
        product, and this model runs its rows itself."""
        return self.layout.fused and self.layout.runner is None

    def output_layer(self, hidden: Tensor) -> OutputLayer:
        """The head, and hidden states (N, H) that it takes."""
        head = self.lm.get_output_embeddings()

        def gathered() -> AbstractContextManager[Any]:
            """In the block, ZeRO-3 has the weights whole on each rank."""
            # a student over the same base may hold them whole already
            missing = [
                parameter
                for parameter in (head.weight, head.bias)
                if parameter is not None
                and is_partitioned(parameter)
                and parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
            ]
            if missing:
                return deepspeed.zero.GatheredParameters(missing)
            return nullcontext()

        return OutputLayer(
            hidden.to(head.weight.dtype), head.weight, head.bias, self._head, gathered
        )

    def _fused_scores(
        self,
        rows: PassRows,
        temperature: float,
        entropy_grad: bool,
        forbidden: Forbidden | None,
        states: bool,
        teachings: Sequence[Teaching],
    ) -> tuple[Tensor, ...]:
        """`forward` through the vocabulary in blocks."""
        target_slots = rows.slots + 1
        tokens = rows.input_ids.flatten()[target_slots]
        if forbidden is not None:
            forbidden = replace(forbidden, positions=forbidden.positions.flatten()[target_slots])
        all_states, offsets = token_states(self.backbone, self.layout, rows)
        hidden = all_states[offsets]  # (N, H)
        logprobs, entropy, *divergences = self.head_scores(
            hidden, tokens, temperature, entropy_grad, forbidden, teachings
        )
        if states:
            return logprobs, entropy, hidden, *divergences
        return logprobs, entropy, *divergences

    def _plain_scores(
        self,
        input_ids: Tensor,
        target_mask: Tensor,
        temperature: float,
        entropy_grad: bool,
        forbidden: Forbidden | None,
        given: GivenEmbeddings | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (N,) of the targets from whole logits of padded rows."""
        predicts = target_mask[:, 1:]  # (B, T - 1): tokens whose next one is a target
        tokens = input_ids[:, 1:][predicts]
        first = 0
        if predicts.numel():
            first = int(predicts.any(dim=0).int().argmax())
        count = input_ids.shape[1] - first  # columns whose logits are computed
        with padded_rows(self.lm, self.layout.attention).running():
            output = self.lm(
                input_ids=input_ids,
                attention_mask=None,
                use_cache=False,
                **row_arguments(self.lm, input_ids, given),
                **last_logits_argument(self.lm, count),
                **observer_arguments(),
            )
        show_pass(output, real_slots(input_ids, lengths_read(target_mask)))
        logits = output.logits[:, -count:-1][predicts[:, first:]]  # (N, V)
        if forbidden is not None:
            logits = logits.float()
            of_targets = forbidden.positions[:, 1:][predicts]
            forbid_(logits, replace(forbidden, positions=of_targets))
        return scores_of_logits(logits, tokens, temperature, entropy_grad)

    def head_scores(
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
            """The outputs of `head_scores`, while the weight of the head is whole."""
            layer = OutputLayer(hidden, head.weight, head.bias, self._head)
            logprobs, entropy = fused_token_scores(
                layer,
                tokens,
                temperature,
                entropy_grad,
                forbidden=forbidden,
                kernels=head_kernels_for(hidden),
            )
            divergences = [
                _divergence(layer, temperature, forbidden, teaching) for teaching in teachings
            ]
            return logprobs, entropy, *divergences

        # Call the head as a module, so that ZeRO-3 gathers its weight, with another function
        # inside.
        with forward_replaced(head, scores):
            return head(states.to(head.weight.dtype))  # Mamba's states are in fp32


def _divergence(
    layer: OutputLayer, temperature: float, forbidden: Forbidden | None, teaching: Teaching
) -> Tensor:
    """The divergence from a teacher (N,) fp32 at the N hidden states of `layer`, whose weight is
    whole; 0 at tokens that the teacher does not teach."""
    if teaching.tokens is None:
        return fused_divergence(
            layer, teaching.teacher, teaching.divergence, temperature, forbidden=forbidden
        )
    forbidden_there = None
    if forbidden is not None:
        forbidden_there = forbidden.at(teaching.tokens)
    divergence = fused_divergence(
        replace(layer, hidden=layer.hidden[teaching.tokens]),
        teaching.teacher,
        teaching.divergence,
        temperature,
        forbidden=forbidden_there,
    )
    zeros = divergence.new_zeros(len(layer.hidden))
    return zeros.index_add(0, teaching.tokens, divergence)


def scores_of_logits(
    logits: Tensor, tokens: Tensor, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs of `tokens` (N,), and entropies (N,), from logits (N, V)."""
    entropy_logits = logits
    if not entropy_grad:
        entropy_logits = logits.detach()
    entropy = token_entropy(entropy_logits, temperature)
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
        read_mask: Tensor | PassRows | None = None,
        given: GivenEmbeddings | None = None,
    ) -> Tensor:
        """A value for each token, as the causal model sees the row up to it.

        Args:
            input_ids: (B, T) int64, right-padded.
            lengths: (B,) int64.
            last_only: compute the values of the last tokens alone.
            read_mask: (B, T) bool, True on the N real tokens whose values are computed; None: all.
                Or these rows as they are laid out already, if the model runs its rows itself.
            given: what takes the place of the embeddings of some ids; with `PassRows` it is theirs.

        Returns:
            (B, T) fp32, meaningless after a row's end; (B,) with `last_only`; (N,) with
            `read_mask`, row after row. Packed rows then need no memory for padding.
        """
        with activations_on_host(self.layout.offload_activations):
            if isinstance(read_mask, PassRows):
                rows = read_mask
            else:
                slots = torch.arange(input_ids.numel(), device=input_ids.device)
                slots = slots.view(input_ids.shape)
                if read_mask is not None:
                    slots = slots[read_mask]
                elif last_only:
                    slots = slots.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
                if self.layout.runner is not None:
                    values = self.layout.runner.token_values(self, input_ids, lengths)
                    return values.flatten()[slots]
                rows = PassRows.of(input_ids, lengths, slots, self.layout, given)
            states, offsets = token_states(self.backbone, self.layout, rows)
            if offsets.dim() == 1:
                return self.head_values(states[offsets])
            return self.head_values(states)[offsets]

    def head_values(self, states: Tensor) -> Tensor:
        """(..., H) -> (...) fp32."""
        head = self.classifier.score
        return head(states.to(head.weight.dtype)).squeeze(-1).float()  # Mamba's states are in fp32


def vocabulary_size(model: Any) -> int:
    """Width of the logits, V, which may be more than the number of the tokenizer's tokens."""
    return int(model.get_output_embeddings().out_features)


def given_for(engine: Model, rows: Rollout) -> GivenEmbeddings | None:
    """What a model, or the one in an engine, gets for the `full_sequences` of rows in place of the
    embeddings of some ids; None: nothing."""
    source: GivenSource | None = getattr(unwrap(engine), "given_source", None)
    if source is None:
        return None
    return source.for_rollout(rows)


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
    forbidden_tokens: ForbiddenTokens | None = None,
    keeps_layer: bool = False,
    teachings: Sequence[Teaching] = (),
    pass_rows: PassRows | None = None,
) -> ResponseLogprobs:
    """Log-probs of the response tokens under a `PolicyModel`, or the one in an engine.

    Args:
        engine: the model.
        rows: prompts and responses.
        temperature: of sampling.
        entropy_grad: keep the gradient of the entropies.
        forbidden_tokens: tokens that could not be drawn, at the beginning of a response or at all.
        keeps_layer: give the `layer` too.
        teachings: give the `divergences` from these teachers on the same tokens.
        pass_rows: these rows as they are laid out for this model (`StepPasses`).

    Returns:
        Log-probs, entropies of the distributions that the tokens are drawn from, and what was asked
        for.
    """
    given_embeddings = None
    if pass_rows is not None:
        input_ids = pass_rows.input_ids
    else:
        input_ids, _ = full_sequences(rows)
        given_embeddings = given_for(engine, rows)
    targets = pass_rows or chosen_columns(rows, input_ids.shape[1])
    forbidden = None
    if forbidden_tokens is not None:
        is_early = _is_early(rows, forbidden_tokens, input_ids.shape[1])
        forbidden = Forbidden(is_early, forbidden_tokens.ends, forbidden_tokens.banned)
    logprobs, entropy, *extras = engine(
        input_ids,
        targets,
        temperature,
        entropy_grad,
        forbidden,
        keeps_layer,
        teachings,
        given_embeddings,
    )

    def in_rows(values: Tensor) -> Tensor:
        """(N,) -> (B, R), 0 outside `response_mask`."""
        zeros = values.new_zeros(rows.response_mask.shape)
        return zeros.masked_scatter(rows.response_mask, values)

    policy: Any = unwrap(engine)
    layer = None
    if keeps_layer:
        layer = policy.output_layer(extras.pop(0))
    divergences = [in_rows(divergence) for divergence in extras]
    return ResponseLogprobs(in_rows(logprobs), in_rows(entropy), divergences, layer)


def _is_early(rows: Rollout, forbidden_tokens: ForbiddenTokens, width: int) -> Tensor:
    """(B, `width`) bool: the columns of `full_sequences` before those of a response that may end
    it. `ValueError` for rows with contexts, each of which could not end early."""
    if forbidden_tokens.minimum == 0:
        sequence_count = len(row_sequences(rows).rows)
        return rows.prompt_mask.new_zeros(sequence_count, width)
    if rows.contexts is not None:
        raise ValueError("a minimum length of responses does not fit rows with contexts")
    columns = torch.arange(width, device=rows.prompt_mask.device)
    return columns < rows.prompt_mask.sum(dim=1, keepdim=True) + forbidden_tokens.minimum


def response_values(engine: Model, rows: Rollout, pass_rows: PassRows | None = None) -> Tensor:
    """The critic's value before each response token, (B, R) fp32, 0 outside `response_mask`.
    `pass_rows`: these rows as they are laid out for this model (`StepPasses`)."""
    if pass_rows is None:
        input_ids, lengths = full_sequences(rows)
        before_responses = chosen_columns(rows, input_ids.shape[1], shift=1)
        given_embeddings = given_for(engine, rows)
        values = engine(
            input_ids, lengths, read_mask=before_responses, given=given_embeddings
        )  # (N,)
    else:
        values = engine(pass_rows.input_ids, pass_rows.lengths, read_mask=pass_rows)
    zeros = torch.zeros(rows.response_mask.shape, device=rows.response_mask.device)
    return zeros.masked_scatter(rows.response_mask, values)
