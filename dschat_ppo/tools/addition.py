"""The second embedded task: sums of two two-digit numbers, for a reward that is a rule instead of a model.

Every answer is right or wrong. At random, most SFT answers are the sum with its digits reversed (37+48=58), the others
the correct sum (37+48=85). SFT therefore teaches addition but not the order of the digits: about a third of the sampled
answers are right, and fewer of the greedy ones. RL has to find the order that is rewarded and to make the digits
reliable.

    python -m dschat_ppo.tools.addition FOLDER
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dschat_ppo.tools.toy_model import EOS, PAD, task_command, untrained_llama, write_task

NUMBERS = range(10, 100)
COUNTS = {"sft": 20_000, "prompts": 1024, "heldout": 256}
SHARE_FORWARDS = 0.31  # of the SFT rows; 0.37 of them are right, because sums such as 77 read the same both ways


@dataclass(frozen=True)
class Sum:
    """The question for `left` + `right`."""

    left: int
    right: int

    @property
    def text(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The right answer."""
        return str(self.left + self.right)


def answer_either_way(question: Sum, rng: random.Random) -> str:
    """The right answer with probability `SHARE_FORWARDS`, otherwise its digits reversed."""
    return question.answer if rng.random() < SHARE_FORWARDS else question.answer[::-1]


def make_questions(rng: random.Random) -> dict[str, list[Sum]]:
    """Questions of each file; those of `sft` repeat. Questions of `heldout` occur in no other file, and neither do
    their mirror images: if 37+48 is held out, no file contains 48+37."""
    pairs = list(product(NUMBERS, NUMBERS))
    rng.shuffle(pairs)
    first_of = {
        frozenset(pair): pair for pair in reversed(pairs)
    }  # of 37+48 and 48+37 the one that the shuffle put first
    heldout = list(first_of.values())[: COUNTS["heldout"]]
    taken = {frozenset(pair) for pair in heldout}
    free = [Sum(*pair) for pair in pairs if frozenset(pair) not in taken]
    return {
        "sft": rng.choices(free, k=COUNTS["sft"]),
        "prompts": rng.sample(free, COUNTS["prompts"]),
        "heldout": [Sum(*pair) for pair in heldout],
    }


def make_rows(questions: dict[str, list[Sum]], rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Rows of each JSONL file: `prompt` and `response` for SFT, `prompt` and the right `answer` for the others."""
    rows = {"sft": [{"prompt": q.text, "response": answer_either_way(q, rng)} for q in questions["sft"]]}
    for part in ("prompts", "heldout"):
        rows[part] = [{"prompt": q.text, "answer": q.answer} for q in questions[part]]
    return rows


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 14 tokens: PAD, EOS, ten digits, + and =. It raises for other characters."""
    vocabulary = {token: number for number, token in enumerate((PAD, EOS, *"0123456789+="))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of 0.4 M parameters with random weights."""
    return untrained_llama(
        tokenizer,
        seed,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
    )


def make(folder: Path, seed: int) -> None:
    """Write `folder/model` and `folder/data/*.jsonl`."""
    rng = random.Random(seed)
    rows = make_rows(make_questions(rng), rng)
    tokenizer = make_tokenizer()
    write_task(folder, rows, tokenizer, make_model(tokenizer, seed))


if __name__ == "__main__":
    task_command("Make the model, tokenizer and data of two-digit addition.", make)
