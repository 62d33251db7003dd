"""The records that the layers of the package exchange: prompts, rollouts and experience.

Shapes: B rows, P prompt length, R response length, T sequence length, K reward sources. Prompts are
left-padded and responses right-padded, so the real tokens of a row `[prompt | response]` are
contiguous. Masks are True on real tokens and are carried along, never derived from token ids:
padding may hold any id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, Literal, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from dschat_ppo.features import hooks

Rows = TypeVar(
    "Rows",
    "PromptBatch",
    "Rollout",
    "ForwardedRollout",
    "ScoredRollout",
    "RewardedRollout",
    "Experience",
)

Record = TypeVar("Record")

ColumnKind = Literal["row", "token", "prompt", "prompt_mask"]

# Columns of features, which records hold in `extra` -> "row": one entry per row; "token": (B, R);
# "prompt" and "prompt_mask": (B, P), left-padded.
FEATURE_COLUMNS: dict[str, ColumnKind] = {}
for columns_of_feature in hooks("columns.COLUMNS"):
    FEATURE_COLUMNS |= columns_of_feature


def _feature_columns(*kinds: ColumnKind) -> tuple[str, ...]:
    """The columns of features of these kinds."""
    return tuple(name for name, kind in FEATURE_COLUMNS.items() if kind in kinds)


# Columns of shape (B, P), and columns with one entry per row; all others are (B, R).
PROMPT_MASKS = ("prompt_mask", *_feature_columns("prompt_mask"))
LEFT_PADDED = ("prompt_ids", *_feature_columns("prompt"), *PROMPT_MASKS)
PER_ROW = (
    *_feature_columns("row"),
    "episode_lengths",
    "finish_reason",
    "left_group",
    "source_scores",
    "scores",
    "baselines",
    "groups",
    "data_sources",
    "row_indices",
    "penalised_scores",
)


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one rank."""

    prompt_ids: Tensor  # (B, P) int64, left-padded
    prompt_mask: Tensor  # (B, P) bool, True on prompt tokens
    # columns of features, by name (`FEATURE_COLUMNS`), which the responses get too
    extra: dict[str, Tensor] = field(default_factory=dict, kw_only=True)


class FinishReason(IntEnum):
    """Why a response ended."""

    EOS = 0  # EOS or the end-of-turn token
    STOP = 1  # a stop token or stop string
    LENGTH = 2  # truncated by the length limit


@dataclass(frozen=True)
class ForbiddenTokens:
    """Ids that cannot be drawn: `ends`, which end a response, before it has `minimum` tokens, and
    `banned` at any place. The policy is the distribution over the others, in sampling, scoring and
    training."""

    ends: tuple[int, ...]
    minimum: int
    banned: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """Prompts and sampled responses."""

    prompt_ids: Tensor  # (B, P) int64, left-padded
    prompt_mask: Tensor  # (B, P) bool, True on prompt tokens
    response_ids: Tensor  # (B, R) int64, right-padded
    # (B, R) bool, True on the tokens that the policy chose: up to and including the token that
    # ended the response, without observations
    response_mask: Tensor
    # (B, R) fp32, recorded while sampling: with the temperature, before top-k and top-p
    rollout_logprobs: Tensor
    finish_reason: Tensor  # (B,) int8, a `FinishReason`
    # (B, R) int16, for rows of several contexts: conversations that start anew. The number of
    # the context of each token, which ascends along the row; context 0 begins with the prompt, and
    # the prompts of the others are observed. Models read each one alone. None: rows have one
    contexts: Tensor | None = field(default=None, kw_only=True)
    # (B,) int64, tokens after the prompt, in the mask or not; None where all are in it: there are
    # no observations, and no row has left its group
    episode_lengths: Tensor | None = field(default=None, kw_only=True)
    # columns of features, by name (`FEATURE_COLUMNS`)
    extra: dict[str, Tensor] = field(default_factory=dict, kw_only=True)

    @property
    def response_lengths(self) -> Tensor:
        """(B,) int64, tokens after the prompt, of both kinds."""
        if self.episode_lengths is None:
            return self.response_mask.sum(dim=1)
        return self.episode_lengths

    def with_lengths(self, lengths: Tensor) -> Self:
        """The rows with these `response_lengths` (B,), which are stored if the mask says others."""
        if bool((lengths == self.response_mask.sum(dim=1)).all()):
            return replace(self, episode_lengths=None)
        return replace(self, episode_lengths=lengths)

    @property
    def real_mask(self) -> Tensor:
        """(B, R) bool, True on the tokens after the prompt, chosen or observed."""
        columns = torch.arange(self.response_ids.shape[1], device=self.response_ids.device)
        return columns < self.response_lengths.unsqueeze(1)

    @property
    def ended(self) -> Tensor:
        """(B,) bool, True for responses that ended by themselves, False for truncated ones."""
        return self.finish_reason != FinishReason.LENGTH


