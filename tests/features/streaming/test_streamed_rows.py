"""Streams: order of raw and token rows, chunks, positions, mixtures, bad rows; what a rank sees;
ends and failures."""

import atexit
import io
import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from dschat_ppo.common import stop_requests
from dschat_ppo.data import shards
from dschat_ppo.data.batches import chunked_order
from dschat_ppo.data.lazy_rows import rows_at_hand
from dschat_ppo.data.shards import Batch, FileShard
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.features.streaming import streamed_rows
from dschat_ppo.features.streaming.streamed_rows import (
    ALL,
    READ,
    SPLIT_ROWS,
    UNUSABLE,
    StreamedRows,
    StreamSource,
    Tokens,
    chunks,
    neediest,
    raw_batches,
    start_of,
)

NUMBER = datasets.Value("int32")
ANSWERS = {"prompt_ids": datasets.List(NUMBER), "answers": datasets.List(datasets.List(NUMBER))}
FEATURES = datasets.Features({**ANSWERS, "margin": datasets.Value("float32"), "source": NUMBER})


@dataclass
class NumberFile:
    """A file with the rows {"n": first}, {"n": first + 1}, ...; `read` notes the number of each row
    that is read."""

    first: int
    count: int
    name: str = "numbers"
    flag: str = "--data_path"
    read: list = field(default_factory=list)

    def numbered_rows(self, place, keep=None):
        for number in range(place or 0, self.count):
            self.read.append(self.first + number)
            yield number + 1, {"n": self.first + number}, number + 1


def tokens_of(batch: Batch) -> Tokens:
    """A token row [n] for each row; multiples of 5 give none, multiples of 3 two."""
    kept = [
        n
        for n in (row["n"] for row in batch.rows)
        for _ in range(0 if n % 5 == 0 else 2 if n % 3 == 0 else 1)
    ]
    made = [{"prompt_ids": [n], "answers": [[n, 0]], "margin": n / 2} for n in kept]
    return made, Counter({"kept whole": len(kept)}), ""


def expected(numbers) -> list[int]:
    """The token rows of these raw rows."""
    return [row["prompt_ids"][0] for row in tokens_of(Batch([], [{"n": n} for n in numbers]))[0]]


