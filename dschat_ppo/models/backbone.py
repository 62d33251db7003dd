"""How a model runs the rows that it gets: `Layout`, arguments of a forward pass, and that of the
backbone. Errors of probes, which try a faster way: whatever the model raises there, it runs the
slower way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dschat_ppo.common.dist import all_reduce
from dschat_ppo.common.exit_codes import ran_out_of_memory
from dschat_ppo.errors import (
    Attempt,
    NonFiniteError,
    RolloutCancelled,
    StopRequested,
    UserError,
    in_one_line,
)
from dschat_ppo.models.architectures import first_position
from dschat_ppo.models.given_embeddings import GivenEmbeddings, given_arguments
from dschat_ppo.models.pass_observers import observer_arguments, show_pass
from dschat_ppo.types import Model

# By type of device: rows are padded to a multiple of so many columns. On a GPU, few shapes steady
# the memory allocator, and kernels have less to choose and plan; on a CPU padding is computed for
# nothing.
COLUMNS = {"cuda": 64}
_signature = lru_cache(maxsize=64)(inspect.signature)
# kinds of layers that carry a state from token to token; the last two have attention too
WITH_STATES = ("conv", "linear_attention", "hybrid", "hybrid_sliding")


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward takes an argument of this name."""
    return argument in _signature(type(model).forward).parameters


def unwrap(engine: Model) -> nn.Module:
    """The model inside a DeepSpeed engine, or the model itself."""
    module: Any = getattr(engine, "module", engine)
    return module


@contextmanager
def forward_replaced(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Make a call of `module` run its hooks around `function`."""
    earlier = module.__dict__.get("forward")  # on the instance, set by an earlier replacement
    module.forward = function
    try:
        yield
    finally:
        del module.forward
        if earlier is not None:
            module.forward = earlier


def attention_is_replaceable(model: Any) -> bool:
    """Whether transformers lets the model's attention be replaced, or it has none: by its own word
    or by its source."""
    return bool(model._supports_attention_backend or model._can_set_attn_implementation())


def hidden_window(config: Any, received: dict[int, int | None]) -> bool:
    """Whether only the model's mask limits how far back a token sees; attention without a mask
    would see too much. `received`: the `sliding_window` that each layer passed to its attention."""
    text = config.get_text_config()
    if getattr(text, "attention_chunk_size", None) is not None:
        return True
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        known = set(kinds) <= {"full_attention", "sliding_attention", "moe", "mlp", *WITH_STATES}
        passed = all(
            ("sliding" in kinds[layer]) == (window is not None)
            for layer, window in received.items()
        )
        return not (known and passed)
    has_window = getattr(text, "sliding_window", None) is not None
    return has_window and all(window is None for window in received.values())


def has_states(config: Any) -> bool:
    """Whether layers of the model carry a state from token to token."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    return any(kind in WITH_STATES for kind in layer_types)


def position_arguments(model: Any, positions: Tensor) -> dict[str, Tensor]:
    """`position_ids`, int64 from 0 in each row, for models that take them; ALiBi models compute
    them themselves."""
    if not accepts(model, "position_ids"):
        return {}
    return {"position_ids": positions + first_position(model.config)}


def slot_arguments(model: nn.Module, input_ids: Tensor) -> dict[str, Tensor]:
    """`position_ids` (1, T) equal to the slots, for right-padded rows and models that take them."""
    slots = torch.arange(input_ids.shape[1], device=input_ids.device)
    return position_arguments(model, slots.unsqueeze(0))


def row_arguments(
    model: nn.Module, input_ids: Tensor, given: GivenEmbeddings | None
) -> dict[str, Any]:
    """`slot_arguments` of right-padded rows (B, T), with what is given for some of their ids."""
    slots = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape)
    return given_arguments(given, slots, model, slot_arguments(model, input_ids))


def last_logits_argument(model: nn.Module, count: int) -> dict[str, int]:
    """`logits_to_keep` for the last `count` positions, for models that take it."""
    if accepts(model, "logits_to_keep"):
        return {"logits_to_keep": count}
    return {}


