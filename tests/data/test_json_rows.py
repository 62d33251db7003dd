"""JSON to columns: the values that come back are those of the file."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, Json, List, Value
from test_splits import load, origins_of

from dschat_ppo.data import json_rows, row_readers
from dschat_ppo.data.splits import ORIGIN
from dschat_ppo.errors import UserError


def lines(*rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def values_of(rows: Dataset) -> list[dict]:
    return [{name: value for name, value in row.items() if name != ORIGIN} for row in rows]


def read(tmp_path: Path, content: bytes, bad_rows: str = "error", name: str = "d.jsonl"):
    (tmp_path / name).write_bytes(content)
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
    [{"a": 2**62}, {"a": -1}],
    [{"a": 0.30000000000000004}, {"a": 1e-300}],
    [{"a": "\u2028 \x00 \U0001f600 \r"}, {"a": ""}],
    [{"id": "x", "source": "y", "model": "m", "system_prompt": "s", "messages": [TURN]}],  # like an agent trace
]


@pytest.mark.parametrize("rows", EXACT, ids=lambda rows: json.dumps(rows)[:40])
@pytest.mark.parametrize("per_batch", [1, 2000])
def test_values_are_exactly_those_of_the_file(tmp_path, monkeypatch, rows, per_batch):
    monkeypatch.setattr(json_rows, "_BATCH_ROWS", per_batch)
    found = values_of(read(tmp_path, lines(*rows)).train)
    assert json.dumps(found) == json.dumps(rows)


def test_values_of_one_type_are_plain_columns(tmp_path):
    rows = [{"p": "a", "m": [TURN], "n": 1, "e": []}, {"p": "b", "m": [], "n": 2, "e": ["x"]}]
    features = read(tmp_path, lines(*rows)).train.features
    assert (
        features["p"] == Value("string") and features["n"] == Value("int64") and features["e"] == List(Value("string"))
    )
    assert features["m"] == List({"role": Value("string"), "content": Value("string")})


@pytest.mark.parametrize("per_batch", [1, 2, 2000])
def test_missing_keys_are_null_wherever_they_come(tmp_path, monkeypatch, per_batch):
    monkeypatch.setattr(json_rows, "_BATCH_ROWS", per_batch)
    rows = read(tmp_path, lines({"a": "x"}, {"b": [1]}, {"a": None, "c": {"d": "y"}})).train
    assert values_of(rows) == [
        {"a": "x", "b": None, "c": None},
        {"a": None, "b": [1], "c": None},
        {"a": None, "b": None, "c": {"d": "y"}},
    ]


@pytest.mark.parametrize("per_batch", [1, 2000])
@pytest.mark.parametrize(("odd", "what"), [([TURN], "a list"), ({"x": 1}, "an object")], ids=["messages", "an object"])
def test_text_in_some_rows_and_a_structure_in_others_names_row_and_key(tmp_path, monkeypatch, per_batch, odd, what):
    monkeypatch.setattr(json_rows, "_BATCH_ROWS", per_batch)
    content = lines({"prompt": "a"}, {"prompt": None}, {"prompt": odd}, {"prompt": "b"})
    with pytest.raises(UserError, match=rf"d\.jsonl: row 3 has {what} in 'prompt', the rows before it have text"):
        read(tmp_path, content)
    splits = read(tmp_path, content, "skip")
    assert splits.train["prompt"][:] == ["a", None, "b"] and splits.skipped.count == 1
    assert origins_of(splits)[2].endswith("d.jsonl, row 4")


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
        (b'{"p": "\\ud800"}', "row 3 holds half of a surrogate pair"),
        (b'{"p": {"x": NaN}}', "row 3 has an object in 'p'"),
    ],
)
def test_a_bad_line_is_an_error_or_is_left_out_and_counted(tmp_path, line, cause):
    content = lines({"p": "a"}) + b"\n" + line + b"\n" + lines({"p": "b"}) + b'{"p": "c"}'
    with pytest.raises(UserError, match=rf"^--data_path .*d\.jsonl: {cause}") as problem:
        read(tmp_path, content)
    assert "\n" not in str(problem.value) and len(str(problem.value)) < 500
    for _ in range(2):  # converted, and from the cache
        splits = read(tmp_path, content, "skip")
        assert splits.train["p"][:] == ["a", "b", "c"]
        assert [text.rpartition(", ")[2] for text in origins_of(splits)] == ["row 1", "row 4", "row 5"]
        assert splits.skipped.count == 1
        assert str(tmp_path / "d.jsonl") in splits.skipped.first and "3 " in splits.skipped.first


def test_numbers_that_json_does_not_have_are_bad_where_they_cannot_be_stored(tmp_path):
    with pytest.raises(UserError, match="row 2 holds NaN or Infinity, which is not JSON"):
        read(tmp_path, b'{"p": {"a": 1}}\n{"p": {"b": NaN}}\n')
    with pytest.raises(UserError, match="row 2 holds a number of more than 64 bits"):
        read(tmp_path, b'{"p": 1}\n{"p": 99999999999999999999999}\n')


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64])
@pytest.mark.parametrize("wrap", [lambda number: number, lambda number: [1, "a", {"b": number}]], ids=["alone", "deep"])
def test_integers_beyond_64_bits_are_bad_in_columns_that_are_stored_as_json(tmp_path, number, wrap):
    content = lines({"p": "text" if wrap(0) == 0 else ["text"]}, {"p": wrap(number)}, {"p": wrap(-(2**63))})
    with pytest.raises(UserError, match="row 2 holds a number of more than 64 bits"):
        read(tmp_path, content)
    assert [row["p"] for row in values_of(read(tmp_path, content, "skip").train)][1:] == [wrap(-(2**63))]


def test_the_quoted_line_is_cut_at_200_characters(tmp_path):
    with pytest.raises(UserError) as problem:
        read(tmp_path, b'{"p": "' + b"x" * 1000)
    assert "x" * 193 + "'..." in str(problem.value) and "x" * 194 not in str(problem.value)


def test_a_file_of_bad_lines_alone_is_an_error(tmp_path):
    with pytest.raises(UserError, match="every row is bad; the first: line 1 is not JSON"):
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
    ids=["array", "indented array", "after a mark", "indented objects", "windows", "columns", "indented columns"],
)
@pytest.mark.parametrize("block", [7, 2**22])
def test_every_layout_of_json_gives_the_same_rows(tmp_path, monkeypatch, text, block):
    monkeypatch.setattr("dschat_ppo.data.json_stream.BATCH_BYTES", block)
    splits = read(tmp_path, text.encode(), name="d.json")
    assert values_of(splits.train) == ROWS
    assert [text.rpartition(", ")[2] for text in origins_of(splits)] == ["row 1", "row 2", "row 3"]


def test_one_object_with_lists_of_objects_is_one_row(tmp_path):
    row = {"messages": [TURN, TURN], "tools": [{"a": 1}, {"a": 2}]}
    assert values_of(read(tmp_path, json.dumps(row, indent=1).encode(), name="d.json").train) == [row]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('[{"p": "a"}, {"p": "b', "row 2 has no end: the file is truncated"),
        ('[{"p": "a"}, {"p": "b"}', "its array has no end after row 2: the file is truncated"),
        ('[{"p": "a"} {"p": "b"}]', "row 1 is not followed by a comma"),
        ('[{"p": "a"}, {"p" "b"}, {"p": "ccccccccccccccccccccccc"}]', "row 2 is not JSON"),
        ('[{"p": "a"}, {"p": "b\tc"}, {"p": "ccccccccccccccc"}]', r"row 2 is not JSON \(Invalid control character\)"),
        ('[{"p": "a"}] x', "has more text after the end of its array: 'x'"),
        ('[{"p": "a"}, 7]', "row 2 is not an object"),
    ],
)
def test_a_broken_array_is_a_one_line_error(tmp_path, text, cause):
    with pytest.raises(UserError, match=f"d.json: {cause}"):
        read(tmp_path, text.encode(), name="d.json")


def test_a_syntax_error_does_not_read_the_rest_of_the_array(tmp_path, monkeypatch):
    monkeypatch.setattr("dschat_ppo.data.json_stream.BATCH_BYTES", 100)
    (tmp_path / "d.json").write_text('[{"p" 1' + "}, {}" * 10_000)
    sizes = []
    real = json_rows.json_values.__globals__["_read"]
    monkeypatch.setattr("dschat_ppo.data.json_stream._read", lambda *a, **k: sizes.append(1) or real(*a, **k))
    with pytest.raises(UserError, match="row 1 is not JSON"):
        list(json_rows.json_values(tmp_path / "d.json"))
    assert len(sizes) == 1


def test_a_skipped_element_of_an_array_is_counted(tmp_path):
    splits = read(tmp_path, b'[{"p": "a"}, 7, {"p": "b"}]', "skip", "d.json")
    assert splits.train["p"][:] == ["a", "b"] and splits.skipped.count == 1


def test_a_column_of_two_files_is_stored_in_one_way(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_bytes(lines({"messages": [TURN]}))
    (tmp_path / "data/b.jsonl").write_bytes(lines({"messages": [TURN, CALL]}))
    (tmp_path / "data/c.jsonl").write_bytes(lines({"messages": [{"role": "user", "name": "x"}]}))
    rows = load(tmp_path, tmp_path / "data").train
    assert rows["messages"][:] == [[TURN], [TURN, CALL], [{"role": "user", "name": "x"}]]
    assert rows.features["messages"] == Json()


def test_the_file_is_read_twice_at_most(tmp_path, monkeypatch):
    reads = []
    real = row_readers.json_batches
    monkeypatch.setattr(row_readers, "json_batches", lambda *args: reads.append(1) or real(*args))
    monkeypatch.setattr(json_rows, "_BATCH_ROWS", 1)
    (tmp_path / "d.jsonl").write_bytes(lines(*({f"k{n}": n, "x": {f"y{n}": 1}} for n in range(20))))
    row_readers.write_table("json", tmp_path / "d.jsonl", tmp_path / "t.arrow", 0, False, frozenset())
    assert len(reads) == 2 and len(Dataset.from_file(str(tmp_path / "t.arrow"))) == 20
