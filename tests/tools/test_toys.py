"""The embedded tasks, conversations (`toy`) and sums (`addition`): rules, data, tokenizers, and
their seed."""

import json
import random

import addition
import pytest
from transformers import AutoTokenizer

from dschat_ppo.tools import toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("addition")
    addition.make(made, 5)
    return made


def read(folder, name):
    return [
        json.loads(line) for line in (folder / "data" / f"{name}.jsonl").read_text().splitlines()
    ]


def operands(prompt):
    """'37+48=' -> (37, 48), without the code under test."""
    assert len(prompt) == 6 and prompt[2] == "+" and prompt[5] == "="
    return int(prompt[:2]), int(prompt[3:5])


def test_held_out_sums_and_their_mirror_images_are_in_no_other_file(folder):
    held_out = {operands(row["prompt"]) for row in read(folder, "heldout")}
    for name in ("sft", "prompts"):
        asked = {operands(row["prompt"]) for row in read(folder, name)}
        assert not held_out & asked
        assert not held_out & {(right, left) for left, right in asked}
    assert not {pair for pair in held_out if pair[0] != pair[1]} & {
        (right, left) for left, right in held_out
    }
    assert any(left > right for left, right in held_out) and any(
        left < right for left, right in held_out
    )


@pytest.mark.parametrize("task", [addition, toy])
def test_files_depend_on_the_seed_alone(task, tmp_path, monkeypatch):
    for part, count in task.COUNTS.items():
        monkeypatch.setitem(task.COUNTS, part, count // 8)
    for name, seed in (("one", 5), ("again", 5), ("other", 6)):
        task.make(tmp_path / name, seed)
    files = sorted(
        path.relative_to(tmp_path / "one")
        for path in (tmp_path / "one").rglob("*")
        if path.is_file()
    )
    assert len(files) >= 7
    for file in files:
        one, again, other = (
            (tmp_path / name / file).read_bytes() for name in ("one", "again", "other")
        )
        assert one == again, file
        assert one != other or file.suffix not in (".jsonl", ".safetensors"), file
    tokenizer, row = (
        AutoTokenizer.from_pretrained(tmp_path / "one/model"),
        read(tmp_path / "one", "sft")[0],
    )
    text = "0123456789+=<|end|>"
    if task is toy:
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    ids = tokenizer.encode(text)
    assert (
        tokenizer.decode(ids) == text
        and ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id
    )
    assert task is toy or len(set(ids)) == 13


MIA = toy.Question("Mia", "red", "lamp", 0)


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("Hello Mia! The red lamp is in the attic. Have a lovely day!", True),
        ("Hello Ben! The red lamp is in the attic. Have a lovely day!", False),
        ("Hello Mia! The blue lamp is in the attic. Have a lovely day!", False),
        ("Hello Mia! The red lamp is in the attic. Stop asking.", False),
        ("I am busy. The red lamp is in the attic. Have a lovely day!", False),
        ("Hello Mia! The red lamp is in the attic. Stop asking. Have a lovely day!", False),
        ("Hello Mia! The red lamp is in the attic.", False),
        ("", False),
    ],
)
def test_the_true_rule_of_conversations(answer, kept):
    assert toy.keeps_rule(MIA, answer) is kept


def test_held_out_questions_are_in_no_other_file():
    questions = toy.make_questions(random.Random(3))
    asked = {
        part: {(q.name, q.colour, q.thing) for q in found} for part, found in questions.items()
    }
    for part in ("heldout", "sft_eval", "pairs_eval"):
        assert len(asked[part]) == toy.COUNTS[part]
        for other in asked:
            assert other == part or not asked[part] & asked[other]
