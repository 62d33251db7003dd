"""Streams: order of raw and token rows, chunks, positions, mixtures, bad rows; what a rank sees; ends and failures."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from streams import FEATURES, NumberFile, expected, source_of, tokens_of
from test_encode import chat_tokenizer

from dschat_ppo.common import stop_requests
from dschat_ppo.data import parts, streaming
from dschat_ppo.data.batches import chunked_order
from dschat_ppo.data.parts import Batch, FilePart
from dschat_ppo.data.streaming import (
    ALL,
    READ,
    SPLIT_ROWS,
    UNUSABLE,
    StreamedRows,
    Tokens,
    chunks,
    neediest,
    raw_batches,
    rows_at_hand,
    start_of,
)
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.run.start_and_end import log_samples


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 8)
    monkeypatch.setattr(parts, "BATCH_ROWS", 7)


def rest_of(parts, share=ALL, *position) -> list[tuple[str, int]]:
    batches = raw_batches(parts, share, *position)
    return [(origin, row["n"]) for batch in batches for origin, row in zip(batch.origins, batch.rows, strict=True)]


def files() -> list[NumberFile]:
    return [NumberFile(100, 16, name="a"), NumberFile(0, 0, name="empty"), NumberFile(500, 7, name="b")]


def test_raw_rows_of_a_share_continue_after_any_batch_without_reading_the_rows_before():
    share = (500, 1000)
    whole, first = rest_of(files(), share), []
    for batches, batch in enumerate(raw_batches(files(), share), start=1):
        first += [(origin, row["n"]) for origin, row in zip(batch.origins, batch.rows, strict=True)]
        parts = files()
        assert first + rest_of(parts, share, json.loads(json.dumps(batch.place))) == whole
        assert len(parts[0].read) == max(0, 16 - 7 * batches)


def test_the_steps_divide_the_rows_in_proportion_whatever_the_batches_are(monkeypatch):
    count = 3 * SPLIT_ROWS + 137
    found = []
    for share, batch in zip([(0, 200), (200, 600), (600, 1000)], (1, 999, 2500), strict=True):
        monkeypatch.setattr(parts, "BATCH_ROWS", batch)
        found.append([n for _, n in rest_of([NumberFile(0, count)], share)])
    assert sorted(sum(found, [])) == list(range(count))  # disjoint and complete
    whole = [sum(n < 3 * SPLIT_ROWS for n in rows) for rows in found]
    assert whole == [600, 1200, 1200]
    assert found[0][:200] != list(range(200))  # at random, not the first ones
    blocks = [{n % SPLIT_ROWS for n in found[0] if n // SPLIT_ROWS == block} for block in range(2)]
    assert blocks[0] != blocks[1]
    assert rest_of([NumberFile(0, count)], (300, 300)) == []


def chunks_of(*sources, num_rows: int = 50, first: int = 0, position=None):
    """(numbers, their sources, end) of each chunk, from chunk `first` on."""
    for chunk in filter(None, chunks(sources, num_rows, FEATURES, first, position or start_of(sources))):
        columns = chunk.rows[:]
        assert columns["answers"] == [[[n, 0]] for [n] in columns["prompt_ids"]]
        yield [n for [n] in columns["prompt_ids"]], columns["source"], replace(chunk, rows=len(chunk.rows))


def test_the_chunks_are_the_token_rows_in_order_although_some_raw_rows_give_none_and_some_two():
    found = [rows for rows, _, _ in chunks_of(source_of(NumberFile(0, 31), NumberFile(40, 60)))]
    assert sum(found, []) == expected([*range(31), *range(40, 100)])[:50]
    assert [len(rows) for rows in found] == [8] * 6 + [2]


def test_the_position_after_a_chunk_continues_it_in_json_and_reads_at_most_one_batch_again():
    whole = list(chunks_of(source_of(NumberFile(0, 99))))
    for number, (rows, _, end) in enumerate(whole[:-1], start=1):
        text, file = json.dumps(end.after), NumberFile(0, 99)
        again = list(chunks_of(source_of(file), first=number, position=json.loads(text)))
        assert again == whole[number:] and min(file.read) >= rows[-1] - 7
        assert len(text) < 1000 and json.loads(text)["taken"] == [8 * number]


def tokens_of_text(batch: Batch) -> Tokens:
    return tokens_of(replace(batch, rows=[{"n": int(row["n"])} for row in batch.rows if isinstance(row, dict)]))


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_files_whose_batches_differ_after_a_resume_continue_at_the_same_row(tmp_path, monkeypatch, kind):
    if kind == "parquet":  # batches cross its row groups, and reading begins with a row group
        pyarrow.parquet.write_table(pa.table({"n": range(99)}), tmp_path / "a.parquet", row_group_size=11)
    else:  # the bad rows behind the last batch of a file are a batch without rows
        (tmp_path / "a.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(28)) + "1,2\n" * 3)
        (tmp_path / "b.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(28, 99)))
    files = [FilePart(path, "--data_path") for path in sorted(tmp_path.iterdir())]
    source = source_of(*files, make=tokens_of_text, policy="skip")
    whole = [(rows, end.after) for rows, _, end in chunks_of(source, num_rows=90)]
    assert sum((rows for rows, _ in whole), []) == expected(range(99))[:90]
    monkeypatch.setattr(parts, "BATCH_ROWS", 3)
    for number, (_, position) in enumerate(whole[:-1], start=1):
        again = [rows for rows, _, _ in chunks_of(source, num_rows=90, first=number, position=position)]
        assert again == [rows for rows, _ in whole[number:]]


def test_counts_cover_each_raw_row_once():
    counts = [end.counts for _, _, end in chunks_of(source_of(NumberFile(0, 99)), num_rows=16)]
    assert sum(count[READ] for count in counts) == 21  # three batches of 7
    assert sum(count["kept whole"] for count in counts) == len(expected(range(21)))


def test_more_rows_than_before_lengthen_the_last_chunk():
    short, long = (list(chunks_of(source_of(NumberFile(0, 99)), num_rows=rows)) for rows in (12, 20))
    assert [rows for rows, _, _ in long[:1]] == [rows for rows, _, _ in short[:1]]
    assert long[1][0][:4] == short[1][0] and len(long) == 3


def test_the_sources_of_a_mixture_keep_their_shares_at_every_row_and_after_a_resume():
    def sources():
        ones, twos = NumberFile(1001, 900, name="ones"), NumberFile(5001, 900, name="twos")
        return [source_of(ones, weight=5.0), source_of(twos, weight=2.0)]

    found = list(chunks_of(*sources()))
    rows, marks = sum((rows for rows, _, _ in found), []), sum((marks for _, marks, _ in found), [])
    assert marks == [int(n > 5000) for n in rows]
    for count in range(1, 50):
        assert abs(sum(marks[:count]) - count * 2 / 7) < 1
    assert [n for n in rows if n > 5000] == expected(range(5001, 5099))[: sum(marks)]
    assert list(chunks_of(*sources(), first=2, position=found[1][2].after)) == found[2:]


def test_the_neediest_source_by_hand():
    taken, order = [0, 0, 0], []
    for _ in repeat(None, 8):
        order.append(neediest([1, 2, 1], taken))
        taken[order[-1]] += 1
    assert taken == [2, 4, 2]
    assert order[:4] == [1, 0, 2, 1]


def test_a_stream_that_ends_says_how_many_rows_it_has():
    available = len(expected(range(30)))
    found = chunks_of(source_of(NumberFile(0, 30)))
    for _ in range(available // 8):
        next(found)
    with pytest.raises(
        UserError, match=rf"^--streaming_rows 50: numbers has only {available} rows .*_rows {available} or"
    ):
        next(found)
    assert sum(len(rows) for rows, _, _ in chunks_of(source_of(NumberFile(0, 30)), num_rows=available)) == available


def test_a_mixture_ends_with_the_source_that_ends_first():
    few = source_of(NumberFile(1, 4), name="few")  # 1 2 3 3 4
    found = chunks_of(few, source_of(NumberFile(1, 99)))
    next(found)
    with pytest.raises(UserError, match="few has only 5 rows for this step; set --streaming_rows 10 or less"):
        next(found)


def test_a_step_without_any_row_is_an_error():
    with pytest.raises(UserError, match="has only 0 rows for this step; --data_split leaves it none"):
        next(chunks_of(source_of(NumberFile(0, 0))))


def spoilt(batch: Batch, bad: set[int]) -> Tokens:
    rows, counts, _ = tokens_of(Batch([], [row for row in batch.rows if row["n"] not in bad]))
    found = [origin for origin, row in zip(batch.origins, batch.rows, strict=True) if row["n"] in bad]
    return rows, counts + Counter({UNUSABLE: len(found)}), f"{found[0]}: bad" if found else ""


@pytest.mark.parametrize(
    ("bad", "policy", "is_too_many"),
    [({21}, "few", True), ({21}, "skip", False), (set(range(29, 31)), "few", True)],
)
def test_too_many_bad_rows_in_a_chunk_are_an_error(bad, policy, is_too_many, monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 20)
    monkeypatch.setattr(parts, "BATCH_ROWS", 20)
    # chunks of 20 rows end in the raw rows 19 and 37; read in batches of 20, of which the second chunk reads one
    source = source_of(NumberFile(0, 99), name="set", make=partial(spoilt, bad=bad), policy=policy)
    found = chunks_of(source)
    next(found)
    if is_too_many:
        with pytest.raises(
            UserError,
            match=rf"^set: {len(bad)} of \d+ rows .*--bad_rows skip.* The first: numbers, row {min(bad) + 1}: b",
        ):
            next(found)
    else:
        _, _, end = next(found)
        assert end.counts[UNUSABLE] == 1 and end.problems == ["numbers, row 22: bad"]


def test_a_stream_that_ends_because_its_rows_are_bad_says_so():
    source = source_of(NumberFile(1, 30), name="set", make=partial(spoilt, bad=set(range(31))), policy="few")
    with pytest.raises(UserError, match=r"^set: 30 of 30 rows cannot be used\. The first: numbers, row 1: bad$"):
        next(chunks_of(source))


# What a rank sees

NUMBERS = expected(range(99))


def stream(*sources, rows: int = 50) -> StreamedRows:
    return StreamedRows(sources or [source_of(NumberFile(0, 99))], rows, FEATURES, "f")


def number_of(rows: StreamedRows, index: int) -> int:
    [found] = rows[index]["prompt_ids"]
    return found


def tried(make) -> StreamedRows:
    return stream(source_of(NumberFile(0, 99), name="s", make=make))


def test_rows_are_those_of_the_data_in_order():
    rows = stream()
    assert len(rows) == 50
    assert [number_of(rows, i) for i in range(50)] == NUMBERS[:50]
    assert rows[3] == {"prompt_ids": [3], "answers": [[3, 0]], "margin": 1.5, "source": 0}
    assert rows_at_hand(rows)["prompt_ids"] == [[n] for n in NUMBERS[:8]]
    for index in (50, -1):
        with pytest.raises(IndexError):
            rows[index]


def test_epochs_in_training_order_with_three_chunks_in_memory():
    numbers = expected(range(140))[:76]
    rows = stream(source_of(NumberFile(0, 140)), rows=76)
    for epoch in range(3):
        order = list(chunked_order(rows, 5, epoch))
        assert [number_of(rows, i) for i in order] == [numbers[i] for i in order]
        assert set(rows._chunks) == {0, 8, 9}
    assert number_of(rows, 17) == numbers[17], "in another order, rows are made again"


def long_rows(batch, note: Path | None = None):
    """Rows of which a chunk fills the pipe. Notes in a file that it makes some."""
    if note is not None:
        with note.open("a") as made:
            made.write("x")
    return [row | {"answers": [[0] * 50_000]} for row in tokens_of(batch)[0]], Counter(), ""


def test_rows_are_made_ahead_but_not_without_bound(tmp_path, monkeypatch):
    def made() -> int:
        return len((tmp_path / "made").read_text())

    monkeypatch.setattr(streaming, "AHEAD", 2)
    rows, before = tried(partial(long_rows, note=tmp_path / "made")), -1
    while made() != before:
        before = made()
        time.sleep(0.5)
    assert 3 <= made() < 8  # batches of 7 raw rows
    assert number_of(rows, 8) == NUMBERS[8]


@pytest.mark.parametrize("index", [16, 23, 24, 49])
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_resumed_run_opens_the_data_at_the_position_before_its_chunk(tmp_path, index, epochs, said):
    before = stream()
    for number in [*range(50)] * epochs + [*range(index)]:
        before[number]
    opened = tmp_path / "opened"

    class Noting(NumberFile):
        def found(self, place):
            with opened.open("a") as file:
                file.write(f"{place} ")
            yield from super().found(place)

    rows = stream(source_of(Noting(0, 99)))
    rows.load_state_dict(torch_copy(before.state_dict()))
    assert [number_of(rows, i) for i in range(index, 50)] == NUMBERS[index:50]
    places, last = opened.read_text().split(), NUMBERS[index // 8 * 8 - 1]  # of the last row before the chunk
    assert places[:2] == ["None", str(last // 7 * 7)] and not any("no position" in line for line in said)


def torch_copy(state):
    """The state as a checkpoint gives it back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("state", [{"rows": "f", "positions": {}}, {"rows": "others", "positions": {5: "wrong"}}])
