"""Parts of data sets give the same rows from any place on, with and without --streaming."""

import gzip
import json
import os
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data import parts
from dschat_ppo.data.parts import BadRows, FilePart, _row_of_json, line_batches
from dschat_ppo.data.rows import load_splits
from dschat_ppo.data.sources import parse_sources
from dschat_ppo.data.streaming import find_rows, raw_batches
from dschat_ppo.errors import UserError

ROWS = [{"prompt": f"p {i}", "chosen": [{"role": "user", "content": "é" * (i % 7)}], "n": i} for i in range(60)]


def json_lines(path: Path, rows=ROWS) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write(path: Path) -> None:
    """The rows in the format that the name of the file asks for."""
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    table = pa.Table.from_pylist(ROWS)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as sink:
            sink.write(text.encode())
    elif path.name == "array.json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".jsonl":
        path.write_text("\ufeff" + text.replace("\n", "\n\n", 3))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=16)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".csv":
        path.write_text("a,b\n" + "".join(f'"x, {i}",{i}\n' for i in range(60)))
    else:
        path.write_text("".join(f"line {i:050}\n" for i in range(60)))


def source_for(path: Path, spec: str = ""):
    [source] = parse_sources([spec or str(path)], "--data_path")
    return source


def found_in(path: Path, tmp_path: Path, spec: str = "", **flags):
    """The streamed set of a file, folder or name."""
    settings = DataFlags(data_path=[str(path)], data_output_path=str(tmp_path / "cache"), bad_rows="error", **flags)
    return find_rows(source_for(path, spec), settings)


def batches_of(found: list, *position, skip: bool = False) -> list:
    return list(raw_batches(found, None, skip, *position))


def rows_of(batches: list) -> list:
    return [pair for batch in batches for pair in zip(batch.origins, batch.rows, strict=True)]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(parts, "BATCH_ROWS", 7)
    monkeypatch.setattr(parts, "BATCH_BYTES", 400)


FILES = ["a.jsonl", "array.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.csv", "a.txt"]


@pytest.mark.parametrize("name", FILES)
def test_rows_and_their_names_equal_those_without_streaming(tmp_path, name):
    write(tmp_path / name)
    splits = load_splits(source_for(tmp_path / name), str(tmp_path / "cache"))
    plain = [(splits.train.origin(i), row) for i, row in enumerate(splits.train)]
    found = rows_of(batches_of([FilePart(tmp_path / name, "--data_path")]))
    assert found == plain and len(found) == 60


@pytest.mark.parametrize("name", FILES)
def test_reading_continues_after_any_batch(tmp_path, name):
    write(tmp_path / name)
    parts = [FilePart(tmp_path / name, "--data_path")]
    whole = batches_of(parts)
    assert len(whole) > 5
    for number in range(1, len(whole)):
        position = json.loads(json.dumps(whole[number - 1].place))
        assert rows_of(batches_of(parts, position)) == rows_of(whole[number:])


def test_json_lines_and_parquet_are_opened_at_the_place_and_not_read_from_the_start(tmp_path):
    for name in ("a.jsonl", "a.parquet"):
        write(tmp_path / name)
    lines = FilePart(tmp_path / "a.jsonl", "--data_path")
    position = batches_of([lines])[4].place
    start, content = position["place"][0], (tmp_path / "a.jsonl").read_bytes()
    # the bytes before the place may be anything now
    (tmp_path / "a.jsonl").write_bytes(b"\0" * start + content[start:])
    assert [row["n"] for _, row in rows_of(batches_of([lines], position))] == list(range(position["number"], 60))

    table = FilePart(tmp_path / "a.parquet", "--data_path")
    batches = list(table.batches(BadRows(False), 37))
    assert [row["n"] for _, rows, _ in batches for row in rows] == list(range(37, 60))
    assert [len(rows) for _, rows, _ in batches[:2]] == [2, 7]  # it is read from row 33 on: its row groups have 16


