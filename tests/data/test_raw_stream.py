"""Raw rows of a stream: their names, resuming at any batch, and the division among the steps."""

import json

import pytest
from streams import NumberFile

from dschat_ppo.data.raw_stream import SPLIT_ROWS, RawStream, StepShare
from dschat_ppo.errors import UserError


def rest_of(stream: RawStream) -> list[tuple[str, int]]:
    found = []
    while (batch := stream.batch()) is not None:
        found += [(origin, row["n"]) for origin, row in zip(batch.origins, batch.rows, strict=True)]
    return found


def files() -> list[NumberFile]:
    return [NumberFile(100, 16, name="a"), NumberFile(0, 0, name="empty"), NumberFile(500, 7, name="b")]


def test_rows_come_in_order_and_are_named_by_their_file():
    found = rest_of(RawStream(files(), None))
    assert [n for _, n in found] == [*range(100, 116), *range(500, 507)]
    assert found[0][0] == "a, row 1" and found[15][0] == "a, row 16" and found[16][0] == "b, row 1"


@pytest.mark.parametrize("share", [None, StepShare((1, 1, 2), 2, 7)])
def test_a_stream_continues_after_any_batch_without_reading_the_rows_before(share):
    whole = rest_of(RawStream(files(), share))
    for batches in range(5):
        before, parts = RawStream(files(), share), files()
        first = []
        for _ in range(batches):
            batch = before.batch()
            first += [(origin, row["n"]) for origin, row in zip(batch.origins, batch.rows, strict=True)]
        after = RawStream(parts, share)
        after.seek(json.loads(json.dumps(before.position)))
        assert first + rest_of(after) == whole
        assert len(parts[0].read) == max(0, 16 - 7 * batches)


def test_the_steps_divide_the_rows_in_proportion_whatever_the_batches_are():
    count = 3 * SPLIT_ROWS + 137
    parts = [StepShare((2, 4, 4), part, seed=1234) for part in range(3)]
    found = []
    for share, batch in zip(parts, (1, 999, 2500), strict=True):
        found.append([n for _, n in rest_of(RawStream([NumberFile(0, count, batch)], share))])
        assert found[-1] == [n for n in range(count) if share.includes(n, 1) == [True]]
    assert sorted(sum(found, [])) == list(range(count))  # disjoint and complete
    whole = [sum(n < 3 * SPLIT_ROWS for n in rows) for rows in found]
    assert whole == [600, 1200, 1200]
    assert found[0][:200] != list(range(200))  # at random, not the first ones
    blocks = [{n % SPLIT_ROWS for n in found[0] if n // SPLIT_ROWS == block} for block in range(2)]
    assert blocks[0] != blocks[1]
    assert found[0] != [n for n in range(count) if StepShare((2, 4, 4), 0, seed=1).includes(n, 1)[0]]


def test_a_step_without_a_share_has_no_rows_and_one_with_all_of_it_all():
    assert StepShare((1, 0, 3), 1, 0).includes(995, 10) == [False] * 10
    assert StepShare((0, 0, 3), 2, 0).includes(995, 10) == [True] * 10


def test_a_file_that_cannot_be_read_is_named_with_its_flag():
    class Broken(NumberFile):
        def batches(self, bad, place):
            yield from super().batches(bad, place)
            raise ValueError("bad magic")

    stream = RawStream([Broken(0, 7, name="x.parquet")], None)
    assert stream.batch() is not None
    with pytest.raises(UserError, match=r"^--data_path x.parquet: cannot be read: bad magic$"):
        stream.batch()
