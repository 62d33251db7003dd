"""Cached data sets: complete entries are reused; the keys notice what rows depend on."""

import errno

import datasets
import pytest
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)
from datasets import Dataset
from filelock import FileLock
from tiny_tokenizers import tokenizer_of

from dschat_ppo.common import file_lock, stop_requests
from dschat_ppo.common.logging import logger
from dschat_ppo.data import cache
from dschat_ppo.data.cache import cached_dataset
from dschat_ppo.errors import StopRequested, UserError
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


def test_an_entry_is_made_once_and_keeps_the_order_of_its_files(tmp_path):
    rows = Rows(tmp_path)
    assert [rows.read(), rows.read()] == [[1, 2, 3], [1, 2, 3]]
    assert rows.calls == 1
    assert sorted(path.name for path in rows.folder.glob("*.arrow")) == ["rows_00000.arrow", "rows_00001.arrow"]


def test_rows_made_from_an_entry_are_no_part_of_it(tmp_path):
    """`Dataset.map` writes them into its folder."""
    rows = Rows(tmp_path)
    rows.read()
    cached_dataset(str(tmp_path), "key", rows.make).map(lambda row: {"a": row["a"] + 10})
    assert len(list(rows.folder.iterdir())) > 2 and rows.read() == [1, 2, 3]


@pytest.mark.parametrize("damage", ["zeros", "gone"])
def test_an_entry_that_cannot_be_read_is_named(tmp_path, damage):
    rows = Rows(tmp_path)
    rows.read()
    for file in rows.folder.glob("*.arrow"):
        file.write_bytes(bytes(file.stat().st_size))
        if damage == "gone":
            file.unlink()
    with pytest.raises(UserError, match=f"^{rows.folder}: prepared data cannot be read; remove this folder: "):
        rows.read()


def test_other_code_misses_the_cache(monkeypatch):
    rows, tokenizer = "rows", toy.make_tokenizer(["words"])
    key = cache.token_key(rows, tokenizer, "x")
    assert cache.token_key(rows, tokenizer, "x") == key != cache.token_key(rows, tokenizer, "y")
    monkeypatch.setattr(cache, "_code", lambda: "other")
    assert cache.token_key(rows, tokenizer, "x") != key


def test_another_vocabulary_misses_the_cache():
    rows, tokenizer = "rows", tokenizer_of("letters")
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


def test_an_unwritable_cache_is_named_in_the_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^--data_output_path .*file: prepared data cannot be written there \(Not a"):
        cached_dataset(str(tmp_path / "file"), "key", Rows(tmp_path).make)


def test_a_disk_that_is_full_of_prepared_rows_is_named_and_freed(tmp_path):
    def make(folder):
        (folder / "rows.arrow").write_bytes(b"many rows")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"^--data_output_path .*No space left on device"):
        cached_dataset(str(tmp_path), "key", make)
    assert [path.name for path in (tmp_path / "dschat_ppo").iterdir()] == ["key.lock"]


def test_an_entry_that_another_process_made_meanwhile_is_used(tmp_path, monkeypatch):
    """Between the first look and the lock."""
    rows, locked = Rows(tmp_path), cache.locked

    def after_another(*how):
        cache._write_entry(rows.folder, rows.make)
        return locked(*how)

    monkeypatch.setattr(cache, "locked", after_another)
    assert rows.read() == [1, 2, 3] and rows.calls == 1


def test_waiting_for_another_process_is_logged_and_can_be_stopped(tmp_path, monkeypatch):
    lines, flag_is_set = [], iter([False, True])
    monkeypatch.setattr(file_lock, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(logger(), "info", lines.append)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: next(flag_is_set))
    rows = Rows(tmp_path)
    rows.folder.parent.mkdir()
    with FileLock(f"{rows.folder}.lock", is_singleton=False), pytest.raises(StopRequested, match="waited for prepared"):
        rows.read()
    assert lines == [f"data: another process prepares {rows.folder}; waiting for it"]
    assert rows.read() == [1, 2, 3]
