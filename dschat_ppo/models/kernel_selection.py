"""Which ways a model can run its rows. Its configuration says, before it is loaded, whether it
suits the flags that ask for a way. A probe selects the kernels once the engine exists: it runs a
few tokens both ways, and compares. A way that ends with an error counts as infinitely far from the
model's own, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.common.dist import all_reduce
from dschat_ppo.common.logging import logger
from dschat_ppo.config.on_policy import router_adds_noise
from dschat_ppo.config.run_flags import MemoryFlags
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError, attempt, reading
from dschat_ppo.features import hooks
from dschat_ppo.models.activation_memory import last_mlp
from dschat_ppo.models.architectures import (
    DROPOUTS,
    backbone_of,
    build_classifier,
)
from dschat_ppo.models.backbone import hidden_window, of_any_rank, unfit, unwrap
from dschat_ppo.models.lm_kinds import LMKind, built_without_weights
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.packing import reason_not_to_pack, recorded_attention
from dschat_ppo.models.state_layers import can_go_on, state_layers
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.types import Model

PROBE_ROWS = 3
PROBE_TOKENS = 16
# mean difference of log-probs and entropies, in nats
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# mean difference between packed and padded rows, relative to the standard deviation of the numbers
PACKED_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
# settings of configurations
ATTENTION_DROPOUTS = "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"
LEAK_TOLERANCE = 1e-3  # the same products in the same order: only their grouping can differ


def check_attention(
    config: StepConfig, flag: str, folder: str, scalar: bool, kinds: Sequence[LMKind] = ()
) -> None:
    """Check, without loading weights, that a model suits the attention that is asked for and, where
    ranks share rows, that they can divide its rows.

    Args:
        config: the flags.
        flag: the option that names the model, for messages.
        folder: the model's folder, which passed the other checks.
        scalar: build a classifier, for a reward model or a critic, instead of a language model.
        kinds: of language models that the run takes, beside causal ones.

    Raises:
        UserError: the model does not suit the flags.
    """
    choice = config.memory.attn_implementation
    if config.ranks_of_row == 1 and choice == "auto":
        return
    with reading(f"{flag} {folder}: no model can be built from its config.json"):
        model_config = load_config(folder, flag)
        with torch.device("meta"):
            if scalar:
                backbone = build_classifier(model_config, kinds).base_model
            else:
                backbone = backbone_of(built_without_weights(model_config, kinds))
    name = type(backbone).__name__
    reason = reason_against(choice, backbone)
    if reason is not None:
        raise UserError(
            f"--attn_implementation {choice}: {flag} {folder}: {name} cannot use it, because"
            f" {reason}; use auto"
        )
    for check_backbone in hooks("checks.check_backbone"):
        check_backbone(config, backbone, f"{flag} {folder}")


def reason_against(choice: str, backbone: PreTrainedModel) -> str | None:
    """Why the model cannot use the attention that `--attn_implementation` names; None if it can."""
    attention = backbone.config._attn_implementation
    if choice in ("auto", attention):
        return None
    if not backbone._supports_attention_backend:
        return f"transformers does not let its attention, '{attention}', be replaced"
    if choice == "sdpa":
        return "it needs a soft cap or sinks, which SDPA does not have"
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


@torch.no_grad()
def select_kernels(engine: Model, pack_on_gpu: bool = False) -> str | None:
    """Set the `layout` of the model inside to the fastest ways of running rows that give the
    numbers of its own forward pass over padded rows. Collective: all ranks make the same choice.

    Args:
        engine: a `PolicyModel` or `ScalarModel`, or an engine around one.
        pack_on_gpu: on a GPU rows are packed where FlashAttention computes all of them in one
            call, in half precision. This also allows kernels for each row.

    Returns:
        Why rows are not packed; None if they are.

    Raises:
        UserError: a feature runs the rows (`RowRunner`), and cannot run those of this model.
    """
    module: Any = unwrap(engine)
    was_training = module.training
    engine.eval()
    size = module.config.get_text_config().vocab_size
    ids = torch.linspace(0, size - 1, PROBE_ROWS * PROBE_TOKENS, device=engine.device).long()
    ids = ids.view(PROBE_ROWS, PROBE_TOKENS)
    if isinstance(module, PolicyModel):
        _select_fused(engine, module, ids)
    reason = reason_not_to_pack(module.backbone, module.layout.attention)
    if reason is None and module.given_source is not None:
        reason = module.given_source.reason_to_pad
    in_one_call = False
    if reason is None:
        reason, in_one_call = _select_packed(engine, module, ids)
    packing_is_quick = engine.device.type == "cpu" or in_one_call
    if reason is None and not (packing_is_quick or pack_on_gpu):
        _change_layout(module, packed=False)
        reason = "no kernel computes the attention of all of them in one call on this GPU"
    # Dropout and router noise would draw other numbers for fewer tokens.
    is_random = was_training and _draws_noise(module)
    has_runner = any(select(engine, module, ids) for select in hooks("row_runners.select"))
    if not has_runner and not is_random:
        if reason is None and packing_is_quick:
            _select_shared(engine, module, ids)
        _select_read_tokens(engine, module, ids)
    engine.train(was_training)
    if reason is not None:
        logger().info(f"{type(module.backbone).__name__}: {reason}, so rows are padded")
    if reason is None and isinstance(module, PolicyModel) and not module.layout.fused:
        return "its output head needs whole logits"  # which are computed for padded rows
    return reason


def _change_layout(module: PolicyModel | ScalarModel, **ways: Any) -> None:
    """Switch ways of the model's layout on or off."""
    module.layout = replace(module.layout, **ways)


