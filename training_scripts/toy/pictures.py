"""The third embedded task: the colour in a picture, which no text says; or the shape, or the number
of dots.

Each picture has 32 x 32 pixels and shows a patch of one of four colours, one of four shapes, or one
to four dots on grey. SFT sees a random answer, so that a quarter of the sampled ones are right, or
with a `--right_share` as many right ones more. RL has to find out what to look at. The model is an
Idefics3 of 0.3 M parameters with random weights, its vision tower among them. The colour is learned
without training the tower.

    python training_scripts/toy/pictures.py FOLDER [--asked colour|shape|number]
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from dschat_ppo.common.atomic_files import PARTIAL, empty_folder, move_files_up, write_file
from dschat_ppo.tools.toy import task_command

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 40),
    "blue": (40, 60, 220),
    "yellow": (230, 220, 40),
}
SHAPES = ("circle", "square", "triangle", "cross")
NUMBERS = ("one", "two", "three", "four")
ANSWERS = {"colour": tuple(COLOURS), "shape": SHAPES, "number": NUMBERS}
SIDE = 32
COUNTS = {"sft": 512, "pairs": 512, "prompts": 512, "heldout": 128}
SPECIAL = ("<unk>", "<pad>", "<end>", "<user>", "<assistant>")
# those that Idefics3's processor writes around an image
OF_IMAGES = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %} <image>{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %}{% if message['role'] == 'assistant' %} <end>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS = {"processor_class": "Idefics3Processor", "image_seq_len": 4}


def question(asked: str) -> str:
    """What the prompts ask."""
    return f"what is the {asked} ?"


def picture(colour: str, rng: random.Random) -> Image.Image:
    """A patch of a shade of the colour on grey."""
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(0, 255),) * 3)
    left, top = rng.randint(0, 8), rng.randint(0, 8)
    shade = tuple(channel + rng.randint(-20, 20) for channel in COLOURS[colour])
    image.paste(shade, (left, top, rng.randint(20, SIDE), rng.randint(20, SIDE)))
    return image


def shape_picture(shape: str, rng: random.Random) -> Image.Image:
    """A light shape of 18 to 26 pixels on a dark grey."""
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(0, 80),) * 3)
    size = rng.randint(18, 26)
    left, top = rng.randint(0, SIDE - size - 1), rng.randint(0, SIDE - size - 1)
    right, bottom = left + size, top + size
    fill = (rng.randint(170, 255),) * 3
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=fill)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=fill)
    elif shape == "triangle":
        draw.polygon([(left, bottom), (right, bottom), (left + size // 2, top)], fill=fill)
    else:
        third = size // 3
        draw.rectangle((left + third, top, right - third, bottom), fill=fill)
        draw.rectangle((left, top + third, right, bottom - third), fill=fill)
    return image


def number_picture(number: str, rng: random.Random) -> Image.Image:
    """So many light dots on a dark grey, in different quarters of the picture."""
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(0, 80),) * 3)
    fill = (rng.randint(170, 255),) * 3
    draw = ImageDraw.Draw(image)
    half = SIDE // 2
    quarters = [(0, 0), (half, 0), (0, half), (half, half)]
    for left, top in rng.sample(quarters, 1 + NUMBERS.index(number)):
        size = rng.randint(6, 9)
        x, y = left + rng.randint(1, half - size - 2), top + rng.randint(1, half - size - 2)
        draw.ellipse((x, y, x + size, y + size), fill=fill)
    return image


PICTURES = {"colour": picture, "shape": shape_picture, "number": number_picture}


def write_rows(folder: Path, rng: random.Random, asked: str, right_share: float) -> None:
    """Write the pictures of each JSONL file, and its rows: `image`, `prompt` and, for SFT, a random
    `response`, or the right one for a share of the rows; for pairs the right answer as `chosen` and
    another as `rejected`; for the others the right `answer`. `swapped` has the rows of `prompts`
    with their pictures in a random order."""
    names = ANSWERS[asked]
    files = dict[str, list[dict[str, Any]]]()
    for name, count in COUNTS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        rows = list[dict[str, Any]]()
        for index in range(count):
            answer = names[index % len(names)]
            image = f"{name}/{index}.png"
            PICTURES[asked](answer, rng).save(folder / image)
            row = {"image": image, "prompt": question(asked)}
            if name == "sft":
                row["response"] = rng.choice(names)
                if right_share > 0 and rng.random() < right_share:
                    row["response"] = answer
            elif name == "pairs":
                row["chosen"] = answer
                row["rejected"] = rng.choice([other for other in names if other != answer])
            else:
                row["answer"] = answer
            rows.append(row)
        files[name] = rows
    images = [row["image"] for row in files["prompts"]]
    rng.shuffle(images)
    pairs = zip(files["prompts"], images, strict=True)
    files["swapped"] = [{**row, "image": image} for row, image in pairs]
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_file(folder / f"{name}.jsonl", text.encode())


def make_tokenizer(asked: str) -> PreTrainedTokenizerFast:
    """A token for each word of the question and each answer, and the special ones."""
    special = (*SPECIAL, *OF_IMAGES)
    words = (*special, *question(asked).split(), *ANSWERS[asked])
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<end>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """An Idefics3 with random weights, to which a picture is 4 tokens."""
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 4,
        "initializer_range": 0.2,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=4,  # 8 x 8 patches, of which 4 x 4 become a token
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config)


def make(folder: Path, seed: int, asked: str, right_share: float) -> None:
    """Write `folder/data` and `folder/model`, whose weights come last: if they exist, the task is
    complete."""
    write_rows(folder / "data", random.Random(seed), asked, right_share)
    tokenizer = make_tokenizer(asked)
    partial_folder = empty_folder(folder / "model" / PARTIAL)
    tokenizer.save_pretrained(partial_folder)
    size = {"longest_edge": SIDE}
    processor = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    processor.save_pretrained(partial_folder)
    (partial_folder / "processor_config.json").write_text(json.dumps(SETTINGS))
    make_model(tokenizer, seed).save_pretrained(partial_folder)
    move_files_up(partial_folder)


if __name__ == "__main__":
    task_command(
        "Make the model, the pictures and the questions.",
        make,
        asked={"choices": list(ANSWERS), "default": "colour", "help": "what the questions ask"},
        right_share={
            "type": float,
            "default": 0.0,
            "help": "share of the answers of SFT that are right on purpose; the others are random",
        },
    )
