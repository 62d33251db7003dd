"""Chunks of token rows: their content, resuming from saved positions, mixtures, and the end of the stream."""

import json
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import pytest
from streams import FEATURES, NumberFile, expected, source_of, tokens_of

from dschat_ppo.data.chunks import (
    DUPLICATES,
    READ,
    UNUSABLE,
    ChunkMaker,
    StreamSource,
    TokenBatch,
    neediest,
    read_state,
    state_file,
)
from dschat_ppo.data.raw_stream import RawBatch, RawStream
from dschat_ppo.errors import UserError


def maker_for(tmp_path: Path, *sources, num_rows: int = 50, chunk_rows: int = 8) -> ChunkMaker:
    home = tmp_path / "dschat_ppo" / "stream"
    home.mkdir(parents=True, exist_ok=True)
    return ChunkMaker(str(tmp_path), "stream", home, sources, num_rows, chunk_rows, FEATURES, lambda: None)


def numbers(rows) -> list[int]:
    assert rows["answers"] == [[[n, 0]] for [n] in rows["prompt_ids"]]
    return [n for [n] in rows["prompt_ids"]]


def test_the_chunks_are_the_token_rows_in_order_although_some_raw_rows_give_none_and_some_two(tmp_path):
    maker = maker_for(tmp_path, source_of(NumberFile(0, 31), NumberFile(40, 60)))
    found = [numbers(maker.provide(chunk)) for chunk in range(7)]
    assert sum(found, []) == expected([*range(31), *range(40, 100)])[:50]
    assert [len(rows) for rows in found] == [8] * 6 + [2]


@pytest.mark.parametrize("first", range(6))
def test_another_process_continues_from_the_saved_position_and_reads_at_most_one_batch_again(tmp_path, first):
    before = maker_for(tmp_path, source_of(NumberFile(0, 99)))
    for chunk in range(first):
        before.provide(chunk)
    file = NumberFile(0, 99)
    rows = maker_for(tmp_path, source_of(file)).provide(first)
    assert numbers(rows) == expected(range(99))[8 * first : 8 * first + 8]
    last_before = expected(range(99))[8 * first - 1] if first else 0
    assert min(file.read) >= last_before - 7
    assert read_state(before.home, first, 8)["restarted"] is False


def test_a_made_chunk_is_not_made_again(tmp_path):
    maker_for(tmp_path, source_of(NumberFile(0, 99))).provide(0)
    file = NumberFile(0, 99)
    maker = maker_for(tmp_path, source_of(file))
    assert numbers(maker.provide(0)) == expected(range(99))[:8] and not file.read
    assert numbers(maker.provide(1)) == expected(range(99))[8:16]


@pytest.mark.parametrize("damage", ["", '{"sources": [', "[]", '{"taken": [1]}'])
def test_a_position_that_is_lost_is_found_again_from_the_start(tmp_path, damage):
    maker = maker_for(tmp_path, source_of(NumberFile(0, 99)))
    for chunk in range(2):
        maker.provide(chunk)
        state_file(maker.home, chunk, 8).write_text(damage)
    again = maker_for(tmp_path, source_of(NumberFile(0, 99)))
    assert numbers(again.provide(2)) == expected(range(99))[16:24]
    assert read_state(maker.home, 2, 8)["restarted"] is True


def test_a_chunk_after_a_gap_is_made_from_the_last_known_position(tmp_path):
    maker = maker_for(tmp_path, source_of(NumberFile(0, 99)))
    maker.provide(0)
    assert numbers(maker.provide(4)) == expected(range(99))[32:40]
    assert read_state(maker.home, 4, 8)["restarted"] is False
    assert numbers(maker.provide(2)) == expected(range(99))[16:24]  # and back


def test_counts_cover_each_raw_row_once(tmp_path):
    maker = maker_for(tmp_path, source_of(NumberFile(0, 99)), num_rows=16)
    for chunk in range(2):
        maker.provide(chunk)
    counts = [read_state(maker.home, chunk, 8)["counts"] for chunk in range(2)]
    assert sum(count[READ] for count in counts) == 21  # three batches of 7
    assert sum(count["kept whole"] for count in counts) == len(expected(range(21)))
    # 1 2 3 3 4 6 6 7, then 8 9 9 11 12 12 13 14
    assert [count[DUPLICATES] for count in counts] == [2, 2]


def test_more_rows_than_before_lengthen_the_last_chunk(tmp_path):
    source = NumberFile(0, 99)
    maker_for(tmp_path, source_of(source), num_rows=12).provide(1)
    longer = maker_for(tmp_path, source_of(NumberFile(0, 99)), num_rows=20)
    assert numbers(longer.provide(1)) == expected(range(99))[8:16]


