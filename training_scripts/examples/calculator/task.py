"""Sums of three or four two-digit numbers, with and without a calculator.

SFT teaches the format of calls and answers, and nothing about their use: where there is a tool, a
third of the demonstrations call it with the whole sum, a third leave out the last number, and a
third answer without a call. Answers without a call are right in the data, but this model is too
small to add four numbers in one go.

    python training_scripts/examples/calculator/task.py FOLDER
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from calculator import calculate
from transformers.utils import get_json_schema

from dschat_ppo.tools.toy import make_tokenizer, task_command, untrained_llama, write_task

COUNTS = {"sft": 6000, "prompts": 1024, "heldout": 128}
SHARE_WITH_TOOL = 0.75  # of the demonstrations

# Calls and results as Hermes and Qwen write them; tools by name alone, which keeps prompts short.
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}{%"
    " endif %}{% for message in messages %}{% if message.role == 'tool'"
    " %}<|user|><tool_response>{{ message.content }}</tool_response>{% else %}<|{{ message.role"
    ' }}|>{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{'
    ' call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{%'
    " endfor %}{% endif %}{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}<|assistant|>{% endif %}"
)


def ask(numbers: list[int]) -> list[dict[str, Any]]:
    """The user's question."""
    return [{"role": "user", "content": f"What is {'+'.join(map(str, numbers))}?"}]


def answer(total: int) -> dict[str, Any]:
    """The model's last message."""
    return {"role": "assistant", "content": f"The sum is {total}."}


def demonstration(numbers: list[int], rng: random.Random) -> dict[str, Any]:
    """A row of SFT."""
    if rng.random() >= SHARE_WITH_TOOL:
        return {"messages": [*ask(numbers), answer(sum(numbers))], "tools": []}
    called = rng.choice((numbers, numbers[:-1], None))
    turns = [answer(sum(numbers))]
    if called:
        call = {"name": "calculate", "arguments": {"expression": "+".join(map(str, called))}}
        turns = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            },
            {"role": "tool", "name": "calculate", "content": str(calculate(**call["arguments"]))},
            answer(sum(called)),
        ]
    return {"messages": [*ask(numbers), *turns], "tools": [get_json_schema(calculate)]}


def make_rows(rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Rows of each JSONL file; no sum is in two of them."""
    found: dict[tuple[int, ...], None] = {}
    while len(found) < sum(COUNTS.values()):
        found[tuple(rng.randrange(10, 100) for _ in range(rng.choice((3, 4))))] = None
    sums = [list(numbers) for numbers in found]
    parts = {"sft": sums[: COUNTS["sft"]], "heldout": sums[-COUNTS["heldout"] :]}
    parts["prompts"] = sums[COUNTS["sft"] : -COUNTS["heldout"]]
    rows = {
        part: [{"prompt": ask(numbers), "answer": str(sum(numbers))} for numbers in of]
        for part, of in parts.items()
    }
    return rows | {"sft": [demonstration(numbers, rng) for numbers in parts["sft"]]}


def make(folder: Path, seed: int) -> None:
    """Write `folder/model`, a Llama of 0.25 M parameters with random weights, and
    `folder/data/*.jsonl`."""
    rows = make_rows(random.Random(seed))
    call = (
        '<tool_call>{"name": "calculate", "arguments": {"expression":'
        ' ""}}</tool_call><tool_response></tool_response>'
    )
    texts = [turn["content"] for row in rows["sft"] for turn in row["messages"]] + [call] * 1000
    # so each digit is a token
    tokenizer = make_tokenizer([re.sub(r"\d", "", text) for text in texts])
    tokenizer.chat_template = CHAT_TEMPLATE
    shape = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    write_task(
        folder,
        rows,
        tokenizer,
        untrained_llama(tokenizer, seed, **shape, max_position_embeddings=256),
    )


if __name__ == "__main__":
    task_command("Make the model, tokenizer and data of sums with a calculator.", make)
