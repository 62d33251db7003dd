"""Rows with images as a run of step 1 reads them, and pictures in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_vlms import noise

from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.templates import with_template_flags
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
    return words + ["--eval_fraction", "0", *further]


def prepared(vlm: Path, data: Path, *further: str) -> tuple[Any, Any, Any]:
    """(the token rows of a data file, the configuration, the tokenizer)."""
    config: Any = parse("sft", flags(vlm, data, *further))
    tokenizer = with_template_flags(load_tokenizer(str(vlm), "model"), config.data)
    data_of_step = read_by_model(config, config.step_data, str(vlm), tokenizer)
    return prepare(data_of_step, tokenizer).at_hand, config, tokenizer
