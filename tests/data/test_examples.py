"""Column layouts to prompts and answers, and messages about bad rows."""

import pytest

from dschat_ppo.data.examples import layout_of, read_example
from dschat_ppo.errors import UserError

ASK = [{"role": "user", "content": "Where is the lamp?"}]


@pytest.mark.parametrize(
    ("columns", "use", "layout"),
    [
        (["prompt", "response"], "sft", ("prompt", "response")),
        (["messages", "source"], "sft", ("messages",)),
        (["prompt", "chosen", "rejected"], "sft", ("prompt", "chosen")),
        (["prompt", "response", "chosen", "rejected"], "sft", ("prompt", "response")),
        (["prompt", "chosen", "rejected", "margin"], "preference", ("prompt", "chosen", "rejected")),
        (["prompt", "chosen", "rejected"], "prompt", ("prompt",)),
        (["messages"], "prompt", ("messages",)),
    ],
)
def test_layout_is_found_from_the_columns(columns, use, layout):
    assert layout_of(columns, use, "data.jsonl") == layout


@pytest.mark.parametrize("use", ["sft", "preference", "prompt"])
def test_wrong_columns_are_named_with_the_accepted_ones(use):
    with pytest.raises(UserError) as problem:
        layout_of(["question", "reply"], use, "data.jsonl")
    message = str(problem.value)
    assert "data.jsonl" in message
    assert "'question', 'reply'" in message
    assert "prompt" in message


def test_sft_uses_the_chosen_answer_of_deepspeed_chat_rows():
    row = {"prompt": "Human: hi Assistant:", "chosen": " Hello.", "rejected": " Go away."}
    parsed = read_example(row, layout_of(list(row), "sft", "d"), "sft", "d, row 0")
    assert (parsed.prompt, parsed.answers) == ("Human: hi Assistant:", [" Hello."])


def test_pairs_keep_both_answers_and_the_margin():
    row = {"prompt": "p", "chosen": "c", "rejected": "r", "margin": 2}
    parsed = read_example(row, ("prompt", "chosen", "rejected"), "preference", "d, row 0")
    assert (parsed.prompt, parsed.answers, parsed.margin) == ("p", ["c", "r"], 2.0)


@pytest.mark.parametrize("row", [{}, {"margin": None}])
def test_a_missing_margin_is_zero(row):
    row = {"prompt": "p", "chosen": "c", "rejected": "r", **row}
    assert read_example(row, ("prompt", "chosen", "rejected"), "preference", "d, row 0").margin == 0.0


def test_messages_are_split_before_the_last_answer():
    messages = [*ASK, {"role": "assistant", "content": "In the hall."}]
    parsed = read_example({"messages": messages}, ("messages",), "sft", "d, row 0")
    assert (parsed.prompt, parsed.answers) == (ASK, ["In the hall."])


def test_messages_as_ppo_prompts_lose_their_answer():
    messages = [*ASK, {"role": "assistant", "content": "In the hall."}]
    assert read_example({"messages": messages}, ("messages",), "prompt", "d, row 0").prompt == ASK
    assert read_example({"messages": ASK}, ("messages",), "prompt", "d, row 0").prompt == ASK


def test_an_answer_given_as_messages_is_their_last_turn():
    row = {"prompt": ASK, "chosen": [*ASK, {"role": "assistant", "content": "Here."}], "rejected": "No."}
    parsed = read_example(row, ("prompt", "chosen", "rejected"), "preference", "d, row 0")
    assert parsed.answers == ["Here.", "No."]


def test_extra_fields_of_messages_are_dropped():
    turn = {"role": "user", "content": "hi", "tool_calls": None}
    read = read_example({"prompt": [turn]}, ("prompt",), "prompt", "d, row 0")
    assert read.prompt == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "use", "column"),
    [
        ({"prompt": None, "response": "a"}, "sft", "prompt"),
        ({"prompt": 7, "response": "a"}, "sft", "prompt"),
        ({"prompt": [], "response": "a"}, "sft", "prompt"),
        ({"prompt": "p", "response": None}, "sft", "response"),
        ({"prompt": "p", "response": 3.5}, "sft", "response"),
        ({"prompt": "p", "response": ASK}, "sft", "response"),
        ({"messages": ASK}, "sft", "messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "sft", "messages"),
        ({"messages": [{"role": "user", "text": "a"}]}, "prompt", "messages"),
        ({"prompt": "p", "chosen": "c", "rejected": None}, "preference", "rejected"),
        ({"prompt": "p", "chosen": ["c"], "rejected": "r"}, "preference", "chosen"),
        ({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "big"}, "preference", "margin"),
    ],
)
def test_bad_rows_are_named_with_their_column(row, use, column):
    with pytest.raises(UserError) as problem:
        read_example(row, layout_of(list(row), use, "data.jsonl"), use, "data.jsonl, row 17")
    assert "data.jsonl, row 17" in str(problem.value)
    assert f"'{column}'" in str(problem.value)
