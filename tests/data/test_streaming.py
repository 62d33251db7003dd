"""Streamed rows: what a rank sees while a process makes them, memory, saved positions, ends and failures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from streams import FEATURES, NumberFile, expected, source_of, tokens_of
from test_encode import chat_tokenizer

from dschat_ppo.data import streaming
from dschat_ppo.data.batches import chunk_rows_of, chunked_order
from dschat_ppo.data.sample_text import log_samples
from dschat_ppo.data.streaming import StreamedRows, rows_at_hand
from dschat_ppo.errors import StopRequested, StorageError, UserError
from dschat_ppo.runtime import stop_requests

NUMBERS = expected(range(99))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 8)


def stream(tmp_path: Path, *sources, rows: int = 50) -> StreamedRows:
    return StreamedRows(str(tmp_path), "key", sources or [source_of(NumberFile(0, 99))], rows, FEATURES, "f")


def home_of(tmp_path: Path) -> Path:
    return tmp_path / "dschat_ppo" / "stream_key_8"


def number(rows: StreamedRows, index: int) -> int:
    [found] = rows[index]["prompt_ids"]
    return found


def tried(tmp_path: Path, make) -> StreamedRows:
    return stream(tmp_path, source_of(NumberFile(0, 99), name="s", make=make))


def test_rows_are_those_of_the_data_in_order(tmp_path):
    rows = stream(tmp_path)
    assert len(rows) == 50
    assert [number(rows, i) for i in range(50)] == NUMBERS[:50]
    assert rows[3] == {"prompt_ids": [3], "answers": [[3, 0]], "margin": 1.5, "source": 0}
    assert rows_at_hand(rows)["prompt_ids"] == [[n] for n in NUMBERS[:8]]
    for index in (50, -1):
        with pytest.raises(IndexError):
            rows[index]


def test_several_rows_are_columns_also_across_chunks(tmp_path):
    rows = stream(tmp_path)
    assert rows[[9, 2, 7]]["prompt_ids"] == [[NUMBERS[9]], [NUMBERS[2]], [NUMBERS[7]]]
    found = rows[range(6, 10)]
    assert list(found) == list(FEATURES) and found["margin"] == [n / 2 for n in NUMBERS[6:10]]


def test_epochs_in_training_order_with_three_chunks_in_memory_and_one_position_a_chunk_on_the_disk(tmp_path):
    numbers = expected(range(140))[:76]
    rows = stream(tmp_path, source_of(NumberFile(0, 140)), rows=76)
    for epoch in range(3):
        order = list(chunked_order(len(rows), chunk_rows_of(rows), 5, epoch))
        assert [number(rows, i) for i in order] == [numbers[i] for i in order]
        assert set(rows._chunks) == {0, 8, 9}
    assert number(rows, 17) == numbers[17], "in another order, rows are made again"
    assert sorted(path.name for path in home_of(tmp_path).iterdir()) == [f"before_{n:06d}.json" for n in range(1, 10)]


def test_rows_are_made_ahead_but_not_without_bound(tmp_path, monkeypatch):
    def make(batch):
        with (tmp_path / "made").open("a") as made:
            made.write("x")
        return tokens_of(batch)

    def made() -> int:
        return len((tmp_path / "made").read_text())

    tried(tmp_path, make)
    before = -1
    while made() != before:
        before = made()
        time.sleep(0.5)
    assert made() == 3  # batches of 7 raw rows: one chunk of 8 rows is ahead of the first


@pytest.mark.parametrize("chunk", [2, 3, 6])
def test_a_resumed_run_opens_the_data_at_the_position_before_its_chunk(tmp_path, chunk):
    list(map(stream(tmp_path).__getitem__, range(50)))
    opened = tmp_path / "opened"

    class Noting(NumberFile):
        def batches(self, bad, place):
            with opened.open("a") as file:
                file.write(f"{place} ")
            yield from super().batches(bad, place)

    rows = stream(tmp_path, source_of(Noting(0, 99)))
    assert [number(rows, i) for i in range(8 * chunk + 1, 50)] == NUMBERS[8 * chunk + 1 : 50]
    places, batch = opened.read_text().split(), NUMBERS[8 * chunk - 1] // 7 * 7  # of the last row before the chunk
    assert places[:2] == ["None", str(batch)]


@pytest.mark.parametrize("damage", [None, "", '{"sources": [', "[]", '{"taken": [1]}', '{"sources": [], "taken": []}'])
def test_positions_that_are_lost_are_found_again(tmp_path, damage, said):
    list(map(stream(tmp_path).__getitem__, range(50)))
    for path in home_of(tmp_path).iterdir():
        path.unlink()
        if damage is not None:
            path.write_text(damage)
    assert number(stream(tmp_path), 44) == NUMBERS[44]
    assert any(
        "the position of the stream after row 40 was not saved, so it is read again from row 8" in one for one in said
    )
    assert json.loads((home_of(tmp_path) / "before_000005.json").read_text())["taken"] == [40]


def test_the_samples_in_the_log_show_each_data_set(tmp_path, said):
    sources = [source_of(NumberFile(0, 99), name="one"), source_of(NumberFile(0, 99), name="two")]
    log_samples(chat_tokenizer("letters", "zephyr"), stream(tmp_path, *sources), ("one", "two"))
    assert [line.partition(": a sample")[0] for line in said if "a sample" in line] == ["data: one", "data: two"]


def test_a_bad_row_ends_the_run_where_its_chunk_is_needed(tmp_path):
    def make(batch):
        if any(row["n"] == 15 for row in batch.rows):
            raise UserError(f"{batch.origins[0]}: bad row")
        return tokens_of(batch)

    rows = tried(tmp_path, make)
    assert number(rows, 7) == 7
    for _ in range(2):
        with pytest.raises(UserError, match="^numbers, row 15: bad row$"):
            rows[8]
    assert number(rows, 0) == 1


def test_a_disk_that_cannot_be_written_is_a_storage_error(tmp_path):
    rows = stream(tmp_path)
    (home_of(tmp_path) / "before_000002.json").mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        rows[8]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "dschat_ppo").write_text("")
    with pytest.raises(UserError, match="--data_output_path"):
        stream(tmp_path)


def test_the_end_of_the_process_ends_the_run(tmp_path):
    rows = stream(tmp_path)
    os.kill(rows.process.pid, signal.SIGKILL)
    assert number(rows, 5) == 6  # what is there can be used
    for _ in range(2):
        with pytest.raises(UserError, match="the process that reads the stream has ended"):
            rows[8]


def test_the_launchers_signals_do_not_end_the_process(tmp_path):
    rows = stream(tmp_path)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(rows.process.pid, name)
    assert number(rows, 40) == NUMBERS[40]


def test_the_process_ends_with_its_rows(tmp_path):
    rows = stream(tmp_path)
    process = rows.process
    del rows
    process.join(10)
    assert process.exitcode == 0


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "os.kill(os.getpid(), 9)"])
def test_no_process_is_left_when_the_rank_ends(tmp_path, end):
    """... also while it makes a batch."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom streams import *\n"
        "from dschat_ppo.data.streaming import StreamedRows\n"
        "def make(batch):\n    time.sleep(3600 if batch.rows[0]['n'] > 20 else 0)\n    return tokens_of(batch)\n"
        "from dschat_ppo.data import streaming\nstreaming.CHUNK_ROWS = 8\n"
        f"rows = StreamedRows({str(tmp_path)!r}, 'k', [source_of(NumberFile(0, 99), make=make)], 50, FEATURES, 'f')\n"
        f"time.sleep(0.5)\nprint(rows.process.pid, flush=True)\n{end}\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    pid, until = int(result.stdout.split()[-1]), time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, result.stderr
        time.sleep(0.05)


def slowly(batch):
    time.sleep(0.3)
    return tokens_of(batch)


def test_a_stop_request_ends_the_wait_for_the_first_chunk_only(tmp_path, monkeypatch):
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    with pytest.raises(StopRequested, match="prepared the data"):
        tried(tmp_path, slowly)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: False)
    rows = tried(tmp_path, slowly)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    assert number(rows, 8) == NUMBERS[8]


def test_waiting_sends_a_heartbeat_for_each_piece(tmp_path, monkeypatch):
    beats = []
    monkeypatch.setattr(streaming, "heartbeat", lambda: beats.append(time.monotonic()))

    def few(batch):
        return tokens_of(batch) if batch.rows[0]["n"] > 60 else tokens_of(type(batch)([], []))

    tried(tmp_path, few)
    assert len(beats) >= 9  # nine batches without a row
