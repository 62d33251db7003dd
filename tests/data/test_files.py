"""Files of every kind, compressed or not: their values, places to read on from, and what malformed
ones get."""

import csv
import gzip
import io
import json
import os
import random
import re
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
from prepared import TOKENIZER, column, flags_for, load, origins_of, write_jsonl

from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data import shards
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.shards import FileShard, read_shard
from dschat_ppo.errors import UserError

ROWS = [{"prompt": f"ask, {n}", "response": f"Grüße {n}"} for n in range(50)]
TABLE = pa.Table.from_pylist(ROWS)
NUMBERS = range(1, 51)


def parquet(table: pa.Table = TABLE, **settings) -> bytes:
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, **settings)
    return sink.getvalue().to_pybytes()


def arrow(opener) -> bytes:
    sink = pa.BufferOutputStream()
    with opener(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=20)
    return sink.getvalue().to_pybytes()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(content)
    return sink.getvalue().to_pybytes()


def lines(*rows, end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode()


COLUMNS = {name: {str(n): row[name] for n, row in enumerate(ROWS)} for name in ROWS[0]}
CONTENT = {
    "a.jsonl": lines(*ROWS),
    "lines.json": b"\xef\xbb\xbf" + lines(*ROWS, end="\r\n"),
    "array.json": json.dumps(ROWS).encode(),
    "indented.json": b"\xef\xbb\xbf" + json.dumps(ROWS, indent=2).encode(),
    "array.jsonl": json.dumps(ROWS, indent=2).encode(),
    "columns.json": json.dumps(COLUMNS).encode(),
    "a.CSV": "\ufeffprompt,response\n".encode()
    + "".join(f'"{p}",{r}\n' for p, r in map(dict.values, ROWS)).encode(),
    "a.tsv": b"prompt\tresponse\r\n"
    + "".join(f"{p}\t{r}\r\n" for p, r in map(dict.values, ROWS)).encode(),
    "a.parquet": parquet(row_group_size=16),
    "stream.arrow": arrow(pa.ipc.new_stream),
    "file.arrow": arrow(pa.ipc.new_file),
}
PACK = {"": lambda content: content, ".gz": gzip.compress, ".zst": zstd}
PACKED = ("a.jsonl", "array.json", "a.tsv", "a.parquet", "file.arrow")


def batches(path: Path, place=None) -> list:
    return list(read_shard(FileShard(path, "--data_path"), place))


def pairs(found: list) -> list:
    return [pair for batch in found for pair in zip(batch.origins, batch.rows, strict=True)]


@pytest.mark.parametrize(
    ("name", "packing"),
    [(name, packing) for packing in PACK for name in CONTENT if not packing or name in PACKED],
)
def test_every_kind_gives_the_same_rows_from_any_place_on(tmp_path, monkeypatch, name, packing):
    path = tmp_path / f"{name}{packing}"
    path.write_bytes(PACK[packing](CONTENT[name]))
    monkeypatch.setattr(shards, "BATCH_ROWS", 7)
    whole = batches(path)
    assert (
        pairs(whole) == [(f"{path}, row {n}", row) for n, row in zip(NUMBERS, ROWS, strict=True)]
        and len(whole) == 8
    )
    for number in range(1, 8):
        assert batches(path, json.loads(json.dumps(whole[number - 1].end))) == whole[number:]
    if name == "a.jsonl" and not packing:  # lines are read from the place and not from the start
        offset, number = whole[2].end
        path.write_bytes(bytes(offset) + CONTENT[name][offset:])
        assert [row for _, row in pairs(batches(path, [offset, number]))] == ROWS[21:]
        path.write_bytes(CONTENT[name])
    splits = load(tmp_path, path)
    assert (list(splits.train), origins_of(splits.train)) == (
        ROWS,
        [origin for origin, _ in pairs(whole)],
    )
    assert not splits.bad


TURN = {"role": "user", "content": "hi"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
}
EXACT = [
    [{"a": "2020-01-01"}, {"a": "2021-01-01T00:00:00Z"}],  # dates stay text
    [{"a": 5}, {"a": 4.5}, {"a": "5"}, {"a": "[1]"}, {"a": True}],
    [{"a": [1, 0.5]}, {"a": [[1, "x"], []]}],
    [{"a": {"x": 1}}, {"a": {"y": 2.0}}, {"a": {}}],  # no key is added
    [{"messages": [TURN]}, {"messages": [TURN, CALL]}],
    [
        {"a": 2**62},
        {"a": 10**30},
        {"a": {"b": -(10**30)}},
        {"a": 0.30000000000000004},
        {"a": 1e-300},
    ],
    [{"a": "\u2028 \x00 \U0001f600 \r"}, {"a": ""}],
]


@pytest.mark.parametrize("rows", EXACT, ids=lambda rows: json.dumps(rows)[:40])
def test_values_of_json_are_exactly_those_of_the_file(tmp_path, rows):
    (tmp_path / "a.jsonl").write_bytes(lines(*rows))
    assert json.dumps(list(load(tmp_path, tmp_path / "a.jsonl").train)) == json.dumps(rows)


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("nan.jsonl", b'{"p": NaN}\n', [{"p": None}]),
        (
            "missing.jsonl",
            b'{"a": "x"}\n{"b": [1]}\n',
            [{"a": "x", "b": None}, {"a": None, "b": [1]}],
        ),
        (
            "one.json",
            json.dumps(
                {"messages": [TURN, TURN], "tools": [{"a": 1}, {"a": 2}]}, indent=1
            ).encode(),
            [{"messages": [TURN, TURN], "tools": [{"a": 1}, {"a": 2}]}],
        ),
        ("one.jsonl", b'{"p": {"0": "a"}}', [{"p": {"0": "a"}}]),  # no columns: each line is a row
        ("pandas.csv", b",p\n0,Gr\xc3\xbc\xc3\x9fe\n", [{"Unnamed: 0": "0", "p": "Grüße"}]),
        ("long.csv", b"p,q\n" + b"x" * 300_000 + b",1\n", [{"p": "x" * 300_000, "q": "1"}]),
        (
            "a.txt",
            "\ufeffone\r\n\n  \n two \nfour".encode(),
            [{"text": "one"}, {"text": " two "}, {"text": "four"}],
        ),
        (
            "kinds.parquet",
            parquet(pa.table({"c": pa.array(["x"]).dictionary_encode(), "b": [b"xyz"]})),
            [{"c": "x", "b": {"bytes": 3}}],
        ),
    ],
)
def test_rows_of_a_file(tmp_path, name, content, rows):
    (tmp_path / name).write_bytes(content)
    assert list(load(tmp_path, tmp_path / name).train) == rows


