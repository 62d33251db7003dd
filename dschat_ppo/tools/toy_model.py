"""Shared parts of the embedded tasks: special tokens, an untrained Llama, the output folder, and the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dschat_ppo.common.atomic_files import PARTIAL, empty_folder, make_folder, move_files_up, write_file
from dschat_ppo.common.logging import quiet_hugging_face

PAD, EOS = "<|pad|>", "<|end|>"


def untrained_llama(tokenizer: PreTrainedTokenizerFast, seed: int, **shape: Any) -> LlamaForCausalLM:
    """A Llama with random weights and the vocabulary, PAD and EOS of `tokenizer`; `shape` are names of
    `LlamaConfig`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), initializer_range=0.05, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **shape,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def write_task(
    folder: Path,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    tokenizer: PreTrainedTokenizerFast,
    model: LlamaForCausalLM,
) -> None:
    """Write and sync `folder/model` (weights and tokenizer) and `folder/data/NAME.jsonl` for each entry of `rows`. The
    weights are written last: if they exist, the task is complete."""
    make_folder(folder / "data")
    for name, of_file in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in of_file)
        write_file(folder / "data" / f"{name}.jsonl", lines.encode())
    partial = empty_folder(folder / "model" / PARTIAL)
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    move_files_up(partial)


def task_command(description: str, make: Callable[[Path, int], None]) -> None:
    """The command line `FOLDER [--seed N]` of a task: calls `make(FOLDER, N)`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="folder for `model/` and `data/`")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the data and the weights")
    args = parser.parse_args()
    if args.folder.exists() and not args.folder.is_dir():
        parser.error(f"{args.folder}: is not a folder")
    quiet_hugging_face()
    make(args.folder, args.seed)
    print(f"wrote the model and the data of the task to {args.folder}")
