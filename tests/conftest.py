"""Small models, tokenizers and data that the tests share. Nothing is downloaded."""

import gc
import json
import logging
import os
import random
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for GPUs run on the CPU

from dschat_ppo.common.host_memory import lasting_objects

with lasting_objects():
    import pytest
    import torch
    from fixed_dtype import use_bf16_by_default
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from dschat_ppo.common import stop_requests
    from dschat_ppo.common.logging import logger
    from dschat_ppo.tools import toy

use_bf16_by_default()
torch.set_num_threads(1)
# a shell lets what it starts with `&` ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--update-docs",
        action="store_true",
        help="write measured tables to docs/ instead of comparing",
    )


def pytest_collection() -> None:
    """The garbage collector would search all modules again and again while tests import them."""
    gc.disable()


def pytest_collection_finish() -> None:
    """DeepSpeed collects garbage for each engine: the modules and tests need not be searched each
    time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_signals():
    """After each test, signals are handled as before, and no request to stop is left."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    stop_requests.reset()


def tiny_config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**{**settings, **changes})


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> Path:
    """A folder with `lm`, `uniform_lm` and `reward` (tiny fp32 models, one tokenizer) and
    `sft|pairs|prompts.jsonl`."""
    folder = tmp_path_factory.mktemp("assets")
    rng = random.Random(0)
    questions = [
        toy.Question(*map(rng.choice, (toy.NAMES, toy.COLOURS, toy.THINGS)), 0) for _ in range(40)
    ]
    tokenizer = toy.make_tokenizer(["a few words to merge"])
    torch.manual_seed(0)
    kinds = {
        "lm": LlamaForCausalLM,
        "reward": LlamaForSequenceClassification,
        "uniform_lm": LlamaForCausalLM,
    }
    for name, kind in kinds.items():
        spread = 0.02 if name == "uniform_lm" else 0.2
        kind(tiny_config(num_labels=1, initializer_range=spread)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    words = ["red", "blue", "a lamp", "here", "yes", "no thanks", "in the hall"]

    def answer() -> str:
        return " " + " ".join(rng.choice(words) for _ in range(rng.randint(1, 5)))

    rows = {
        "sft": [{"prompt": q.text[: rng.randint(3, 20)], "response": answer()} for q in questions],
        "pairs": [
            {"prompt": q.text[:12], "chosen": answer(), "rejected": answer()} for q in questions
        ],
        "prompts": [{"prompt": q.text[: rng.randint(3, 20)]} for q in questions],
    }
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in part), encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="session")
def stored_rollout(assets) -> Path:
    """`assets/rollout.pt`: fields of a `Rollout` of 16 rows of uneven lengths, random ids in
    padding too."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (16,), generator=generator)
    prompt_lengths = torch.randint(2, 7, (16,), generator=generator)
    rollout = {
        "prompt_ids": torch.randint(5, 300, (16, 6), generator=generator),
        "prompt_mask": torch.arange(6) >= 6 - prompt_lengths.unsqueeze(1),
        "response_ids": torch.randint(5, 300, (16, 8), generator=generator),
        "response_mask": torch.arange(8) < lengths.unsqueeze(1),
        "rollout_logprobs": torch.zeros(16, 8),
        "finish_reason": torch.where(lengths < 8, 0, 2).to(torch.int8),
    }
    torch.save(rollout, assets / "rollout.pt")
    return assets / "rollout.pt"


@pytest.fixture
def said():
    """Messages logged while the test runs."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger().addHandler(handler)
    yield lines
    logger().removeHandler(handler)