@dataclass(frozen=True)
class ForwardedRollout(Rollout):
    """A rollout with what forward passes of the models give. (B, R) tensors are aligned to the
    response tokens and 0 outside `response_mask`; columns of features may hold anything there. A
    field that the run does not need is None."""

    # (B, R) fp32, log-probs under the policy before its updates; None until an update computes
    # them, where the only update of a PPO step does (`config/on_policy.py`)
    old_logprobs: Tensor | None
    entropies: Tensor | None  # (B, R) fp32, entropy of that policy at each token, in nats
    ref_logprobs: Tensor | None  # (B, R) fp32, log-probs under the reference
    kl: Tensor | None  # (B, R) fp32, KL to the reference, for the penalty in the reward
    values: Tensor | None  # (B, R) fp32, the critic's value before each response token
    groups: Tensor  # (B,) int64, index of the row's prompt among all prompts of the run
    # (B,) int64, index of the prompt's data set
    data_sources: Tensor | None = field(default=None, kw_only=True)

    @property
    def policy_logprobs(self) -> Tensor:
        """(B, R) fp32, `old_logprobs`; until these are known, the log-probs recorded while
        sampling."""
        if self.old_logprobs is not None:
            return self.old_logprobs
        return torch.where(self.response_mask, self.rollout_logprobs, 0.0)


@dataclass(frozen=True)
class ScoredRollout(ForwardedRollout):
    """A rollout with what forward passes give, and with the scores of the reward sources."""

    # (B, K) fp32, score by each reward source; NaN where it does not score the row
    source_scores: Tensor
    scores: Tensor  # (B,) fp32, weighted sum over the reward sources
    # (B,) fp32, score of the greedy response to the same prompt, for remax
    baselines: Tensor | None
    # (B,) bool, True for rows without a score, which leave their group; None: there are none
    left_group: Tensor | None = field(default=None, kw_only=True)
    # (B, R) bool, `response_mask` before rows left; None if none did
    sampled_mask: Tensor | None = field(default=None, kw_only=True)

    @property
    def has_score(self) -> Tensor:
        """(B,) bool, True for rows that have a score."""
        if self.left_group is None:
            return torch.ones_like(self.groups, dtype=torch.bool)
        return ~self.left_group


@dataclass(frozen=True)
class RewardedRollout(ScoredRollout):
    """A scored rollout with token rewards: what the critic needs, if its update computes the
    values; 0 or False outside `response_mask`."""

    rewards: Tensor  # (B, R) fp32, reward of each token: KL penalty, and on the last one the score
    loss_mask: Tensor  # (B, R) bool, True on the response tokens in the policy loss
    # (B,) int64, index of the row among those of its PPO step
    row_indices: Tensor | None = field(default=None, kw_only=True)
    # (B,) fp32, `scores` after scaling and clipping, less the penalties of responses that are cut
    # or too long: what the last token's reward holds
    penalised_scores: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Experience(RewardedRollout):
    """A rewarded rollout with advantages and returns, ready for the updates; 0 or False outside
    `response_mask`."""

    advantages: Tensor  # (B, R) fp32
    returns: Tensor  # (B, R) fp32, targets of the critic
    loss_weights: Tensor  # (B, R) fp32, weights of the token losses of the policy
    # (B, R) bool, tokens that clip_cov and kl_cov act on; None for the other losses
    selected: Tensor | None