def test_without_a_position_the_rows_before_are_read_again(state, said):
    rows = stream()
    rows.load_state_dict(state)
    assert number_of(rows, 44) == NUMBERS[44]
    assert any("no position of these rows after row 40, so they are read again from row 8" in line for line in said)


def test_the_samples_in_the_log_show_each_data_set(said):
    sources = [source_of(NumberFile(0, 99), name="one"), source_of(NumberFile(0, 99), name="two")]
    log_samples(chat_tokenizer("letters", "zephyr"), rows_at_hand(stream(*sources)), ("one", "two"))
    assert [line.partition(": a sample")[0] for line in said if "a sample" in line] == ["data: one", "data: two"]


def test_a_bad_row_ends_the_run_where_its_chunk_is_needed():
    def make(batch):
        if any(row["n"] == 15 for row in batch.rows):
            raise UserError(f"{batch.origins[0]}: bad row")
        return tokens_of(batch)

    rows = tried(make)
    assert number_of(rows, 7) == 7
    for _ in range(2):
        with pytest.raises(UserError, match="^numbers, row 15: bad row$"):
            rows[8]
    assert number_of(rows, 0) == 1


def test_the_end_of_the_process_ends_the_run_where_its_rows_are_needed():
    rows = tried(long_rows)
    time.sleep(1)  # half a chunk is in the pipe
    os.kill(rows._worker._workers[0].pid, signal.SIGKILL)
    time.sleep(0.5)
    assert number_of(rows, 5) == 6  # what is there can be used
    with pytest.raises(UserError, match="the process that reads the stream has ended"):
        rows[8]


