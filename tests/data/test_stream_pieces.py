"""Token rows of a stream: their order, chunks, positions, mixtures, shares of the steps, bad rows and the end."""

import json
from functools import partial
from itertools import repeat

import pytest
from streams import FEATURES, NumberFile, expected, source_of, tokens_of

from dschat_ppo.data.streaming import (
    READ,
    SPLIT_ROWS,
    UNUSABLE,
    RawBatch,
    StepShare,
    TokenBatch,
    neediest,
    pieces,
    raw_batches,
    start_of,
)
from dschat_ppo.errors import UserError


def rest_of(parts, share=None, *position) -> list[tuple[str, int]]:
    batches = raw_batches(parts, share, False, *position)
    return [(origin, row["n"]) for batch in batches for origin, row in zip(batch.origins, batch.rows, strict=True)]


def files() -> list[NumberFile]:
    return [NumberFile(100, 16, name="a"), NumberFile(0, 0, name="empty"), NumberFile(500, 7, name="b")]


def test_raw_rows_come_in_order_and_are_named_by_their_file():
    found = rest_of(files())
    assert [n for _, n in found] == [*range(100, 116), *range(500, 507)]
    assert found[0][0] == "a, row 1" and found[15][0] == "a, row 16" and found[16][0] == "b, row 1"


@pytest.mark.parametrize("share", [None, StepShare((1, 1, 2), 2, 7)])
def test_raw_rows_continue_after_any_batch_without_reading_the_rows_before(share):
    whole, first = rest_of(files(), share), []
    for batches, batch in enumerate(raw_batches(files(), share, False), start=1):
        first += [(origin, row["n"]) for origin, row in zip(batch.origins, batch.rows, strict=True)]
        parts = files()
        assert first + rest_of(parts, share, json.loads(json.dumps(batch.after))) == whole
        assert len(parts[0].read) == max(0, 16 - 7 * batches)


