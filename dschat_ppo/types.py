"""The records that travel between layers. Masks are True on real tokens and are carried, never recovered from ids.

Shapes: B rows, P prompt length, R response length. Prompts are left-padded, responses right-padded, so that a row
`[prompt | response]` has its real tokens in one run. Padding may hold any id.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Rows = TypeVar("Rows", "PromptBatch", "Rollout", "ScoredRollout", "Experience")

Record = TypeVar("Record")

# Of the fields of a record these are (B, P), these have one entry a row, and all others are (B, R), right-padded.
LEFT_PADDED = ("prompt_ids", "prompt_mask")
PER_ROW = ("finish_reason", "source_scores", "scores", "baselines", "groups")


@dataclass(frozen=True)
class PromptBatch:
    """Prompts on this rank: `prompt_ids` (B, P) int64, `prompt_mask` (B, P) bool."""

    prompt_ids: Tensor
    prompt_mask: Tensor


class FinishReason(IntEnum):
    """Why an answer ended: by EOS or end of turn, by a stop token or stop string, or cut by the length limit."""

    EOS = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True)
class Rollout:
    """Prompts and sampled responses.

    `response_ids` (B, R) int64; `response_mask` (B, R) bool, True up to and including the token that ended the answer;
    `rollout_logprobs` (B, R) fp32, log-probs seen while sampling, under the temperature, before top-k and top-p;
    `finish_reason` (B,) int8, a `FinishReason`.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    finish_reason: Tensor

    @property
    def ended(self) -> Tensor:
        """(B,) bool, True where the answer ended by itself, False where the length limit cut it."""
        return self.finish_reason != FinishReason.LENGTH


@dataclass(frozen=True)
class ScoredRollout(Rollout):
    """A rollout with what the models say of it. (B, R) tensors are fp32, aligned to response tokens, 0 outside
    `response_mask`; None stands for what the run does not ask for.

    `old_logprobs` (B, R) of the policy that is about to be trained; `entropies` (B, R) of its distributions;
    `ref_logprobs` (B, R) of the reference; `kl` (B, R), the estimate of KL to the reference that the reward is
    penalised by; `values` (B, R); `source_scores` (B, K) fp32 of each source of reward; `scores` (B,) fp32, their
    mixture; `baselines` (B,) fp32, the score of the greedy answer to the same prompt; `groups` (B,) int64, the number
    of the row's prompt in the run.
    """

    old_logprobs: Tensor
    entropies: Tensor | None
    ref_logprobs: Tensor | None
    kl: Tensor | None
    values: Tensor | None
    source_scores: Tensor
    scores: Tensor
    baselines: Tensor | None
    groups: Tensor


@dataclass(frozen=True)
class Experience(ScoredRollout):
    """Scored answers ready for the updates. All (B, R) fp32 and 0 outside `response_mask` unless said otherwise.

    `rewards` per token; `advantages`; `returns`, the critic's targets; `loss_mask` (B, R) bool, True on the response
    tokens that the policy's loss counts; `loss_weights`, factors of their losses; `selected` (B, R) bool, the tokens
    that `clip_cov` and `kl_cov` act on, or None.
    """

    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor
    loss_weights: Tensor
    selected: Tensor | None


def row_lengths(rows: Rollout) -> Tensor:
    """Real tokens of each row, prompt and response, (B,) int64."""
    return rows.prompt_mask.sum(dim=1) + rows.response_mask.sum(dim=1)


def full_sequences(rows: Rollout) -> tuple[Tensor, Tensor]:
    """Prompt and response of each row as one run from slot 0 on, right-padded, so that a token's slot is its position.

    Returns:
        `(input_ids (B, T) int64, lengths (B,) int64)`, T the longest of the rows. What stands after a row's length is
        of no meaning: causal attention lets no real token see it.
    """
    prompt_lengths, lengths = rows.prompt_mask.sum(dim=1), row_lengths(rows)
    joined = torch.cat([rows.prompt_ids, rows.response_ids], dim=1)
    first = rows.prompt_ids.shape[1] - prompt_lengths
    slots = torch.arange(int(lengths.max()), device=joined.device)
    return joined.gather(1, (first.unsqueeze(1) + slots).clamp_max(joined.shape[1] - 1)), lengths


def response_slots(rows: Rollout) -> Tensor:
    """Slot in `full_sequences` of each response token, (B, R) int64; the last real one of the row where there is none.

    The slot before it is where that token is predicted.
    """
    columns = torch.arange(rows.response_ids.shape[1], device=rows.response_ids.device)
    prompt_lengths = rows.prompt_mask.sum(dim=1, keepdim=True)
    return torch.minimum(prompt_lengths + columns, row_lengths(rows).unsqueeze(1) - 1)