def row_lengths(rows: Rollout) -> Tensor:
    """Number of real tokens of each row, prompt and response together, (B,) int64."""
    return rows.prompt_mask.sum(dim=1) + rows.response_lengths


@dataclass(frozen=True)
class RowSequences:
    """The S sequences that models read of rows, row after row: one of each context. A sequence is a
    part of the row's `[prompt | response]`, which has P + R columns."""

    rows: Tensor  # (S,) int64, the row of each
    starts: Tensor  # (S,) int64, its first column
    lengths: Tensor  # (S,) int64, its tokens


def row_sequences(rows: Rollout) -> RowSequences:
    """The sequences of the rows; one of each row if they have no contexts."""
    lengths = row_lengths(rows)  # (B,)
    first_columns = rows.prompt_ids.shape[1] - rows.prompt_mask.sum(dim=1)  # (B,)
    if rows.contexts is None:
        row_indices = torch.arange(len(lengths), device=lengths.device)
        return RowSequences(row_indices, first_columns, lengths)
    earlier = pad(rows.contexts, (1, 0))[:, :-1]  # of the token before, 0 of the prompt
    begins = pad((rows.contexts > earlier) & rows.real_mask, (rows.prompt_ids.shape[1], 0))
    begins.scatter_(1, first_columns.unsqueeze(1), True)  # (B, P + R)
    row_indices, starts = begins.nonzero(as_tuple=True)  # (S,) each
    ends = (first_columns + lengths)[row_indices]  # of the row
    has_next = row_indices[1:] == row_indices[:-1]  # (S - 1,)
    ends[:-1] = torch.where(has_next, starts[1:], ends[:-1])
    return RowSequences(row_indices, starts, ends - starts)


def full_sequences(rows: Rollout) -> tuple[Tensor, Tensor]:
    """Right-padded sequences `[prompt | response]` that begin at column 0, so that a token's column
    is its position: `(input_ids (S, T) int64, lengths (S,) int64)`, T the longest. S is B, or with
    contexts the number of these (`row_sequences`). Ids after a sequence's length are arbitrary:
    with causal attention no real token sees them."""
    sequences = row_sequences(rows)
    joined = torch.cat([rows.prompt_ids, rows.response_ids], dim=1)  # (B, P + R)
    if rows.contexts is not None:
        joined = joined[sequences.rows]  # (S, P + R)
    columns = torch.arange(int(sequences.lengths.max()), device=joined.device)  # (T,)
    joined_columns = sequences.starts.unsqueeze(1) + columns  # (S, T)
    return joined.gather(1, joined_columns.clamp_max(joined.shape[1] - 1)), sequences.lengths


def response_slots(rows: Rollout) -> Tensor:
    """Column in `full_sequences` of each response token, (B, R) int64; in the padding the column of
    the row's last token. The logits at the column before predict the token. Rows have no
    contexts."""
    assert rows.contexts is None
    columns = torch.arange(rows.response_ids.shape[1], device=rows.response_ids.device)  # (R,)
    prompt_lengths = rows.prompt_mask.sum(dim=1, keepdim=True)  # (B, 1)
    return torch.minimum(prompt_lengths + columns, row_lengths(rows).unsqueeze(1) - 1)


def chosen_columns(rows: Rollout, width: int, shift: int = 0) -> Tensor:
    """(S, `width`) bool: the columns of `full_sequences` that hold tokens that the policy chose, or
    those `shift` before them. Row after row, True stands for the tokens of `response_mask` in their
    order, with contexts too."""
    sequences = row_sequences(rows)
    chosen = pad(rows.response_mask, (rows.prompt_ids.shape[1], 0))  # (B, P + R)
    if rows.contexts is not None:
        chosen = chosen[sequences.rows]  # (S, P + R)
    columns = torch.arange(width, device=chosen.device) + shift
    joined_columns = sequences.starts.unsqueeze(1) + columns  # (S, width)
    is_real = columns < sequences.lengths.unsqueeze(1)
    return chosen.gather(1, joined_columns.clamp_max(chosen.shape[1] - 1)) & is_real