def test_the_steps_divide_the_rows_in_proportion_whatever_the_batches_are():
    count = 3 * SPLIT_ROWS + 137
    parts = [StepShare((2, 4, 4), part, seed=1234) for part in range(3)]
    found = []
    for share, batch in zip(parts, (1, 999, 2500), strict=True):
        found.append([n for _, n in rest_of([NumberFile(0, count, batch)], share)])
        assert found[-1] == [n for n in range(count) if share.includes(n)]
    assert sorted(sum(found, [])) == list(range(count))  # disjoint and complete
    whole = [sum(n < 3 * SPLIT_ROWS for n in rows) for rows in found]
    assert whole == [600, 1200, 1200]
    assert found[0][:200] != list(range(200))  # at random, not the first ones
    blocks = [{n % SPLIT_ROWS for n in found[0] if n // SPLIT_ROWS == block} for block in range(2)]
    assert blocks[0] != blocks[1]
    assert found[0] != [n for n in range(count) if StepShare((2, 4, 4), 0, seed=1).includes(n)]


def test_a_step_without_a_share_has_no_rows_and_one_with_all_of_it_all():
    assert not any(map(StepShare((1, 0, 3), 1, 0).includes, range(995, 1005)))
    assert all(map(StepShare((0, 0, 3), 2, 0).includes, range(995, 1005)))


def test_a_file_that_cannot_be_read_is_named_with_its_flag():
    class Broken(NumberFile):
        def batches(self, bad, place):
            yield from super().batches(bad, place)
            raise ValueError("bad magic")

    batches = raw_batches([Broken(0, 7, name="x.parquet")], None, False)
    assert next(batches).rows
    with pytest.raises(UserError, match=r"^--data_path x.parquet: cannot be read: bad magic$"):
        next(batches)


def chunks_of(*sources, num_rows: int = 50, chunk_rows: int = 8, first: int = 0, position=None):
    """(numbers, their sources, end) of each chunk, from that of row `first` on."""
    position, rows, marks = position or start_of(sources), [], []
    for piece in pieces(sources, num_rows, chunk_rows, FEATURES.arrow_schema, first, position):
        columns = piece.rows.to_pydict()
        assert columns["answers"] == [[[n, 0]] for [n] in columns["prompt_ids"]]
        rows += [n for [n] in columns["prompt_ids"]]
        marks += columns["source"]
        if piece.after is not None:
            yield rows, marks, piece
            rows, marks = [], []


def test_the_chunks_are_the_token_rows_in_order_although_some_raw_rows_give_none_and_some_two():
    found = [rows for rows, _, _ in chunks_of(source_of(NumberFile(0, 31), NumberFile(40, 60)))]
    assert sum(found, []) == expected([*range(31), *range(40, 100)])[:50]
    assert [len(rows) for rows in found] == [8] * 6 + [2]


def test_the_position_after_a_chunk_continues_it_in_json_and_reads_at_most_one_batch_again():
    whole = list(chunks_of(source_of(NumberFile(0, 99))))
    for number, (rows, _, end) in enumerate(whole[:-1], start=1):
        text, file = json.dumps(end.after), NumberFile(0, 99)
        again = list(chunks_of(source_of(file), first=8 * number, position=json.loads(text)))
        assert again == whole[number:] and min(file.read) >= rows[-1] - 7
        assert len(text) < 1000 and json.loads(text)["taken"] == [8 * number]


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

    chunks = list(chunks_of(*sources()))
    rows, marks = sum((rows for rows, _, _ in chunks), []), sum((marks for _, marks, _ in chunks), [])
    assert marks == [int(n > 5000) for n in rows]
    for count in range(1, 50):
        assert abs(sum(marks[:count]) - count * 2 / 7) < 1
    assert [n for n in rows if n > 5000] == expected(range(5001, 5099))[: sum(marks)]
    assert list(chunks_of(*sources(), first=16, position=chunks[1][2].after)) == chunks[2:]


def test_the_neediest_source_by_hand():
    taken, order = [0, 0, 0], []
    for _ in repeat(None, 8):
        order.append(neediest([1, 2, 1], taken))
        taken[order[-1]] += 1
    assert taken == [2, 4, 2]
    assert order[:4] == [1, 0, 2, 1]


def test_a_stream_that_ends_says_how_many_rows_it_has():
    available = len(expected(range(30)))
    chunks = chunks_of(source_of(NumberFile(0, 30)))
    for _ in range(available // 8):
        next(chunks)
    with pytest.raises(
        UserError, match=rf"^--streaming_rows 50: numbers has only {available} rows .*_rows {available} or"
    ):
        next(chunks)
    assert sum(len(rows) for rows, _, _ in chunks_of(source_of(NumberFile(0, 30)), num_rows=available)) == available


def test_a_mixture_ends_with_the_source_that_ends_first():
    few = source_of(NumberFile(1, 4), name="few")  # 1 2 3 3 4
    chunks = chunks_of(few, source_of(NumberFile(1, 99)))
    next(chunks)
    with pytest.raises(UserError, match="few has only 5 rows for this step, enough for 10 rows of the mixture"):
        next(chunks)


def test_a_step_without_any_row_is_an_error():
    with pytest.raises(UserError, match="has only 0 rows for this step: --data_split leaves it none"):
        next(chunks_of(source_of(NumberFile(0, 0))))


def spoilt(batch: RawBatch, bad: set[int]) -> TokenBatch:
    good = tokens_of(RawBatch([], [row for row in batch.rows if row["n"] not in bad]))
    found = [origin for origin, row in zip(batch.origins, batch.rows, strict=True) if row["n"] in bad]
    return TokenBatch(good.rows, good.counts, len(found), f"{found[0]}: bad" if found else "")


@pytest.mark.parametrize(
    ("bad", "policy", "is_too_many"),
    [({21}, "few", True), ({21}, "skip", False), (set(range(29, 31)), "few", True)],
)
def test_too_many_bad_rows_in_a_chunk_are_an_error(bad, policy, is_too_many):
    # chunks of 20 rows end in the raw rows 19 and 37; read in batches of 20, of which the second chunk reads one
    source = source_of(NumberFile(0, 99, batch=20), name="set", make=partial(spoilt, bad=bad), policy=policy)
    chunks = chunks_of(source, chunk_rows=20)
    next(chunks)
    if is_too_many:
        with pytest.raises(
            UserError,
            match=rf"^set: {len(bad)} of \d+ rows .*--bad_rows skip.* The first: numbers, row {min(bad) + 1}: b",
        ):
            next(chunks)
    else:
        _, _, end = next(chunks)
        assert end.counts[UNUSABLE] == 1 and end.problems == ["numbers, row 22: bad"]


def test_a_stream_that_ends_because_its_rows_are_bad_says_so():
    source = source_of(NumberFile(1, 30), name="set", make=partial(spoilt, bad=set(range(31))), policy="few")
    with pytest.raises(UserError, match=r"^set: 30 of 30 rows cannot be used\. The first: numbers, row 1: bad$"):
        next(chunks_of(source))