def position_ids_of(attention_mask: Tensor) -> Tensor:
    """Positions counted from the mask, (B, T) int64: the first real token of each row is at 0."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp_min(0)


def tensors_of(rows: Any) -> dict[str, Tensor]:
    """Field name -> tensor of a record, without the fields that are None."""
    values = {f.name: getattr(rows, f.name) for f in fields(rows)}
    return {name: value for name, value in values.items() if value is not None}


def record_of(kind: type[Record], tensors: dict[str, Tensor]) -> Record:
    """The record that `tensors_of` took apart: what it does not name is None."""
    return kind(**{f.name: tensors.get(f.name) for f in fields(kind)})  # type: ignore[arg-type]


def select_rows(rows: Rows, index: Tensor) -> Rows:
    """The rows at `index` (n,) int64, cut to the longest prompt and response among them."""
    chosen = {name: value[index] for name, value in tensors_of(rows).items()}
    prompt_length = int(chosen["prompt_mask"].sum(dim=1).max())
    chosen |= {name: _last_columns(chosen[name], prompt_length) for name in LEFT_PADDED}
    if "response_mask" in chosen:
        response_length = max(1, int(chosen["response_mask"].sum(dim=1).max()))
        responses = [name for name in chosen if name not in (*LEFT_PADDED, *PER_ROW)]
        chosen |= {name: chosen[name][:, :response_length] for name in responses}
    return replace(rows, **chosen)


def _last_columns(value: Tensor, count: int) -> Tensor:
    return value[:, value.shape[1] - count :]


def pad_rows(rows: Rows, prompt_length: int, response_length: int) -> Rows:
    """The same rows with padding columns up to the given lengths: prompts grow leftwards, responses rightwards."""

    def padded(name: str, value: Tensor) -> Tensor:
        if name in PER_ROW:
            return value
        if name in LEFT_PADDED:
            return torch.nn.functional.pad(value, (prompt_length - value.shape[1], 0))
        return torch.nn.functional.pad(value, (0, response_length - value.shape[1]))

    return replace(rows, **{name: padded(name, value) for name, value in tensors_of(rows).items()})


def repeat_rows(rows: Rows, times: int) -> Rows:
    """Every row `times` times, one after another."""
    return replace(rows, **{name: v.repeat_interleave(times, dim=0) for name, v in tensors_of(rows).items()})


def concat_rows(parts: list[Rows]) -> Rows:
    """Rows of all parts, in order, padded to common lengths. What is None in one part is None in all."""
    prompt_length = max(part.prompt_ids.shape[1] for part in parts)
    response_length = max(part.response_ids.shape[1] if isinstance(part, Rollout) else 0 for part in parts)
    padded = [tensors_of(pad_rows(part, prompt_length, response_length)) for part in parts]
    return replace(parts[0], **{name: torch.cat([part[name] for part in padded]) for name in padded[0]})


def to_device(record: Record, device: torch.device | str) -> Record:
    """The same record (a dataclass of tensors) on `device`."""
    moved: dict[str, Any] = {name: value.to(device) for name, value in tensors_of(record).items()}
    return replace(record, **moved)  # type: ignore[type-var]


class Model(Protocol):
    """A `PolicyModel` or a `ScalarModel`, or the DeepSpeed engine around one: what scoring and evaluation need."""

    @property
    def device(self) -> torch.device:
        """Device of the weights and of the inputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward pass."""

    def train(self, mode: bool = True) -> Any:
        """Training mode."""

    def eval(self) -> Any:
        """Evaluation mode: no dropout."""


class Engine(Model, Protocol):
    """The part of `deepspeed.DeepSpeedEngine` that the project uses."""

    module: Any  # the `PolicyModel` or `ScalarModel` inside
    optimizer: Any  # DeepSpeed's ZeRO optimizer; torch's own at stage 0 in fp32; None in an engine that only evaluates
    basic_optimizer: Any  # the one inside `optimizer`
    lr_scheduler: Any
    param_names: Any  # parameter -> name, of those that train
    skipped_steps: int  # optimizer steps without an update

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Whether the next backward pass is the last one of the optimizer step."""

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool = True) -> Any:
        """Backward pass; averages gradients over ranks. `scale_wrt_gas` divides by DeepSpeed's accumulation steps."""

    def step(self) -> None:
        """Clip the gradients, update the weights and advance the schedule."""

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def fp16_enabled(self) -> bool:
        """Whether the engine trains in fp16 with a loss scale."""

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""

    def get_global_grad_norm(self) -> Any:
        """Norm of the last step's gradients over all ranks, before clipping."""

    def zero_optimization(self) -> bool:
        """Whether the ZeRO stage is 1 or above."""

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the ZeRO stage is 3."""

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtype of the weights, and of the accumulated gradients."""

    def save_checkpoint(self, save_dir: str, *, tag: str, save_latest: bool, client_state: dict[str, Any]) -> Any:
        """Write the states below `save_dir/tag`. Collective."""

    def load_checkpoint(self, load_dir: str, *, tag: str) -> tuple[str | None, Any]:
        """Read the states. Collective. Returns the file that was read, or None, and the client state."""
