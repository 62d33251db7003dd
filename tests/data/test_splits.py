"""Reading files, folders and hub data sets, and splitting their rows."""

import io
import json
from pathlib import Path

import datasets
import pytest
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)
from datasets import Dataset, DatasetDict
from test_prepare import ROWS, TOKENIZER, answers_of, flags_for, prompts_of, write_jsonl

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.sources import DataSource, parse_sources
from dschat_ppo.data.splits import ORIGIN, Splits, load_splits
from dschat_ppo.errors import UserError


def source_of(path: Path | str, flag: str = "--data_path", **settings) -> DataSource:
    (source,) = parse_sources([str(path)], flag, DataFlags(data_path=[str(path)], **settings))
    return source


def load(tmp_path: Path, path: Path | str, bad_rows: str = "error") -> Splits:
    return load_splits(source_of(path), str(tmp_path / "cache"), bad_rows)


def origins_of(splits: Splits, rows: Dataset | None = None) -> list[str]:
    return [splits.origins.describe(origin) for origin in (rows or splits.train)[ORIGIN]]


def test_every_csv_column_is_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('prompt,response\n1,4\ntwo,N/A\nthree,\nfour,"a, b"\n')
    rows = load(tmp_path, path).train
    assert rows["prompt"][:] == ["1", "two", "three", "four"]
    assert rows["response"][:] == ["4", "N/A", "", "a, b"]


def test_brackets_in_a_path_are_not_a_glob_pattern(tmp_path):
    folder = tmp_path / "data[1]"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    assert len(load(tmp_path, folder / "rows.jsonl").train) == 1
    assert len(load(tmp_path, folder).train) == 1


def parquet_of(columns: dict[str, list]) -> bytes:
    file = io.BytesIO()
    Dataset.from_dict(columns).to_parquet(file)
    return file.getvalue()


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "a/b/c"])
def test_missing_files_are_named_with_their_flag(tmp_path, name):
    with pytest.raises(UserError, match=r"--data_path .*: no such file or folder") as problem:
        load(tmp_path, name)
    assert name in str(problem.value)


def test_a_missing_absolute_path_is_rejected(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        load(tmp_path, tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("zero.jsonl", b""),
        ("blank.jsonl", b"\n\n"),
        ("list.json", b"[]"),
        ("header.csv", b"prompt,response\n"),
        ("rows.parquet", parquet_of({"prompt": [], "response": []})),
    ],
)
def test_empty_data_sets_are_an_error(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"--data_path .*empty") as problem:
        load(tmp_path, path)
    assert name in str(problem.value)


def test_files_of_a_folder_that_differ_in_a_column_are_an_error(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "a", "response": 1}])
    with pytest.raises(UserError, match="--data_path .*differ in a column.*response"):
        load(tmp_path, tmp_path)


def test_other_file_formats_are_rejected(tmp_path):
    path = tmp_path / "data.xlsx"
    path.write_text("hello")
    with pytest.raises(UserError, match=r"'\.xlsx' files are not supported; use one of \.json, .*\.gz"):
        load(tmp_path, path)


def test_folders_without_training_files_are_rejected(tmp_path):
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="the folder holds no data file; supported are"):
        load(tmp_path, tmp_path / "bare")
    write_jsonl(tmp_path / "bare" / "test.jsonl", ROWS)
    with pytest.raises(UserError, match="only evaluation files"):
        load(tmp_path, tmp_path / "bare")


@pytest.mark.parametrize(
    ("line", "what"),
    [('{"prompt": ', "not JSON"), ("3", "not an object"), ('["a", "b"]', "not an object")],
)
def test_a_bad_json_line_is_named_by_its_number(tmp_path, line, what):
    path = tmp_path / "d.jsonl"
    good = [json.dumps(row) for row in ROWS]
    path.write_text("\n".join([*good[:3], line, *good[3:]]) + "\n")
    with pytest.raises(UserError, match=rf"d\.jsonl.*line 4 .*{what}"):
        load(tmp_path, path)


def test_hub_splits_without_rows_are_ignored(tmp_path, monkeypatch):
    rows, none = Dataset.from_dict({"prompt": ["a"]}), Dataset.from_dict({"prompt": []})
    found = iter([DatasetDict(train=rows, validation=none, test=rows), DatasetDict(train=none)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: next(found))
    splits = load(tmp_path, "name")
    assert (len(splits.train), len(splits.eval)) == (1, 1)
    assert origins_of(splits) == ["name (train), row 1"]
    assert origins_of(splits, splits.eval) == ["name (test), row 1"]
    with pytest.raises(UserError, match="--data_path name: has no split with rows"):
        load(tmp_path, "name")


def test_files_of_a_folder_are_split_by_their_names(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:5])
    write_jsonl(tmp_path / "validation.jsonl", ROWS[5:])
    (tmp_path / "README.md").write_text("no data")
    splits = load(tmp_path, tmp_path)
    assert (len(splits.train), len(splits.eval)) == (5, 3)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    table = Dataset.from_list(ROWS)
    if suffix == ".jsonl":
        write_jsonl(path, ROWS)
    elif suffix == ".json":
        path.write_text(json.dumps(ROWS), encoding="utf-8")
    elif suffix == ".csv":
        path.write_text("prompt,response\n" + "".join(f"{r['prompt']},{r['response']}\n" for r in ROWS))
    else:
        table.to_parquet(str(path))
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, str(path)), 64).train
    assert sorted(zip(prompts_of(rows), answers_of(rows), strict=True)) == [
        (row["prompt"], [row["response"] + TOKENIZER.eos_token]) for row in ROWS
    ]


@pytest.mark.parametrize(
    "text",
    [
        "prompt,response\nGrüße,ja\n".encode("utf-8-sig"),  # as Excel writes it
        ",prompt,response\n0,Grüße,ja\n".encode(),  # as pandas writes it
    ],
)
def test_csv_files_written_by_excel_and_pandas(tmp_path, text):
    path = tmp_path / "data.csv"
    path.write_bytes(text)
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, str(path)), 64).train
    assert (prompts_of(rows), answers_of(rows)) == (["Grüße"], [["ja" + TOKENIZER.eos_token]])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bytes.jsonl", b'{"prompt": "a", "response": "\xff\xfe"}\n'),
        ("bytes.parquet", b"this is not a table"),
        ("quote.csv", b'prompt,response\n"a,b\n'),
        ("cut.json", b'[{"prompt": "a"'),
        ("commas.csv", b"prompt,response\nOne, two,three\nFour, five,six\n"),  # pandas would take "One" for a name
    ],
)
def test_an_unreadable_file_is_named_in_the_error(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as problem:
        prepare("sft", TOKENIZER, flags_for(tmp_path, str(path)), 64)
    assert name in str(problem.value)
