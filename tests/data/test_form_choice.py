"""Rows that can be read in two ways stop with the flags that choose; rows that say the same twice do not."""

import pytest
from form_fixtures import ASK, HALL, HH, ROOF, assistant, form_of, read, user

from dschat_ppo.errors import UserError

TALK = [user("Why?"), assistant("So.")]


@pytest.mark.parametrize(("row", "column", "form", "other"), [
    ({"prompt": "Q:", "question": "Why?", "answer": "So."}, "prompt", "question_answer", "prompt_response"),
    ({"prompt": "Q:", "response": "r", "messages": TALK}, "prompt", "messages", "prompt_response"),
    ({"prompt": "Q:", "response": "r", "responses": ["a", "b"], "scores": [1, 2]}, "response", "ranked",
     "prompt_response"),
    ({"prompt": "Why?", "chosen": " So.", "rejected": " No.", "messages": [ASK, HALL]}, "messages", "preference",
     "messages"),
    ({"messages": [ASK, HALL], "text": "Something else."}, "text", "messages", "text"),
])  # fmt: skip
def test_a_column_that_another_form_reads_stops_with_the_flags_that_choose(row, column, form, other):
    with pytest.raises(UserError) as caught:
        form_of([row])
    message = str(caught.value)
    assert message.startswith("d.jsonl: '") and "\n" not in message
    assert f"that the form {form} does not use; --ignore_columns " in message and "--data_format" in message
    assert f"'{column}' holds content, " in message
    for name in (form, other) if other != "text" else (form,):
        assert form_of([row], data_format=name).name == name


@pytest.mark.parametrize(("row", "column", "flags", "answer"), [
    ({"prompt": "Q:", "response": "r", "completion": "c"}, "completion", {"response_column": "completion"}, "c"),
    ({"prompt": "P:", "question": "Q:", "responses": ["a", "b"], "scores": [1, 2]}, "question",
     {"prompt_column": "question"}, "b"),
    ({"prompt": "Q:", "response": "r", "messages": TALK}, "prompt", {"messages_column": "messages"}, "So."),
    ({"prompt": "Tell of lamps:", "text": " They shine."}, "text", {"response_column": "text"}, " They shine."),
])  # fmt: skip
def test_two_columns_for_one_role_need_a_choice(row, column, flags, answer):
    with pytest.raises(UserError, match=rf"^d\.jsonl: '{column}' holds .* does not use; --ignore_columns {column}"):
        form_of([{**row, "response": None, "question": None} | row, row])
    assert [example.answers for example in read([row], "sft", **flags)] == [[answer]]


def test_a_difference_in_any_of_the_first_rows_counts():
    transcripts = [{"text": f"{HH} a"}, {"text": "no transcript"}, {"text": "none"}]  # a form must read half of them
    assert [form_of(transcripts[:count]).name for count in (2, 3)] == ["hh", "text"]
    same = {"prompt": "Why?", "messages": [user("Why?"), assistant("So.")]}
    assert form_of([same] * 20).name == "messages"
    with pytest.raises(UserError, match="'prompt' holds content, 'Who.'"):
        form_of([same] * 19 + [same | {"prompt": "Who?"}])
    assert form_of([same] * 20 + [same | {"prompt": "Who?"}]).name == "messages"


@pytest.mark.parametrize(("row", "form"), [
    ({"conversation": TALK, "model": "m-1", "user": "u7"}, "sharegpt"),  # WildChat: who asked and answered
    ({"id": "1", "system_prompt": "Be.", "question": "Why?", "response": "So."}, "question_answer"),  # OpenOrca
    # UltraChat: the prompt is the first message of the user
    ({"prompt": "Why?", "messages": [user("Why?"), assistant("So."), user("Oh?"), assistant("Yes.")]}, "messages"),
    ({"messages": [ASK, HALL], "text": "<s>Where is the lamp?</s> In the hall."}, "messages"),
    ({"chosen": [ASK, HALL], "rejected": [ASK, ROOF], "messages": [ASK, HALL]}, "implicit_preference"),
    ({"prompt": "Q:", "chosen": " yes", "rejected": " no", "text": "Q: yes"}, "preference"),
    ({"prompt": "Q:", "response": "b", "responses": ["a", "b"], "scores": [1, 2]}, "ranked"),
    ({"question": "1+2=", "steps": ["1+2=3"], "labels": [1], "answer": "42"}, "stepwise"),  # for rewards
    ({"prompt": "Q:", "output": "A reference.", "reasoning": "Hm."}, "prompt_response"),  # for rewards
])  # fmt: skip
def test_columns_that_repeat_each_other_are_no_second_reading(row, form):
    assert form_of([row]).name == form


@pytest.mark.parametrize(("rows", "name", "words"), [
    ([{"question": "Why?", "answers": {"text": ["So"]}}], "ranked", "'answers' is an object"),  # as in SQuAD
    ([{"conversation": [{"from": "customer", "value": "Why?"}]}], "sharegpt", "role 'customer'.*--role_names"),
    ([{"messages": None, "id": 1}] * 9 + [{"messages": TALK, "id": 2}], "messages", "'messages' is null"),
])  # fmt: skip
def test_rows_that_no_form_can_read_are_warned_of_and_say_what_is_wrong(rows, name, words):
    form = form_of(rows)
    assert form.name == name
    assert form.warning.startswith(f"most of the first rows do not fit the form {name}; --prompt_column")
    with pytest.raises(UserError, match=words):
        form.read(rows[0], form.uses[0])


# Prompts and answers without anything between them


@pytest.mark.parametrize(("glued", "apart"), [
    (("What is 2+2?", "4"), ("What is 2+2?", " 4")), (("你好。", "好"), ("2+2=", "4")),
    (('"Why?"', "So"), ("Why", ", so")),
])  # fmt: skip
def test_text_whose_answer_is_glued_to_the_prompt_stops_with_both_readings(glued, apart):
    with pytest.raises(UserError, match="--apply_chat_template True.*False keeps the text; --input_te") as caught:
        form_of([{"prompt": glued[0], "response": glued[1]}])
    assert repr(f"...{''.join(glued)}...") in str(caught.value)
    form = form_of([{"prompt": apart[0], "response": apart[1]}])  # something is between them
    assert (form.rendering, form.warning) == ("text", "")


def test_glued_rows_count_from_more_than_half():
    glued, apart = {"prompt": "Why?", "response": "So"}, {"prompt": "Why?", "response": " So"}
    assert form_of([glued, apart]).rendering == "text"
    pair, ranked = {"prompt": "Why?", "chosen": "a", "rejected": "b"}, {"responses": ["a", "b"], "scores": [1, 2]}
    warning = form_of([glued], has_template=False).warning
    assert warning.startswith("nothing separates prompt and answer: '...Why?So...'; --input_template ")
    for rows in ([glued, apart, glued], [pair], [{**glued, "label": True}], [{"prompt": "Why?", **ranked}]):
        with pytest.raises(UserError, match="nothing separates"):
            form_of(rows)
