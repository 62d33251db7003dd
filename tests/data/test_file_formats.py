"""JSON, CSV, TSV and text: the values that come back are those of the file; bad rows, and the numbers of rows."""

import csv
import io
import json
import random
import tracemalloc
from pathlib import Path

import pandas
import pytest
from test_splits import column, load, origins_of

from dschat_ppo.data import parts
from dschat_ppo.data.parts import FilePart
from dschat_ppo.errors import UserError


def lines(*rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(tmp_path: Path, content: str | bytes, bad_rows: str = "error", name: str = "d.jsonl"):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return load(tmp_path, tmp_path / name, bad_rows)


TURN = {"role": "user", "content": "hi"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
EXACT = [
    [{"a": "2020-01-01"}, {"a": "2021-01-01T00:00:00Z"}],  # dates stay text
    [{"a": 5}, {"a": 4.5}],  # numbers stay what they are
    [{"a": 5}, {"a": "5"}, {"a": "[1]"}, {"a": True}],
    [{"a": [1, 0.5]}, {"a": [2]}],
    [{"a": [[1, "x"], []]}],
    [{"a": {"x": 1}}, {"a": {"y": 2.0}}],  # no key is added
    [{"a": {}}, {"a": {"y": "z"}}],
    [{"messages": [TURN]}, {"messages": [TURN, CALL]}],
    [{"messages": [TURN, {"role": "tool", "content": [{"type": "text", "text": "x"}]}]}],
    [{"a": 2**62}, {"a": -1}, {"a": 10**30}, {"a": {"b": -(10**30)}}],
    [{"a": "text"}, {"a": [TURN]}, {"a": 5}],
    [{"a": 0.30000000000000004}, {"a": 1e-300}],
    [{"a": "\u2028 \x00 \U0001f600 \r"}, {"a": ""}],
    [{"id": "x", "source": "y", "model": "m", "system_prompt": "s", "messages": [TURN]}],  # like an agent trace
]


@pytest.mark.parametrize("rows", EXACT, ids=lambda rows: json.dumps(rows)[:40])
def test_values_are_exactly_those_of_the_file(tmp_path, rows):
    assert json.dumps(list(read(tmp_path, lines(*rows)).train)) == json.dumps(rows)


def test_nan_is_null(tmp_path):
    """Programs that write with `json.dumps` mean a missing number."""
    assert list(read(tmp_path, b'{"p": "x", "score": NaN}\n{"p": "y", "score": 1}').train) == [
        {"p": "x", "score": None},
        {"p": "y", "score": 1},
    ]


@pytest.mark.parametrize("batch_bytes", [1, 20, 2000])
def test_missing_keys_are_null_wherever_they_come(tmp_path, monkeypatch, batch_bytes):
    monkeypatch.setattr(parts, "BATCH_BYTES", batch_bytes)
    rows = read(tmp_path, lines({"a": "x"}, {"b": [1]}, {"a": None, "c": {"d": "y"}})).train
    assert list(rows) == [
        {"a": "x", "b": None, "c": None},
        {"a": None, "b": [1], "c": None},
        {"a": None, "b": None, "c": {"d": "y"}},
    ]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b'{"p": ', r"line 3 is not JSON \(Expecting value at column 7\)"),
        (b'{"p": "x", "resp', r"line 3 is not JSON \(Unterminated string at column 12\): '{\"p\": \"x\", \"resp'"),
        (b'{"p": "x\ty"}', r"line 3 is not JSON \(Invalid control character at column 9\)"),
        (b'{"p": "\\x"}', r"line 3 is not JSON \(Invalid \\\\?escape at column 8\)"),
        (b"nothing", r"line 3 is not JSON \(Expecting value at column 1\): 'nothing'"),
        (b'{"p": "a\xff"}', r"line 3 is not UTF-8 text .*: '.*a.*xff"),
        (b"[1]", "line 3 is not an object with named fields"),
        (b"{}", "line 3 is an object without fields"),
        (b'{"p": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 3 is nested too deeply"),
        (b'{"p": "\\ud800"}', "line 3 holds half of a surrogate pair"),
        (b'{"p": {"x": -Infinity}}', "line 3 is not JSON .-Infinity is no number"),
    ],
)
def test_a_bad_line_is_an_error_or_is_left_out_and_counted(tmp_path, line, cause):
    content = lines({"p": "a"}) + b"\n" + line + b"\n" + lines({"p": "b"}) + b'{"p": "c"}'
    with pytest.raises(UserError, match=rf"^--data_path .*d\.jsonl: {cause}") as problem:
        read(tmp_path, content)
    assert "\n" not in str(problem.value) and len(str(problem.value)) < 500
    for _ in range(2):  # converted, and from the cache
        splits = read(tmp_path, content, "skip")
        assert column(splits.train, "p") == ["a", "b", "c"]
        assert [text.rpartition(", ")[2] for text in origins_of(splits)] == ["row 1", "row 4", "row 5"]
        assert splits.train.unreadable == 1
        assert str(tmp_path / "d.jsonl") in splits.train.problem and "3 " in splits.train.problem


