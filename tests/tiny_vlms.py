"""Tiny random models that see images, with their tokenizers and processors, in folders as the hub
has them; pictures; and the plain pass of transformers over one row, as an oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

WORDS = (
    "a what is the colour shape of picture this it has red green blue yellow circle square one two"
    " three which left right and or not yes no big small first second image describe answer"
    " question in on : . ?"
).split()
SPECIAL = ["<unk>", "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
OF_FAMILY = {
    "idefics3": ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    + [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
    "qwen": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "llava": ["<image>"],
    "internvl": ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "lfm2_vl": ["<image>"],
}
PLACEHOLDERS = {
    "idefics3": "<image>",
    "qwen": "<|image_pad|>",
    "llava": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<image_soft_token>",
    "lfm2_vl": "<image>",
}
# what the tokenizer of a family names
NAMED = {
    "idefics3": {},
    "qwen": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "llava": {"image_token": "<image>"},
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "lfm2_vl": {"image_token": "<image>"},
}
# contents are lists of parts, as in SmolVLM's template
PARTS_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} :"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %} <image>{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant :{% endif %}"
)
# contents are text or lists of parts, as in the templates of Qwen, LLaVA and InternVL
EITHER_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} : "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant :{% endif %}"
)
IMAGES = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "llava": "<image>"}
# in `EITHER_TEMPLATE`; of Gemma 3 the line break is one token with those around the image
IMAGES |= {
    "internvl": "<IMG_CONTEXT>\n ",
    "gemma3": "{{ '\\n' }}<start_of_image>",
    "lfm2_vl": "<image>",
}
FAMILIES = ("idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "internvl")
FAMILIES += ("gemma3",)
# those that are language models of text too, unless a flag asks for their images
ASKED = ("qwen3_5", "gemma3")
# settings of processors of images and text. Tokens of an image of 32 x 32, or of a tile of it:
# (32 / 4)^2 patches, of which 4^2 (Idefics3) or 2^2 (InternVL) are joined
PROCESSORS = {
    "idefics3": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    "llava": {
        "processor_class": "LlavaProcessor",
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
    "internvl": {"processor_class": "InternVLProcessor", "image_seq_length": 16},
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 16},
}


def group_of(family: str) -> str:
    """Families with one set of special tokens."""
    if family.startswith("qwen"):
        return "qwen"
    if family == "smolvlm":
        return "idefics3"
    return family


@cache
def tiny_vlm_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """A word for each token, or a character for Qwen3.5's, and the special tokens of the family."""
    special = SPECIAL + OF_FAMILY[group_of(family)]
    added = [AddedToken(text, special=True) for text in special]
    settings = {
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "extra_special_tokens": NAMED[group_of(family)],
    }
    if family == "qwen3_5":  # transformers has a class for it, which splits texts itself
        characters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {text: index for index, text in enumerate([*special, *characters])}
        wrapped: Any = transformers.Qwen3_5Tokenizer(vocab=vocabulary, merges=[], **settings)
        wrapped.add_tokens(added, special_tokens=True)
    else:
        words = [*special, *WORDS, "user", "assistant", "system", "\n", "\n\n"]
        vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
        if family == "gemma3":  # runs of line breaks
            tokenizer.add_tokens(
                [AddedToken("\n" * count, normalized=False) for count in range(1, 7)]
            )
        tokenizer.add_special_tokens(added)
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    wrapped.chat_template = PARTS_TEMPLATE
    if group_of(family) in IMAGES:
        wrapped.chat_template = EITHER_TEMPLATE.replace("IMAGE", IMAGES[group_of(family)])
    return wrapped


