"""Which architectures are supported, from the configuration alone, and the peculiarities of some of
them; the class of reward models and critics: transformers' classifier, or the backbone with a head
made here."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dschat_ppo.errors import UserError, reading
from dschat_ppo.features import hooks
from dschat_ppo.models.lm_kinds import CAUSAL, LMKind, kind_of_lm
from dschat_ppo.models.model_folders import SCORE

LM_HEADS = ("lm_head.", "embed_out.")  # of language models; classifiers do not have them
# BERT and similar models are decoders only if their configuration says so; else every token sees
# every other.
ENCODERS_UNLESS_DECODER = frozenset(
    {
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "reformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)

# Their position embeddings begin with rows for padding, so the first token has position
# `pad_token_id + 1`.
POSITIONS_AFTER_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
    }
)

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

# Settings of configurations.
DROPOUTS = (
    "dropout",
    "attention_dropout",
    "hidden_dropout",
    "activation_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "embed_dropout",
    "classifier_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "emb_pdrop",
    "embedding_dropout",
    "mlp_dropout",
    "resid_dropout",
    "residual_dropout",
)
# share of the layers that a pass in training skips
SKIPPED_LAYERS = "layerdrop", "decoder_layerdrop"


def check_architecture(config: PretrainedConfig, folder: str, needs_lm: bool) -> None:
    """Refuse models that are not decoders. Rows are right-padded and models get no mask, so
    attention must be causal. `needs_lm`: whether the language model's head is used, and not only
    the backbone under a scalar head."""
    name = type(config).__name__
    if getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        raise UserError(
            f"{folder}: use_bidirectional_attention lets tokens see later tokens; take a causal"
            " model"
        )
    if config.model_type in ENCODERS_UNLESS_DECODER and not config.is_decoder:
        raise UserError(
            f"{folder}: {name} without is_decoder is an encoder, whose tokens see later tokens;"
            " take a decoder"
        )
    if config.model_type in UNUSABLE:
        raise UserError(
            f"{folder}: {name} is not supported: {UNUSABLE[config.model_type]}; take another model"
        )
    if config.model_type in POSITIONS_AFTER_PADDING and config.pad_token_id is None:
        raise UserError(
            f"{folder}: {name} counts positions from pad_token_id, which is missing in config.json;"
            " add it"
        )
    lm_classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING  # class of a configuration -> model
    is_lm = type(config) in lm_classes
    if not is_lm and (needs_lm or config.model_type not in CLASSIFIERS_ONLY):
        for reason_unusable in hooks("lm_kinds.reason_unusable"):
            reason = reason_unusable(config)
            if reason is not None:
                raise UserError(f"{folder}: {reason}")
        raise UserError(
            f"{folder}: transformers has no causal language model for {name}; take a decoder-only"
            " model"
        )
    if is_lm:
        saved_config_class = lm_classes[type(config)].config_class
        if saved_config_class not in lm_classes:
            raise UserError(
                f"{folder}: {name} is not supported: its text model would be saved with"
                f" {saved_config_class.__name__}, for which transformers has no causal language"
                " model; take another model"
            )


def first_position(config: PretrainedConfig) -> int:
    """The position of a row's first token: 0, except for RoBERTa and similar models."""
    if config.model_type not in POSITIONS_AFTER_PADDING:
        return 0
    return int(config.pad_token_id) + 1


# What building a model without weights has told, because a step asks for each model when it checks
# and when it loads it. Keys: class, configuration as JSON.
_HAS_SCORE: dict[tuple[Any, str], bool] = {}
_HEAD_NAMES: dict[tuple[Any, str], Set[str]] = {}


def check_classifier_config(
    config: PretrainedConfig, folder: str, kinds: Sequence[LMKind] = ()
) -> None:
    """Check from the configuration alone that a model can be a reward model or a critic. The scalar
    head reads the state of every token, so the model must be causal. A classifier must have one
    label and a head named `score`. Other models get a new head, or must have the layout of
    DeepSpeed-Chat. `kinds`: of language models that the run takes, beside causal ones."""
    if kind_of_lm(config, kinds) is CAUSAL:
        check_architecture(config, folder, needs_lm=False)
    names = [str(name) for name in config.architectures or []]
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return
    if config.num_labels != 1:
        raise UserError(
            f"{folder}: the classifier has {config.num_labels} labels; a reward model or critic"
            " has one"
        )
    with reading(f"{folder}: no reward model can be built from its config.json"):
        classifier = _transformers_classifier(config)
        lacks_head = classifier is not None and not _has_score(classifier, config)
    if classifier is not None and lacks_head:
        raise UserError(
            f"{folder}: {classifier.__name__} has no head named '{SCORE}' that scores every token;"
            " take the one-label classifier of a decoder, such as LlamaForSequenceClassification,"
            " or train a reward model (step 2)"
        )


