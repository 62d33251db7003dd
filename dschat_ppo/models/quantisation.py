"""QLoRA: frozen weights in 4 or 8 bits through bitsandbytes (Dettmers 2023, https://arxiv.org/abs/2305.14314)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from dschat_ppo.common import dist
from dschat_ppo.common.extras import require_extra
from dschat_ppo.errors import UserError

Bits = Literal[4, 8]


def require_quantisation(bits: Bits) -> None:
    """Check that this machine has a GPU and bitsandbytes."""
    flag = f"--load_in_{bits}bit"
    if not dist.on_gpu():
        raise UserError(f"{flag} needs a GPU, and this run has none; omit it to train LoRA over whole weights")
    require_extra("bitsandbytes", flag)


def quantised_loading(
    bits: Bits, dtype: torch.dtype, layers: list[str], skipped: list[str], ds_config: dict[str, Any] | None
) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise the linear `layers` on this rank's GPU, and not the `skipped` ones.

    Quantised weights are integers, so DeepSpeed's cast to bf16 or fp16 leaves them alone; their products are computed
    in `dtype`. 4 bits: NF4 with double quantisation. 8 bits: LLM.int8(). Not under ZeRO-3, which `--deepspeed_config`
    may ask for.
    """
    assert layers
    if ds_config is not None and ds_config["zero_optimization"]["stage"] == 3:
        raise UserError(f"--load_in_{bits}bit needs ZeRO stage 0, 1 or 2: ZeRO-3 cannot partition quantised weights")
    if bits == 4:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=torch.uint8, llm_int8_skip_modules=skipped,
        )  # fmt: skip
    else:
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    return {"quantization_config": config, "device_map": {"": dist.device()}}


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether weights of the model are quantised, so that nothing can be merged into them without another rounding."""
    return bool(getattr(model, "is_quantized", False))
