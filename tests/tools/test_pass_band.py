"""The rows in a band of pass rates, by hand."""

import json
from types import SimpleNamespace

import pytest

from dschat_ppo.data.examples import Example
from dschat_ppo.data.tokenise import row_of_file, row_text
from dschat_ppo.tools.pass_band import band_line, rows_in_band

NAN = float("nan")
# five answers to each prompt; with a pass score of 1 they pass at the rates
SCORES = {
    0.0: [0, 0.9, 0, 0, 0],
    0.2: [1, 0, 0, 0, 0],
    0.25: [NAN, 0, 2, 0, 0],
    0.8: [1, 1, 3, 0.5, 1],
    1.0: [1, 1, NAN, NAN, NAN],
    None: [NAN, NAN, 1, NAN, NAN],
}
ROWS = [{"id": number, "prompt": "\u00e9\nsame", "tags": [1]} for number in range(6)]
TEXTS = [json.dumps(row)[:-1] + ',\n"data_source": "d", "_truth": 4}' for row in ROWS]


def evaluated(keep):
    prompts = [SimpleNamespace(scores=scores) for scores in SCORES.values()]
    wrong = [SimpleNamespace(scores=[1.0] * 5)] * 6
    results = [
        SimpleNamespace(decoding="greedy", prompts=wrong),
        SimpleNamespace(decoding="sampled", prompts=prompts),
        SimpleNamespace(decoding="sampled", prompts=wrong),  # of another model
    ]
    flags = {"pass_score": "1.0", "keep": keep}
    return SimpleNamespace(flags=flags, results=results, rows=TEXTS)


@pytest.mark.parametrize(
    ("keep", "rates", "counts"),
    [
        ("0.2:0.8", [0.2, 0.25, 0.8], "below: 1, inside: 3, above: 1"),
        ("0.21:0.79", [0.25], "below: 2, inside: 1, above: 2"),
        ("0:1", [0, 0.2, 0.25, 0.8, 1], "below: 0, inside: 5, above: 0"),
        ("0.25:0.25", [0.25], "below: 2, inside: 1, above: 2"),
        ("1:1", [1], "below: 4, inside: 1, above: 0"),
        ("0.3:0.7", [], "below: 3, inside: 0, above: 2"),
    ],
)
def test_rows_in_the_closed_band(keep, rates, counts):
    rows = [json.loads(line) for line in rows_in_band(evaluated(keep)).splitlines()]
    numbers = [list(SCORES).index(rate) for rate in rates]
    assert rows == [
        ROWS[number] | {"pass_rate": rate} for number, rate in zip(numbers, rates, strict=True)
    ]
    line = f"--keep {keep}: prompts {counts}; with fewer than two scored answers: 1"
    assert band_line(evaluated(keep)) == line


def test_rows_of_several_data_sets_keep_their_source():
    mixed = evaluated("0:1")
    mixed.rows = list(TEXTS)
    mixed.rows[1] = mixed.rows[1].replace('"data_source": "d"', '"data_source": "e"')
    rows = [json.loads(line) for line in rows_in_band(mixed).splitlines()]
    assert [row["data_source"] for row in rows] == ["d", "e", "d", "d", "d"]


@pytest.mark.parametrize("row", [{"prompt": "a\n,", "answer": "4"}, {"prompt": ",\n{"}])
def test_the_row_of_the_file_is_whole_and_has_nothing_more(row):
    settings = SimpleNamespace(
        step=SimpleNamespace(flags=SimpleNamespace(answer_column="answer", answer_pattern=None)),
        source="d",
    )
    for example in (Example("p"), Example([{"role": "user", "content": "p"}], truth=4)):
        for of_source in (row, row | {"data_source": "mine"}):
            assert row_of_file(row_text(of_source, example, settings)) == of_source