def test_the_quoted_line_is_cut_at_200_characters(tmp_path):
    with pytest.raises(UserError) as problem:
        read(tmp_path, b'{"p": "' + b"x" * 1000 + b"\n{}")
    assert "x" * 193 + "'..." in str(problem.value) and "x" * 194 not in str(problem.value)


def test_a_file_of_bad_lines_alone_is_an_error(tmp_path):
    with pytest.raises(UserError, match="every row is bad; the first: .*d.jsonl, line 1 is not JSON"):
        read(tmp_path, b"abc\ndef\n", "skip")


ROWS = [{"p": "a", "n": 1}, {"p": "b]", "n": 2}, {"p": "c", "n": 3}]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        "\ufeff\n" + json.dumps(ROWS),
        "\n".join(json.dumps(row, indent=1) for row in ROWS),
        "".join(json.dumps(row) + "\r\n" for row in ROWS),
        json.dumps({"p": {"0": "a", "1": "b]", "2": "c"}, "n": {"0": 1, "1": 2, "2": 3}}),
        json.dumps({"p": {"0": "a", "1": "b]", "2": "c"}, "n": {"0": 1, "1": 2, "2": 3}}, indent=1),
    ],
    ids=[
        "array",
        "indented array",
        "after a mark",
        "indented objects",
        "windows",
        "columns",
        "indented columns",
    ],
)
def test_every_layout_of_json_gives_the_same_rows(tmp_path, text):
    splits = read(tmp_path, text.encode(), name="d.json")
    assert list(splits.train) == ROWS
    assert [text.rpartition(", ")[2] for text in origins_of(splits)] == ["row 1", "row 2", "row 3"]


def test_one_object_with_lists_of_objects_is_one_row(tmp_path):
    row = {"messages": [TURN, TURN], "tools": [{"a": 1}, {"a": 2}]}
    assert list(read(tmp_path, json.dumps(row, indent=1).encode(), name="d.json").train) == [row]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('[{"p": "a"}, {"p": "b', r"is not JSON \(Unterminated string at column 20\): '.*\"b'"),
        ('[{"p": "a"}, {"p": "b"}', r"is not JSON \(Expecting ',' delimiter at column 24\)"),
        ('[{"p": "a"} {"p": "b"}]', r"is not JSON \(Expecting ',' delimiter at column 13\)"),
        ('[{"p": "a"},\n {"p" "b"}]', r"is not JSON \(Expecting ':' delimiter: line 2 column 7 .*\): .*\"p\" \"b\""),
        ('[{"p": "a"}] x', r"is not JSON \(Extra data at column 14\)"),
        ('[{"p": "a"}, ]', r"is not JSON \(Illegal trailing comma before end of array at column 14\): '.*a.*, ]'"),
        ('[{"p": "a"}, {"p": Infinity}]', r"is not JSON \(Infinity is no number\): '.*Infinity"),
        ('[{"p": "a"}, 7]', "row 2 is not an object"),
        ('[{"p": "a"}, 7.5e+10]', "row 2 is not an object"),
        ('[{"p": "a"}, {"p": "\\ud83d\\ude00"}, {"p": "\\ud83d"}]', "row 3 holds half of a surrogate pair"),
    ],
)
def test_a_broken_array_is_a_one_line_error(tmp_path, text, cause):
    with pytest.raises(UserError, match=f"d.json: {cause}"):
        read(tmp_path, text.encode(), name="d.json")


