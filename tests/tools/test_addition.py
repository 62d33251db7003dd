"""The task of two-digit addition: its questions, its two directions of writing, its tokenizer."""

import json

import pytest
from transformers import AutoTokenizer

from dschat_ppo.tools import addition


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("addition")
    addition.make(made, 5)
    return made


def read(folder, name):
    return [json.loads(line) for line in (folder / "data" / f"{name}.jsonl").read_text().splitlines()]


def operands(prompt):
    """'37+48=' -> (37, 48), without the code under test."""
    assert len(prompt) == 6 and prompt[2] == "+" and prompt[5] == "="
    return int(prompt[:2]), int(prompt[3:5])


def test_a_question_by_hand():
    assert addition.Sum(37, 48).text == "37+48="
    assert addition.Sum(37, 48).answer == "85"
    assert addition.Sum(99, 99).answer == "198"


@pytest.mark.parametrize("name", ["prompts", "heldout"])
def test_the_answer_column_is_right(folder, name):
    rows = read(folder, name)
    assert len(rows) == {"prompts": 1024, "heldout": 256}[name]
    assert all(set(row) == {"prompt", "answer"} for row in rows)
    assert all(row["answer"] == str(sum(operands(row["prompt"]))) for row in rows)
    assert len({row["prompt"] for row in rows}) == len(rows)


def test_held_out_questions_and_their_mirror_images_are_in_no_other_file(folder):
    held_out = {operands(row["prompt"]) for row in read(folder, "heldout")}
    for name in ("sft", "prompts"):
        asked = {operands(row["prompt"]) for row in read(folder, name)}
        assert not held_out & asked
        assert not held_out & {(right, left) for left, right in asked}
    assert not {pair for pair in held_out if pair[0] != pair[1]} & {(right, left) for left, right in held_out}
    assert any(left > right for left, right in held_out) and any(left < right for left, right in held_out)


def test_tokenizer_round_trip(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert len(tokenizer) == 14
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    ids = tokenizer.encode("37+48=85<|end|>")
    assert len(ids) == 9 and ids[-1] == tokenizer.eos_token_id
    assert len(set(tokenizer.encode("0123456789+="))) == 12
    assert tokenizer.decode(ids) == "37+48=85<|end|>"
    assert tokenizer.decode([*ids, tokenizer.pad_token_id], skip_special_tokens=True) == "37+48=85"


def test_files_depend_on_the_seed_alone(folder, tmp_path):
    addition.make(tmp_path / "again", 5)
    addition.make(tmp_path / "other", 6)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) >= 7
    for file in files:
        assert (folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
    for file in ("data/sft.jsonl", "data/prompts.jsonl", "data/heldout.jsonl", "model/model.safetensors"):
        assert (folder / file).read_bytes() != (tmp_path / "other" / file).read_bytes(), file
