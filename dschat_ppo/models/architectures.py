"""Which architectures are supported, from the configuration alone, and the peculiarities of some of them."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PretrainedConfig

from dschat_ppo.errors import UserError

# BERT and similar models are decoders only if their configuration says so; else every token sees every other.
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
    "cpmant": "padding on the right changes its outputs",
    "gemma4_assistant": "it drafts tokens for another model and reads that model's keys",
    "gemma4_unified_assistant": "it drafts tokens for another model and reads that model's keys",
    "musicgen": "its tokens are sounds",
    "musicgen_melody": "its tokens are sounds",
    "prophetnet": "padding on the right changes its outputs",
    "qwen4_exp": "it takes no positions shared by several rows",
    "qwen4_exp_text": "it takes no positions shared by several rows",
    "reformer": "its row lengths must be multiples of its chunks",
    "rembert": "its head does not read the states of its layers",
    "xlm": "it takes no positions shared by several rows",
    "xlnet": "its tokens see later tokens",
    "xmod": "its layers depend on the language of each row",
}

# Sparse attention that reads the mask, which packed rows do not have.
MASK_IS_READ = frozenset({"axk2", "deepseek_v32", "glm_moe_dsa"})

# Decoders for which transformers has a classifier but no language model.
CLASSIFIERS_ONLY = frozenset({"mistral4"})

SCORE = "score"  # name of the scalar head in the classifiers of decoders

# Settings of configurations.
DROPOUTS = (
    "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "embed_dropout", "classifier_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "emb_pdrop",
    "embedding_dropout", "mlp_dropout", "resid_dropout", "residual_dropout",
)  # fmt: skip
SKIPPED_LAYERS = ("layerdrop", "decoder_layerdrop")  # share of the layers that a pass in training skips


def check_architecture(config: PretrainedConfig, folder: str, needs_lm: bool) -> None:
    """Refuse models that are not decoders. Rows are right-padded and models get no mask, so attention must be causal.
    `needs_lm`: whether the language model's head is used, and not only the backbone under a scalar head."""
    name = type(config).__name__
    if getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        raise UserError(f"{folder}: use_bidirectional_attention lets tokens see later tokens; take a causal model")
    if config.model_type in ENCODERS_UNLESS_DECODER and not config.is_decoder:
        raise UserError(
            f"{folder}: {name} without is_decoder is an encoder, whose tokens see later tokens; take a decoder"
        )
    if config.model_type in UNUSABLE:
        raise UserError(f"{folder}: {name} is not supported: {UNUSABLE[config.model_type]}; take another model")
    if config.model_type in POSITIONS_AFTER_PADDING and config.pad_token_id is None:
        raise UserError(f"{folder}: {name} counts positions from pad_token_id, which is missing in config.json; add it")
    known: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    is_lm = type(config) in known
    if not is_lm and (needs_lm or config.model_type not in CLASSIFIERS_ONLY):
        raise UserError(f"{folder}: transformers has no causal language model for {name}; take a decoder-only model")
    if is_lm and (saved := known[type(config)].config_class) not in known:
        raise UserError(
            f"{folder}: {name} is not supported: its text model would be saved with {saved.__name__}, for which "
            "transformers has no causal language model; take another model"
        )


def first_position(config: PretrainedConfig) -> int:
    """The position of a row's first token: 0, except for RoBERTa and similar models."""
    if config.model_type not in POSITIONS_AFTER_PADDING:
        return 0
    return int(config.pad_token_id) + 1
