"""Tiny random models that see images, with their tokenizers and processors, in folders as the hub
has them; pictures; and the plain pass of transformers over one row, as an oracle."""

from __future__ import annotations

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
}
PLACEHOLDERS = {"idefics3": "<image>", "qwen": "<|image_pad|>"}
# contents are lists of parts, as in SmolVLM's template
PARTS_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} :"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %} <image>{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant :{% endif %}"
)
# contents are text or lists of parts, as in Qwen's templates
EITHER_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} : "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant :{% endif %}"
)
FAMILIES = ("idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl")


def group_of(family: str) -> str:
    """Families with one set of special tokens."""
    return "qwen" if family.startswith("qwen") else "idefics3"


@cache
def tiny_vlm_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """A word for each token, and the special tokens of the family."""
    special = SPECIAL + OF_FAMILY[group_of(family)]
    words = [*special, *WORDS, "user", "assistant", "system", "\n", "\n\n"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    named = {}
    if group_of(family) == "qwen":
        named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=named,
    )
    template = PARTS_TEMPLATE
    if group_of(family) == "qwen":
        template = EITHER_TEMPLATE
    wrapped.chat_template = template
    return wrapped


def tiny_vlm_config(family: str) -> Any:
    """The configuration of a model with a decoder of 4 layers."""
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
    vision |= {
        "depth": 3,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 64,
    }
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
    model.save_pretrained(folder)
    tiny_vlm_tokenizer(family).save_pretrained(folder)
    tiny_image_processor(family).save_pretrained(folder)
    if group_of(family) == "idefics3":
        # tokens of an image of 32 x 32: (32 / 4)^2 patches, 4^2 of them joined
        (folder / "processor_config.json").write_text(
            '{"processor_class": "%s", "image_seq_len": 4}'
            % ("SmolVLMProcessor" if family == "smolvlm" else "Idefics3Processor")
        )
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