def _select_fused(engine: Model, policy: PolicyModel, ids: Tensor) -> None:
    """Go through the vocabulary in blocks, if that gives the numbers of whole logits; else warn."""
    error = ""
    if policy.layout.fused:
        _change_layout(policy, fused=False)
        fused, from_logits, error = compare_ways(engine, policy, ids, fused=True)
        difference = _largest((fused - from_logits).abs().mean(dim=-1))
        _change_layout(policy, fused=difference < TOLERANCE[policy.lm.dtype])
    if not policy.layout.fused:
        reason = "its output head is more than a matrix product with a known scale and soft cap"
        if error:
            reason += f": {error}"
        logger().warning(
            f"{type(policy.lm).__name__}: {reason}; log-probs are computed from whole logits,"
            " which costs memory and time"
        )


def _select_packed(
    engine: Model, module: PolicyModel | ScalarModel, ids: Tensor
) -> tuple[str | None, bool]:
    """Pack rows if that gives the numbers of padded rows, and if the first row does not influence
    the others: layers other than attention may carry a state along the packed row.

    Returns:
        Why rows are not packed, or None; and whether one call of the attention computed all rows.
    """
    with recorded_attention() as recorded:
        packed, padded, error = compare_ways(engine, module, ids, packed=True)
    needs_mask = not error and hidden_window(module.config, recorded.windows)
    changed = packed
    if not error:
        with_other_first_row = torch.cat([ids[:1].flip(1), ids[1:]])
        changed, error = _outputs_or_error(engine, with_other_first_row, padded)

    # log-probs, entropies or values are compared each by itself
    spread = padded.std(dim=-1)
    tolerance = PACKED_TOLERANCE[module.backbone.dtype]
    difference = (packed - padded).abs().mean(dim=-1) / spread / tolerance
    first_row_outputs = PROBE_TOKENS
    if isinstance(module, PolicyModel):
        first_row_outputs = PROBE_TOKENS - 1  # the first token of a row has no log-prob
    change = (packed - changed)[..., first_row_outputs:].abs().amax(dim=-1)
    leak = change / spread / LEAK_TOLERANCE
    config = module.config.get_text_config()
    # dropout takes another kernel in training; here it is off
    has_dropout = any(getattr(config, name, None) for name in ATTENTION_DROPOUTS)
    needs_several_calls = has_dropout or not recorded.in_one_call
    largest_difference = _largest(difference)
    leaks = _largest(leak)
    in_one_call = _largest(torch.full_like(leak, needs_several_calls)) == 0  # on all ranks

    reason = None
    if error:
        reason = f"with packed rows {error}"
    elif needs_mask:
        reason = "its sliding window is in its mask, which packed rows do not have"
    elif not leaks < 1:
        reason = "a row's numbers depend on the row before it"
        layers = state_layers(module.backbone)
        if layers:
            reason = f"its {type(layers[0]).__name__} does not keep rows apart: {reason}"
    elif not largest_difference < 1:
        reason = "packed rows do not give the numbers of padded rows"
    _change_layout(module, packed=reason is None)
    return reason, in_one_call


