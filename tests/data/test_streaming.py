"""Streamed rows: what their users see while a process makes the chunks, disk use, ends and failures."""

import os
import signal
import time
from itertools import count
from pathlib import Path

import pytest
from streams import FEATURES, NumberFile, expected, source_of, tokens_of
from test_encode import chat_tokenizer

from dschat_ppo.data import chunk_reader
from dschat_ppo.data.batches import order_of
from dschat_ppo.data.chunk_reader import ChunkReader, wait_until_ready, want
from dschat_ppo.data.chunks import StreamSource
from dschat_ppo.data.raw_stream import RawStream
from dschat_ppo.data.sample_text import log_samples
from dschat_ppo.data.streaming import StreamedRows, start_stream
from dschat_ppo.errors import StopRequested, StorageError, UserError
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.processes import find_process


@pytest.fixture(autouse=True)
def no_reader_left(monkeypatch):
    monkeypatch.setattr(chunk_reader, "POLL_SECONDS", 0.01)
    yield
    while ChunkReader._running:
        ChunkReader._running.pop().end()


def stream(tmp_path: Path, *sources, rows: int = 50, chunk_rows: int = 8) -> StreamedRows:
    return start_stream(
        str(tmp_path), "key", sources or [source_of(NumberFile(0, 99))], rows, FEATURES, "f", chunk_rows
    )


def home_of(tmp_path: Path) -> Path:
    return tmp_path / "dschat_ppo" / "stream_key_0"


def chunks_on_disk(tmp_path: Path) -> list[int]:
    return sorted(
        int(entry.name.split("_")[1])
        for entry in home_of(tmp_path).glob("chunk_*")
        if entry.is_dir() and not entry.suffix
    )


def reader_pid() -> int:
    return ChunkReader._running[0]._process.pid


def wait_for(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_rows_are_those_of_the_data_in_order(tmp_path):
    rows = stream(tmp_path)
    assert len(rows) == 50
    assert [rows[i]["prompt_ids"] for i in range(50)] == [[n] for n in expected(range(99))[:50]]
    assert rows[3] == {"prompt_ids": [3], "answers": [[3, 0]], "margin": 1.5, "source": 0}


def test_several_rows_are_columns_also_across_chunks(tmp_path):
    rows, numbers = stream(tmp_path), expected(range(99))
    assert rows[[9, 2, 7]]["prompt_ids"] == [[numbers[9]], [numbers[2]], [numbers[7]]]
    assert rows[6:10] == {
        "prompt_ids": [[n] for n in numbers[6:10]],
        "answers": [[[n, 0]] for n in numbers[6:10]],
        "margin": [n / 2 for n in numbers[6:10]],
        "source": [0] * 4,
    }


@pytest.mark.parametrize("index", [50, -1])
def test_an_index_beyond_the_rows_is_an_error(tmp_path, index):
    with pytest.raises(IndexError):
        stream(tmp_path)[index]


def test_two_epochs_in_training_order_with_few_chunks_on_the_disk(tmp_path):
    most = 0
    numbers = expected(range(140))[:76]
    rows = stream(tmp_path, source_of(NumberFile(0, 140)), rows=76)
    for epoch in range(2):
        order = list(order_of(rows, 5, epoch))
        assert [rows[i]["prompt_ids"][0] for i in order] == [numbers[i] for i in order]
        most = max(most, len(chunks_on_disk(tmp_path)))
    for i in order_of(rows, 5, 2):
        rows[i]
        most = max(most, len(chunks_on_disk(tmp_path)))
    assert most <= 5  # chunk 0, the one before, the one in use, the next, and one about to be deleted


def test_the_next_chunk_is_made_ahead_and_chunks_behind_are_deleted(tmp_path):
    rows = stream(tmp_path)
    assert chunks_on_disk(tmp_path) == [0]
    rows[0]
    wait_for(lambda: chunks_on_disk(tmp_path) == [0, 1])
    for index, left in ((8, [0, 1, 2]), (16, [0, 1, 2, 3]), (24, [0, 2, 3, 4]), (32, [0, 3, 4, 5])):
        rows[index]
        wait_for(lambda left=left: chunks_on_disk(tmp_path) == left)
    assert rows[0]["prompt_ids"] == [1]  # a padding row needs no chunk to be made
    time.sleep(0.1)
    assert chunks_on_disk(tmp_path) == [0, 3, 4, 5]


def test_a_resumed_run_uses_the_chunks_of_the_run_before(tmp_path):
    rows = stream(tmp_path)
    for index in range(0, 41, 8):
        rows[index]
    wait_for(lambda: chunks_on_disk(tmp_path) == [0, 4, 5, 6])
    made = {entry: entry.stat().st_mtime_ns for entry in home_of(tmp_path).glob("chunk_*_?/rows*")}
    again = stream(tmp_path)
    assert again[41]["prompt_ids"] == [expected(range(99))[41]]
    wait_for(lambda: 6 in chunk_reader._get(home_of(tmp_path) / "ready.json")["chunks"])
    assert {entry: entry.stat().st_mtime_ns for entry in home_of(tmp_path).glob("chunk_*_?/rows*")} == made


def test_the_samples_in_the_log_leave_the_chunks_of_the_run_before(tmp_path, said):
    """... and show each data set."""
    sources = [source_of(NumberFile(0, 99), name="one"), source_of(NumberFile(0, 99), name="two")]
    rows = stream(tmp_path, *sources)
    for start in range(0, 41, 8):
        rows[start]
    wait_for(lambda: chunks_on_disk(tmp_path) == [0, 4, 5, 6])
    log_samples(chat_tokenizer("letters", "zephyr"), stream(tmp_path, *sources), ("one", "two"))
    assert [line.partition(": a sample")[0] for line in said if "a sample" in line] == ["data: one", "data: two"]
    time.sleep(0.1)
    assert chunks_on_disk(tmp_path) == [0, 4, 5, 6]


def test_each_rank_of_a_node_may_be_ahead_by_several_chunks(tmp_path):
    stream(tmp_path)
    home, others = home_of(tmp_path), count(1)
    for chunk in (4, 1):
        rank = next(others)
        want(home, rank, chunk, chunk)
        wait_until_ready(home, chunk, may_stop=False)
    wait_until_ready(home, 4, may_stop=False)


def test_a_bad_row_ends_the_run_where_its_chunk_is_needed(tmp_path):
    def tokenise(batch):
        if any(row["n"] == 15 for row in batch.rows):
            raise UserError(f"{batch.origins[0]}: bad row")
        return tokens_of(batch)

    rows = stream(tmp_path, StreamSource("s", 1.0, RawStream([NumberFile(0, 99)], None), tokenise))
    assert rows[7]["prompt_ids"] == [7]
    with pytest.raises(UserError, match="^numbers, row 15: bad row$"):
        rows[8]
    assert rows[0]["prompt_ids"] == [1]


def test_a_bad_row_in_the_first_chunk_ends_the_run_at_once(tmp_path):
    def tokenise(batch):
        raise UserError("bad")

    with pytest.raises(UserError, match="^bad$"):
        stream(tmp_path, StreamSource("s", 1.0, RawStream([NumberFile(0, 99)], None), tokenise))


def test_a_disk_that_cannot_be_written_is_a_storage_error(tmp_path):
    rows = stream(tmp_path)
    blocker = home_of(tmp_path) / "after_000001_8.json.partial"
    blocker.mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        rows[8]


def test_the_end_of_the_reader_ends_the_run(tmp_path):
    rows = stream(tmp_path)
    os.kill(reader_pid(), signal.SIGKILL)
    assert rows[5]["prompt_ids"] == [6]  # what is there can be used
    with pytest.raises(UserError, match="the process that reads the stream has ended"):
        rows[8]


def test_the_launchers_signals_do_not_end_the_reader(tmp_path):
    rows = stream(tmp_path)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(reader_pid(), number)
    assert rows[40]["prompt_ids"] == [expected(range(99))[40]]


def slow_source() -> StreamSource:
    def tokenise(batch):
        time.sleep(0.3)
        return tokens_of(batch)

    return StreamSource("s", 1.0, RawStream([NumberFile(0, 99)], None), tokenise)


def test_a_stop_request_ends_the_wait_for_the_first_chunk_only(tmp_path, monkeypatch):
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    with pytest.raises(StopRequested, match="prepared the data"):
        stream(tmp_path, slow_source())
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: False)
    rows = stream(tmp_path, slow_source(), rows=16)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    assert rows[8]["prompt_ids"] == [expected(range(99))[8]]