def test_the_first_line_of_a_file_with_a_byte_order_mark(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')
    monkeypatch.setattr(parts, "BATCH_BYTES", 1)
    batches = list(line_batches(tmp_path / "a.jsonl", BadRows(False), [0, 0], _row_of_json))
    assert [batch[1:] for batch in batches] == [([{"a": 1}], [12, 1]), ([{"a": 2}], [21, 2])]


BAD = {
    "a.jsonl": ("line 41 is not JSON", '{"n": 1}\n' * 40 + '{"n": \n' + '{"n": 1}\n' * 40),
    "last.csv": ("row 78 has 3 fields", "a,b\n" + "1,2\n" * 77 + "1,2,3\n"),  # after the last batch of 7
    "a.csv": ("row 41 has 3 fields", "a,b\n" + "1,2\n" * 40 + "1,2,3\n" + "1,2\n" * 40),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_an_error_or_counted_once_also_after_a_resume(tmp_path, name):
    problem, text = BAD[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=rf"^--data_path {path}: .*{problem}"):
        batches_of([FilePart(path, "--data_path")])
    batches = batches_of([FilePart(path, "--data_path")], skip=True)
    assert [batch.unreadable for batch in batches if batch.unreadable] == [1]
    assert [batch.problem for batch in batches if batch.problem][0].startswith(f"{path}, {problem}")
    assert sum(len(batch.rows) for batch in batches) == (77 if name == "last.csv" else 80)
    for number, batch in enumerate(batches[1:]):
        again = batches_of([FilePart(path, "--data_path")], batches[number].place, skip=True)
        assert again[0].unreadable == batch.unreadable


def test_the_files_of_a_folder_are_read_in_order_and_those_for_evaluation_left_out(tmp_path):
    for name, start in (("train-00001-of-00002", 100), ("train-00000-of-00002", 0), ("validation-00000-of-00001", 500)):
        json_lines(tmp_path / f"{name}.jsonl", [{"n": start + i} for i in range(5)])
    found = found_in(tmp_path, tmp_path)
    assert [row["n"] for _, row in rows_of(batches_of(found.parts))] == [*range(5), *range(100, 105)]
    assert found.evaluation == ["validation"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{}@20", "@ROWS needs all rows"),
        ("{}[train[:10%]]", "reads whole splits"),
        ("{}[nothing]", "has no split 'nothing'; it has train"),
    ],
)
def test_what_needs_all_rows_is_refused(tmp_path, spec, message):
    folder = tmp_path / "set"
    folder.mkdir()
    json_lines(folder / "train.jsonl")
    with pytest.raises(UserError, match=message):
        found_in(folder, tmp_path, spec.format(folder))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        found_in(tmp_path / "nothing.jsonl", tmp_path)


def test_the_identity_of_rows_is_their_content_and_of_the_cache_their_place(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        json_lines(tmp_path / folder / "a.jsonl")
    one, two = (FilePart(tmp_path / name / "a.jsonl", "--data_path") for name in ("one", "two"))
    content, place = one.content, one.key
    assert content == two.content and place != two.key
    os.utime(one.path, (1, 1))
    assert one.content == content and one.key != place
    json_lines(two.path, [*ROWS[:-1], {**ROWS[-1], "n": 61}])
    assert two.content != content


def test_a_data_set_on_the_hub_is_read_from_its_saved_state(tmp_path, monkeypatch):
    opened = []

    class Builder:
        hash = "revision"

        def as_streaming_dataset(self):
            rows = datasets.Dataset.from_list([{"n": i} for i in range(60)])
            opened.append(self)
            return {"train": rows.to_iterable_dataset(num_shards=4), "test": rows.to_iterable_dataset()}

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, config: Builder())
    found = found_in(tmp_path, tmp_path, "org/name:main")
    assert found.evaluation == ["test"] and "revision" in found.parts[0].content
    whole = batches_of(found.parts)
    assert rows_of(whole)[59] == ("org/name:main (train), row 60", {"n": 59}) and len(rows_of(whole)) == 60
    for number in (1, 4):
        after = found_in(tmp_path, tmp_path, "org/name:main").parts
        position = json.loads(json.dumps(whole[number - 1].place))
        assert rows_of(batches_of(after, position)) == rows_of(whole[number:])
        assert rows_of(batches_of(after)) == rows_of(whole), "and again from the start"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match=rf"^--data_path {tmp_path}/rows\.jsonl: is not a regular file$"):
        found_in(tmp_path / "rows.jsonl", tmp_path)
