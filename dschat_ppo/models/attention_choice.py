"""`--attn_implementation`: refuse what a machine or a model cannot run, before any weight is read."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.common.extras import how_to_install, require_extra
from dschat_ppo.errors import UserError, in_one_line
from dschat_ppo.models.architectures import MASK_IS_READ
from dschat_ppo.models.segment_attention import LARGEST_FLASH_HEAD

FLAG = "--attn_implementation"
WITHOUT_MASKS = ("flash_attention_2", "flex_attention")  # padded rows too run without transformers' masks
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # settings of configurations
HEAD_SIZES = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")  # likewise


def check_attention(choice: str, device: torch.device) -> None:
    """Check that this machine can run the attention that `--attn_implementation` chooses."""
    if choice not in WITHOUT_MASKS:
        return
    if device.type == "cpu":
        reason = "PyTorch has no gradient of it on a CPU" if choice == "flex_attention" else "its kernels are for GPUs"
        raise UserError(f"{FLAG} {choice} needs a GPU, because {reason}; use sdpa")
    if choice == "flex_attention":
        return
    require_extra("flash_attn", f"{FLAG} flash_attention_2")
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"{FLAG} flash_attention_2 needs a GPU of compute capability 8.0; {name} has less: use sdpa")
    if not _flash_caps():
        install = how_to_install("flash_attn")
        raise UserError(f"{FLAG} flash_attention_2: the installed flash-attn is older than 2.6: {install}")


def _flash_caps() -> bool:
    """Whether flash-attn has soft caps. `UserError`: its library was compiled for another torch."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as problem:
        raise UserError(
            f"{FLAG} flash_attention_2: flash-attn was compiled for another torch ({in_one_line(problem)}); compile it "
            f"again: pip uninstall flash-attn, {how_to_install('flash_attn')}"
        ) from problem

    return "softcap" in inspect.signature(flash_attn_varlen_func).parameters


def check_attention_of_model(choice: str, backbone: PreTrainedModel, named: str) -> None:
    """Check that a model, built without its weights, can run the attention; `named` is its flag and folder."""
    reason = None if choice == "auto" else reason_against(choice, backbone)
    if reason is not None:
        name = type(backbone).__name__
        raise UserError(f"{FLAG} {choice}: {named}: {name} cannot use it, because {reason}; use auto")


def reason_against(choice: str, backbone: PreTrainedModel) -> str | None:
    """Why the model cannot use the attention, as far as its configuration and modules tell; None if it can."""
    own, config = backbone.config._attn_implementation, backbone.config.get_text_config()
    if choice == own:
        return None
    if not backbone._supports_attention_backend:
        return f"transformers does not let its attention, '{own}', be replaced"
    if choice == "sdpa":
        return "it needs a soft cap or sinks, which PyTorch's scaled dot product attention does not have"
    if choice == "eager":
        return None
    if config.model_type in MASK_IS_READ or getattr(config, "attention_chunk_size", None) is not None:
        return "its attention needs a mask, which the kernel does not get"
    if choice == "flex_attention":
        return None if backbone._supports_flex_attn else "transformers does not know that flex attention suits it"
    if not backbone._supports_flash_attn:
        return "transformers does not know that FlashAttention suits it"
    if any(isinstance(getattr(module, "sinks", None), torch.nn.Parameter) for module in backbone.modules()):
        return "FlashAttention-2 has no sinks"
    sizes = head_sizes(config)
    if max(sizes) > LARGEST_FLASH_HEAD:
        return f"its heads have {max(sizes)} numbers, and FlashAttention-2 at most {LARGEST_FLASH_HEAD}"
    if getattr(config, "v_head_dim", None) not in (None, getattr(config, "qk_head_dim", None)):
        return "its keys and values differ in size"
    return None


def head_sizes(config: Any) -> set[int]:
    """How many numbers an attention head has, for each kind of layer and tensor that the configuration names."""
    sizes = {size for name in HEAD_SIZES if isinstance(size := getattr(config, name, None), int)}
    return sizes or {config.hidden_size // config.num_attention_heads}


def attention_dropout(config: PretrainedConfig) -> float:
    """The dropout of a model's attention while it trains."""
    return max(float(getattr(config.get_text_config(), name, None) or 0) for name in ATTENTION_DROPOUTS)


def check_attention_dropout(choice: str, config: PretrainedConfig, dropout: float | None, named: str) -> None:
    """Check that a model that trains with flex attention has no dropout in its attention. `dropout` replaces all of the
    config; None: nothing does."""
    share = attention_dropout(config) if dropout is None else dropout
    if choice == "flex_attention" and share > 0:
        raise UserError(
            f"{FLAG} flex_attention: {named} trains with a dropout of {share:g} in its attention, which the kernel "
            "does not have; use --dropout 0, or another attention"
        )