def tiny_vlm_config(family: str) -> Any:
    """The configuration of a model with a decoder of 4 layers, or 2 for Qwen3.5."""
    tokenizer = tiny_vlm_tokenizer(family)
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.1,
    }
    placeholder = tokenizer.convert_tokens_to_ids(PLACEHOLDERS[group_of(family)])
    if group_of(family) == "qwen":
        return _config_of_qwen(family, text, placeholder)
    if group_of(family) == "idefics3":
        vision = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
            "initializer_range": 0.3,
        }
        kind: Any = transformers.Idefics3Config
        if family == "smolvlm":
            kind = transformers.SmolVLMConfig
        return kind(
            text_config={"model_type": "llama", **text},
            vision_config=vision,
            image_token_id=placeholder,
            scale_factor=4,
            tie_word_embeddings=False,
        )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "initializer_range": 0.3,
    }
    if family == "llava":
        return transformers.LlavaConfig(
            text_config={"model_type": "llama", **text},
            vision_config={"model_type": "clip_vision_model", **vision},
            image_token_index=placeholder,
            image_seq_length=16,
        )
    if family == "gemma3":
        text |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}
        text["layer_types"] = ["sliding_attention", "full_attention"] * 2
        return transformers.Gemma3Config(
            text_config=text,
            vision_config={**vision, "patch_size": 4},
            image_token_index=placeholder,
            boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
            eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
            mm_tokens_per_image=16,
            tie_word_embeddings=False,
        )
    if family == "lfm2_vl":
        text["layer_types"] = ["conv", "full_attention"] * 2
        del vision["image_size"]
        return transformers.Lfm2VlConfig(
            text_config={"model_type": "lfm2", **text},
            vision_config={**vision, "num_patches": 64, "vision_use_head": False},
            image_token_id=placeholder,
            projector_hidden_size=48,
            tie_word_embeddings=False,
        )
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **text},
        vision_config={**vision, "patch_size": 4},
        image_token_id=placeholder,
        image_seq_length=16,
        tie_word_embeddings=False,
    )


def _config_of_qwen(family: str, text: dict[str, Any], placeholder: int) -> Any:
    """That of a model of Qwen's families, with the settings `text` of its decoder."""
    tokenizer = tiny_vlm_tokenizer(family)
    ids = {
        "image_token_id": placeholder,
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        "tie_word_embeddings": False,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 2,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "initializer_range": 0.3,
    }
    if family == "qwen2_5_vl":
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        }
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    text["head_dim"] = 16
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    vision |= {"depth": 3, "num_position_embeddings": 64}
    if family == "qwen3_5":
        text["rope_parameters"]["mrope_section"] = [1, 1, 0]
        text["rope_parameters"]["partial_rotary_factor"] = 0.25
        text |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        return transformers.Qwen3_5Config(text_config=text, vision_config=vision, **ids)
    vision["deepstack_visual_indexes"] = [0, 1]
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)


def tiny_image_processor(family: str) -> Any:
    """The family's own processor of images, without torchvision."""
    if group_of(family) == "qwen":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        return Qwen2VLImageProcessorPil(
            patch_size=4,
            temporal_patch_size=2,
            merge_size=2,
            size={"shortest_edge": 8 * 8, "longest_edge": 32 * 32},
        )
    if family == "llava":
        from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

        side = {"height": 32, "width": 32}
        return LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size=side)
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    if family == "internvl":
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            GotOcr2ImageProcessorPil,
        )

        return GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=3)
    size = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    if family == "smolvlm":
        from transformers.models.smolvlm.image_processing_pil_smolvlm import (
            SmolVLMImageProcessorPil,
        )

        return SmolVLMImageProcessorPil(**size)
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    return Idefics3ImageProcessorPil(**size)


def save_tiny_vlm(folder: Path, family: str, seed: int = 0) -> Path:
    """A folder with a random model, its tokenizer and its processor of images."""
    config = tiny_vlm_config(family)
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    if family == "gemma3":  # 0 in transformers, so that no picture would count
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    model.save_pretrained(folder)
    tiny_vlm_tokenizer(family).save_pretrained(folder)
    if family != "lfm2_vl":  # its processor needs torchvision
        tiny_image_processor(family).save_pretrained(folder)
    if family in PROCESSORS:
        settings = json.dumps(PROCESSORS[family])
        (folder / "processor_config.json").write_text(settings)
    return folder


def noise(width: int, height: int, seed: int) -> Image.Image:
    """A picture of random pixels."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def plain_logprobs(model: Any, inputs: dict[str, Tensor], banned_ids: Sequence[int] = ()) -> Tensor:
    """(T - 1,): log-probs of the tokens of one row after the first, by transformers' own pass over
    ids and pixels; banned tokens have no probability."""
    with torch.no_grad():
        logits = model(**inputs).logits[0, :-1].float()
    logits[:, list(banned_ids)] = -torch.inf
    return logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
