"""Plain text to token rows of one block each."""

import pytest
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)
from test_prepare import TOKENIZER, flags_for, write_jsonl

from dschat_ppo.data import encode
from dschat_ppo.errors import UserError
from dschat_ppo.ppo.mini_dataset import text_blocks


def read_blocks(tmp_path, rows: list, length: int, **flags):
    path = write_jsonl(tmp_path / "texts.jsonl", rows)
    return text_blocks(path, None, TOKENIZER, length, flags_for(tmp_path, path, **flags))


def test_texts_are_joined_by_eos_and_cut_into_blocks(tmp_path):
    texts = ["a b c d", None, "d c"]
    joined = [token for text in texts for token in [*TOKENIZER.encode(text or ""), TOKENIZER.eos_token_id]]
    rows = read_blocks(tmp_path, [{"text": text} for text in texts], 4)
    blocks = [[*row["prompt_ids"], *row["answers"][0]] for row in rows]
    expected = [joined[start : start + 4] for start in range(0, len(joined), 4)]
    assert blocks == [block for block in expected if len(block) > 1]
    assert all(len(row["prompt_ids"]) == 1 and len(row["answers"]) == 1 and row["margin"] == 0 for row in rows)


def test_a_last_block_of_one_token_is_dropped(tmp_path):
    count = len(TOKENIZER.encode("a b c d"))  # and EOS: the last block has one token
    rows = read_blocks(tmp_path, [{"text": "a b c d"}], count)
    assert [len(row["prompt_ids"]) + len(row["answers"][0]) for row in rows] == [count]


def test_another_block_length_misses_the_cache(tmp_path):
    rows = [{"text": "a b c d"}]
    assert len(read_blocks(tmp_path, rows, 2)) != len(read_blocks(tmp_path, rows, 64))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"prompt": "a"}], "has the columns prompt; it needs a text column 'text'"),
        ([{"text": 3}], "it needs a text column 'text'"),
        ([{"text": ""}], "no text has two tokens or more"),
    ],
)
def test_data_without_text_is_rejected(tmp_path, rows, problem):
    with pytest.raises(UserError, match=f"^--unsupervised_dataset_name.*{problem}"):
        read_blocks(tmp_path, rows, 8)


def test_a_text_that_cannot_be_encoded_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "MOST_BYTES", 10)
    with pytest.raises(
        UserError, match=r"^--unsup.* The first: .*texts\.jsonl, row 2: a text of 11 characters is too long for the tok"
    ):
        read_blocks(tmp_path, [{"text": "a"}, {"text": "b" * 11}], 8)


def test_bad_rows_are_counted_whether_or_not_the_blocks_are_in_the_cache(tmp_path, capsys):
    good = [{"text": f"{number} a b c d"} for number in range(99)]
    rows = [{"text": 3}, *good]
    read = read_blocks(tmp_path, rows, 8)
    assert read["answers"][:] == read_blocks(tmp_path, good, 8)["answers"][:]
    assert "skipped: 1 of 100 rows cannot be used; the first:" in "".join(capsys.readouterr())
    for _ in range(2):  # from the file, and from the cache
        with pytest.raises(UserError, match=r"^--unsup.*: 1 of 100 rows cannot be used; --bad_rows skip"):
            read_blocks(tmp_path, rows, 8, bad_rows="error")
    with pytest.raises(UserError, match=r"^--unsup.*: 2 of 3 rows cannot"):
        read_blocks(tmp_path, [{"text": 3}, {"text": "a b"}, {"text": 4}], 8)
    assert len(read_blocks(tmp_path, [{"text": 3}, {"text": "a b"}, {"text": 4}], 8, bad_rows="skip")) == 1
