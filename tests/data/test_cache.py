"""Cached data sets: complete entries are reused; the keys notice what rows depend on."""

import errno
import os
from pathlib import Path

import pytest
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)
from datasets import Dataset
from filelock import FileLock
from prepared import ROWS, column, load, write_jsonl
from tiny_tokenizers import tokenizer_of

from dschat_ppo.common import atomic_files, stop_requests
from dschat_ppo.common.logging import logger
from dschat_ppo.data import cache
from dschat_ppo.data.cache import new_entry, rows_of_entry
from dschat_ppo.data.parts import FilePart
from dschat_ppo.errors import StopRequested, UserError


class Rows:
    """An entry of three rows in two files; counts how often it is made."""

    def __init__(self, root):
        self.root, self.calls = root, 0
        self.folder = root / "dschat_ppo/key"

    def rows(self):
        with new_entry(str(self.root), "key") as folder:
            if folder is not None:
                self.calls += 1
                for number, values in enumerate(([1, 2], [3])):
                    rows = Dataset.from_dict({"a": values})
                    rows.map(lambda row: row, cache_file_name=str(folder / f"rows_{number:05d}.arrow"))
        return rows_of_entry(str(self.root), "key")

    def read(self):
        return self.rows()["a"][:]


def test_an_entry_is_made_once_and_keeps_the_order_of_its_files(tmp_path):
    rows = Rows(tmp_path)
    assert [rows.read(), rows.read()] == [[1, 2, 3], [1, 2, 3]]
    assert rows.calls == 1
    assert sorted(path.name for path in rows.folder.glob("*.arrow")) == ["rows_00000.arrow", "rows_00001.arrow"]
    # `Dataset.map` writes the rows that are made from an entry into its folder; they are no part of it
    rows.rows().map(lambda row: {"a": row["a"] + 10})
    assert len(list(rows.folder.iterdir())) > 2 and rows.read() == [1, 2, 3]


def test_an_unfinished_entry_is_made_again_and_one_that_cannot_be_read_is_named(tmp_path):
    rows = Rows(tmp_path)
    (tmp_path / "dschat_ppo/key.partial").mkdir(parents=True)
    (tmp_path / "dschat_ppo/key.partial/rows_00000.arrow").write_text("half")
    assert rows.read() == [1, 2, 3] and not (tmp_path / "dschat_ppo/key.partial").exists()
    for file in rows.folder.glob("*.arrow"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError, match=f"^{rows.folder}: prepared data cannot be read; remove this folder: "):
        rows.read()


def test_other_settings_code_or_another_vocabulary_miss_the_cache(monkeypatch):
    tokenizer = tokenizer_of("letters")
    key = cache.token_key("rows", tokenizer, "x")
    assert cache.token_key("rows", tokenizer_of("letters"), "x") == key != cache.token_key("rows", tokenizer, "y")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_code", lambda: "other")
        assert cache.token_key("rows", tokenizer, "x") != key
    found = {key}
    for change in ({"chat_template": "{{ messages }}"}, {"eos_token": "<|im_end|>"}):
        for name, value in change.items():
            setattr(tokenizer, name, value)
        found.add(cache.token_key("rows", tokenizer, "x"))
    first, second = list(tokenizer.letters)[:2]
    tokenizer.letters[first], tokenizer.letters[second] = tokenizer.letters[second], tokenizer.letters[first]
    assert len({*found, cache.token_key("rows", tokenizer, "x")}) == 4


def test_the_identity_of_rows_is_their_content_and_of_the_cache_their_place(tmp_path):
    one, two = (FilePart(Path(write_jsonl(tmp_path / name / "a.jsonl", ROWS)), "--data_path") for name in "ab")
    content, place = one.content, one.key
    assert content == two.content and place != two.key
    os.utime(one.path, (1, 1))
    assert one.content == content and one.key != place
    write_jsonl(two.path, [{"prompt": "prompt 9"}, *ROWS[1:]])
    assert two.content != content


def test_other_content_with_the_time_of_the_old_one_misses_the_cache(tmp_path):
    path = Path(write_jsonl(tmp_path / "a.jsonl", [{"a": 1}, "x"]))
    before = path.stat()
    assert column(load(tmp_path, path).train, "a") == [1]
    write_jsonl(path, [{"a": 2}, "x"])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert column(load(tmp_path, path).train, "a") == [2]


def test_a_disk_that_is_full_of_prepared_rows_is_named_and_freed(tmp_path):
    full = pytest.raises(UserError, match=r"^--data_output_path .*No space left on device")
    with full, new_entry(str(tmp_path), "key") as folder:
        (folder / "rows_00000.arrow").write_bytes(b"many rows")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [path.name for path in (tmp_path / "dschat_ppo").iterdir()] == ["key.lock"]


def test_waiting_for_another_process_is_logged_and_can_be_stopped(tmp_path, monkeypatch):
    lines, flag_is_set = [], iter([False, True])
    monkeypatch.setattr(atomic_files, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(logger(), "info", lines.append)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: next(flag_is_set))
    rows = Rows(tmp_path)
    rows.folder.parent.mkdir()
    with FileLock(f"{rows.folder}.lock", is_singleton=False), pytest.raises(StopRequested, match="waited for prepared"):
        rows.read()
    assert lines == [f"data: another process prepares {rows.folder}; waiting for it"]
    assert rows.read() == [1, 2, 3]