def test_fields_of_csv_are_those_that_pandas_reads(tmp_path):
    rng, out = random.Random(0), io.StringIO()
    fields = [
        "",
        "a",
        "1.50",
        "N/A",
        'say "x"',
        "two\nlines",
        "a,b",
        " space ",
        "é\t",
        "\r\n",
        "NULL",
    ]
    csv.writer(out, lineterminator="\n").writerows(
        [["p", "", "q"], *([*rng.choices(fields, k=2), "end"] for _ in ROWS)]
    )
    (tmp_path / "d.csv").write_text(out.getvalue(), newline="")
    frame = pandas.read_csv(tmp_path / "d.csv", dtype=str, keep_default_na=False)
    found = load(tmp_path, tmp_path / "d.csv").train
    assert list(found.columns) == list(frame.columns)
    assert [list(row.values()) for row in found] == frame.to_numpy().tolist()


# Malformed files


def not_utf8() -> bytes:
    """A Parquet file whose second text is not UTF-8, which only validation finds."""
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"abc\xff")]
    text = pa.Array.from_buffers(pa.string(), 2, buffers)
    return parquet(pa.table({"prompt": text, "response": text}))


GOOD, DEEP = b'{"p": "a"}\n\n', b"[" * 200_000 + b"]" * 200_000
BAD_ROWS = [  # a row, line 3 or row 2 of the file, that can be left out
    (
        ".jsonl",
        b'{"p": "x", "resp',
        r"is not JSON \(Unterminated string starting at: column 12 .*\): '{\"p\": \"x\", ",
    ),
    (
        ".jsonl",
        b'{"p": "' + "é".encode() * 60 + b'\xfc"}',
        r"is not UTF-8 text \(.*\): 'é{20}\\\\xfc\"}'",
    ),
    (".jsonl", b"{}", "is not an object with named fields"),
    (".jsonl", b'{"p": ' + DEEP + b"}", r"is not JSON \(maximum recursion"),
    (".jsonl", b'{"p": "\\ud800"}', "holds half of a surrogate pair"),
    (".jsonl", b'{"p": {"x": -Infinity}}', r"is not JSON \(-Infinity is no number\)"),
    (".json", b"7", "is not an object with named fields"),
    (
        ".csv",
        b'"x\ny",b,c',
        "has 3 fields, the header has 2; put text that contains the separator in double quotes",
    ),
    (".csv", b"caf\xe9,2", r"is not UTF-8 text \(save the file as UTF-8\): 'caf\\\\xe9,2'"),
    (".txt", b"\xff", r"is not UTF-8 text \(save the file as UTF-8\): '\\\\xff\\n'"),
]
AROUND = {
    ".jsonl": (GOOD, b'\n{"p": "b"}', 3),
    ".json": (b'[{"p": "a"}, ', b', {"p": "b"}]', 2),
    ".csv": (b"p,q\na,2\n", b"\n\nb,4", 2),
    ".txt": (b"a\n\n", b"\nb", 3),
}


