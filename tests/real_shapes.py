"""Small data sets with the columns and nesting of published ones."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

THINGS = ("lamp", "chair", "rope", "kite", "jar", "drum", "clock", "scarf")
PLACES = ("hall", "attic", "shed", "garden", "cellar")


def questions(count: int) -> list[tuple[str, str, str]]:
    """(question, good answer, bad answer), all different."""
    pairs = [(thing, place) for place in PLACES for thing in THINGS][:count]
    return [(f"Where is the {thing}?", f"In the {place}.", f"Not in the {place}.") for thing, place in pairs]


def turns(*contents: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def sharegpt(count: int) -> list[dict[str, Any]]:
    """ShareGPT: `conversations` of `from` and `value`, several turns."""
    return [
        {
            "id": f"c{number}",
            "conversations": [
                {"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."},
                {"from": "human", "value": question}, {"from": "gpt", "value": good},
            ],
        }
        for number, (question, good, _) in enumerate(questions(count))
    ]  # fmt: skip


def hh(count: int) -> list[dict[str, Any]]:
    """Anthropic/hh-rlhf: two transcripts that share all but the last turn."""
    start = "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: {}\n\nAssistant: {}"
    return [
        {"chosen": start.format(question, good), "rejected": start.format(question, bad)}
        for question, good, bad in questions(count)
    ]


def verl(count: int, source: str = "openai/gsm8k") -> list[dict[str, Any]]:
    """Rows as verl's preprocessing scripts write them to Parquet."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"What is {number} + 2?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 2)},
            "extra_info": {"split": "train", "index": number, "answer": f"#### {number + 2}"},
        }
        for number in range(count)
    ]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write JSONL."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write Parquet."""
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
