"""What a teacher reads in place of a prompt, and the metrics of the rows that it teaches."""

from types import SimpleNamespace

import pytest
import torch
from tiny_experience import experience

from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError
from dschat_ppo.features.distillation.experience_metrics import scalars_of
from dschat_ppo.features.distillation.step_data import teacher_prompt
from dschat_ppo.tools.toy import make_tokenizer

TOKENIZER = make_tokenizer(["a b c d"])
SYSTEM = {"role": "system", "content": "be short"}


def settings(limit: int = 64) -> SimpleNamespace:
    return SimpleNamespace(tokenizer=TOKENIZER, step=SimpleNamespace(limit=limit))


def test_a_teacher_reads_the_text_of_its_column():
    row = {"more": "a longer one"}
    ids = TOKENIZER("a longer one")["input_ids"]
    assert teacher_prompt("more", row, Example("short", ["yes"]), settings()) == ids


def test_of_a_chat_the_text_is_in_place_of_the_last_message():
    row = {"more": "a longer one"}
    chat = Example([SYSTEM, {"role": "user", "content": "short"}], [])
    longer = Example([SYSTEM, {"role": "user", "content": "a longer one"}], [])
    ids = encode_example(TOKENIZER, longer).prompt
    assert teacher_prompt("more", row, chat, settings()) == ids


@pytest.mark.parametrize(
    ("column", "limit", "message"),
    [
        ("none", 64, r"no value at 'none' \(--teacher_prompt_column\)"),
        ("more", 6, "more than --max_prompt_seq_len 6; raise it"),
    ],
)
def test_a_column_without_a_value_and_one_that_is_too_long_are_refused(column, limit, message):
    with pytest.raises(UserError, match=message):
        teacher_prompt(column, {"more": "a longer one"}, Example("short", []), settings(limit))


def test_the_kl_to_a_teacher_is_that_of_the_rows_that_have_one():
    """Answers of 3, 0 and 1 tokens, of which the last has no teacher."""
    old_logprobs = torch.tensor([[-1.0, -2.0, -3.0], [0.0, 0.0, 0.0], [-4.0, 0.0, 0.0]])
    rows = experience(
        teachers=torch.tensor([1, 0, -1]),
        old_logprobs=old_logprobs,
        teacher_logprobs=torch.full((3, 3), -0.5),
    )
    scalars = scalars_of(rows)
    assert float(scalars["distill/kl_k1"]) == pytest.approx(-2 + 0.5)
    assert float(scalars["distill/taught_share"]) == pytest.approx(2 / 3)
    assert scalars_of(experience()) == {}