def test_waiting_sends_heartbeats_only_while_the_reader_makes_progress(tmp_path, monkeypatch):
    rows, beats = stream(tmp_path), []
    monkeypatch.setattr(chunk_reader, "heartbeat", lambda: beats.append(time.monotonic()))
    os.kill(reader_pid(), signal.SIGSTOP)
    home = home_of(tmp_path)
    want(home, 0, 1, 1)
    looks = count()

    def found(path):
        if next(looks) == 60:  # each look reads the number of the process and the announcement
            os.kill(reader_pid(), signal.SIGCONT)
        return real(path)

    real = chunk_reader._get
    monkeypatch.setattr(chunk_reader, "_get", found)
    wait_until_ready(home, 1, may_stop=False)
    assert next(looks) > 60 and len(beats) <= 10
    assert len(rows) == 50


def test_a_folder_in_use_by_another_run_is_left_to_it(tmp_path):
    stream(tmp_path)
    mine = ChunkReader._running.pop()
    rows = stream(tmp_path)
    ChunkReader._running.append(mine)
    assert rows._home.name == "stream_key_1" and mine.home.name == "stream_key_0"
    assert rows[20]["prompt_ids"] == [expected(range(99))[20]]


def test_the_next_stream_of_a_process_ends_the_reader_and_continues_its_work(tmp_path):
    stream(tmp_path)[16]
    pid = reader_pid()
    file = NumberFile(0, 99)
    assert stream(tmp_path, source_of(file))[16]["prompt_ids"] == [expected(range(99))[16]]
    process = find_process(pid)
    assert process is None or process.ended


def test_a_damaged_chunk_of_an_earlier_run_is_made_again(tmp_path):
    stream(tmp_path)
    [entry] = home_of(tmp_path).glob("chunk_000000_8/rows*")
    entry.write_bytes(entry.read_bytes()[:-40])
    assert stream(tmp_path)[1]["prompt_ids"] == [2]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "dschat_ppo").write_text("")
    with pytest.raises(UserError, match="--data_output_path"):
        stream(tmp_path)
