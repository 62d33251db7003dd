"""Rows with labels from files to token rows: KTO answers and labelled steps, cuts, duplicates, streams, the cache."""

import json
from pathlib import Path

import pytest

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.prepare import prepare
from dschat_ppo.errors import UserError
from dschat_ppo.tools.toy import make_tokenizer

TOKENIZER = make_tokenizer(["a b c d"])
END = "<|end|>"


def flags_for(tmp_path: Path, rows: list[dict], **settings) -> DataFlags:
    path = tmp_path / f"d{len(list(tmp_path.glob('*.jsonl')))}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {"data_split": "0,1,0", "apply_chat_template": False, **settings}
    return DataFlags(data_path=[str(path)], data_output_path=str(tmp_path / "cache"), **settings)


def text_of(ids) -> str:
    return TOKENIZER.decode(ids)


def single(row) -> tuple[str, str, float]:
    [answer] = row["answers"]
    return text_of(row["prompt_ids"]), text_of(answer).removesuffix(END), row["label"]


KTO = [{"prompt": f"Q{i % 4}:", "completion": f"answer {i}", "label": i % 3 == 0} for i in range(10)]


def test_kto_rows_become_one_token_row_each(tmp_path):
    rows = prepare("unpaired", TOKENIZER, flags_for(tmp_path, KTO), 64).train
    assert sorted(map(single, rows)) == sorted((f"Q{i % 4}:", f"answer {i}", float(i % 3 == 0)) for i in range(10))


def test_pairs_become_two_token_rows(tmp_path):
    pairs = [{"prompt": "Q:", "chosen": f"good {i}", "rejected": f"bad {i}", "margin": 2} for i in range(3)]
    rows = prepare("unpaired", TOKENIZER, flags_for(tmp_path, pairs), 64).train
    expected = [("Q:", f"{what} {i}", label) for i in range(3) for what, label in (("good", 1.0), ("bad", 0.0))]
    assert sorted(map(single, rows)) == sorted(expected)


def test_the_digest_differs_with_the_label(tmp_path):
    rows = [prepare("unpaired", TOKENIZER, flags_for(tmp_path, [{**KTO[0], "label": label}]), 64).train[0]
            for label in (True, False)]  # fmt: skip
    assert rows[0]["answers"] == rows[1]["answers"] and rows[0]["digest"] != rows[1]["digest"]


STEPS = [
    {"prompt": "Q:", "completions": ["one", "two", "three"], "labels": [True, None, 0.25]},
    {"prompt": "R:", "completions": ["four"], "labels": [False]},
]


def labelled_texts(row) -> list[tuple[str, float]]:
    """For each label, the text of the answer up to and including its token."""
    [answer] = row["answers"]
    ends = zip(row["step_ends"], row["step_labels"], strict=True)
    return [(text_of(answer[: end + 1]), label) for end, label in ends]


@pytest.mark.parametrize("separator", ["\n", "; "])
def test_labels_are_at_the_separators_and_at_the_final_token(tmp_path, separator):
    rows = prepare("steps", TOKENIZER, flags_for(tmp_path, STEPS), 64, step_separator=separator).train
    found = {text_of(row["prompt_ids"]): labelled_texts(row) for row in rows}
    first = ("one" + separator).rstrip(" ")
    assert found == {
        "Q:": [(first, 1.0), (separator.join(["one", "two", "three"]) + END, 0.25)],
        "R:": [("four" + END, 0.0)],
    }


def test_the_separator_is_part_of_the_key_of_the_cache(tmp_path):
    flags = flags_for(tmp_path, STEPS)
    texts = [text_of(prepare("steps", TOKENIZER, flags, 64, step_separator=s).train[0]["answers"][0]) for s in "\n|"]
    assert len(set(texts)) == 2


def test_a_cut_answer_loses_the_labels_behind_the_cut_and_then_the_row(tmp_path):
    ends = prepare("steps", TOKENIZER, flags_for(tmp_path, STEPS[:1] * 1), 64).train[0]["step_ends"]
    short = prepare("steps", TOKENIZER, flags_for(tmp_path, [*STEPS[:1], STEPS[1]]), ends[0] + 3).train
    kept = [row for row in short if text_of(row["answers"][0]).startswith("one")]
    assert [row["step_labels"] for row in kept] == [[1.0]]
    with pytest.raises(UserError, match="no row is within --max_seq_len"):
        prepare("steps", TOKENIZER, flags_for(tmp_path, STEPS[:1]), 3)


def test_a_step_with_the_separator_is_a_bad_row(tmp_path):
    rows = [{**STEPS[0], "completions": ["one", "t\nwo", "three"]}]
    with pytest.raises(UserError, match=r"row 1: step 2 contains the separator '\\n'; choose another --step_separator"):
        prepare("steps", TOKENIZER, flags_for(tmp_path, rows), 64)


def test_bad_rows_are_left_out(tmp_path, said):
    rows = [*({**STEPS[1], "prompt": f"{i}:"} for i in range(25)), {**STEPS[0], "labels": [1, 1]}]
    found = prepare("steps", TOKENIZER, flags_for(tmp_path, rows, bad_rows="skip"), 64).train
    assert len(found) == 25
    assert any("'completions' has 3 steps, but 'labels' 2" in line for line in said)


def test_steps_are_streamed_as_they_are_prepared(tmp_path):
    rows = [{**STEPS[0], "prompt": f"{i}:"} for i in range(12)]
    whole = prepare("steps", TOKENIZER, flags_for(tmp_path, rows), 64).train
    stream = prepare("steps", TOKENIZER, flags_for(tmp_path, rows, streaming=True, streaming_rows=12), 64).train
    columns = ("prompt_ids", "answers", "step_ends", "step_labels")
    made = [tuple(str(row[name]) for name in columns) for row in whole]
    assert sorted(tuple(str(stream[i][name]) for name in columns) for i in range(12)) == sorted(made)