def classifier_class(
    config: PretrainedConfig, kinds: Sequence[LMKind] = ()
) -> type[PreTrainedModel]:
    """The class with one scalar head, named `score`, over the states of a causal model: that of
    transformers, which then loads the saved model, or else `<Architecture>WithScalarHead`, which
    only this project loads: the base class and backbone of the language model, and a linear head
    without bias. It is whole, also for one of the `kinds` of language models with parts beside
    their decoder. Building may raise almost any exception."""
    classifier = _transformers_classifier(config)
    if classifier is not None and _has_score(classifier, config):
        return classifier
    with torch.device("meta"):
        lm = kind_of_lm(config, kinds).auto_class.from_config(config)
    lm_class = type(lm)
    backbone_name = _backbone_name(lm)
    bases = [c for c in lm_class.__mro__ if issubclass(c, PreTrainedModel)]
    # the last but PreTrainedModel, which the architecture's models share: LlamaPreTrainedModel, ...
    base: Any = bases[-2]

    def init(self: Any, config: PretrainedConfig) -> None:
        base.__init__(self, config)
        # as the language model builds it, without a pooler
        setattr(self, backbone_name, backbone_of(lm_class(config)))
        self.score = nn.Linear(config.get_text_config().hidden_size, 1, bias=False)
        self.post_init()

    stem = lm_class.__name__
    for suffix in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
        stem = stem.removesuffix(suffix)
    members = {
        "__init__": init,
        "base_model_prefix": backbone_name,
        "config_class": lm_class.config_class,
        # transformers reads its source to find which kernels can be replaced
        "__module__": lm_class.__module__,
    }
    return type(f"{stem}WithScalarHead", (base,), members)


def build_classifier(config: PretrainedConfig, kinds: Sequence[LMKind] = ()) -> Any:
    """The decoder and a scalar head, without the weights of a folder; the arguments are those of
    `classifier_class`."""
    scalar_class: Any = classifier_class(config, kinds)
    classifier = scalar_class(config_for(scalar_class, config))
    kind_of_lm(config, kinds).take_apart(classifier)
    return classifier


def config_for(kind: Any, config: PretrainedConfig) -> PretrainedConfig:
    """`config` with one label; its text part for a class of text models, as in transformers' auto
    classes."""
    if kind.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    config.num_labels = 1
    return config


def lm_head_names(config: PretrainedConfig) -> Set[str]:
    """Names of the weights of the causal language model outside its backbone."""
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return frozenset()
    key = (type(config), config.to_json_string(use_diff=False))
    if key not in _HEAD_NAMES:
        lm = lm_without_weights(config)
        backbone = f"{_backbone_name(lm)}."
        _HEAD_NAMES[key] = frozenset(
            name for name in lm.state_dict() if not name.startswith(backbone)
        )
    return _HEAD_NAMES[key]


def _transformers_classifier(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """transformers' sequence classifier for a configuration; None: it has none."""
    classifiers: Any = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    classifier: type[PreTrainedModel] | None = classifiers.get(type(config), None)
    return classifier


def _has_score(kind: Any, config: PretrainedConfig) -> bool:
    """Whether the class `kind` of classifiers has a head named `score`."""
    config = config_for(kind, config)
    key = (kind, config.to_json_string(use_diff=False))
    if key not in _HAS_SCORE:
        with torch.device("meta"):
            _HAS_SCORE[key] = hasattr(kind(config), SCORE)
    return _HAS_SCORE[key]


def lm_without_weights(config: PretrainedConfig) -> Any:
    """The causal language model of a configuration, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def backbone_of(lm: Any) -> Any:
    """A causal language model without its head. (transformers expects another name for the backbone
    of Llama 4.)"""
    if lm.base_model is lm:
        return lm.model
    return lm.base_model


def _backbone_name(lm: PreTrainedModel) -> str:
    """The attribute of a language model that holds its backbone."""
    backbone = backbone_of(lm)
    return next(name for name, module in lm.named_children() if module is backbone)