@pytest.mark.parametrize(("kind", "row", "cause"), BAD_ROWS, ids=map(str, range(len(BAD_ROWS))))
def test_what_cannot_be_read_is_a_bad_row(tmp_path, monkeypatch, kind, row, cause):
    before, after, number = AROUND[kind]
    path = tmp_path / f"d{kind}"
    path.write_bytes(before + row + after)
    for _ in range(2):  # read, and from the cache
        train, _, [bad] = load(tmp_path, path)
        assert column(train, "text" if kind == ".txt" else "p") == ["a", "b"]
        assert re.match(f"{path}, row {number} {cause}", bad) and "\n" not in bad and len(bad) < 500
    monkeypatch.setattr(shards, "BATCH_ROWS", 1)
    one, wrong, other = batches(path)
    assert [isinstance(batch.rows[0], str) for batch in (one, wrong, other)] == [False, True, False]
    assert batches(path, one.end) == [wrong, other] and batches(path, wrong.end) == [other]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.xlsx", b"text", r"'\.xlsx' files are not supported; use one of \.json, .*\.gz"),
        (
            "a.parquet",
            b"version https://git-lfs.github.com/spec/v1\noid",
            "is a Git LFS pointer, .*git lfs pull",
        ),
        ("bad.jsonl", b"abc\ndef\n", "every row is bad; the first: .*bad.jsonl, row 1 is not JSON"),
        (
            "cut.json",
            b'[{"p": "a"}, {"p": "b',
            r"is not JSON \(Unterminated string .*column 20 .*'; a .json ",
        ),
        (
            "several.json",
            b'{\n"p": "a"}\n{\n"p": "b"}\n',
            r"is not JSON \(Extra data: line 3 .*on each line$",
        ),
        ("header.csv", b"caf\xe9,q\n1,2\n", "is not UTF-8 text"),
        ("same.csv", b"a,b,a\n1,2,3\n", "several columns have the same name: a, b, a"),
        (
            "quote.csv",
            b'p,q\n1,2\n"a" b,c\n',
            r"line 3 is not CSV \(',' expected after '\"'\); text with",
        ),
        (
            "open.csv",
            b"p,q\n1,2\n" + b'"open,b\n' + b"3,4\n" * 9,
            r"line 12 is not CSV \(unexpected end of data\)",
        ),
        ("cut.parquet", parquet()[:-20], "cannot be read: "),
        ("not_utf8.parquet", not_utf8(), "cannot be read: .*UTF8"),
        ("cut.jsonl.gz", gzip.compress(CONTENT["a.jsonl"])[:-9], "cannot be read: Truncated"),
        *(
            (name, content, "the data set is empty$")
            for name, content in [
                ("zero.jsonl", b""),
                ("blank.jsonl", b"\n\n"),
                ("list.json", b"[]"),
                ("header.csv", b"p,q\n"),
                ("rows.parquet", parquet(TABLE[:0])),
                ("zero.csv", b""),
            ]
        ),
    ],
)
def test_a_malformed_file_is_an_error(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"^--data_path {tmp_path / name}: {words}") as problem:
        load(tmp_path, tmp_path / name)
    assert "\n" not in str(problem.value) and len(str(problem.value)) < 700


def test_what_is_no_regular_file_is_refused_and_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "dead.jsonl").symlink_to(tmp_path / "nowhere")
    for name in ("pipe", "dead"):
        with pytest.raises(
            UserError, match=rf"^--data_path {tmp_path}/{name}\.jsonl: is not a regular file$"
        ):
            load(tmp_path, tmp_path / f"{name}.jsonl")


# Folders and streams


def test_files_of_a_folder_keep_their_order_names_and_bad_rows(tmp_path):
    folder = tmp_path / "data"
    for name, numbers in {"b": [1, "bad"], "a": [2], "test": ["worse", 3], "c": [4, "bad"]}.items():
        write_jsonl(
            folder / f"{name}.jsonl",
            [line if line in ("bad", "worse") else {"n": line} for line in numbers],
        )
    splits = load(tmp_path, folder)
    assert column(splits.train, "n") == [2, 1, 4] and column(splits.eval, "n") == [3]
    assert origins_of(splits.train) == [f"{folder / name}.jsonl, row 1" for name in ("a", "b", "c")]
    assert origins_of(splits.eval) == [f"{folder / 'test'}.jsonl, row 2"]
    assert len(splits.bad) == 3 and splits.bad[0].startswith(
        f"{folder / 'b.jsonl'}, row 2 is not JSON"
    )


def test_files_of_different_kinds_are_one_data_set_of_which_a_row_without_its_columns_is_bad(
    tmp_path,
):
    folder = tmp_path / "data"
    write_jsonl(
        folder / "a.jsonl", [{"prompt": "x", "response": "1"}, {"response": "2", "prompt": "y"}]
    )
    (folder / "b.csv").write_text("response,prompt\n3,z\n")
    assert column(load(tmp_path, folder).train, "prompt") == ["x", "y", "z"]
    write_jsonl(folder / "a.jsonl", [{"prompt": "x", "response": "1"}] * 30)
    (folder / "notes.txt").write_text("a note\n" * 30)
    with pytest.raises(
        UserError, match="30 of 61 rows cannot be used; .*notes.txt, row 1: 'prompt' is null"
    ):
        prepare(StepData("sft", flags_for(tmp_path, str(folder)), 64), TOKENIZER)