def last_contexts(rows: Rollout) -> Rollout:
    """The rows with their last contexts alone: what these hold before the first token that the
    policy chose is their prompt, and what follows is the response. The same object if rows have no
    contexts."""
    if rows.contexts is None:
        return rows
    prompt_width = rows.prompt_ids.shape[1]
    sequences = row_sequences(rows)
    last = sequences.rows.bincount().cumsum(0) - 1  # (B,) of S
    starts = sequences.starts[last]
    ends = starts + sequences.lengths[last]
    joined = torch.cat([rows.prompt_ids, rows.response_ids], dim=1)  # (B, P + R)
    columns = torch.arange(joined.shape[1], device=joined.device)  # (P + R,)
    is_chosen = pad(rows.response_mask, (prompt_width, 0)) & (columns >= starts.unsqueeze(1))
    splits = torch.where(is_chosen, columns, ends.unsqueeze(1)).amin(dim=1)  # (B,)
    splits = torch.where(starts < prompt_width, prompt_width, splits)  # context 0

    longest = torch.stack([(splits - starts).amax(), (ends - splits).amax().clamp_min(1)])
    prompt_length, response_length = longest.tolist()
    prompt_columns = splits.unsqueeze(1) - prompt_length + columns[:prompt_length]
    response_columns = splits.unsqueeze(1) + columns[:response_length]
    is_real = response_columns < ends.unsqueeze(1)
    response_columns = response_columns.clamp_max(joined.shape[1] - 1)
    changed = {
        "prompt_ids": joined.gather(1, prompt_columns.clamp_min(0)),
        "prompt_mask": prompt_columns >= starts.unsqueeze(1),
        "episode_lengths": ends - splits,
    }
    for name, column in tensors_of(rows).items():
        if name not in (*PER_ROW, *LEFT_PADDED):
            tokens = pad(column, (prompt_width, 0)).gather(1, response_columns)
            changed[name] = tokens.masked_fill(~is_real, 0)
    return replace(with_columns(rows, changed), contexts=None)


def tensors_of(rows: Any) -> dict[str, Tensor]:
    """The columns of a record as name -> tensor, with those of features, without those that are
    None."""
    columns: dict[str, Any] = {}
    for f in fields(rows):
        if f.name == "extra":
            columns |= rows.extra
        else:
            columns[f.name] = getattr(rows, f.name)
    return {name: column for name, column in columns.items() if column is not None}


def record_of(kind: type[Record], tensors: dict[str, Tensor]) -> Record:
    """The inverse of `tensors_of`; missing fields are None."""
    columns: dict[str, Any] = {f.name: tensors.get(f.name) for f in fields(kind)}  # type: ignore[arg-type]
    if "extra" in columns:
        columns["extra"] = {name: tensors[name] for name in FEATURE_COLUMNS if name in tensors}
    return kind(**columns)


def with_columns(rows: Record, tensors: Mapping[str, Tensor]) -> Record:
    """The record with these columns in place of its own; those of features by their names."""
    of_features = {name: tensors[name] for name in tensors if name in FEATURE_COLUMNS}
    changes: dict[str, Any] = {
        name: column for name, column in tensors.items() if name not in FEATURE_COLUMNS
    }
    if of_features:
        changes["extra"] = {**vars(rows)["extra"], **of_features}
    return replace(rows, **changes)  # type: ignore[type-var]


def select_rows(rows: Rows, index: Tensor) -> Rows:
    """The rows at `index` (n,) int64, without columns that are padding in all of them; at least one
    response column."""
    selected = {name: column[index] for name, column in tensors_of(rows).items()}
    prompt_lengths = [selected[name].sum(dim=1).amax() for name in PROMPT_MASKS if name in selected]
    longest = [torch.stack(prompt_lengths).amax()]
    if isinstance(rows, Rollout):
        longest.append(rows.response_lengths[index].amax())
    widths = torch.stack(longest).tolist()  # one wait for the device
    prompt_width = widths[0]
    response_width = max(1, widths[-1])  # of a `Rollout`
    for name, column in selected.items():
        if name in LEFT_PADDED:
            # (n, P) -> (n, prompt_width); `[:, -prompt_width:]` would keep every column for 0
            selected[name] = column[:, column.shape[1] - prompt_width :]
        elif name not in PER_ROW:
            selected[name] = column[:, :response_width]  # (n, R) -> (n, response_width)
    return with_columns(rows, selected)


