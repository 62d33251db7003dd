"""Cached data sets: intact entries are reused, damaged ones are made again."""

import errno

import datasets
import pytest
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)
from datasets import Dataset
from filelock import FileLock
from tiny_tokenizers import tokenizer_of

from dschat_ppo.common.atomic_files import checksum
from dschat_ppo.common.logging import logger
from dschat_ppo.config.cli import parse
from dschat_ppo.data import cache
from dschat_ppo.data.cache import cached_dataset
from dschat_ppo.data.prepare import prepare
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.runtime import stop_requests
from dschat_ppo.tools import toy


class Rows:
    """An entry of three rows in two files; counts how often it is made."""

    def __init__(self, root):
        self.root, self.calls = root, 0
        self.folder = root / "dschat_ppo/key"

    def make(self, folder):
        self.calls += 1
        parts = [
            Dataset.from_dict({"a": numbers}).map(lambda row: row, cache_file_name=str(folder / f"{numbers[0]}.arrow"))
            for numbers in ([1, 2], [3])
        ]
        return datasets.concatenate_datasets(parts)

    def read(self):
        return cached_dataset(str(self.root), "key", self.make)["a"][:]


@pytest.fixture
def warnings(monkeypatch):
    lines = []
    monkeypatch.setattr(logger(), "warning", lines.append)
    return lines


def test_an_entry_is_made_once_and_keeps_the_order_of_its_files(tmp_path, warnings):
    rows = Rows(tmp_path)
    assert [rows.read(), rows.read()] == [[1, 2, 3], [1, 2, 3]]
    assert rows.calls == 1 and warnings == []
    assert sorted(path.name for path in rows.folder.iterdir()) == [
        "files.json",
        "rows_00000.arrow",
        "rows_00001.arrow",
    ]


@pytest.mark.parametrize("name", ["files.json", "rows_00000.arrow", "rows_00001.arrow"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: bytes(len(content)),
        lambda content: content[:-8] + bytes(8),
        lambda content: None,
    ],
    ids=["empty", "cut", "zeros", "zeros at the end", "gone"],
)
def test_a_damaged_entry_is_made_again(tmp_path, warnings, name, damage):
    rows = Rows(tmp_path)
    rows.read()
    content = damage((rows.folder / name).read_bytes())
    (rows.folder / name).unlink()
    if content is not None:
        (rows.folder / name).write_bytes(content)
    assert [rows.read(), rows.read()] == [[1, 2, 3], [1, 2, 3]]
    assert rows.calls == 2 and warnings == [f"data: {rows.folder} is damaged and is made again"]


def test_only_the_first_rank_of_a_node_reads_an_entry_whole(tmp_path, monkeypatch):
    rows, read = Rows(tmp_path), []
    rows.read()
    monkeypatch.setattr(cache, "checksum", lambda path: read.append(path.name) or checksum(path))
    for rank, files in (("0", 2), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert rows.read() == [1, 2, 3] and len(read) == files
        read.clear()
    (rows.folder / "rows_00000.arrow").write_bytes(b"short")
    assert rows.read() == [1, 2, 3] and rows.calls == 2, "another rank compares sizes"


def test_other_code_misses_the_cache(monkeypatch):
    rows, tokenizer = Dataset.from_dict({"a": [1]}), toy.make_tokenizer(["words"])
    key = cache.token_key(rows, tokenizer, "x")
    assert cache.token_key(rows, tokenizer, "x") == key != cache.token_key(rows, tokenizer, "y")
    monkeypatch.setattr(cache, "_code", lambda: "other")
    assert cache.token_key(rows, tokenizer, "x") != key


def test_another_vocabulary_misses_the_cache():
    rows, tokenizer = Dataset.from_dict({"a": [1]}), tokenizer_of("letters")
    key = cache.token_key(rows, tokenizer)
    assert cache.token_key(rows, tokenizer_of("letters")) == key
    first, second = list(tokenizer.letters)[:2]
    tokenizer.letters[first], tokenizer.letters[second] = tokenizer.letters[second], tokenizer.letters[first]
    assert cache.token_key(rows, tokenizer) != key


def test_an_unfinished_entry_is_made_again(tmp_path):
    rows = Rows(tmp_path)
    (tmp_path / "dschat_ppo/key.partial").mkdir(parents=True)
    (tmp_path / "dschat_ppo/key.partial/rows_00000.arrow").write_text("half")
    assert rows.read() == [1, 2, 3] and not (tmp_path / "dschat_ppo/key.partial").exists()


def test_a_damaged_cache_does_not_reject_the_data_file(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,response\na:,b\nc:,d\n")
    words = f"--model_name_or_path m --output_dir o --data_split 1,0,0 --data_path {path} --data_output_path {tmp_path}"
    flags, tokenizer = parse("sft", words.split()).data, toy.make_tokenizer(["words"])
    rows = prepare("sft", tokenizer, flags, 64).train.to_list()
    entries = list((tmp_path / "dschat_ppo").glob("*/rows_00000.arrow"))
    assert len(entries) == 2
    for file in entries:
        file.write_bytes(file.read_bytes()[:100])
    assert prepare("sft", tokenizer, flags, 64).train.to_list() == rows


def test_an_unwritable_cache_is_named_in_the_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/dschat_ppo: cannot be written \(.*name another .* --data_output_path"):
        cached_dataset(str(tmp_path / "file"), "key", Rows(tmp_path).make)


def test_a_disk_that_is_full_of_prepared_rows_is_named_and_freed(tmp_path):
    def make(folder):
        (folder / "rows.arrow").write_bytes(b"many rows")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"dschat_ppo: .*No space left on device.* --data_output_path"):
        cached_dataset(str(tmp_path), "key", make)
    assert [path.name for path in (tmp_path / "dschat_ppo").iterdir()] == ["key.lock"]


def test_waiting_for_another_process_is_logged_and_can_be_stopped(tmp_path, monkeypatch):
    lines, flag_is_set = [], iter([False, True])
    monkeypatch.setattr(cache, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(logger(), "info", lines.append)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: next(flag_is_set))
    rows = Rows(tmp_path)
    rows.folder.parent.mkdir()
    with FileLock(f"{rows.folder}.lock", is_singleton=False), pytest.raises(StopRequested, match="waited for prepared"):
        rows.read()
    assert lines == [f"data: another process prepares {rows.folder}; waiting for it"]
    assert rows.read() == [1, 2, 3]
