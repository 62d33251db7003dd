"""Token rows and batches of labelled steps."""

import pytest
from datasets import Dataset
from prepared import TOKENIZER, flags_for, listed, write_jsonl

from dschat_ppo.config.data_flags import DataFlags, StepData
from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.errors import UserError
from dschat_ppo.features.process_rewards.batches import collate_steps

EOS = TOKENIZER.eos_token


def rows_for(use: str, flags: DataFlags, limit: int = 64, use_settings: str = "\n") -> TokenRows:
    return prepare(StepData(use, flags, limit, use_settings=use_settings), TOKENIZER)


STEPS = [
    {"prompt": "Q:", "completions": ["one", "two", "three"], "labels": [True, None, 0.25]},
    {"prompt": "R:", "completions": ["four"], "labels": [False]},
]


@pytest.mark.parametrize("separator", ["\n", "; "])
def test_labels_are_at_the_separators_and_at_the_final_token(tmp_path, separator):
    """For another separator not from the cache."""
    path = write_jsonl(tmp_path / "d.jsonl", STEPS)
    rows_for("steps", flags_for(tmp_path, path, use="steps"), use_settings="|")
    flags = flags_for(tmp_path, path, use="steps")
    rows = listed(rows_for("steps", flags, use_settings=separator).train)
    found = []
    for row in rows:
        [answer] = row["answers"]
        ends = zip(row["step_ends"], row["step_labels"], strict=True)
        found.append([(TOKENIZER.decode(answer[: end + 1]), label) for end, label in ends])
    if separator == "\n":  # a cut answer loses the labels behind the cut
        ends = rows[0]["step_ends"]
        cut = rows_for("steps", flags_for(tmp_path, path, use="steps"), ends[0] + 3).train
        assert sorted(row["step_labels"] for row in cut) == [[0.0], [1.0]]
    whole = (separator.join(["one", "two", "three"]) + EOS, 0.25)
    assert found == [[(("one" + separator).rstrip(" "), 1.0), whole], [("four" + EOS, 0.0)]]


@pytest.mark.parametrize(
    ("row", "flags", "words"),
    [
        (
            {"prompt": "p", "completions": ["x" * 99], "labels": [1]},
            {"truncation": "drop"},
            "no row is within",
        ),
        (
            {**STEPS[0], "completions": ["one", "t\nwo", "three"]},
            {},
            r"row 1: step 2 contains .*'\\n'; choose",
        ),
    ],
)
def test_data_that_step_2_cannot_use_are_refused(tmp_path, row, flags, words):
    path = write_jsonl(tmp_path / "d.jsonl", [row])
    with pytest.raises(UserError, match=words):
        rows_for("steps", flags_for(tmp_path, path, use="steps", **flags))


def test_step_labels_by_hand():
    rows = Dataset.from_list(
        [
            {
                "prompt_ids": [5, 6],
                "answers": [[7, 8, 9, 1]],
                "step_ends": [1, 3],
                "step_labels": [1.0, 0.25],
            },
            {"prompt_ids": [5], "answers": [[7, 1]], "step_ends": [1], "step_labels": [1.0]},
        ]
    )
    batch = collate_steps(rows, [1, 0, PADDING_ROW], 99)
    assert batch.input_ids.tolist() == [
        [5, 7, 1, 99, 99, 99],
        [5, 6, 7, 8, 9, 1],
        [5, 6, 7, 8, 9, 1],
    ]
    assert batch.label_mask.int().tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 1], [0] * 6]
    assert batch.labels.tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0.25], [0] * 6]
    assert batch.lengths.tolist() == [3, 6, 6]
