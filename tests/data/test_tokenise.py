"""Batches of raw rows to token rows: several, one or none of each, bad rows, and the columns for reward functions."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)
from datasets import Dataset

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.examples import Example
from dschat_ppo.data.form_kinds import Kind
from dschat_ppo.data.form_readers import Answer
from dschat_ppo.data.forms import Form
from dschat_ppo.data.rows import ORIGIN, ROW, Rows
from dschat_ppo.data.tokenise import Fitted, TokeniseSettings, row_text, tokenise_batch, tokenise_rows
from dschat_ppo.errors import UserError
from dschat_ppo.tools.toy import make_tokenizer

TOKENIZER = make_tokenizer(["a b c d"])


def read(cells, use):
    """One example for each answer of a row; a null is a bad row."""
    row = cells.row
    if row["answers"] is None:
        raise UserError("'answers' is null")
    return row["prompt"], [Answer(text, 1.0, f"answer {number}") for number, text in enumerate(row["answers"], start=1)]


FORM = Form(
    Kind("several", {}, (("sft prompt", ""),), read, labelled=True), {}, about="f", description="several answers"
)


def settings(use="sft", limit=64, truncation="left", **changes) -> TokeniseSettings:
    values = {"form": FORM, "source": "mine", "use": use, "tokenizer": TOKENIZER, "limit": limit}
    flags = changes.pop("flags", DataFlags(data_path=["f"], truncation=truncation))
    return TokeniseSettings(**values | {"flags": flags} | changes)


def raw_rows(count: int) -> list[dict]:
    """Row n has n % 3 answers."""
    return [{"prompt": f"p{n}", "answers": [f"a{n}.{k}" for k in range(n % 3)]} for n in range(count)]


def batch(rows, **changes) -> list[dict]:
    return tokenise_batch(rows, [f"f, row {n + 1}" for n in range(len(rows))], settings(**changes))


def numbers(rows: list[dict], code: Fitted = Fitted.KEPT_WHOLE) -> list[int]:
    return [row["number"] for row in rows if row["fitted"] == code]


def test_a_row_gives_none_one_or_several_token_rows():
    rows = batch(raw_rows(6))
    assert numbers(rows) == [1, 2, 2, 4, 5, 5] and len(rows) == 6
    texts = [TOKENIZER.decode(row["answers"][0]) for row in rows]
    assert texts == [f"{text}<|end|>" for text in ("a1.0", "a2.0", "a2.1", "a4.0", "a5.0", "a5.1")]
    assert {(row["tokens"], row["problem"]) for row in rows} == {(7, None)}


def test_a_bad_row_stands_at_its_place_once_with_its_first_characters():
    rows = [
        {"prompt": "p", "answers": ["a"]}, {"prompt": "", "answers": ["b"]}, {"prompt": "q", "answers": None},
        {"prompt": "r" * 500, "answers": ["c" * 100, ""]}, {"prompt": "s", "answers": ["e", "<|end|>"]},
        {"prompt": "p", "answers": ["a"]},
    ]  # fmt: skip
    found = batch(rows, truncation="error")
    assert [row["number"] for row in found] == [0, 1, 2, 3, 4, 5], "a row with one bad answer gives no token row"
    assert (numbers(found), numbers(found, Fitted.UNUSABLE)) == ([0, 5], [1, 2, 3, 4])
    problems = [row["problem"] for row in found[1:5]]
    assert problems[0].startswith('f, row 2: the prompt is empty; the row: {"prompt": "", "answers": ["b"]}')
    assert problems[1] == 'f, row 3: \'answers\' is null; the row: {"prompt": "q", "answers": null}'
    assert problems[2].endswith(json.dumps(rows[3])[:200] + "...")
    assert problems[3].startswith("f, row 5, answer 2: the answer is empty: it has only the final token; the row: ")


def test_a_row_over_the_limit_ends_the_reading_where_the_flag_says_so():
    rows = [{"prompt": "p", "answers": ["a"]}, {"prompt": "r" * 500, "answers": ["c"]}]
    with pytest.raises(UserError) as raised:
        batch(rows, truncation="error")
    assert str(raised.value).startswith("f, row 2: longer than the limit of 64 tokens (--truncation error); the row: {")
    assert str(raised.value).endswith("rrr...; --truncation left cuts such rows, drop leaves them out")


def test_tokens_are_counted_before_the_limit_and_those_of_blocks_after_it():
    assert [row["tokens"] for row in batch([{"prompt": "p" * 30, "answers": ["abc"]}], limit=10)] == [30 + 4]
    form = replace(FORM, kind=Kind("text", {}, (("sft", ""),), lambda cells, use: ("", [Answer(cells.row["text"])])))
    blocks = batch([{"text": "a" * 6}], form=form, limit=4)  # 7 tokens
    assert [(row["tokens"], row["fitted"]) for row in blocks] == [(4, Fitted.BLOCKS)] * 2


def test_rows_that_the_limit_drops_are_marked():
    found = batch([{"prompt": "p", "answers": ["a" * 50, "b"]}], limit=20, truncation="drop")
    assert [row["fitted"] for row in found] == [Fitted.DROPPED, Fitted.KEPT_WHOLE]


def test_the_first_token_of_plain_text_is_its_prompt():
    form = replace(FORM, kind=Kind("text", {}, (("sft", ""),), lambda cells, use: ("", [Answer(cells.row["text"])])))
    rows = batch([{"text": "abc"}, {"text": "a"}, {"text": ""}], form=form)
    texts = [TOKENIZER.decode([*row["prompt_ids"], 0, *row["answers"][0]]) for row in rows[:2]]
    assert texts == ["a<|pad|>bc<|end|>", "a<|pad|><|end|>"] and numbers(rows, Fitted.UNUSABLE) == [2]


def test_digests_tell_rows_apart_by_their_final_content():
    rows = [{"prompt": "x" * 40, "answers": ["a"]}, {"prompt": "y" + "x" * 39, "answers": ["a"]},
            {"prompt": "x" * 39, "answers": ["xa"]}]  # fmt: skip
    digests = [row["digest"] for row in batch(rows, limit=12)]
    assert digests[0] == digests[1] != digests[2], "after the limit"
    rows = [{"prompt": "p", "answers": ["a"], "truth": truth} for truth in ("4", "5", "4", 4)]
    form = replace(FORM, truth="truth")
    digests = [row["digest"] for row in batch(rows, use="prompt", form=form)]
    assert digests[0] == digests[2] and len({*digests}) == 3


def test_row_text_keeps_the_columns_and_adds_what_they_lack():
    row = {"prompt": "é", "answer": "... #### 4", "n": None}
    text = row_text(row, Example("é", []), settings("prompt"))
    assert text == json.dumps(row)[:-1] + ',\n"data_source": "mine"}'
    assert json.loads(text) == row | {"data_source": "mine"}
    solved = Example([{"role": "user", "content": "é"}], [], truth="4")
    chat = {"data_source": "mine", "_messages": solved.prompt}
    assert json.loads(row_text(row, solved, settings("prompt"))) == row | chat | {"ground_truth": "4", "_truth": "4"}
    named = settings("prompt", flags=DataFlags(data_path=["f"], answer_column="x"))
    assert json.loads(row_text(row, solved, named)) == row | chat | {"answer": "4", "ground_truth": "4", "_truth": "4"}
    assert json.loads(row_text({"data_source": "own"}, Example("p", []), named)) == {"data_source": "own"}
    assert row_text({"data_source": "own"}, Example("p", []), named) == '{"data_source": "own"}'
    assert json.loads(row_text({}, Example("p", []), named)) == {"data_source": "mine"}


# A whole data set: in the order of the step, equal for any number of processes


def dataset(rows: list[dict]) -> Rows:
    table = Dataset.from_list([{ROW: json.dumps(row), ORIGIN: f"f, row {n + 1}"} for n, row in enumerate(rows)])
    return Rows(table, tuple(rows[0]))


def tokenised(rows: Rows, numbers: np.ndarray, tmp_path, workers=1):
    cache = str(tmp_path / f"cache{workers}")
    flags = DataFlags(data_path=["f"], data_output_path=cache, preprocessing_num_workers=workers)
    return tokenise_rows(rows, numbers, settings(flags=flags))


def test_token_rows_follow_the_order_of_the_step(tmp_path):
    numbers = np.array([8, 1, 3, 5])  # 2, 1, no and 2 answers; the others are of other steps
    table = tokenised(dataset(raw_rows(12)), numbers, tmp_path)
    assert list(table.number) == [1, 5, 5, 8, 8]
    assert list(table.rows_of(numbers)) == [3, 4, 0, 1, 2]
    assert list(table.rows_of(np.array([3, 8, 3]))) == [3, 4]
    rows = table.rows.select(table.rows_of(numbers))
    assert [TOKENIZER.decode(ids[0]) for ids in rows["answers"]] == [
        f"{text}<|end|>" for text in ("a8.0", "a8.1", "a1.0", "a5.0", "a5.1")
    ]


def test_several_processes_make_the_same_rows(tmp_path):
    raw, numbers = dataset(raw_rows(1500)), np.arange(1500)
    found = [tokenised(raw, numbers, tmp_path, workers) for workers in (1, 2)]
    assert found[0].rows.to_list() == found[1].rows.to_list()
    assert (found[0].number == found[1].number).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_rows_stand_among_the_others_in_the_order_of_the_file(tmp_path, workers):
    rows, places = raw_rows(1500), [20, 800, 1499]
    for place in places:
        rows[place] = {"prompt": "p", "answers": None}
    table = tokenised(dataset(rows), np.arange(1500), tmp_path, workers)
    bad = np.flatnonzero(table.fitted == Fitted.UNUSABLE)
    assert list(table.number[bad]) == places and (np.diff(table.number) >= 0).all()
    assert str(table.problems[int(bad[0])]).startswith("f, row 21: 'answers' is null; the row: ")
    elsewhere = np.setdiff1d(np.arange(1500), places)
    others = tokenised(dataset(rows), elsewhere, tmp_path, workers)
    assert len(others.number) == 1494 and not (others.fitted == Fitted.UNUSABLE).any()


def test_a_data_set_without_a_row_for_the_step_is_rejected(tmp_path):
    rows = dataset([{"prompt": "p", "answers": []}, {"prompt": "q", "answers": ["a"]}])
    with pytest.raises(UserError, match=r"mine: no row of this data set serves this step \(several answers\)"):
        tokenised(rows, np.array([0]), tmp_path)


def test_a_column_with_the_name_of_an_added_one_is_left_out():
    """Rewards would take its value for the conversation of the row."""
    settings = SimpleNamespace(flags=SimpleNamespace(answer_column=None, answer_pattern=None), source="a")
    text = row_text({"x": 1, "data_source": "b", "_messages": "no"}, Example("Q:", []), settings)
    assert json.loads(text) == {"x": 1, "data_source": "b"}
