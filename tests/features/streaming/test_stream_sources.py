"""`prepare` with a stream gives the token rows that it gives without; what each data set gives a
stream; what cannot be streamed."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from prepared import PAIRS, TOKENIZER, flags_for, listed, source_of, write_jsonl
from transformers import AutoTokenizer

from dschat_ppo.config.data_flags import DataFlags, StepData
from dschat_ppo.data import shards
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.data.shards import Shard
from dschat_ppo.data.sources import open_set
from dschat_ppo.errors import UserError
from dschat_ppo.features.streaming import streamed_rows
from dschat_ppo.features.streaming.step_data import streamed
from dschat_ppo.features.streaming.stream_sources import first_rows
from dschat_ppo.features.streaming.streamed_rows import ALL, raw_batches


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Of 8 token rows, read in batches of 7 raw rows."""
    monkeypatch.setattr(streamed_rows, "CHUNK_ROWS", 8)
    monkeypatch.setattr(shards, "BATCH_ROWS", 7)


SIXTY = [
    {"prompt": f"prompt {i}", "chosen": f"good {i}", "rejected": f"bad {i}", "answer": str(i)}
    for i in range(60)
]
LONG = "word " * 200
EXCLUDED = Path(__file__).parents[2] / "data/inputs/turn_loss_mask.jsonl"


def train(
    tmp_path: Path, *paths: str, rows: int | None = 60, use: str = "sft", limit: int = 64, **flags
) -> TokenRows:
    """Token rows for training, as a stream of so many; None: all, without a stream."""
    step = StepData(use, flags_for(tmp_path, *paths, use=use, **flags), limit)
    if rows is not None:
        step = replace(step, lazy=streamed(rows))
    return prepare(step, TOKENIZER)


@pytest.mark.parametrize(("use", "limit"), [("sft", 14), ("preference", 14), ("prompt", 64)])
def test_the_token_rows_equal_those_without_streaming(tmp_path, use, limit):
    path = write_jsonl(tmp_path / "data.jsonl", SIXTY)
    plain = train(tmp_path, path, rows=None, use=use, limit=limit)
    found = train(tmp_path, path, use=use, limit=limit)
    assert listed(found.train) == listed(plain.train)
    assert found.sources == plain.sources == ("data",) and found.eval is None


def test_rewards_get_null_for_a_column_that_only_other_rows_have(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "note": 5}, {"prompt": "b"}])
    rows = listed(train(tmp_path, path, rows=2, use="prompt").train)
    assert [json.loads(row["row"])["note"] for row in rows] == [5, None]


def test_remarks_are_counted_in_the_log(assets, tmp_path, said):
    answer = {"role": "assistant", "content": "There.", "thinking": "Um."}
    chat = [{"role": "user", "content": "Where?"}, answer]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat}] * 2)
    flags = flags_for(tmp_path, path, apply_chat_template=None)
    step = StepData("sft", flags, 100, lazy=streamed(2))
    prepare(step, AutoTokenizer.from_pretrained(assets / "lm"))
    assert any("2 " in line and "the thoughts in 'thinking'" in line for line in said)


