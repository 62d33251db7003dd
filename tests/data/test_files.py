"""Files of every kind, compressed or not; damaged ones; several files as one table."""

import gzip
import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from test_splits import column, load, origins_of

from dschat_ppo.data import cache, parts, rows
from dschat_ppo.errors import UserError

ROWS = [{"prompt": f"ask {n}", "response": f"Grüße {n}"} for n in range(50)]
TEXT = {
    ".jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS),
    ".json": json.dumps(ROWS),
    ".csv": "prompt,response\n" + "".join(f"{row['prompt']},{row['response']}\n" for row in ROWS),
    ".tsv": "prompt\tresponse\r\n" + "".join(f"{row['prompt']}\t{row['response']}\r\n" for row in ROWS),
}


def parquet(**settings) -> bytes:
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), sink, **settings)
    return sink.getvalue().to_pybytes()


def arrow(opener) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(ROWS)
    with opener(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return sink.getvalue().to_pybytes()


CONTENT = {name: text.encode() for name, text in TEXT.items()} | {
    ".parquet": parquet(), "1.arrow": arrow(pa.ipc.new_stream), "2.arrow": arrow(pa.ipc.new_file),
}  # fmt: skip


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(content)
    return sink.getvalue().to_pybytes()


PACK = {"": lambda content: content, ".gz": gzip.compress, ".zst": zstd}


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", CONTENT)
def test_every_kind_gives_the_same_rows_with_their_origins(tmp_path, kind, packing):
    path = tmp_path / f"d{kind.upper() if kind == '.csv' else kind}{packing}"
    path.write_bytes(PACK[packing](CONTENT[kind]))
    splits = load(tmp_path, path)
    assert list(splits.train) == ROWS
    assert origins_of(splits) == [f"{path}, row {number}" for number in range(1, 51)]
    assert splits.train.unreadable == 0


def test_nothing_but_the_entry_is_left_in_the_cache(tmp_path):
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(CONTENT[".csv"]))
    load(tmp_path, tmp_path / "d.csv.gz")
    left = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert left == {"notes.json", "rows_00000.arrow"}


def test_text_files_have_one_row_for_each_line_that_is_not_blank(tmp_path):
    (tmp_path / "d.txt").write_bytes("\ufeffone\r\n\n  \n two, three \nfour".encode())
    splits = load(tmp_path, tmp_path / "d.txt")
    assert column(splits.train, "text") == ["one", " two, three ", "four"]
    assert [text.rpartition(", ")[2] for text in origins_of(splits)] == ["row 1", "row 4", "row 5"]


@pytest.mark.parametrize("bad_rows", ["error", "skip"])
@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("part", [0.001, 0.5, 0.99])
def test_a_truncated_compressed_file_is_an_error_in_both_modes(tmp_path, packing, part, bad_rows):
    content = PACK[packing](random.Random(0).randbytes(9999).hex().encode())
    path = tmp_path / f"d.jsonl{packing}"
    path.write_bytes(content[: max(1, int(len(content) * part))])
    with pytest.raises(UserError, match=r"d\.jsonl\..*: cannot be read: .*; copy or download it again$"):
        load(tmp_path, path, bad_rows)


def test_zeros_that_fill_up_a_gzip_file_are_ignored(tmp_path):
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(CONTENT[".jsonl"]) + bytes(512))
    assert list(load(tmp_path, tmp_path / "d.jsonl.gz").train) == ROWS