def test_the_rows_of_an_array_are_made_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BATCH_ROWS", 7)
    rows = [{"conversations": [{"from": "human", "value": "hi"}] * 4, "id": n} for n in range(5000)]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    tracemalloc.start()
    try:
        numbers = [
            row["id"] for batch in parts.read_part(FilePart(tmp_path / "d.json", ""), False) for row in batch.rows
        ]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert numbers == list(range(5000))
    assert peak < 3 * (tmp_path / "d.json").stat().st_size  # its bytes and its text


def test_a_skipped_element_of_an_array_is_counted(tmp_path):
    splits = read(tmp_path, b'[{"p": "a"}, 7, {"p": "b"}]', "skip", "d.json")
    assert column(splits.train, "p") == ["a", "b"] and splits.train.unreadable == 1


# CSV, TSV and text


@pytest.mark.parametrize("per_batch", [1, 2, 2000])
def test_rows_are_those_that_pandas_reads(tmp_path, monkeypatch, per_batch):
    monkeypatch.setattr(parts, "BATCH_ROWS", per_batch)
    rng = random.Random(0)
    fields = ["", "a", "1.50", "N/A", 'say "x"', "two\nlines", "a,b", " space ", "é\t", "\r\n", "NULL"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["p", "", "p", "p.1"])
    writer.writerows([rng.choices(fields, k=3) + ["end"] for _ in range(40)])
    rows = read(tmp_path, out.getvalue(), name="d.csv").train
    assert list(rows.columns) == ["p", "Unnamed: 1", "p.2", "p.1"] or list(rows.columns[:2]) == ["p", "Unnamed: 1"]
    frame = pandas.read_csv(tmp_path / "d.csv", dtype=str, keep_default_na=False)
    assert [list(row.values()) for row in rows] == frame.to_numpy().tolist()


def test_fields_of_tsv_may_hold_commas(tmp_path):
    assert column(read(tmp_path, 'p\tq\na,b\t"c\td"\n', name="d.tsv").train, "q") == ["c\td"]


@pytest.mark.parametrize(
    ("name", "text", "mark"),
    [
        ("d.csv", "p;q\na, b;c\n", "';'"),
        ("d.csv", "p\tq\na\tb\n", r"'\\t'"),
        ("d.tsv", "p,q\na,b\n", "','"),
    ],
)
def test_another_separator_is_named(tmp_path, name, text, mark):
    with pytest.raises(
        UserError, match=rf"{name}: the header is one column, 'p.*q', with the separator {mark}; a .csv"
    ):
        read(tmp_path, text, "skip", name)


@pytest.mark.parametrize(
    ("row", "cause", "lines"),
    [
        ("one", "row 2 has 1 fields, the header has 2", 1),
        ("a,b,c", "row 2 has 3 fields, the header has 2; put text that contains the separator in double quotes", 1),
        ('"x\ny",b,c', "row 2 has 3 fields", 2),
        ('"a" b,c', r"row 2, line 3, is not CSV \(',' expected after '\"'\)", 1),
    ],
)
def test_a_bad_row_is_an_error_or_is_left_out_and_counted(tmp_path, row, cause, lines):
    text = f"p,q\n1,2\n{row}\n\n3,4\n"
    with pytest.raises(UserError, match=rf"^--data_path .*d\.csv: {cause}") as problem:
        read(tmp_path, text, name="d.csv")
    assert "\n" not in str(problem.value)
    splits = read(tmp_path, text, "skip", "d.csv")
    assert list(splits.train) == [{"p": "1", "q": "2"}, {"p": "3", "q": "4"}]
    assert [text.rpartition(", ")[2] for text in origins_of(splits)] == ["row 1", "row 3"]
    assert splits.train.unreadable == lines


