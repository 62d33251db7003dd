"""Plain text as blocks of tokens."""

import pytest
from prepared import ROWS, TOKENIZER, flags_for, write_jsonl

from dschat_ppo.data import encode
from dschat_ppo.errors import UserError
from dschat_ppo.features.ptx.blocks import text_blocks


def test_texts_take_neither_a_weight_nor_a_number_of_rows(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[:6])
    flag = "--unsupervised_dataset_name .*a.jsonl"
    for ending, words in ((":2", "the weight has no effect"), ("@2", "takes all rows; omit '@2'")):
        with pytest.raises(UserError, match=rf"^{flag}{ending}: {words}"):
            text_blocks(f"{path}{ending}", None, TOKENIZER, 8, flags_for(tmp_path, path))


def read_blocks(tmp_path, rows: list, length: int, **flags):
    path = write_jsonl(tmp_path / "texts.jsonl", rows)
    return text_blocks(path, None, TOKENIZER, length, flags_for(tmp_path, path, **flags))


def test_texts_of_the_unsupervised_loss_are_joined_by_eos_and_cut_into_blocks(tmp_path):
    texts = ["a b c d", None, "d c"]
    joined = [
        token for text in texts for token in [*TOKENIZER.encode(text or ""), TOKENIZER.eos_token_id]
    ]
    # the last block of the second, which is not in the cache, is one token
    for length in (4, len(joined) - 1):
        rows = read_blocks(tmp_path, [{"text": text} for text in texts], length)
        expected = [joined[start : start + length] for start in range(0, len(joined), length)]
        assert [[*row["prompt_ids"], *row["answers"][0]] for row in rows] == [
            b for b in expected if len(b) > 1
        ]
        assert all(len(row["prompt_ids"]) == 1 and row["margin"] == 0 for row in rows)


def test_bad_texts_are_counted_whether_or_not_the_blocks_are_in_the_cache(
    tmp_path, said, monkeypatch
):
    good = [{"text": f"{number} a b c d"} for number in range(99)]
    rows = [{"text": 3}, *good]
    read = read_blocks(tmp_path, rows, 8)
    assert read["answers"][:] == read_blocks(tmp_path, good, 8)["answers"][:]
    assert any("skipped: 1 of 100 rows cannot be used; the first:" in line for line in said)
    with pytest.raises(
        UserError, match=r"^--unsup.*: 1 of 100 rows cannot be used; --bad_rows skip"
    ):
        read_blocks(tmp_path, rows, 8, bad_rows="error")
    for rows, words in (
        ([{"prompt": "a"}], "has the columns prompt; it needs a text column 'text'"),
        ([{"text": 3}], "it needs a text column 'text'"),
        ([{"text": ""}], "no text has two tokens or more"),
    ):
        with pytest.raises(UserError, match=f"^--unsupervised_dataset_name.*{words}"):
            read_blocks(tmp_path, rows, 8)
    monkeypatch.setattr(encode, "MOST_BYTES", 10)
    with pytest.raises(
        UserError, match=r"^--unsup.* The first: .*, row 2: a text of 11 characters is too long for"
    ):
        read_blocks(tmp_path, [{"text": "a"}, {"text": "b" * 11}], 8)