def _select_shared(engine: Model, module: PolicyModel | ScalarModel, ids: Tensor) -> None:
    """Run the beginning that rows share once, if that gives the numbers of packed rows."""
    if isinstance(module, PolicyModel) and not module.layout.fused:
        return
    for layer in state_layers(module.backbone):
        if not can_go_on(layer):
            logger().info(
                f"{type(module.backbone).__name__}: its {type(layer).__name__} takes no state,"
                " so prompts are not shared"
            )
            return
    half = PROBE_TOKENS // 2
    beginning = ids[:1, :half].expand(PROBE_ROWS, -1)
    alike = torch.cat([beginning, ids[:, half:]], dim=1)
    _keep_if_close(engine, module, alike, "shares", "shared prompts")


def _select_read_tokens(engine: Model, module: PolicyModel | ScalarModel, ids: Tensor) -> None:
    """Run the last MLP only for the tokens whose states are read, if these then have the same
    numbers. Dropout would draw other numbers for fewer tokens, so a model that trains with it runs
    all tokens."""
    if last_mlp(module.backbone) is None:
        return
    if isinstance(module, PolicyModel) and not module.layout.fused:
        return
    description = "a last MLP for some tokens"
    _keep_if_close(engine, module, ids, "reads_few", description, first_column=PROBE_TOKENS // 2)


def _keep_if_close(
    engine: Model,
    module: PolicyModel | ScalarModel,
    ids: Tensor,
    way: str,
    description: str,
    first_column: int = 0,
) -> None:
    """Switch a way of the layout on if it gives the numbers of the model without it."""
    outputs, expected, error = compare_ways(engine, module, ids, first_column, **{way: True})
    _change_layout(module, **{way: is_close(outputs, expected, module.backbone.dtype)})
    if error:
        name = type(module.backbone).__name__
        logger().info(f"{name}: with {description} {error}, so it runs without")


def _draws_noise(module: PolicyModel | ScalarModel) -> bool:
    """Whether training is random, in the same way for all rows that share a beginning."""
    config = module.config.get_text_config()
    has_layers = any(
        isinstance(layer, torch.nn.Dropout) and layer.p > 0 for layer in module.modules()
    )
    of_heads = "classifier_dropout"  # which the heads of this project do not have
    by_config = any(getattr(config, name, None) for name in DROPOUTS if name != of_heads)
    return has_layers or by_config or router_adds_noise(module.config.to_dict())


def compare_ways(
    engine: Model,
    module: PolicyModel | ScalarModel,
    ids: Tensor,
    first_column: int = 0,
    **ways: Any,
) -> tuple[Tensor, Tensor, str]:
    """Switch `ways` of the layout on, and leave them on.

    Returns:
        The model's outputs with them and as it was before; and why the former raised, or "".
    """
    expected = _outputs(engine, ids, first_column)
    _change_layout(module, **ways)
    outputs, error = _outputs_or_error(engine, ids, expected, first_column)
    return outputs, expected, error


def _outputs_or_error(
    engine: Model, ids: Tensor, expected: Tensor, first_column: int = 0
) -> tuple[Tensor, str]:
    """`_outputs` of a way that the model may not fit, and ""; if it raises on any rank, on all
    ranks infinity in the shape of the `expected` outputs, and why."""
    with attempt() as tried:
        outputs = _outputs(engine, ids, first_column)
    error = of_any_rank(unfit(tried), expected.device)
    if error:
        return torch.full_like(expected, torch.inf), error
    return outputs, ""


def _largest(values: Tensor) -> float:
    """The largest value on all ranks; infinity if any is NaN. Collective."""
    return float(all_reduce(values.nan_to_num(torch.inf).max(), "max"))


def is_close(outputs: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether log-probs, entropies or values (kinds, N), each kind by itself, are near on all
    ranks."""
    difference = (outputs - expected).abs().mean(dim=-1) / expected.std(dim=-1)
    return _largest(difference) < PACKED_TOLERANCE[dtype]


def _outputs(engine: Model, ids: Tensor, first_column: int = 0) -> Tensor:
    """For uneven rows, from column `first_column` on: log-probs and entropies (2, N), or values
    (N,), without padding."""
    lengths = torch.arange(PROBE_TOKENS, 0, -PROBE_TOKENS // (2 * PROBE_ROWS), device=ids.device)[
        :PROBE_ROWS
    ]
    slots = torch.arange(PROBE_TOKENS, device=ids.device)
    is_read = (slots < lengths.unsqueeze(1)) & (slots >= first_column)
    module: Any = unwrap(engine)
    given_embeddings = None
    if module.given_source is not None:
        ids, given_embeddings = module.given_source.for_probe(ids)
    if isinstance(module, ScalarModel):
        return engine(ids, lengths, read_mask=is_read, given=given_embeddings)
    return torch.stack(engine(ids, is_read, given=given_embeddings))