def test_a_turn_that_its_owner_excluded_is_the_same_in_a_stream(assets, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    flags = DataFlags([str(EXCLUDED)], data_split="1,0,0", data_output_path=str(tmp_path))
    step = StepData("sft", flags, 400, all_turns=True)
    plain = prepare(step, tokenizer).train
    rows = prepare(replace(step, lazy=streamed(len(plain))), tokenizer).train
    assert listed(rows) == listed(plain)


def test_evaluation_rows_come_from_the_data_set_or_a_flag_and_none_are_held_out(tmp_path, said):
    folder, other = tmp_path / "set", write_jsonl(tmp_path / "e.jsonl", SIXTY[:3])
    write_jsonl(folder / "train.jsonl", SIXTY)
    write_jsonl(folder / "validation.jsonl", SIXTY[:7])
    step = StepData("sft", flags_for(tmp_path, str(folder)), 64, lazy=streamed(60))
    assert len(prepare(replace(step, eval_fraction=0.1), TOKENIZER).eval) == 7
    assert len(prepare(replace(step, eval_paths=[other]), TOKENIZER).eval) == 3
    assert prepare(step, TOKENIZER).eval is None
    assert any(
        "its rows for evaluation are not used; name them with --eval_data_path" in line
        for line in said
    )
    flags = flags_for(tmp_path, str(folder / "train.jsonl"))
    alone = prepare(replace(step, flags=flags, eval_fraction=0.1), TOKENIZER)
    assert (
        alone.eval is None and len({tuple(row["prompt_ids"]) for row in listed(alone.train)}) == 60
    )
    assert any("--eval_fraction holds no rows out of a stream" in line for line in said)


def test_rows_that_are_left_out_are_counted_and_replaced_by_later_ones(tmp_path, said):
    rows = [
        row | {"chosen": {0: LONG, 1: None}.get(i % 5, row["chosen"])}
        for i, row in enumerate(SIXTY)
    ]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    found = train(tmp_path, path, rows=36, truncation="drop", bad_rows="skip").train
    assert [TOKENIZER.decode(found[i]["prompt_ids"]) for i in range(36)] == [
        f"prompt {i}" for i in range(60) if i % 5 > 1
    ]
    assert any(f"data: skipped: {path}, row 2: 'chosen' is null" in line for line in said)
    labelled = [{"prompt": f"p {n}", "completion": "yes", "label": n % 4 != 0} for n in range(40)]
    rows = train(tmp_path, write_jsonl(tmp_path / "d.jsonl", labelled), rows=30).train
    assert [rows[i]["prompt_ids"] for i in (0, 29)] == [
        TOKENIZER.encode("p 1"),
        TOKENIZER.encode("p 39"),
    ]


@pytest.mark.parametrize(
    ("rows", "flags", "words"),
    [
        ([*PAIRS[:10], PAIRS[10] | {"chosen": None}, *PAIRS[11:]], {}, "row 11: 'chosen' is null"),
        ([row | {"chosen": LONG} for row in SIXTY], {}, "every answer is cut by --max_seq_len 64"),
        (
            [*PAIRS[:10], PAIRS[10] | {"chosen": LONG}, *PAIRS[11:]],
            {"truncation": "error", "bad_rows": "skip"},
            r"d\.jsonl, row 11: longer than the limit of 64 tokens",
        ),
        (["", ""], {}, "the data set is empty"),
        (
            SIXTY,
            {"data_split": "2,4,4"},
            "has only 12 rows for this step; set --streaming_rows 12 or less",
        ),
        (
            ["x", "no"],
            {"bad_rows": "skip"},
            r"none of its rows can be read; the first: .*d\.jsonl, row 1 is not JSON",
        ),
    ],
)
def test_data_that_cannot_be_streamed_are_refused(tmp_path, rows, flags, words):
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    with pytest.raises(UserError, match=words):
        listed(train(tmp_path, path, rows=len(rows), **flags).train)


def test_the_fingerprint_is_that_of_the_files_not_of_their_place(tmp_path):
    one = train(tmp_path, write_jsonl(tmp_path / "data.jsonl", SIXTY)).train.fingerprint
    other = write_jsonl(tmp_path / "copy" / "data.jsonl", SIXTY)
    assert train(tmp_path, other, rows=30).train.fingerprint == one
    assert (
        train(tmp_path, write_jsonl(tmp_path / "data.jsonl", SIXTY[::-1])).train.fingerprint != one
    )


# Data sets


def pairs(found: list) -> list:
    return [pair for batch in found for pair in zip(batch.origins, batch.rows, strict=True)]


def found_in(spec: str | Path, tmp_path: Path) -> tuple[list[Shard], list[str]]:
    """The parts of a streamed set, and its splits for evaluation."""
    found = open_set(source_of(spec), str(tmp_path / "cache"), download=False)
    groups, for_eval = found.chosen()
    return first_rows(found, groups)[0], for_eval


def test_the_files_of_a_folder_are_streamed_in_order_and_those_for_evaluation_left_out(tmp_path):
    for name, first in (
        ("train-00001-of-00002", 10),
        ("train-00000-of-00002", 0),
        ("validation-00000-of-00001", 50),
    ):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"n": first + n} for n in range(3)])
    files, for_eval = found_in(tmp_path, tmp_path)
    assert [row["n"] for _, row in pairs(raw_batches(files, ALL))] == [0, 1, 2, 10, 11, 12]
    assert for_eval == ["validation"]
    for ending, words in (("@20", "@ROWS needs all rows"), ("[train[:10%]]", "reads whole splits")):
        with pytest.raises(UserError, match=words):
            found_in(f"{tmp_path}{ending}", tmp_path)


def test_a_data_set_on_the_hub_is_read_on_from_any_place(tmp_path, monkeypatch):
    class Builder:
        hash = "revision"

        def as_streaming_dataset(self):
            rows = datasets.Dataset.from_list([{"n": n} for n in range(60)])
            return {
                "train": rows.to_iterable_dataset(num_shards=4),
                "test": rows.to_iterable_dataset(),
            }

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, config: Builder())
    monkeypatch.setattr(shards, "BATCH_ROWS", 7)
    found, for_eval = found_in("org/name:main", tmp_path)
    assert for_eval == ["test"] and "revision" in found[0].content
    whole = list(raw_batches(found, ALL))
    assert pairs(whole) == [(f"org/name:main (train), row {n + 1}", {"n": n}) for n in range(60)]
    for number in range(1, len(whole)):
        after, _ = found_in("org/name:main", tmp_path)
        place = json.loads(json.dumps(whole[number - 1].end))
        assert pairs(raw_batches(after, ALL, place)) == pairs(whole[number:])
        assert pairs(raw_batches(after, ALL)) == pairs(whole), "and again from the start"
    [part], _ = found_in("org/name:main", tmp_path)
    for number, _, place in list(part.numbered_rows(None))[:-1]:  # also in the middle of a table
        assert next(part.numbered_rows(place))[0] == number + 1
