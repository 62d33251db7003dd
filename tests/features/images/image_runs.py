"""Rows with images as a run of step 1 reads them, and pictures in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_vlms import ASKED, noise
from torch import Tensor

from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.templates import with_template_flags
from dschat_ppo.features.images.given_embeddings import sources_of_roles
from dschat_ppo.features.images.image_files import ImageFile, decoded_image
from dschat_ppo.features.images.step_data import read_by_model
from dschat_ppo.models.tokenizers import load_tokenizer

SIZES = {"a.png": (32, 32), "b.png": (20, 50), "c.png": (64, 40)}


def write_pictures(folder: Path) -> None:
    """Pictures of noise of three sizes, and one more of the size of `a.png`."""
    for seed, (name, size) in enumerate([*SIZES.items(), ("d.png", SIZES["a.png"])]):
        noise(*size, seed).save(folder / name)


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A data file."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(vlm: Path, data: Path, *further: str) -> list[str]:
    """Words of a command of step 1 in fp32 over all rows."""
    words = ["--model_name_or_path", str(vlm), "--data_path", str(data), "--dtype", "fp32"]
    words += ["--data_output_path", str(data.parent / "cache"), "--data_split", "1,0,0"]
    words += ["--output_dir", str(data.parent / "out"), "--max_seq_len", "256"]
    if json.loads((Path(vlm) / "config.json").read_text())["model_type"] in ASKED:
        words += ["--with_images", "True"]
    return words + ["--eval_fraction", "0", *further]


def source_of(config: Any, vlm: str, tokenizer: Any, device: torch.device) -> Any:
    """The images of a run with one model; None if it sees none."""
    sources = sources_of_roles(config, {"model": vlm}, config.run.dtype, tokenizer, device)
    return sources.get("model")


def alone_inputs(row: dict[str, Any], processor: Any, side: int = 0) -> dict[str, Tensor]:
    """What transformers takes of a token row: the ids of its prompt and of one of its answers, and
    pixels of its images."""
    ids = torch.tensor([row["prompt_ids"] + row["answers"][side]])
    inputs = {"input_ids": ids}
    if row["images"]:
        files = [ImageFile.of(reference) for reference in row["images"]]
        images = [decoded_image(file.content(), 10**6) for file in files]
        inputs |= processor.pixels(images)
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == processor.image_id).int()
        if processor.config.model_type == "gemma3":
            inputs["token_type_ids"] = (ids == processor.image_id).int()
    return inputs


def each_row_alone(
    whole: Any, masks: Tensor, alone: list[dict[str, Tensor]]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Log-probs of the targets, and the gradients of their sum by the names of the weights, by
    transformers' own pass over each row."""
    logprobs = []
    for mask, inputs in zip(masks, alone, strict=True):
        logits = whole(**inputs).logits[0, :-1]
        of_row = logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        logprobs.append(of_row[mask[1 : len(of_row) + 1]])
        logprobs[-1].sum().backward()
    gradients = {name: weight.grad for name, weight in whole.named_parameters()}
    return torch.cat(logprobs).detach(), gradients


def prepared_pairs(vlm: Path, data: Path, *further: str) -> tuple[Any, Any, Any]:
    """`prepared` of step 2, which gets all rows."""
    return prepared(vlm, data, *further, step="reward")


def flags_of_prompts(vlm: Path, data: Path, *further: str) -> list[str]:
    """Those of step 3, which gets all rows."""
    words = flags(vlm, data, *further)
    words[words.index("--model_name_or_path")] = "--actor_model_name_or_path"
    words[words.index("1,0,0")] = "0,0,1"
    words[words.index("--max_seq_len")] = "--max_prompt_seq_len"
    fraction = words.index("--eval_fraction")
    del words[fraction : fraction + 2]
    return words


def prepared_prompts(vlm: Path, data: Path, *further: str) -> tuple[Any, Any, Any]:
    """(the prompts of step 3 in the order of their file, the configuration, the tokenizer)."""
    words = flags_of_prompts(vlm, data, *further)
    words += ["--use_reward_model", "False", "--reward_function", "numbers:value"]
    config: Any = parse("ppo", words)
    tokenizer = with_template_flags(load_tokenizer(str(vlm), "model"), config.data)
    data_of_step = read_by_model(config, config.step_data, str(vlm), tokenizer)
    rows = prepare(data_of_step, tokenizer).at_hand
    texts = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
    pictures = [json.loads(line)["image"] for line in data.read_text().splitlines()]
    order = sorted(
        range(len(rows)),
        key=lambda index: list(zip(texts, pictures, strict=True)).index(_read(rows[index])),
    )
    return rows.select(order), config, tokenizer


def _read(token_row: dict[str, Any]) -> tuple[Any, Any]:
    """The text and the pictures of the data row of a token row."""
    row = json.loads(token_row["row"])
    return row["prompt"], row["image"]


def prepared(vlm: Path, data: Path, *further: str, step: str = "sft") -> tuple[Any, Any, Any]:
    """(the token rows of a data file, the configuration, the tokenizer)."""
    words = flags(vlm, data, *further)
    if step == "reward":
        words[words.index("1,0,0")] = "0,1,0"
    config: Any = parse(step, words)
    tokenizer = with_template_flags(load_tokenizer(str(vlm), "model"), config.data)
    data_of_step = read_by_model(config, config.step_data, str(vlm), tokenizer)
    return prepare(data_of_step, tokenizer).at_hand, config, tokenizer
