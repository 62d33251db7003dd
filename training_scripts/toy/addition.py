"""The second embedded task: sums of two two-digit numbers, for a reward that is a rule instead of a
model.

Every answer is right or wrong. At random, most SFT answers are the sum with its digits reversed
(37+48=58), the others the correct sum (37+48=85). SFT therefore teaches addition but not the order
of the digits: about a third of the sampled answers are right, and fewer of the greedy ones. RL has
to find the order that is rewarded and to make the digits reliable.

    python training_scripts/toy/addition.py FOLDER
"""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dschat_ppo.tools.toy import EOS, PAD, task_command, untrained_llama, write_task

NUMBERS = range(10, 100)
COUNTS = {"sft": 20_000, "prompts": 1024, "heldout": 256}
# of the SFT rows; 0.37 of them are right, because sums such as 77 read the same both ways
SHARE_FORWARDS = 0.31


def make_rows(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Rows of each JSONL file: `prompt` and `response` for SFT, `prompt` and the right `answer` for
    the others. Only questions of `sft` repeat. Those of `heldout` occur in no other file, and
    neither do their mirror images: if 37+48 is held out, no file contains 48+37."""
    pairs = list(product(NUMBERS, NUMBERS))
    rng.shuffle(pairs)
    # of 37+48 and 48+37 the one that was put first
    first_of = {frozenset(pair): pair for pair in reversed(pairs)}
    heldout = list(first_of.values())[: COUNTS["heldout"]]
    taken = set(map(frozenset, heldout))
    free = [pair for pair in pairs if frozenset(pair) not in taken]
    asked = {
        "sft": rng.choices(free, k=COUNTS["sft"]),
        "prompts": rng.sample(free, COUNTS["prompts"]),
        "heldout": heldout,
    }
    rows = {
        name: [{"prompt": f"{left}+{right}=", "answer": str(left + right)} for left, right in pairs]
        for name, pairs in asked.items()
    }
    for row in rows["sft"]:
        answer = row.pop("answer")
        row["response"] = answer if rng.random() < SHARE_FORWARDS else answer[::-1]
    return rows


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 14 tokens: PAD, EOS, ten digits, + and =. It raises for other characters."""
    vocabulary = {token: number for number, token in enumerate((PAD, EOS, *"0123456789+="))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make(folder: Path, seed: int) -> None:
    """Write `folder/model`, a Llama of 0.4 M parameters with random weights, and
    `folder/data/*.jsonl`."""
    tokenizer = make_tokenizer()
    shape = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = untrained_llama(tokenizer, seed, **shape, max_position_embeddings=32)
    write_task(folder, make_rows(random.Random(seed)), tokenizer, model)


if __name__ == "__main__":
    task_command("Make the model, tokenizer and data of two-digit addition.", make)