def source_of(
    *files,
    weight: float = 1.0,
    share: tuple[int, int] = ALL,
    name: str = "numbers",
    make=tokens_of,
    policy="error",
) -> StreamSource:
    return StreamSource(name, weight, files, share, make, policy)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Of 8 token rows, read in batches of 7 raw rows."""
    monkeypatch.setattr(streamed_rows, "CHUNK_ROWS", 8)
    monkeypatch.setattr(shards, "BATCH_ROWS", 7)


def rest_of(parts, share=ALL, *position) -> list[tuple[str, int]]:
    batches = raw_batches(parts, share, *position)
    return [
        (origin, row["n"])
        for batch in batches
        for origin, row in zip(batch.origins, batch.rows, strict=True)
    ]


def files() -> list[NumberFile]:
    return [
        NumberFile(100, 16, name="a"),
        NumberFile(0, 0, name="empty"),
        NumberFile(500, 7, name="b"),
    ]


def test_raw_rows_of_a_share_continue_after_any_batch_without_reading_the_rows_before():
    share = (500, 1000)
    whole, first = rest_of(files(), share), []
    for batches, batch in enumerate(raw_batches(files(), share), start=1):
        first += [(origin, row["n"]) for origin, row in zip(batch.origins, batch.rows, strict=True)]
        parts = files()
        assert first + rest_of(parts, share, json.loads(json.dumps(batch.end))) == whole
        assert len(parts[0].read) == max(0, 16 - 7 * batches)


def test_the_steps_divide_the_rows_in_proportion_whatever_the_batches_are(monkeypatch):
    count = 3 * SPLIT_ROWS + 137
    found = []
    for share, batch in zip([(0, 200), (200, 600), (600, 1000)], (1, 999, 2500), strict=True):
        monkeypatch.setattr(shards, "BATCH_ROWS", batch)
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
    for chunk in filter(
        None, chunks(sources, num_rows, FEATURES, first, position or start_of(sources))
    ):
        columns = chunk.rows[:]
        assert columns["answers"] == [[[n, 0]] for [n] in columns["prompt_ids"]]
        yield (
            [n for [n] in columns["prompt_ids"]],
            columns["source"],
            replace(chunk, rows=len(chunk.rows)),
        )


def test_the_position_after_a_chunk_continues_it_in_json_and_reads_at_most_one_batch_again():
    """Some raw rows give no token row and some two."""
    whole = list(chunks_of(source_of(NumberFile(0, 31), NumberFile(31, 68))))
    assert sum((rows for rows, _, _ in whole), []) == NUMBERS[:50]
    assert [len(rows) for rows, _, _ in whole] == [8] * 6 + [2]
    counts = [end.counts for _, _, end in whole[:2]]
    assert (sum(c[READ] for c in counts), sum(c["kept whole"] for c in counts)) == (
        21,
        len(expected(range(21))),
    )
    whole = list(chunks_of(source_of(NumberFile(0, 99))))
    for number, (rows, _, end) in enumerate(whole[:-1], start=1):
        text, file = json.dumps(end.after), NumberFile(0, 99)
        again = list(chunks_of(source_of(file), first=number, position=json.loads(text)))
        assert again == whole[number:] and min(file.read) >= rows[-1] - 7
        assert len(text) < 1000 and json.loads(text)["taken"] == [8 * number]


def tokens_of_text(batch: Batch) -> Tokens:
    return tokens_of(
        replace(batch, rows=[{"n": int(row["n"])} for row in batch.rows if isinstance(row, dict)])
    )


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_files_whose_batches_differ_after_a_resume_continue_at_the_same_row(
    tmp_path, monkeypatch, kind
):
    if kind == "parquet":  # batches cross its row groups, and reading begins with a row group
        pyarrow.parquet.write_table(
            pa.table({"n": range(99)}), tmp_path / "a.parquet", row_group_size=11
        )
    else:  # the bad rows behind the last batch of a file are a batch without rows
        (tmp_path / "a.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(28)) + "1,2\n" * 3)
        (tmp_path / "b.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(28, 99)))
    files = [FileShard(path, "--data_path") for path in sorted(tmp_path.iterdir())]
    source = source_of(*files, make=tokens_of_text, policy="skip")
    whole = [(rows, end.after) for rows, _, end in chunks_of(source, num_rows=90)]
    assert sum((rows for rows, _ in whole), []) == expected(range(99))[:90]
    monkeypatch.setattr(shards, "BATCH_ROWS", 3)
    for number, (_, position) in enumerate(whole[:-1], start=1):
        again = [
            rows for rows, _, _ in chunks_of(source, num_rows=90, first=number, position=position)
        ]
        assert again == [rows for rows, _ in whole[number:]]


def test_the_sources_of_a_mixture_keep_their_shares_at_every_row_and_after_a_resume():
    def sources():
        ones, twos = NumberFile(1001, 900, name="ones"), NumberFile(5001, 900, name="twos")
        return [source_of(ones, weight=5.0), source_of(twos, weight=2.0)]

    found = list(chunks_of(*sources()))
    rows, marks = sum((rows for rows, _, _ in found), []), sum((marks for _, marks, _ in found), [])
    assert marks == [int(n > 5000) for n in rows]
    taken, order = [0, 0, 0], []  # by hand
    for _ in range(8):
        order.append(neediest([1, 2, 1], taken))
        taken[order[-1]] += 1
    assert taken == [2, 4, 2] and order[:4] == [1, 0, 2, 1]
    for count in range(1, 50):
        assert abs(sum(marks[:count]) - count * 2 / 7) < 1
    assert [n for n in rows if n > 5000] == expected(range(5001, 5099))[: sum(marks)]
    assert list(chunks_of(*sources(), first=2, position=found[1][2].after)) == found[2:]


def spoilt(batch: Batch, bad: set[int]) -> Tokens:
    rows, counts, _ = tokens_of(Batch([], [row for row in batch.rows if row["n"] not in bad]))
    found = [
        origin for origin, row in zip(batch.origins, batch.rows, strict=True) if row["n"] in bad
    ]
    return rows, counts + Counter({UNUSABLE: len(found)}), f"{found[0]}: bad" if found else ""


def test_too_many_bad_rows_in_a_chunk_are_an_error(monkeypatch):
    monkeypatch.setattr(streamed_rows, "CHUNK_ROWS", 20)
    monkeypatch.setattr(shards, "BATCH_ROWS", 20)
    # chunks of 20 rows end in the raw rows 19 and 37; read in batches of 20, of which the second
    # chunk reads one
    for bad, policy in (({21}, "few"), ({29, 30}, "few"), ({21}, "skip")):
        found = chunks_of(
            source_of(NumberFile(0, 99), name="set", make=partial(spoilt, bad=bad), policy=policy)
        )
        next(found)
        if policy == "few":
            words = (
                rf"^set: {len(bad)} of \d+ rows .*--bad_rows skip.* The first: numbers, row"
                rf" {min(bad) + 1}: bad"
            )
            with pytest.raises(UserError, match=words):
                next(found)
        else:
            _, _, end = next(found)
            assert end.counts[UNUSABLE] == 1 and end.problems == ["numbers, row 22: bad"]


@pytest.mark.parametrize(
    ("sources", "full_chunks", "words"),
    [
        (
            [source_of(NumberFile(0, 30))],
            4,
            "50: numbers has only 32 rows for this step; set --streaming_rows 32 or",
        ),
        # 1 2 3 3 4 of the first one
        (
            [source_of(NumberFile(1, 4), name="few"), source_of(NumberFile(1, 99))],
            1,
            "50: few has only 5 rows for this step; set --streaming_rows 10 or less",
        ),
        (
            [source_of(NumberFile(0, 0))],
            0,
            "has only 0 rows for this step; --data_split leaves it none",
        ),
        (
            [source_of(NumberFile(1, 30), name="set", make=partial(spoilt, bad=set(range(31))))],
            0,
            r"^set: 30 of 30 rows cannot be used\. The first: numbers, row 1: bad$",
        ),
    ],
)
def test_a_stream_that_ends_says_how_many_rows_it_has(sources, full_chunks, words):
    found = chunks_of(*sources)
    for _ in range(full_chunks):
        next(found)
    with pytest.raises(UserError, match=words):
        next(found)


# What a rank sees

NUMBERS = expected(range(99))


def stream(*sources, rows: int = 50) -> StreamedRows:
    return StreamedRows(sources or [source_of(NumberFile(0, 99))], rows, FEATURES, "f")


def number_of(rows: StreamedRows, index: int) -> int:
    [found] = rows[index]["prompt_ids"]
    return found


def tried(make) -> StreamedRows:
    return stream(source_of(NumberFile(0, 99), name="s", make=make))


def test_rows_in_training_order_with_three_chunks_in_memory():
    numbers = expected(range(140))[:76]
    rows = stream(source_of(NumberFile(0, 140)), rows=76)
    assert (
        rows[3] == {"prompt_ids": [3], "answers": [[3, 0]], "margin": 1.5, "source": 0}
        and len(rows) == 76
    )
    for epoch in range(3):
        order = list(chunked_order(rows, 5, epoch))
        assert [number_of(rows, i) for i in order] == [numbers[i] for i in order]
        assert set(rows._chunks) == {0, 8, 9}
    assert number_of(rows, 17) == numbers[17], "in another order, rows are made again"
    assert rows_at_hand(rows)["prompt_ids"] == [[n] for n in numbers[:8]]
    for index in (76, -1):
        with pytest.raises(IndexError):
            rows[index]


@pytest.mark.parametrize(("index", "epochs"), [(16, 0), (49, 1)])
def test_a_resumed_run_opens_the_data_at_the_position_before_its_chunk(
    tmp_path, index, epochs, said
):
    before = stream()
    for number in [*range(50)] * epochs + [*range(index)]:
        before[number]
    opened = tmp_path / "opened"

    class Noting(NumberFile):
        def numbered_rows(self, place, keep=None):
            with opened.open("a") as file:
                file.write(f"{place} ")
            yield from super().numbered_rows(place)

    rows = stream(source_of(Noting(0, 99)))
    saved = io.BytesIO()
    torch.save(before.state_dict(), saved)  # as a checkpoint does
    saved.seek(0)
    rows.load_state_dict(torch.load(saved, weights_only=True))
    assert [number_of(rows, i) for i in range(index, 50)] == NUMBERS[index:50]
    # of the last row before the chunk
    places, last = opened.read_text().split(), NUMBERS[index // 8 * 8 - 1]
    assert places[:2] == ["None", str(last // 7 * 7)] and not any(
        "no position" in line for line in said
    )


@pytest.mark.parametrize(
    "state", [{"rows": "f", "positions": {}}, {"rows": "others", "positions": {5: "wrong"}}]
)
def test_without_a_position_the_rows_before_are_read_again(state, said):
    rows = stream()
    rows.load_state_dict(state)
    before = rows.process
    assert number_of(rows, 44) == NUMBERS[44]
    before.join(20)
    assert before.exitcode == 0, "what nobody reads ends"
    assert any(
        "no position of these rows after row 40, so they are read again from row 8" in line
        for line in said
    )


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


def long_rows(batch):
    """Rows of which a chunk fills the pipe."""
    return [row | {"answers": [[0] * 50_000]} for row in tokens_of(batch)[0]], Counter(), ""


def test_the_launchers_signals_do_not_end_the_process_and_its_end_ends_the_run_that_needs_rows():
    rows = tried(long_rows)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(rows.process.pid, name)
    assert number_of(rows, 8) == NUMBERS[8]
    time.sleep(0.5)  # half a chunk is in the pipe
    os.kill(rows.process.pid, signal.SIGKILL)
    time.sleep(0.5)
    assert number_of(rows, 5) == 6  # what is there can be used
    with pytest.raises(UserError, match="the process that reads the stream has ended"):
        rows[16]


def test_the_traceback_of_the_process_is_written_before_the_run_ends(capfd):
    slow = type("Slow", (Exception,), {"__str__": lambda self: str(time.sleep(0.5))})
    with pytest.raises(UserError, match="its own message, if any, is above"):
        tried(lambda batch: (_ for _ in ()).throw(slow()))
    assert "Slow: None" in capfd.readouterr().err


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_process_is_left_when_the_rank_ends(is_killed):
    read, write = os.pipe()
    rank = os.fork()
    if rank == 0:
        try:
            atexit._clear()
            rows = tried(long_rows)  # the process waits for the pipe
            worker = rows.process
            if not is_killed:
                atexit._run_exitfuncs()
                worker.join(10)
            os.write(write, f"{worker.pid} {worker.exitcode}\n".encode())
        finally:  # else this process would go on with the tests
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    with os.fdopen(read) as told:
        pid, code = told.readline().split()
    os.waitpid(rank, 0)
    assert code == ("None" if is_killed else "-9")
    until = time.monotonic() + 20
    while (
        Path(f"/proc/{pid}").exists()
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    ):
        assert time.monotonic() < until
        time.sleep(0.05)


def slowly(batch):
    time.sleep(0.1)
    return tokens_of(batch)


def test_a_stop_request_ends_the_wait_for_the_first_chunk_only(monkeypatch):
    beats = []
    monkeypatch.setattr(streamed_rows, "heartbeat", lambda: beats.append(1))
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    with pytest.raises(StopRequested, match="prepared the data"):
        tried(slowly)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: False)
    rows = tried(slowly)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    assert number_of(rows, 8) == NUMBERS[8] and len(beats) > 2, "a sign of life for each batch"


def test_a_process_that_begins_after_a_stop_request_still_reads():
    def make(batch):
        stop_requests.raise_if_stop_requested("prepared")  # as `tokenise_batch` does
        return tokens_of(batch)

    rows = tried(make)
    stop_requests.set_flag()
    for number in (49, 8):  # the last chunk begins a process for the next epoch
        assert number_of(rows, number) == NUMBERS[number]