def backbone_states(
    backbone: Any, input_ids: Tensor, lengths: Tensor, given: GivenEmbeddings | None = None
) -> Tensor:
    """Last hidden states of a causal backbone, (B, T, H), in its dtype, for ids (B, T) int64 from
    slot 0 on. There is no attention mask: rows are right-padded, so under causal attention no real
    token sees padding, and kernels without a mask are faster. States after the `lengths` (B,) int64
    of the rows are meaningless. `given`: in place of the embeddings of some ids."""
    # padded to a multiple of `COLUMNS`, within the positions that the config names; if it names
    # none, as they are
    width = input_ids.shape[1]
    multiple = COLUMNS.get(input_ids.device.type, 1)
    rounded_width = -(-width // multiple) * multiple
    positions = getattr(backbone.config.get_text_config(), "max_position_embeddings", None) or 0
    most_columns = positions - first_position(backbone.config)
    padded = input_ids
    padding = min(rounded_width, most_columns) - width
    if given is not None:
        padding = 0  # its columns are those of the rows
    if padding > 0:
        padded = torch.nn.functional.pad(input_ids, (0, padding))
    output = backbone(
        input_ids=padded,
        attention_mask=None,
        use_cache=False,
        **row_arguments(backbone, padded, given),
        **observer_arguments(),
    )
    show_pass(output, real_slots(padded, lengths))
    return output.last_hidden_state[:, :width]


def real_slots(input_ids: Tensor, lengths: Tensor) -> Tensor:
    """(B, T) bool, True on the first `lengths` (B,) slots of each row."""
    return torch.arange(input_ids.shape[1], device=input_ids.device) < lengths.unsqueeze(1)


class RowRunner(Protocol):
    """Runs the rows of a `PolicyModel` or `ScalarModel` in a way of its own. Collective."""

    def token_scores(
        self,
        policy: Any,
        input_ids: Tensor,
        target_mask: Tensor,
        temperature: float,
        entropy_grad: bool,
        forbidden: Any,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (N,); arguments as `PolicyModel.forward`."""
        ...

    def token_values(self, scalar: Any, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """The value of each token, (B, T); arguments as `ScalarModel.forward`."""
        ...


@dataclass(frozen=True)
class Layout:
    """What a forward pass does with its rows: `select_kernels` finds out what fits a model, flags
    name the rest. Two models with the same weights and the same layout give the same bits. A
    language model packs, shares and reads few tokens only if it is fused."""

    # go through the vocabulary in blocks, instead of computing whole logits; of a language model
    fused: bool = True
    packed: bool = False  # run rows end to end as one row, without padding
    shares: bool = False  # run the beginning that rows share once
    reads_few: bool = False  # run the last MLP only for tokens whose states are read
    runner: RowRunner | None = None  # of a feature, which runs the rows in place of the ways above
    attention: str = "auto"  # the value of `--attn_implementation`
    offload_activations: bool = False


# Of the user, of the run, of other ranks and of the device, which stays broken.
_OTHERS = (
    UserError,
    NonFiniteError,
    StopRequested,
    RolloutCancelled,
    torch.distributed.DistError,
    torch.AcceleratorError,
)

# Arguments of transformers' attention functions that no attention of this project has, and what
# they are.
_FOREIGN = {
    "attention_mask": "a mask of its own",
    "position_bias": "a bias",
    "sinks": "sinks",
    "indices": "chosen keys",
    "block_indices": "chosen keys",
}


class UnsupportedAttentionError(Exception):
    """The model's attention needs something that an attention function of this project does not
    have."""


def check_attention_call(
    module: Any, attention_mask: Tensor | None, options: dict[str, Any]
) -> None:
    """Refuse a call of attention with what would be ignored: a mask, a bias, ... even if its
    numbers are 0."""
    if attention_mask is None and _FOREIGN.keys().isdisjoint(options):
        return
    arguments = {**options, "attention_mask": attention_mask}
    for name, what in _FOREIGN.items():
        if arguments.get(name) is not None:
            raise UnsupportedAttentionError(f"{type(module).__name__} needs {what}")


def unfit(tried: Attempt) -> str:
    """Why a model does not fit the way that was tried, in one line, or "". Models raise almost
    anything there. The exception itself is raised if no other way would help: memory, the device or
    another rank failed."""
    problem = tried.problem
    if problem is None:
        return ""
    if isinstance(problem, _OTHERS) or ran_out_of_memory(problem):
        raise problem
    problem.__traceback__ = None  # its frames hold tensors
    if isinstance(problem, UnsupportedAttentionError):
        return str(problem)
    return f"it ends with {type(problem).__name__} ({in_one_line(problem)})"


def of_any_rank(reason: str, device: torch.device) -> str:
    """`reason` of this rank; else that others have one; else "". Collective, so that all make the
    same passes."""
    failed_here = torch.tensor(float(bool(reason)), device=device)
    failed_anywhere = all_reduce(failed_here, "max") > 0
    if failed_anywhere and not reason:
        return "another rank cannot run it"
    return reason