def pad_rows(rows: Rows, prompt_length: int, response_length: int) -> Rows:
    """The same rows padded to the given lengths: prompts at the left, responses at the right."""

    def padded(name: str, value: Tensor) -> Tensor:
        if name in PER_ROW:
            return value
        if name in LEFT_PADDED:
            return pad(value, (prompt_length - value.shape[1], 0))
        return pad(value, (0, response_length - value.shape[1]))

    return with_columns(
        rows, {name: padded(name, value) for name, value in tensors_of(rows).items()}
    )


def repeat_rows(rows: Rows, times: int) -> Rows:
    """(B, ...) -> (B * times, ...): each row `times` times in a row."""
    columns = tensors_of(rows)
    return with_columns(
        rows, {name: column.repeat_interleave(times, dim=0) for name, column in columns.items()}
    )


def concat_rows(batches: list[Rows]) -> Rows:
    """The rows of all batches in order, padded to common lengths. A column must be in all
    batches or in none."""
    prompt_length = max(batch.prompt_ids.shape[1] for batch in batches)
    response_length = 0
    for batch in batches:
        if isinstance(batch, Rollout):
            response_length = max(response_length, batch.response_ids.shape[1])
    padded = [tensors_of(pad_rows(batch, prompt_length, response_length)) for batch in batches]
    joined = {}
    for name in padded[0]:
        joined[name] = torch.cat([columns[name] for columns in padded])
    return with_columns(batches[0], joined)


def to_device(record: Record, device: torch.device | str) -> Record:
    """The record (a dataclass of tensors) on `device`."""
    return with_columns(
        record, {name: value.to(device) for name, value in tensors_of(record).items()}
    )


class Model(Protocol):
    """A `PolicyModel` or a `ScalarModel`, or the DeepSpeed engine around one: what scoring and
    evaluation need."""

    @property
    def device(self) -> torch.device: ...  # of the weights and of the inputs
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...


class Engine(Model, Protocol):
    """The part of `deepspeed.DeepSpeedEngine` that the project uses."""

    module: Any  # the `PolicyModel` or `ScalarModel` inside
    # DeepSpeed's ZeRO optimizer; torch's own at stage 0 in fp32; None in an engine that only
    # evaluates
    optimizer: Any
    basic_optimizer: Any  # the one inside `optimizer`
    lr_scheduler: Any
    param_names: Any  # parameter -> name, of those that train
    skipped_steps: int  # optimizer steps without an update
    allreduce_and_copy: Any  # averages a list of gradients over ranks, in place, below ZeRO-2

    # whether the next backward pass is the last one of the optimizer step
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...
    # averages gradients over ranks; `scale_wrt_gas` divides by DeepSpeed's accumulation steps
    def backward(self, loss: Tensor, *, scale_wrt_gas: bool = True) -> Any: ...
    # clips the gradients, updates the weights and advances the schedule
    def step(self) -> None: ...
    def was_step_applied(self) -> bool: ...  # whether the last `step` changed the weights
    def zero_grad(self) -> None: ...
    def fp16_enabled(self) -> bool: ...  # whether it trains in fp16 with a loss scale
    def get_lr(self) -> list[float]: ...  # of each parameter group
    # of the last step's gradients over all ranks, before clipping
    def get_global_grad_norm(self) -> Any: ...
    def zero_optimization(self) -> bool: ...  # whether the ZeRO stage is 1 or above
    def zero_optimization_partition_weights(self) -> bool: ...  # whether it is 3
    # of the weights, and of accumulated gradients
    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]: ...
