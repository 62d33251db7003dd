"""CSV and TSV row by row: what is read, what is bad, and the numbers of the rows."""

import csv
import io
import json
import random

import pandas
import pytest
from test_splits import load, origins_of

from dschat_ppo.data import row_readers
from dschat_ppo.data.row_readers import read_skipped, write_table
from dschat_ppo.data.splits import ORIGIN
from dschat_ppo.errors import UserError


def read(tmp_path, text: str | bytes, bad_rows: str = "error", name: str = "d.csv"):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(tmp_path, tmp_path / name, bad_rows)


@pytest.mark.parametrize("per_batch", [1, 2, 2000])
def test_rows_are_those_that_pandas_reads(tmp_path, monkeypatch, per_batch):
    monkeypatch.setattr(row_readers, "_BATCH_ROWS", per_batch)
    rng = random.Random(0)
    fields = ["", "a", "1.50", "N/A", 'say "x"', "two\nlines", "a,b", " space ", "é\t", "\r\n", "NULL"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["p", "", "p", "p.1"])
    writer.writerows([rng.choices(fields, k=3) + ["end"] for _ in range(40)])
    rows = read(tmp_path, out.getvalue()).train.remove_columns(ORIGIN)
    assert rows.column_names == ["p", "Unnamed: 1", "p.2", "p.1"] or rows.column_names[:2] == ["p", "Unnamed: 1"]
    frame = pandas.read_csv(tmp_path / "d.csv", dtype=str, keep_default_na=False)
    assert [list(row.values()) for row in rows] == frame.to_numpy().tolist()


def test_fields_of_tsv_may_hold_commas(tmp_path):
    assert read(tmp_path, 'p\tq\na,b\t"c\td"\n', name="d.tsv").train["q"][:] == ["c\td"]


@pytest.mark.parametrize(
    ("row", "cause", "lines"),
    [
        ("one", "row 2 has 1 fields, the header has 2", 1),
        ("a,b,c", "row 2 has 3 fields, the header has 2; put text that contains the separator in double quotes", 1),
        ('"x\ny",b,c', "row 2 has 3 fields", 2),
        ('"a" b,c', r"row 2 is not CSV \(',' expected after '\"'\)", 1),
    ],
)
def test_a_bad_row_is_an_error_or_is_left_out_and_counted(tmp_path, row, cause, lines):
    text = f"p,q\n1,2\n{row}\n\n3,4\n"
    with pytest.raises(UserError, match=rf"^--data_path .*d\.csv: {cause}") as problem:
        read(tmp_path, text)
    assert "\n" not in str(problem.value)
    splits = read(tmp_path, text, "skip")
    assert splits.train.remove_columns(ORIGIN).to_list() == [{"p": "1", "q": "2"}, {"p": "3", "q": "4"}]
    assert [text.rpartition(", ")[2] for text in origins_of(splits)] == ["row 1", "row 3"]
    assert splits.skipped.count == lines


def test_a_quote_without_end_counts_all_lines_that_it_swallows(tmp_path):
    text = "p,q\n1,2\n" + '"open,b\n' + "3,4\n" * 9
    with pytest.raises(UserError, match="row 2 is not CSV .unexpected end of data"):
        read(tmp_path, text)
    splits = read(tmp_path, text, "skip")
    assert len(splits.train) == 1 and splits.skipped.count == 10


def test_text_that_is_not_utf8_is_named(tmp_path):
    content = "p,q\né,1\n".encode() + b"caf\xe9,2\n"
    with pytest.raises(UserError, match=r"row 2 is not UTF-8 text \(save the file as UTF-8\): 'caf\\\\xe9,2'"):
        read(tmp_path, content)
    assert read(tmp_path, content, "skip").train["p"][:] == ["é"]
    with pytest.raises(UserError, match="the header is not UTF-8 text"):
        read(tmp_path, b"caf\xe9,q\n1,2\n", "skip")


@pytest.mark.parametrize("name", ["d.csv", "d.txt", "d.jsonl"])
def test_the_text_around_the_first_byte_that_is_not_utf8_is_shown(tmp_path, name):
    before, after = "x" * 300 + "é" * 40, "z" * 40
    first = b'{"p": "a"}\n' if name == "d.jsonl" else b"p\n"
    content = first + before.encode() + b"\xfc" + after.encode() + b"\xfc\n"
    with pytest.raises(UserError) as problem:
        read(tmp_path, content, name=name)
    shown = "..." + "é" * 40 + "\\xfc" + "z" * 36 + "..."
    assert f"is not UTF-8 text (save the file as UTF-8): {shown!r}; --bad_rows skip" in str(problem.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("d.csv", "p;q\n1,5;2\n3;4\n", "fields are separated by commas; this file seems to use ';'; convert it"),
        ("d.csv", "p;q\n1;2\n", "this file seems to use ';'"),
        ("d.csv", '"p";"q"\n"1, 2";"3"\n', "this file seems to use ';'"),
        ("d.csv", '\np|q|r\n"1\n2"|3|4\n', "this file seems to use '|'; convert it"),
        ("d.csv", "p\tq\na\tb, c\n", "this file seems to use tabs; rename it to NAME.tsv"),
        ("d.tsv", "p,q\na,b\n", "fields are separated by tabs; this file seems to use commas; rename it to NAME.csv"),
    ],
)
@pytest.mark.parametrize("bad_rows", ["error", "skip"])
def test_another_separator_is_named(tmp_path, name, text, words, bad_rows):
    with pytest.raises(UserError) as problem:
        read(tmp_path, text, bad_rows, name)
    assert str(problem.value).startswith(f"--data_path {tmp_path / name}: fields are separated by ")
    assert words in str(problem.value)


@pytest.mark.parametrize(
    ("text", "column"),
    [("p;q\n1\n2;3;4\n", "p;q"), ('"p;q"\n"1;2"\n', "p;q"), ("p\na;b\n", "p"), ("p;q,r\n1;2,3\n", "p;q")],
)
def test_other_separators_inside_fields_are_text(tmp_path, text, column):
    assert read(tmp_path, text).train.column_names[0] == column


def test_a_long_field_is_read(tmp_path):
    assert read(tmp_path, f"p,q\n{'x' * 300_000},1\n").train["p"][:] == ["x" * 300_000]


def test_lines_of_text_that_are_not_utf8(tmp_path):
    with pytest.raises(UserError, match=r"line 2 is not UTF-8 text"):
        read(tmp_path, b"a\n\xff\nb\n", name="d.txt")
    splits = read(tmp_path, b"a\n\xff\nb\n", "skip", "d.txt")
    assert splits.train["text"][:] == ["a", "b"] and splits.skipped.count == 1


def test_the_origin_holds_the_numbers_of_file_and_row(tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"a": n}) + "\n" for n in range(3)))
    write_table("json", tmp_path / "d.jsonl", tmp_path / "t.arrow", 5, False, frozenset())
    with row_readers.pa.memory_map(str(tmp_path / "t.arrow")) as source:
        origins = row_readers.pa.ipc.open_stream(source).read_all()[ORIGIN].to_pylist()
    assert origins == [5 * 2**40 + 1, 5 * 2**40 + 2, 5 * 2**40 + 3]
    assert read_skipped(tmp_path / "t.arrow").count == 0
