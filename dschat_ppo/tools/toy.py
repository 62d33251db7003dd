"""The embedded default task: a tokenizer, an untrained model and data of short conversations,
generated from a seed.

A user says their name and asks where a thing is. Half of the training answers are kind (a greeting
by name, the thing, a friendly close), half are curt. A quarter of the conversations go on with a
second question, which is answered in the same tone. Kind answers are preferred. `keeps_rule` checks
this preference exactly, so the result of PPO with a *learned* reward can be compared with the true
preference; `true_rule` is its reward function.

    python -m dschat_ppo.tools.toy FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

# imported where they are used: `true_rule` runs in separate processes, and needs no torch
if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ida Jon Kim Leo Mia Ned Ola Pia Quin Rosa Sam Tess".split()
)
COLOURS = "red blue green black white yellow brown grey pink golden".split()
THINGS = (
    "lamp kettle chair scarf drum ladder bucket violin clock basket helmet pillow mirror rope"
    " kite jar".split()
)
PLACES = "kitchen garden attic cellar garage hall library bedroom office shed".split()
QUESTIONS = (
    "I am {name}. Where is the {colour} {thing}?",
    "My name is {name}. Have you seen the {colour} {thing}?",
    "This is {name}. I am looking for the {colour} {thing}.",
    # of a second question
    "Where is the {colour} {thing}?",
    "And the {colour} {thing}?",
)
FIRST = 3  # wordings that say the name
GREETINGS = ("Hello", "Hi", "Good day", "Welcome")
KIND_CLOSES = ("Have a lovely day!", "I am glad to help.", "Ask me any time.", "It was a pleasure.")
GRUMBLES = ("Not again.", "Use your eyes.", "How boring.", "I am busy.")
CURT_CLOSES = ("Stop asking.", "Now go away.", "Leave me alone.", "What a silly question.")

PAD, EOS = "<|pad|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNTS = {
    "sft": 8000,
    "sft_eval": 256,
    "second": 2000,
    "pairs": 2000,
    "pairs_eval": 256,
    "prompts": 2000,
    "heldout": 128,
}


@dataclass(frozen=True)
class Question:
    """A question: the user's name, and the colour and name of the thing."""

    name: str
    colour: str
    thing: str
    wording: int

    @property
    def text(self) -> str:
        return QUESTIONS[self.wording].format(name=self.name, colour=self.colour, thing=self.thing)


def kind_answer(question: Question, rng: random.Random) -> str:
    """A random answer that satisfies the rule."""
    location = rng.choice(PLACES)
    return (
        f"{rng.choice(GREETINGS)} {question.name}! The {question.colour} {question.thing} is in the"
        f" {location}. {rng.choice(KIND_CLOSES)}"
    )


def curt_answer(question: Question, rng: random.Random) -> str:
    """A random answer that violates the rule."""
    location = rng.choice(PLACES)
    return (
        f"{rng.choice(GRUMBLES)} The {question.colour} {question.thing} is in the {location}."
        f" {rng.choice(CURT_CLOSES)}"
    )


def keeps_rule(question: Question, answer: str) -> bool:
    """The true preference: greets the user by name, mentions the requested thing, closes kindly,
    has no curt phrase."""
    return (
        answer.startswith(tuple(f"{greeting} {question.name}!" for greeting in GREETINGS))
        and f"the {question.colour} {question.thing} " in answer.lower()
        and answer.endswith(KIND_CLOSES)
        and not any(phrase in answer for phrase in GRUMBLES + CURT_CLOSES)
    )


def true_rule(response: str, about: dict[str, Any], **_: Any) -> float:
    """The rule as a reward function of step 3, for `heldout.jsonl`: 1.0 if the answer follows it,
    else 0.0."""
    return float(keeps_rule(Question(**about), response))


def make_questions(rng: random.Random) -> dict[str, list[Question]]:
    """Questions of each file; `second` continues the first rows of `sft`. No file repeats a (name,
    colour, thing) of `heldout`, `sft_eval` or `pairs_eval`, and only `sft` and `second` ask the
    same question twice."""

    def worded(combination: tuple[str, str, str], wordings: int = FIRST) -> Question:
        return Question(*combination, wording=rng.randrange(wordings))

    combinations = list(product(NAMES, COLOURS, THINGS))
    rng.shuffle(combinations)
    questions: dict[str, list[Question]] = {}
    start = 0
    for split in ("heldout", "sft_eval", "pairs_eval"):
        end = start + COUNTS[split]
        questions[split] = [worded(combination) for combination in combinations[start:end]]
        start = end
    free = combinations[start:]
    # their answers differ
    questions["sft"] = [worded(rng.choice(free)) for _ in range(COUNTS["sft"])]
    for split in ("pairs", "prompts"):
        distinct: dict[Question, None] = {}
        while len(distinct) < COUNTS[split]:
            distinct[worded(rng.choice(free))] = None
        questions[split] = list(distinct)
    free_of_name: dict[str, list[tuple[str, str, str]]] = {name: [] for name in NAMES}
    for combination in free:
        free_of_name[combination[0]].append(combination)
    questions["second"] = []
    for first in questions["sft"][: COUNTS["second"]]:
        second = worded(rng.choice(free_of_name[first.name]), len(QUESTIONS))
        questions["second"].append(second)
    return questions


