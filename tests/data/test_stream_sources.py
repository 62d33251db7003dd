"""`prepare` with --streaming: the same token rows, split and sources as without, and what is refused."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data import streaming
from dschat_ppo.data.batches import chunked_order
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.data.streaming import NOTHING, StreamedRows
from dschat_ppo.errors import UserError
from dschat_ppo.tools.toy import make_tokenizer

TOKENIZER = make_tokenizer(["a b c d"])
ROWS = [{"prompt": f"prompt {i}", "chosen": f"good {i}", "rejected": f"bad {i}", "answer": str(i)} for i in range(60)]
WHOLE = {"sft": "1,0,0", "preference": "0,1,0", "prompt": "0,0,1"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 16)


def write(path: Path, rows=ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def flags(tmp_path: Path, *paths: str, rows: int | None = 60, use: str = "sft", **settings) -> DataFlags:
    settings = {"data_split": WHOLE[use], "apply_chat_template": False, **settings}
    stream = {"streaming": rows is not None, "streaming_rows": rows}
    return DataFlags(data_path=list(paths), data_output_path=str(tmp_path / "cache"), **settings, **stream)


def train(
    tmp_path: Path, *paths: str, rows: int | None = 60, use: str = "sft", limit: int = 64, **settings
) -> TokenRows:
    return prepare(use, TOKENIZER, flags(tmp_path, *paths, rows=rows, use=use, **settings), limit)


def listed(rows: Dataset | StreamedRows) -> list[dict]:
    """The rows in a fixed order, without the digest, which only a table has."""
    found = [{name: value for name, value in rows[i].items() if name != "digest"} for i in range(len(rows))]
    return sorted(found, key=lambda row: row["prompt_ids"])


@pytest.mark.parametrize("use", WHOLE)
@pytest.mark.parametrize("limit", [64, 14])
def test_the_token_rows_equal_those_without_streaming(tmp_path, use, limit):
    path = write(tmp_path / "data.jsonl")
    plain = train(tmp_path, path, rows=None, use=use, limit=limit)
    found = train(tmp_path, path, use=use, limit=limit)
    assert listed(found.train) == listed(plain.train)
    assert found.sources == plain.sources == ("data",) and found.eval is None


def test_the_rows_of_the_three_steps_are_disjoint(tmp_path):
    path = write(tmp_path / "data.jsonl", [ROWS[i % 60] | {"prompt": f"prompt {i}"} for i in range(2000)])
    parts = []
    for use, count in (("sft", 400), ("preference", 800), ("prompt", 800)):
        rows = train(tmp_path, path, rows=count, use=use, data_split="2,4,4").train
        parts.append({tuple(rows[i]["prompt_ids"]) for i in range(count)})
    assert len(set.union(*parts)) == 2000
    with pytest.raises(UserError, match="has only 400 rows for this step; set --streaming_rows 400 or less"):
        rows = train(tmp_path, path, rows=401, data_split="2,4,4").train
        list(map(rows.__getitem__, chunked_order(rows, 0, 0)))


def test_a_split_without_rows_for_the_step_is_refused(tmp_path):
    with pytest.raises(UserError, match="--data_split 0,1,1 leaves no row for this step"):
        train(tmp_path, write(tmp_path / "data.jsonl"), data_split="0,1,1")


def test_data_sets_are_mixed_by_their_weights_and_marked(tmp_path, capsys):
    one = write(tmp_path / "one.jsonl")
    two = write(tmp_path / "two.jsonl", [row | {"prompt": "other " + row["prompt"]} for row in ROWS])
    found = train(tmp_path, f"{one}:3", f"{two}:1", rows=40)
    assert found.sources == ("one", "two")
    marks = [found.train[i]["source"] for i in range(40)]
    assert sum(marks) == 10 and sum(marks[:16]) == 4
    other = TOKENIZER.encode("other", add_special_tokens=False)
    assert [row["prompt_ids"][: len(other)] == other for row in map(found.train.__getitem__, range(40))] == [
        mark == 1 for mark in marks
    ]
    assert "in the proportion 3 one : 1 two" in capsys.readouterr().out


def test_evaluation_rows_come_from_the_data_set_or_a_flag_and_none_are_held_out(tmp_path, capsys):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl")
    write(folder / "validation.jsonl", ROWS[:7])
    use = flags(tmp_path, str(folder))
    assert len(prepare("sft", TOKENIZER, use, 64, eval_fraction=0.1).eval) == 7
    assert len(prepare("sft", TOKENIZER, use, 64, eval_paths=[write(tmp_path / "e.jsonl", ROWS[:3])]).eval) == 3
    assert prepare("sft", TOKENIZER, use, 64).eval is None
    assert "its rows for evaluation are not used; name them with --eval_data_path" in capsys.readouterr().out
    alone = prepare("sft", TOKENIZER, flags(tmp_path, str(folder / "train.jsonl")), 64, eval_fraction=0.1)
    assert alone.eval is None and len({tuple(row["prompt_ids"]) for row in listed(alone.train)}) == 60
    assert "--eval_fraction holds no rows out of a stream" in capsys.readouterr().out
    with (folder / "validation.jsonl").open("a") as file:
        file.write("{no\n")
    found = prepare("sft", TOKENIZER, flags(tmp_path, str(folder), bad_rows="skip"), 64, eval_fraction=0.1)
    assert len(found.eval) == 7 and "set: 1 of 8 rows cannot be used" in capsys.readouterr().out


def test_rows_that_are_left_out_are_replaced_by_later_ones(tmp_path):
    rows = [row | {"chosen": "word " * 200} if i % 3 == 0 else row for i, row in enumerate(ROWS)]
    path = write(tmp_path / "data.jsonl", rows)
    found = train(tmp_path, path, rows=40, truncation="drop")
    assert [found.train[i]["prompt_ids"] for i in range(40)] == [
        TOKENIZER.encode(f"prompt {i}") for i in range(60) if i % 3
    ]


def test_bad_rows_end_the_run_or_are_skipped(tmp_path, capsys):
    rows = [*ROWS[:50], ROWS[50] | {"chosen": None}, *ROWS[51:]]
    path = write(tmp_path / "data.jsonl", rows)
    with pytest.raises(UserError, match=rf"{path}, row 51"):
        train(tmp_path, path)
    found = train(tmp_path, path, rows=59, bad_rows="skip")
    assert len(listed(found.train)) == 59
    assert f"data: skipped: {path}, row 51" in capsys.readouterr().out


def test_every_answer_cut_is_an_error(tmp_path):
    rows = [row | {"chosen": "word " * 200} for row in ROWS]
    with pytest.raises(UserError, match="every answer is cut by --max_seq_len 20"):
        train(tmp_path, write(tmp_path / "data.jsonl", rows), limit=20)


def test_truncation_error_ends_a_stream_also_with_bad_rows_skip(tmp_path):
    path = write(tmp_path / "data.jsonl", [*ROWS[:50], ROWS[50] | {"chosen": "word " * 200}, *ROWS[51:]])
    with pytest.raises(UserError, match=rf"^{path}, row 51: longer than the limit of 64 tokens"):
        train(tmp_path, path, truncation="error", bad_rows="skip")


def test_an_empty_data_set_is_refused(tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="the data set is empty"):
        train(tmp_path, str(tmp_path / "blank.jsonl"))
    (tmp_path / "bad.jsonl").write_text("x\nno\n")
    with pytest.raises(UserError, match=r"bad.jsonl: none of its rows can be read; the first: .*bad.jsonl, row 1 is"):
        train(tmp_path, str(tmp_path / "bad.jsonl"), bad_rows="skip")


def test_a_damaged_file_is_named_in_one_line(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1" + b"\x00" * 50)
    with pytest.raises(UserError, match=rf"--data_path {path}: "):
        train(tmp_path, str(path))


def test_the_fingerprint_is_that_of_the_files_not_of_their_place(tmp_path):
    (tmp_path / "copy").mkdir()
    one = train(tmp_path, write(tmp_path / "data.jsonl")).train.fingerprint
    assert train(tmp_path, write(tmp_path / "copy" / "data.jsonl"), rows=30).train.fingerprint == one
    assert train(tmp_path, write(tmp_path / "data.jsonl", ROWS[::-1])).train.fingerprint != one


def test_dpo_needs_all_rows():
    words = "--model_name_or_path m --data_path d --output_dir o --streaming --streaming_rows 5"
    parse("reward", words.split())
    with pytest.raises(UserError, match="--objective dpo computes log-probs .* does not go with --streaming"):
        parse("reward", f"{words} --objective dpo".split())


def test_bad_answers_that_sft_leaves_out_of_a_stream_are_counted(tmp_path):
    turns = [[{"role": "user", "content": f"p {n}"}, {"role": "assistant", "content": "yes"}] for n in range(40)]
    path = write(tmp_path / "d.jsonl", [{"messages": turn, "label": n % 4 != 0} for n, turn in enumerate(turns)])
    rows = train(tmp_path, path, rows=30).train
    assert rows.counts[NOTHING] == 10
