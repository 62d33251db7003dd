"""Settings of a model folder that name code or other files, or belong to a run. The folder chooses none of them.

transformers lets `config.json` name an attention or experts kernel, which it fetches from the hub and runs where the
package `kernels` is installed; Python files (`auto_map`); another file of weights; and a quantisation, whose back ends
fetch kernels too. Flags of this project choose the attention, and all models are loaded unquantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from transformers import PretrainedConfig

from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError

KERNELS = ("attn_implementation", "experts_implementation")
# Left out, with a note. transformers reads some of them with an underscore too. A fusion replaces modules of the whole
# process; a model with a `distributed_config` that is not an object of transformers cannot be saved.
IGNORED = (
    *KERNELS, "auto_map", "custom_generate", "custom_pipelines", "distributed_config", "fusion_config", "kernel_config",
    "use_kernels",
)  # fmt: skip
# Settings of a run that some folders keep from the run that wrote them; flags and forward passes of this one set them.
# (RWKV divides its weights in place for `rescale_every` when it begins to evaluate.)
OF_A_RUN = {
    "gradient_checkpointing": False, "output_attentions": False, "output_hidden_states": False,
    "output_router_logits": False, "return_dict": True, "torchscript": False, "use_cache": True,
    "chunk_size_feed_forward": 0, "rescale_every": 0,
}  # fmt: skip
DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")  # a setting; `--dtype` chooses the dtype of a run


def check_folder_settings(settings: dict[str, Any], folder: str, refused: str) -> None:
    """Refuse settings of `config.json` whose weights this project cannot read, and note those that it ignores.
    `refused` begins the error message."""
    for name, value in _all_settings(settings):
        if name == "quantization_config" and value:
            method = value.get("quant_method", "unnamed") if isinstance(value, dict) else value
            raise UserError(
                f"{refused}: its weights are quantised ('quantization_config', method {method}); use the model with "
                "unquantised weights, and --load_in_4bit for QLoRA"
            )
        if name == "transformers_weights" and value:
            raise UserError(
                f"{refused}: 'transformers_weights' names another file of weights; rename that file to "
                "model.safetensors and remove the setting"
            )
        is_dtype = name in ("dtype", "torch_dtype") and value is not None
        if is_dtype and str(value).removeprefix("torch.") not in DTYPES:
            raise UserError(f"{refused}: '{name}' must be one of {', '.join(DTYPES)}; it is {value!r}")
    names = sorted({name for name, value in _all_settings(settings) if name.strip("_") in IGNORED and value})
    if names:
        _note(folder, ", ".join(names), "a model folder does not choose code")
    names = sorted({name for name, value in _all_settings(settings) if name in OF_A_RUN and value != OF_A_RUN[name]})
    if names:
        _note(folder, ", ".join(names), "this run sets it")


@cache
def _note(folder: str, names: str, reason: str) -> None:
    """Once for a folder, which is read several times."""
    logger().warning(f"{folder}: {names} in config.json is ignored; {reason}")


def _all_settings(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, those of nested configurations such as `text_config` too."""
    for name, value in settings.items():
        yield name, value
        if isinstance(value, dict):
            yield from _all_settings(value)


def without_code(config: PretrainedConfig) -> PretrainedConfig:
    """`config`, changed in place: transformers chooses its kernels, and no setting names code or belongs to a run. The
    model is saved with this configuration, so the names do not reach later users of the saved folder either."""
    config._attn_implementation = None  # those of nested configurations too
    config._experts_implementation = None
    nested = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    for part in (config, *nested):
        for name in IGNORED:
            if name in vars(part):
                delattr(part, name)
        for name, value in OF_A_RUN.items():
            if getattr(part, name, value) != value:
                setattr(part, name, value)
    return config