def test_the_sources_of_a_mixture_keep_their_shares_at_every_row_and_after_a_resume(tmp_path):
    def sources():
        ones, twos = NumberFile(1001, 900, name="ones"), NumberFile(5001, 900, name="twos")
        return [source_of(ones, weight=5.0), source_of(twos, weight=2.0)]

    maker = maker_for(tmp_path, *sources())
    chunks = [maker.provide(chunk) for chunk in range(3)]
    rows = [n for chunk in chunks for n in numbers(chunk)]
    marks = [mark for chunk in chunks for mark in chunk["source"]]
    assert marks == [int(n > 5000) for n in rows]
    for count in range(1, 25):
        assert abs(sum(marks[:count]) - count * 2 / 7) < 1
    assert [n for n in rows if n > 5000] == expected(range(5001, 5099))[: sum(marks)]
    assert numbers(maker_for(tmp_path, *sources()).provide(3))[:2] == numbers(maker.provide(3))[:2]
    resumed = maker_for(tmp_path, *sources())
    for entry in maker.home.glob("chunk_000002_8/*"):
        entry.unlink()
    assert numbers(resumed.provide(2)) == rows[16:24]


def test_the_neediest_source_by_hand():
    taken, order = [0, 0, 0], []
    for _ in repeat(None, 8):
        order.append(neediest([1, 2, 1], taken))
        taken[order[-1]] += 1
    assert taken == [2, 4, 2]
    assert order[:4] == [1, 0, 2, 1]


def test_a_stream_that_ends_says_how_many_rows_it_has(tmp_path):
    available = len(expected(range(30)))
    maker = maker_for(tmp_path, source_of(NumberFile(0, 30)))
    last = available // 8
    for chunk in range(last):
        maker.provide(chunk)
    with pytest.raises(
        UserError, match=rf"^--streaming_rows 50: numbers has only {available} rows .*_rows {available} or"
    ):
        maker.provide(last)
    exact = maker_for(tmp_path, source_of(NumberFile(0, 30)), num_rows=available)
    assert len(exact.provide(last)) == available - 8 * last


def test_a_mixture_ends_with_the_source_that_ends_first(tmp_path):
    few = source_of(NumberFile(1, 4), weight=1.0, name="few")  # 1 2 3 3 4
    maker = maker_for(tmp_path, few, source_of(NumberFile(1, 99), weight=1.0))
    maker.provide(0)
    with pytest.raises(UserError, match="few has only 5 rows for this step, enough for 10 rows of the mixture"):
        maker.provide(1)


def test_a_step_without_any_row_is_an_error(tmp_path):
    with pytest.raises(UserError, match="has only 0 rows for this step: --data_split leaves it none"):
        maker_for(tmp_path, source_of(NumberFile(0, 0))).provide(0)


def test_the_saved_position_is_small_and_json(tmp_path):
    maker = maker_for(tmp_path, source_of(NumberFile(0, 99)))
    maker.provide(0)
    text = state_file(maker.home, 0, 8).read_text()
    assert len(text) < 1000 and json.loads(text)["taken"] == [8]
    assert list(islice(maker.home.glob("after_*"), 2)) == [state_file(maker.home, 0, 8)]


def spoilt(batch: RawBatch, bad: set[int]) -> TokenBatch:
    good = tokens_of(RawBatch([], [row for row in batch.rows if row["n"] not in bad]))
    found = [origin for origin, row in zip(batch.origins, batch.rows, strict=True) if row["n"] in bad]
    return TokenBatch(good.rows, good.counts, len(found), f"{found[0]}: bad" if found else "")


@pytest.mark.parametrize(
    ("bad", "policy", "is_too_many"),
    [({21}, "few", True), ({21}, "skip", False), (set(range(29, 31)), "few", True)],
)
def test_too_many_bad_rows_in_a_chunk_are_an_error(tmp_path, bad, policy, is_too_many):
    # chunks of 20 rows end in the raw rows 19 and 37; read in batches of 20, of which the second chunk reads one
    raw = RawStream([NumberFile(0, 99, batch=20)], None)
    maker = maker_for(tmp_path, StreamSource("set", 1.0, raw, partial(spoilt, bad=bad), policy), chunk_rows=20)
    maker.provide(0)
    if is_too_many:
        with pytest.raises(
            UserError,
            match=rf"^set: {len(bad)} of \d+ rows .*--bad_rows skip.* The first: numbers, row {min(bad) + 1}: b",
        ):
            maker.provide(1)
    else:
        maker.provide(1)
        state = read_state(maker.home, 1, 20)
        assert state["counts"][UNUSABLE] == 1 and state["problems"] == ["numbers, row 22: bad"]


def test_a_stream_that_ends_because_its_rows_are_bad_says_so(tmp_path):
    raw = RawStream([NumberFile(1, 30)], None)
    maker = maker_for(tmp_path, StreamSource("set", 1.0, raw, partial(spoilt, bad=set(range(31)))))
    with pytest.raises(UserError, match=r"^set: 30 of 30 rows cannot be used\. The first: numbers, row 1: bad$"):
        maker.provide(0)
