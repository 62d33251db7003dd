"""Records of rows with several contexts, against the same episodes as lists: the sequences that
models read, the last context, and rows that are selected, padded, joined, copied and saved."""

import io

import torch
from episodes import Context, episodes, fixed_episodes, rollout_of
from hypothesis import given
from hypothesis import strategies as st
from ragged import properties

from dschat_ppo.types import (
    Rollout,
    chosen_columns,
    concat_rows,
    full_sequences,
    last_contexts,
    pad_rows,
    record_of,
    repeat_rows,
    row_lengths,
    select_rows,
    tensors_of,
    to_device,
)


def require_sequences(rows: Rollout, made: list[list[Context]]) -> None:
    """The sequences of the rows are the contexts, one after another, each from column 0 on."""
    contexts = [context for episode in made for context in episode]
    ids, lengths = full_sequences(rows)
    assert lengths.tolist() == [len(context.ids) for context in contexts]
    assert ids.shape[1] == max(lengths)
    chosen = chosen_columns(rows, ids.shape[1])
    before = chosen_columns(rows, ids.shape[1], shift=1)
    for index, context in enumerate(contexts):
        assert ids[index, : len(context.ids)].tolist() == context.ids
        columns = context.chosen_columns
        assert chosen[index].nonzero().flatten().tolist() == columns
        assert before[index].nonzero().flatten().tolist() == [column - 1 for column in columns]
    assert row_lengths(rows).tolist() == [sum(len(c.ids) for c in episode) for episode in made]
    logprobs = rows.rollout_logprobs[rows.response_mask]
    assert len(logprobs) == int(chosen.sum()) and (logprobs == -0.5).all()


def test_sequences_of_rows_by_hand():
    rows = Rollout(
        prompt_ids=torch.tensor([[90, 11], [21, 22]]),
        prompt_mask=torch.tensor([[False, True], [True, True]]),
        response_ids=torch.tensor([[41, 51, 52, 42, 61, 43], [44, 45, 91, 92, 93, 94]]),
        response_mask=torch.tensor([[1, 0, 0, 1, 0, 1], [1, 1, 0, 0, 0, 0]]).bool(),
        rollout_logprobs=torch.zeros(2, 6),
        finish_reason=torch.zeros(2, dtype=torch.int8),
        contexts=torch.tensor([[0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0]], dtype=torch.int16),
        episode_lengths=torch.tensor([6, 2]),
    )
    ids, lengths = full_sequences(rows)
    assert lengths.tolist() == [2, 3, 2, 4]
    assert [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)] == [
        [11, 41],
        [51, 52, 42],
        [61, 43],
        [21, 22, 44, 45],
    ]
    assert chosen_columns(rows, 4).int().tolist() == [
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 1, 0, 0],
        [0, 0, 1, 1],
    ]


@properties
@given(made=episodes(), width=st.integers(0, 5), index=st.lists(st.integers(0, 99), min_size=1))
def test_rows_keep_their_contexts(made, width, index):
    """Selected, padded, joined, repeated, copied, saved."""
    rows = rollout_of(made)
    require_sequences(rows, made)
    indices = [number % len(made) for number in index]
    selected = select_rows(rows, torch.tensor(indices))
    chosen = [made[row] for row in indices]
    require_sequences(selected, chosen)
    padded = pad_rows(rows, rows.prompt_ids.shape[1] + width, rows.response_ids.shape[1] + width)
    require_sequences(padded, made)
    require_sequences(concat_rows([selected, rows, padded]), [*chosen, *made, *made])
    require_sequences(repeat_rows(rows, 2), [episode for episode in made for _ in range(2)])
    require_sequences(to_device(rows, "cpu"), made)
    file = io.BytesIO()
    torch.save(tensors_of(rows), file)
    file.seek(0)
    loaded = record_of(Rollout, torch.load(file, weights_only=True))
    assert loaded.contexts.dtype == torch.int16
    require_sequences(loaded, made)


@properties
@given(made=episodes())
def test_the_last_context_is_a_row_of_its_own(made):
    """Its prompt ends before the first chosen token."""
    rows = last_contexts(rollout_of(made))
    assert rows.contexts is None and not rows.response_mask[~rows.real_mask].any()
    for row, episode in enumerate(made):
        last = episode[-1]
        length = int(rows.response_lengths[row])
        assert rows.prompt_ids[row][rows.prompt_mask[row]].tolist() == last.prompt
        assert rows.response_ids[row, :length].tolist() == last.response
        assert rows.response_mask[row, :length].tolist() == last.chosen
        assert rows.rollout_logprobs[row].tolist() == [-0.5 * c for c in rows.response_mask[row]]


def test_rows_without_contexts_are_their_last_contexts():
    rows = rollout_of(fixed_episodes(), has_contexts=False)
    assert last_contexts(rows) is rows
