"""A stream of row numbers continues from its saved state."""

from dschat_ppo.data.sampler import IndexStream


def test_a_stream_of_rows_continues_inside_and_across_epochs():
    whole = IndexStream(7, seed=3)
    expected = [whole.take(3) for _ in range(8)]
    for cut in range(8):
        before, after = IndexStream(7, seed=3), IndexStream(7, seed=3)
        first = [before.take(3) for _ in range(cut)]
        after.load_state_dict(before.state_dict())
        before.take(5)  # what is saved does not change with the stream
        assert after.taken == 3 * cut
        assert first + [after.take(3) for _ in range(8 - cut)] == expected


def test_rows_that_no_longer_exist_are_left_out_of_a_stream():
    before, after = IndexStream(9, seed=1), IndexStream(4, seed=1)
    first = before.take(2)
    after.load_state_dict(before.state_dict())
    kept = [row for row in before.take(7) if row < 4]
    assert after.take(len(kept)) == kept and len(kept) == 4 - sum(row < 4 for row in first)
    assert sorted(after.take(4)) == [0, 1, 2, 3]
