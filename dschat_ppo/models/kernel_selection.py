"""Which ways a model can run its rows. Its configuration says, before it is loaded, whether it
suits the flags that ask for a way. A probe selects the kernels once the engine exists: it runs a
few tokens both ways, and compares. A way that ends with an error counts as infinitely far from the
model's own, on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.common.dist import all_reduce, sequence_ranks, world_size
from dschat_ppo.common.logging import logger
from dschat_ppo.config.on_policy import router_adds_noise
from dschat_ppo.config.run_flags import MemoryFlags, possible_sizes
from dschat_ppo.errors import UserError, attempt, reading
from dschat_ppo.models.activation_memory import last_mlp
from dschat_ppo.models.architectures import (
    DROPOUTS,
    MASK_IS_READ,
    backbone_of,
    classifier_class,
    config_for,
    lm_without_weights,
)
from dschat_ppo.models.backbone import accepts, hidden_window, of_any_rank, unfit, unwrap
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.packing import reason_not_to_pack, recorded_attention
from dschat_ppo.models.state_layers import can_go_on, state_layers
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.types import Model

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def check_long_sequences(flags: MemoryFlags, flag: str, folder: str, scalar: bool) -> None:
    """Check that the model at `folder`, which passed the other checks, suits the flags, without its
    weights."""
    choice = flags.attn_implementation
    if flags.sequence_parallel_size == 1 and choice == "auto":
        return
    with reading(f"{flag} {folder}: no model can be built from its config.json"):
        config = load_config(folder, flag)
        kind: Any = classifier_class(config) if scalar else None
        with torch.device("meta"):
            if scalar:
                backbone = kind(config_for(kind, config)).base_model
            else:
                backbone = backbone_of(lm_without_weights(config))
    name = type(backbone).__name__
    reason = reason_against(choice, backbone)
    if reason is not None:
        raise UserError(
            f"--attn_implementation {choice}: {flag} {folder}: {name} cannot use it, because"
            f" {reason}; use auto"
        )
    if flags.sequence_parallel_size > 1:
        given = f"--sequence_parallel_size {flags.sequence_parallel_size}: {flag} {folder}: {name}"
        reason = reason_not_to_divide(backbone)
        if reason is not None:
            raise UserError(f"{given} cannot be divided, because {reason}; use 1")
        heads = backbone.config.get_text_config().num_attention_heads
        if heads % flags.sequence_parallel_size:
            raise UserError(
                f"{given} has {heads} attention heads, which the size must divide; with"
                f" {world_size()} ranks use {possible_sizes(world_size(), heads)}"
            )


def reason_against(choice: str, backbone: PreTrainedModel) -> str | None:
    """Why the model cannot use the attention that `--attn_implementation` names; None if it can."""
    own = backbone.config._attn_implementation
    if choice in ("auto", own):
        return None
    if not backbone._supports_attention_backend:
        return f"transformers does not let its attention, '{own}', be replaced"
    if choice == "sdpa":
        return "it needs a soft cap or sinks, which SDPA does not have"
    return None


def reason_not_to_divide(backbone: PreTrainedModel) -> str | None:
    """Why ranks cannot divide the columns of rows among them; None if they can, as far as the
    configuration tells."""
    config = backbone.config.get_text_config()
    if layers := state_layers(backbone):
        return f"its {type(layers[0]).__name__} carries a state from token to token"
    if not backbone._supports_attention_backend:
        return "transformers does not let its attention be replaced"
    if backbone.config._attn_implementation not in ("sdpa", "eager"):
        return (
            f"its attention is '{backbone.config._attn_implementation}', and not 'sdpa' or 'eager'"
        )
    if (
        config.model_type in MASK_IS_READ
        or getattr(config, "attention_chunk_size", None) is not None
    ):
        return "its attention needs a mask, which divided rows do not have"
    if not accepts(backbone, "position_ids"):
        return "it does not take the positions of tokens"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if others:
        return f"it has layers of the type {', '.join(others)}"
    if not isinstance(config.num_attention_heads, int):
        return "its layers differ in their numbers of attention heads"
    return None


def apply_memory_flags(
    model: PolicyModel | ScalarModel, flags: MemoryFlags, checkpointing: bool = False
) -> None:
    """Switch activation checkpointing, `--offload_activations` and `--attn_implementation` on in
    the model as asked."""
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.layout = replace(
        model.layout,
        attention=flags.attn_implementation,
        offload_activations=flags.offload_activations,
    )


ROWS, TOKENS = 3, 16
# mean difference of log-probs and entropies, in nats
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# mean difference between packed and padded rows, relative to the standard deviation of the numbers
PACKED_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
# settings of configurations
ATTENTION_DROPOUTS = "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"
LEAK_TOLERANCE = 1e-3  # the same products in the same order: only their grouping can differ


@torch.no_grad()
def select_kernels(engine: Model, pack_on_gpu: bool = False) -> str | None:
    """Set the `layout` of the model inside: what gives the numbers of its whole, padded forward
    pass. Collective: all ranks make the same choice. Returns why rows are not packed; None if they
    are. On a GPU they are where FlashAttention computes all of them in one call, in half precision;
    `pack_on_gpu` also allows kernels for each row. `UserError` if ranks share rows and the model
    cannot run with a part of the columns on each of them."""
    module: Any = unwrap(engine)
    was_training = module.training
    engine.eval()
    size = module.config.get_text_config().vocab_size
    ids = torch.linspace(0, size - 1, ROWS * TOKENS, device=engine.device).long().view(ROWS, TOKENS)
    if isinstance(module, PolicyModel):
        _select_fused(engine, module, ids)
    reason = reason_not_to_pack(module.backbone, module.layout.attention)
    in_one_call = False
    if reason is None:
        reason, in_one_call = _select_packed(engine, module, ids)
    quick = engine.device.type == "cpu" or in_one_call
    if reason is None and not (quick or pack_on_gpu):
        _set(module, packed=False)
        reason = "no kernel computes the attention of all of them in one call on this GPU"
    if (
        reason is None
        and quick
        and sequence_ranks() == 1
        and not (was_training and _draws_noise(module))
    ):
        _select_shared(engine, module, ids)
    if sequence_ranks() > 1:
        _divide(engine, module, ids)
    elif not (was_training and _draws_noise(module)):
        _select_read_tokens(engine, module, ids)
    engine.train(was_training)
    if reason is not None:
        logger().info(f"{type(module.backbone).__name__}: {reason}, so rows are padded")
    if reason is None and isinstance(module, PolicyModel) and not module.layout.fused:
        return "its output head needs whole logits"
    return reason


def _set(module: PolicyModel | ScalarModel, **ways: Any) -> None:
    module.layout = replace(module.layout, **ways)


def _select_fused(engine: Model, policy: PolicyModel, ids: Tensor) -> None:
    reason = ""
    if policy.layout.fused:
        _set(policy, fused=False)
        fused, whole, reason = _compared(engine, policy, ids, fused=True)
        _set(
            policy, fused=_largest((fused - whole).abs().mean(dim=-1)) < TOLERANCE[policy.lm.dtype]
        )
    if not policy.layout.fused:
        logger().warning(
            f"{type(policy.lm).__name__}: its output head is more than a matrix product with a"
            f" known scale and soft cap{reason and f': {reason}'}; log-probs are computed from"
            " whole logits, which costs memory and time"
        )


def _select_packed(
    engine: Model, module: PolicyModel | ScalarModel, ids: Tensor
) -> tuple[str | None, bool]:
    """Pack rows if that gives the numbers of padded rows, and if the first row does not influence
    the others. Layers other than attention may carry a state along the packed row. Returns why rows
    are not packed, or None, and whether the attention computed all of them in one call."""
    with recorded_attention() as recorded:
        packed, padded, error = _compared(engine, module, ids, packed=True)
    needs_mask = not error and hidden_window(module.config, recorded.windows)
    changed, error = (
        (packed, error) if error else _tried(engine, torch.cat([ids[:1].flip(1), ids[1:]]), padded)
    )
    if isinstance(module, ScalarModel):
        of_first_row = TOKENS
    else:
        of_first_row = TOKENS - 1
    spread = padded.std(dim=-1)  # of log-probs, entropies or values, each by itself
    difference = (
        (packed - padded).abs().mean(dim=-1) / spread / PACKED_TOLERANCE[module.backbone.dtype]
    )
    leak = (packed - changed)[..., of_first_row:].abs().amax(dim=-1) / spread / LEAK_TOLERANCE
    text = module.config.get_text_config()
    # in training; here it is off
    dropped = any(getattr(text, name, None) for name in ATTENTION_DROPOUTS)
    several_calls = torch.full_like(leak, dropped or not recorded.in_one_call)
    differs, leaks, several = (_largest(values) for values in (difference, leak, several_calls))
    reason = None
    if error:
        reason = f"with packed rows {error}"
    elif needs_mask:
        reason = "its sliding window is in its mask, which packed rows do not have"
    elif not leaks < 1:
        reason = "a row's numbers depend on the row before it"
        if layers := state_layers(module.backbone):
            reason = f"its {type(layers[0]).__name__} does not keep rows apart: {reason}"
    elif not differs < 1:
        reason = "packed rows do not give the numbers of padded rows"
    _set(module, packed=reason is None)
    return reason, not several


def _select_shared(engine: Model, module: PolicyModel | ScalarModel, ids: Tensor) -> None:
    """Run the beginning that rows share once, if that gives the numbers of packed rows."""
    if isinstance(module, PolicyModel) and not module.layout.fused:
        return
    if unfit_layers := [
        type(layer).__name__ for layer in state_layers(module.backbone) if not can_go_on(layer)
    ]:
        logger().info(
            f"{type(module.backbone).__name__}: its {unfit_layers[0]} takes no state, so prompts"
            " are not shared"
        )
        return
    alike = torch.cat([ids[:1, : TOKENS // 2].expand(ROWS, -1), ids[:, TOKENS // 2 :]], dim=1)
    _keep_if_close(engine, module, alike, "shares", "shared prompts")


def _select_read_tokens(engine: Model, module: PolicyModel | ScalarModel, ids: Tensor) -> None:
    """Run the last MLP only for the tokens whose states are read, if these then have the same
    numbers. Dropout would draw other numbers for fewer tokens, so a model that trains with it runs
    all tokens."""
    if last_mlp(module.backbone) is None or (
        isinstance(module, PolicyModel) and not module.layout.fused
    ):
        return
    _keep_if_close(
        engine, module, ids, "reads_few", "a last MLP for some tokens", first=TOKENS // 2
    )


def _keep_if_close(
    engine: Model,
    module: PolicyModel | ScalarModel,
    ids: Tensor,
    way: str,
    described: str,
    first: int = 0,
) -> None:
    """Switch a way of the layout on if it gives the numbers of the model without it."""
    found, own, error = _compared(engine, module, ids, first, **{way: True})
    _set(module, **{way: _is_close(found, own, module.backbone.dtype)})
    if error:
        logger().info(
            f"{type(module.backbone).__name__}: with {described} {error}, so it runs without"
        )


def _draws_noise(module: PolicyModel | ScalarModel) -> bool:
    """Whether training is random, in the same way for all rows that share a beginning."""
    text = module.config.get_text_config()
    layers = any(isinstance(layer, torch.nn.Dropout) and layer.p > 0 for layer in module.modules())
    of_heads = "classifier_dropout"  # which the heads of this project do not have
    by_config = any(getattr(text, name, None) for name in DROPOUTS if name != of_heads)
    return layers or by_config or router_adds_noise(module.config.to_dict())


def _divide(engine: Model, module: PolicyModel | ScalarModel, ids: Tensor) -> None:
    with recorded_attention() as recorded:
        divided, whole, error = _compared(engine, module, ids, divided=True)
    is_close = _is_close(divided, whole, module.backbone.dtype)
    reason = None
    if error:
        reason = f"with divided rows {error}"
    elif hidden_window(module.config, recorded.windows):
        reason = "its sliding window is in its mask, which divided rows do not have"
    elif not is_close:
        reason = "divided rows do not give the numbers of whole rows"
    if reason is not None:
        name = type(module.backbone).__name__
        raise UserError(
            f"--sequence_parallel_size: {name} cannot be divided, because {reason}; use 1"
        )


def _compared(
    engine: Model, module: PolicyModel | ScalarModel, ids: Tensor, first: int = 0, **ways: bool
) -> tuple[Tensor, Tensor, str]:
    """`_outputs` of the model in these ways, which it keeps, and as it was; why the first raised,
    or ""."""
    own = _outputs(engine, ids, first)
    _set(module, **ways)
    found, error = _tried(engine, ids, own, first)
    return found, own, error


def _tried(engine: Model, ids: Tensor, own: Tensor, first: int = 0) -> tuple[Tensor, str]:
    """`_outputs` of a way that the model may not fit, and ""; on all ranks infinity, and why, if
    one raises."""
    with attempt() as tried:
        found = _outputs(engine, ids, first)
    error = of_any_rank(unfit(tried), own.device)
    return torch.full_like(own, torch.inf) if error else found, error


def _largest(values: Tensor) -> float:
    return float(all_reduce(values.nan_to_num(torch.inf).max(), "max"))


def _is_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether log-probs, entropies or values (kinds, N), each kind by itself, are near on all
    ranks."""
    return (
        _largest((found - expected).abs().mean(dim=-1) / expected.std(dim=-1))
        < PACKED_TOLERANCE[dtype]
    )


def _outputs(engine: Model, ids: Tensor, first: int = 0) -> Tensor:
    """For uneven rows, from column `first` on: log-probs and entropies (2, N), or values (N),
    without padding."""
    lengths = torch.arange(TOKENS, 0, -TOKENS // (2 * ROWS), device=ids.device)[:ROWS]
    slots = torch.arange(TOKENS, device=ids.device)
    real = (slots < lengths.unsqueeze(1)) & (slots >= first)
    if isinstance(unwrap(engine), ScalarModel):
        return engine(ids, lengths, wanted=real)
    return torch.stack(engine(ids, real))