def test_the_launchers_signals_do_not_end_the_process():
    rows = stream()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(rows._worker._workers[0].pid, name)
    assert number_of(rows, 40) == NUMBERS[40]


def test_the_process_ends_with_its_rows():
    rows = stream()
    process = rows._worker._workers[0]
    del rows
    process.join(10)
    assert process.exitcode == 0


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "os.kill(os.getpid(), 9)"])
def test_no_process_is_left_when_the_rank_ends(tmp_path, end):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom streams import *\n"
        "from dschat_ppo.data.streaming import StreamedRows\n"
        "def make(batch):\n    time.sleep(1 if batch.rows[0]['n'] > 20 else 0)\n    return tokens_of(batch)\n"
        "from dschat_ppo.data import parts, streaming\nstreaming.CHUNK_ROWS, parts.BATCH_ROWS = 8, 7\n"
        "rows = StreamedRows([source_of(NumberFile(0, 99), make=make)], 50, FEATURES, 'f')\n"
        f"time.sleep(0.5)\nprint(rows._worker._workers[0].pid, flush=True)\n{end}\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    pid, until = int(result.stdout.split()[-1]), time.monotonic() + 20
    assert "Traceback" not in result.stderr
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, result.stderr
        time.sleep(0.05)


def slowly(batch):
    time.sleep(0.3)
    return tokens_of(batch)


def test_a_stop_request_ends_the_wait_for_the_first_chunk_only(monkeypatch):
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    with pytest.raises(StopRequested, match="prepared the data"):
        tried(slowly)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: False)
    rows = tried(slowly)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    assert number_of(rows, 8) == NUMBERS[8]


def test_a_process_that_begins_after_a_stop_request_still_reads():
    def make(batch):
        stop_requests.raise_if_stop_requested("prepared")  # as `tokenise_batch` does
        return tokens_of(batch)

    rows = tried(make)
    stop_requests.set_flag()
    try:
        for number in (49, 8):  # the last chunk begins a process for the next epoch
            assert number_of(rows, number) == NUMBERS[number]
    finally:
        stop_requests.restore()


def test_waiting_sends_a_heartbeat_for_each_batch(monkeypatch):
    beats = []
    monkeypatch.setattr(streaming, "heartbeat", lambda: beats.append(time.monotonic()))

    def few(batch):
        return tokens_of(batch if batch.rows[0]["n"] > 60 else Batch([], []))

    tried(few)
    assert len(beats) >= 9  # nine batches without a row