@pytest.mark.parametrize("place", [40, -6])
def test_damage_inside_a_gzip_file_is_an_error(tmp_path, place):
    content = bytearray(gzip.compress(random.Random(0).randbytes(9999).hex().encode()))
    content[place] ^= 99  # the compressed text, which zlib then refuses, or its checksum
    (tmp_path / "d.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"d\.jsonl\..*: cannot be read: "):
        load(tmp_path, tmp_path / "d.jsonl.gz")


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_file_that_is_not_compressed_is_an_error(tmp_path, packing):
    (tmp_path / f"d.jsonl{packing}").write_bytes(CONTENT[".jsonl"])
    with pytest.raises(UserError, match=r"d\.jsonl\..*: cannot be read: "):
        load(tmp_path, tmp_path / f"d.jsonl{packing}")


def test_a_truncated_parquet_file_is_an_error_in_both_modes(tmp_path):
    (tmp_path / "d.parquet").write_bytes(parquet()[:-20])
    for bad_rows in ("error", "skip"):
        with pytest.raises(UserError, match=r"d\.parquet: cannot be read: "):
            load(tmp_path, tmp_path / "d.parquet", bad_rows)


def test_a_full_disk_is_not_an_error_of_the_file(tmp_path, monkeypatch):
    """The parts that were written until then do not keep it full."""

    def fail(path, mode):
        Path(path).write_bytes(b"some of the rows")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(rows.pa, "OSFile", fail)
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(CONTENT[".csv"]))
    with pytest.raises(UserError, match=r"^--data_output_path .*cache: .*No space left on device.*free disk space"):
        load(tmp_path, tmp_path / "d.csv.gz")
    assert [path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [".lock"]


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    (tmp_path / "d.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n")
    with pytest.raises(UserError, match=r"d\.parquet: is a Git LFS pointer, .*git lfs pull"):
        load(tmp_path, tmp_path / "d.parquet")


def test_another_mode_misses_the_cache(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"a": 1}\nx\n')
    assert load(tmp_path, tmp_path / "d.jsonl", "skip").train.unreadable == 1
    with pytest.raises(UserError, match="line 2 is not JSON"):
        load(tmp_path, tmp_path / "d.jsonl")


def test_categories_become_their_values(tmp_path):
    table = pa.table({"a": pa.array(["x", "y", "x"]).dictionary_encode()})
    pa.parquet.write_table(table, tmp_path / "d.parquet")
    assert column(load(tmp_path, tmp_path / "d.parquet").train, "a") == ["x", "y", "x"]


def test_files_of_a_folder_keep_their_order_names_and_bad_lines(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, lines in {"b": ["1", "bad"], "a": ["2"], "test": ["worse", "3"], "c": ["4", "bad"]}.items():
        text = "".join((f'{{"n": "{line}"}}' if line.isdigit() else line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    splits = load(tmp_path, folder, "skip")
    assert column(splits.train, "n") == ["2", "1", "4"] and column(splits.eval, "n") == ["3"]
    assert origins_of(splits) == [f"{folder / name}.jsonl, row 1" for name in ("a", "b", "c")]
    assert origins_of(splits, splits.eval) == [f"{folder / 'test'}.jsonl, row 2"]
    assert (splits.train.unreadable, splits.eval.unreadable) == (2, 1)
    assert splits.train.problem.startswith(f"{folder / 'b.jsonl'}, line 2 is not JSON")


def test_files_of_different_kinds_need_the_same_columns(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"p": "x", "q": "1"}\n{"q": "2", "p": "y"}\n')
    (folder / "b.csv").write_text("q,p\n3,z\n")
    assert column(load(tmp_path, folder).train, "p") == ["x", "y", "z"]
    (folder / "notes.txt").write_text("a note\n" * 30)
    for bad_rows in ("error", "skip"):
        with pytest.raises(
            UserError, match=r"different columns \(json: a.jsonl has p, q; csv: .*; text: notes.txt has t"
        ):
            load(tmp_path, folder, bad_rows)


MUTATED = {**{f"d{kind}": content for kind, content in CONTENT.items()}, "d.txt": b"some\ntext\n" * 20}
MUTATED["plain.parquet"] = parquet(compression="none", use_dictionary=False)
MUTATED |= {
    f"{name}{ending}": PACK[ending](MUTATED[name]) for name in ("d.jsonl", "d.csv") for ending in (".gz", ".zst")
}


@pytest.mark.slow
@pytest.mark.parametrize("bad_rows", ["error", "skip"])
@pytest.mark.parametrize("name", MUTATED)
def test_mutated_and_truncated_files_give_rows_or_a_one_line_error(tmp_path, name, bad_rows):
    rng, content = random.Random(name), MUTATED[name]
    for number in range(12):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 3, 20))):
            damaged[rng.randrange(len(damaged))] ^= rng.randrange(1, 256)
        if number % 3 == 0:
            del damaged[rng.randrange(1, len(damaged)) :]
        if number % 7 == 0:
            damaged = damaged[len(damaged) // 2 :] + damaged[: len(damaged) // 2]
        path = tmp_path / f"{number}_{name}"
        path.write_bytes(damaged)
        try:
            splits = load(tmp_path, path, bad_rows)
            assert len(list(splits.train)) == len(splits.train) > 0
            assert all(str(path) in text for text in origins_of(splits))
        except UserError as problem:
            assert str(path) in str(problem) and "\n" not in str(problem) and len(str(problem)) < 1500


@pytest.mark.parametrize("at", [0, 0.5, 0.999])
def test_a_file_with_other_content_and_the_time_of_the_old_one_is_read_again(tmp_path, at):
    path, words = tmp_path / "a.txt", [f"line {n:06}" for n in range(80_000)]  # just below 1 MiB
    path.write_text("\n".join(words))
    before = path.stat()
    assert column(load(tmp_path, path).train, "text") == words
    words[int(at * len(words))] = "other words"
    path.write_text("\n".join(words))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size < 2**20
    assert column(load(tmp_path, path).train, "text") == words


@pytest.mark.parametrize("at", [0, 2**22 - 1])
def test_the_ends_of_a_large_file_identify_it(tmp_path, at):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(2**22))
    key = cache.content_key([path])
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"x")
    assert cache.content_key([path]) != key


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text(TEXT[".jsonl"])
    opened = parts.Path.open

    def refuse(self, *words, **settings):
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *words, **settings)

    monkeypatch.setattr(parts.Path, "open", refuse)
    with pytest.raises(UserError, match=r"^--data_path .*/a\.jsonl: cannot be read: .*Permission denied"):
        load(tmp_path, path)
