"""Which architectures can be used, from the configuration alone, and what is peculiar about some of them."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PretrainedConfig

from dschat_ppo.errors import UserError

# BERT and its kin are decoders only if their configuration says so; else every token sees every other.
ENCODERS_UNLESS_DECODER = frozenset({
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
    "xmod",
})  # fmt: skip

# Their position embeddings begin with rows for padding, so the first token has position `pad_token_id + 1`.
POSITIONS_AFTER_PADDING = frozenset({
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
})  # fmt: skip

UNUSABLE = {
    "cpmant": "padding on the right changes what it says",
    "gemma4_assistant": "it drafts tokens for another model, whose keys it reads",
    "gemma4_unified_assistant": "it drafts tokens for another model, whose keys it reads",
    "musicgen": "its tokens are those of sounds",
    "musicgen_melody": "its tokens are those of sounds",
    "prophetnet": "padding on the right changes what it says",
    "qwen4_exp": "it takes no positions that several rows share",
    "qwen4_exp_text": "it takes no positions that several rows share",
    "reformer": "its rows must be multiples of its chunks",
    "rembert": "its head reads other states than those of its layers",
    "xlm": "it takes no positions that several rows share",
    "xlnet": "its tokens see those after them",
    "xmod": "its layers depend on the language of each row",
}

# Sparse attention that reads the mask, which packed rows do not have.
MASK_IS_READ = frozenset({"axk2", "deepseek_v32", "glm_moe_dsa"})

# Decoders that transformers knows as classifiers, but not as language models.
CLASSIFIERS_ONLY = frozenset({"mistral4"})


def check_architecture(config: PretrainedConfig, folder: str, needs_lm: bool) -> None:
    """Refuse what is no decoder: rows are padded on the right and no mask is given, so a token must not see those after
    it.

    Args:
        config: of the model.
        folder: of the model, for the message.
        needs_lm: whether it is used as a language model, and not only under a scalar head.

    Raises:
        UserError: the model is an encoder, has no causal language model in transformers, is known not to work, or does
            not say where its positions begin.
    """
    name = type(config).__name__
    if getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        raise UserError(f"{folder}: use_bidirectional_attention lets tokens see the future; take a causal model")
    if config.model_type in ENCODERS_UNLESS_DECODER and not config.is_decoder:
        raise UserError(
            f"{folder}: {name} without is_decoder is an encoder, whose tokens see the future; take a decoder"
        )
    if config.model_type in UNUSABLE:
        raise UserError(f"{folder}: {name} cannot be used: {UNUSABLE[config.model_type]}; take another model")
    if config.model_type in POSITIONS_AFTER_PADDING and config.pad_token_id is None:
        raise UserError(f"{folder}: {name} counts positions from pad_token_id, which config.json lacks; put it there")
    known: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    is_lm = type(config) in known
    if not is_lm and (needs_lm or config.model_type not in CLASSIFIERS_ONLY):
        raise UserError(f"{folder}: transformers has no causal language model for {name}; take a decoder-only model")
    if is_lm and (saved := known[type(config)].config_class) not in known:
        raise UserError(
            f"{folder}: {name} cannot be used: its text model would be saved with {saved.__name__}, for which "
            "transformers has no causal language model; take another model"
        )


def first_position(config: PretrainedConfig) -> int:
    """The position of a row's first token: 0, but for RoBERTa and its kin."""
    if config.model_type not in POSITIONS_AFTER_PADDING:
        return 0
    return int(config.pad_token_id) + 1