def make_rows(
    questions: dict[str, list[Question]], rng: random.Random
) -> dict[str, list[dict[str, Any]]]:
    """Rows of each JSONL file, in the column layouts of the three steps."""

    def user_message(question: Question) -> dict[str, str]:
        return {"role": "user", "content": question.text}

    def assistant_message(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    rows: dict[str, list[dict[str, Any]]] = {}
    for split in ("sft", "sft_eval"):
        answered: dict[tuple[Question, str], None] = {}
        for index, question in enumerate(questions[split]):
            while len(answered) == index:  # until no row repeats another
                write_answer = rng.choice((kind_answer, curt_answer))
                answered[question, write_answer(question, rng)] = None
        rows[split] = [
            {"messages": [user_message(question), assistant_message(text)]}
            for question, text in answered
        ]
    for split in ("pairs", "pairs_eval"):
        rows[split] = [
            {
                "prompt": [user_message(question)],
                "chosen": kind_answer(question, rng),
                "rejected": curt_answer(question, rng),
            }
            for question in questions[split]
        ]
    rows["prompts"] = [{"prompt": [user_message(question)]} for question in questions["prompts"]]
    rows["heldout"] = [
        {"prompt": [user_message(question)], "about": vars(question)}
        for question in questions["heldout"]
    ]
    # The first conversations go on, in the tone of their first answer.
    for row, first, second in zip(rows["sft"], questions["sft"], questions["second"], strict=False):
        write_answer = curt_answer
        if keeps_rule(first, row["messages"][-1]["content"]):
            write_answer = kind_answer
        row["messages"] += [user_message(second), assistant_message(write_answer(second, rng))]
    return rows


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 768 tokens with PAD, EOS, role tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [PAD, EOS, "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=768, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
    fast.add_special_tokens({"additional_special_tokens": specials[2:]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make(folder: Path, seed: int) -> None:
    """Write `folder/model`, a Llama of 1.7 M parameters with random weights, and
    `folder/data/*.jsonl`."""
    rng = random.Random(seed)
    rows = make_rows(make_questions(rng), rng)
    texts = [message["content"] for row in rows["sft"] for message in row["messages"]]
    tokenizer = make_tokenizer(texts)
    shape = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
    }
    model = untrained_llama(
        tokenizer, seed, **shape, num_key_value_heads=3, max_position_embeddings=256
    )
    write_task(folder, rows, tokenizer, model)


def untrained_llama(
    tokenizer: PreTrainedTokenizerFast, seed: int, **shape: Any
) -> LlamaForCausalLM:
    """A Llama with random weights and the vocabulary, PAD and EOS of `tokenizer`; `shape` are names
    of `LlamaConfig`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    return LlamaForCausalLM(config)


def write_task(
    folder: Path,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    tokenizer: PreTrainedTokenizerFast,
    model: LlamaForCausalLM,
) -> None:
    """Write and sync `folder/model` (weights and tokenizer) and `folder/data/NAME.jsonl` for each
    entry of `rows`. The weights are written last: if they exist, the task is complete."""
    from dschat_ppo.common.atomic_files import (
        PARTIAL,
        empty_folder,
        make_folder,
        move_files_up,
        write_file,
    )

    make_folder(folder / "data")
    for name, file_rows in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in file_rows)
        write_file(folder / "data" / f"{name}.jsonl", lines.encode())
    partial = empty_folder(folder / "model" / PARTIAL)
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    move_files_up(partial)


def task_command(description: str, make: Callable[..., None], **options: Mapping[str, Any]) -> None:
    """The command line `FOLDER [--seed N]` of a task: calls `make(FOLDER, N)`, with further
    `options` by their names, whose values are arguments of argparse's `add_argument`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="folder for `model/` and `data/`")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the data and the weights")
    for name, option in options.items():
        parser.add_argument(f"--{name}", **option)
    args = parser.parse_args()
    if args.folder.exists() and not args.folder.is_dir():
        parser.error(f"{args.folder}: is not a folder")
    from dschat_ppo.common.logging import quiet_hugging_face

    quiet_hugging_face()
    make(args.folder, args.seed, **{name: vars(args)[name] for name in options})
    print(f"wrote the model and the data of the task to {args.folder}")


if __name__ == "__main__":
    task_command("Make the embedded model, tokenizer and data.", make)