def test_a_quote_without_end_counts_all_lines_that_it_swallows(tmp_path):
    text = "p,q\n1,2\n" + '"open,b\n' + "3,4\n" * 9
    with pytest.raises(UserError, match="row 2, line 3, is not CSV .unexpected end of data"):
        read(tmp_path, text, name="d.csv")
    splits = read(tmp_path, text, "skip", "d.csv")
    assert len(splits.train) == 1 and splits.train.unreadable == 10


def test_text_that_is_not_utf8_is_named(tmp_path):
    content = "p,q\né,1\n".encode() + b"caf\xe9,2\n"
    with pytest.raises(UserError, match=r"row 2 is not UTF-8 text \(save the file as UTF-8\): 'caf\\\\xe9,2'"):
        read(tmp_path, content, name="d.csv")
    assert column(read(tmp_path, content, "skip", "d.csv").train, "p") == ["é"]
    with pytest.raises(UserError, match="d.csv: is not UTF-8 text"):
        read(tmp_path, b"caf\xe9,q\n1,2\n", "skip", name="d.csv")


@pytest.mark.parametrize("name", ["d.csv", "d.txt", "d.jsonl"])
def test_the_text_around_the_first_byte_that_is_not_utf8_is_shown(tmp_path, name):
    before, after = "x" * 300 + "é" * 40, "z" * 40
    first = b'{"p": "a"}\n' if name == "d.jsonl" else b"p\n"
    content = first + before.encode() + b"\xfc" + after.encode() + b"\xfc\n"
    with pytest.raises(UserError) as problem:
        read(tmp_path, content, name=name)
    shown = "é" * 40 + "\\xfc" + "z" * 39
    assert f"is not UTF-8 text (save the file as UTF-8): {shown!r}; --bad_rows skip" in str(problem.value)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (f'{{"p": "{"x" * 2**20}"}}\nbad\n{{"p": "b"}}\n', ["x" * 2**20, "b"]),  # the first line is longer than a piece
        ('{ "p": "a",\n  "q": "b" }\n', ["a"]),
        ('{"p": ["a", "b"],\n "q": ["c", "d"]}\n', ["a", "b"]),
        ('{"p": "a"}\n{"p": \xff\n', ["a"]),
        ('{"p": \n{"p": "b"}\n{"p": "c"}\n', ["b", "c"]),
        ('{"p": [\n{"q": 1},\n{"q": 2}]}\n', [[{"q": 1}, {"q": 2}]]),
        (f'{{"p": ["{"x" * 2**20}", "b"]}}', ["x" * 2**20, "b"]),
    ],
    ids=[
        "long first line",
        "object over lines",
        "columns over lines",
        "bad last line",
        "bad first line",
        "objects in a list over lines",
        "long columns",
    ],
)
def test_lines_and_values_over_several_lines_are_told_apart(tmp_path, text, values):
    assert column(read(tmp_path, text, "skip", "d.json").train, "p") == values


def test_a_long_field_is_read(tmp_path):
    assert column(read(tmp_path, f"p,q\n{'x' * 300_000},1\n", name="d.csv").train, "p") == ["x" * 300_000]


def test_lines_of_text_that_are_not_utf8(tmp_path):
    with pytest.raises(UserError, match=r"line 2 is not UTF-8 text"):
        read(tmp_path, b"a\n\xff\nb\n", name="d.txt")
    splits = read(tmp_path, b"a\n\xff\nb\n", "skip", "d.txt")
    assert column(splits.train, "text") == ["a", "b"] and splits.train.unreadable == 1
