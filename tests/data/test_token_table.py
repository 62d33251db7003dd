"""The token rows of a whole data set: in the order of the step, equal for any number of processes."""

import json

import numpy as np
import pytest
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)
from datasets import Dataset
from test_tokenise import TOKENIZER, raw_rows, settings

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.lengths import Fitted
from dschat_ppo.data.rows import ORIGIN, ROW, Origins, Rows
from dschat_ppo.data.tokenise import tokenise_rows
from dschat_ppo.errors import UserError

ORIGINS = Origins(("f",))


def dataset(rows: list[dict]) -> Rows:
    table = Dataset.from_list([{ROW: json.dumps(row), ORIGIN: n + 1} for n, row in enumerate(rows)])
    return Rows(table, tuple(rows[0]))


def flags_of(tmp_path, workers=1, **changes) -> DataFlags:
    changes = {"bad_rows": "error", **changes}
    return DataFlags(
        data_path=["f"],
        data_output_path=str(tmp_path / f"cache{workers}"),
        preprocessing_num_workers=workers,
        **changes,
    )


def test_token_rows_follow_the_order_of_the_step(tmp_path):
    numbers = np.array([8, 1, 3, 5])  # 2, 1, no and 2 answers; the others are of other steps
    table = tokenise_rows(dataset(raw_rows(12)), numbers, ORIGINS, settings(), flags_of(tmp_path))
    assert list(table.number) == [1, 5, 5, 8, 8]
    assert list(table.rows_of(numbers)) == [3, 4, 0, 1, 2]
    assert list(table.rows_of(np.array([3, 8, 3]))) == [3, 4]
    rows = table.rows.select(table.rows_of(numbers))
    assert [TOKENIZER.decode(ids[0]) for ids in rows["answers"]] == [
        f"{text}<|end|>" for text in ("a8.0", "a8.1", "a1.0", "a5.0", "a5.1")
    ]


def test_several_processes_make_the_same_rows(tmp_path):
    raw, numbers = dataset(raw_rows(1500)), np.arange(1500)
    found = [tokenise_rows(raw, numbers, ORIGINS, settings(), flags_of(tmp_path, workers)) for workers in (1, 2)]
    assert found[0].rows.to_list() == found[1].rows.to_list()
    assert (found[0].number == found[1].number).all() and (found[0].key == found[1].key).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_rows_stand_among_the_others_in_the_order_of_the_file(tmp_path, workers):
    rows, places = raw_rows(1500), [20, 800, 1499]
    for place in places:
        rows[place] = {"prompt": "p", "answers": None}
    table = tokenise_rows(dataset(rows), np.arange(1500), ORIGINS, settings(), flags_of(tmp_path, workers))
    bad = np.flatnonzero(table.fitted == Fitted.UNUSABLE)
    assert list(table.number[bad]) == places and (np.diff(table.number) >= 0).all()
    assert table.problem(bad[0]).startswith("f, row 21: 'answers' is null; the row: ")
    assert table.problem(bad[0]).endswith("\n'answers' is null")
    elsewhere = np.setdiff1d(np.arange(1500), places)
    others = tokenise_rows(dataset(rows), elsewhere, ORIGINS, settings(), flags_of(tmp_path, workers))
    assert len(others.number) == 1494 and not (others.fitted == Fitted.UNUSABLE).any()


def test_a_data_set_without_a_row_for_the_step_is_rejected(tmp_path):
    rows = dataset([{"prompt": "p", "answers": []}, {"prompt": "q", "answers": ["a"]}])
    with pytest.raises(UserError, match=r"mine: no row of this data set serves this step \(several answers\)"):
        tokenise_rows(rows, np.array([0]), ORIGINS, settings(), flags_of(tmp_path))
