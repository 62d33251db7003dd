"""Rows that can be read in two ways stop with the flags that choose; rows that say the same twice do not."""

import pytest
from form_fixtures import ASK, HALL, HH, ROOF, assistant, form_of, read, user

from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError

TALK = [user("Why?"), assistant("So.")]


@pytest.mark.parametrize(
    ("row", "column", "form", "other"),
    [
        ({"prompt": "Q:", "question": "Why?", "answer": "So."}, "prompt", "question_answer", "prompt_response"),
        ({"prompt": "Q:", "response": "r", "messages": TALK}, "prompt", "messages", "prompt_response"),
        ({"messages": [ASK, HALL], "conversations": [ASK, ROOF]}, "messages", "sharegpt", "messages"),
        ({"prompt": "Q:", "response": "r", "responses": ["a", "b"], "scores": [1, 2]}, "response", "ranked",
         "prompt_response"),
        # prompts alone, beside a question and its answer
        ({"question": "Why?", "answer": "No.", "messages": [user("Hm")]}, "question", "messages", "question_answer"),
        ({"prompt": "Why?", "chosen": " So.", "rejected": " No.", "messages": [ASK, HALL]}, "messages", "preference",
         "messages"),
        ({"user": "Ann", "model": "m-1", "conversations": [ASK, {"role": "agent", "content": "So."}]}, "conversations",
         "user_assistant", "sharegpt"),
        ({"question": "Why?", "answer": "So.", "chosen": "For."}, "chosen", "question_answer", "text"),
        ({"prompt": "Why?", "chosen": "So."}, "chosen", "prompt_response", "text"),
        ({"messages": [ASK, HALL], "text": "Something else."}, "text", "messages", "text"),
    ],
)  # fmt: skip
def test_a_column_that_another_form_reads_stops_with_the_flags_that_choose(row, column, form, other):
    with pytest.raises(UserError) as caught:
        form_of([row])
    message = str(caught.value)
    assert message.startswith("d.jsonl: '") and "\n" not in message
    assert f"that the form {form} does not use; --ignore_columns " in message and "--data_format" in message
    assert f"'{column}' holds content, " in message
    for name in (form, other) if other != "text" else (form,):
        assert form_of([row], data_format=name).name == name


def test_a_flag_that_names_the_column_chooses_too():
    row = {"prompt": "Q:", "response": "r", "messages": [user("Why?"), assistant("So.")]}
    assert form_of([row], messages_column="messages").name == "messages"
    assert form_of([row], response_column="response").name == "prompt_response"


@pytest.mark.parametrize(
    ("row", "words", "flags", "settled"),
    [
        (
            {"prompt": "Q:", "response": "r", "completion": "c"},
            "'completion' holds content, 'c', that the form prompt_response does not use; --ignore_columns completion",
            {"response_column": "completion"}, Example("Q:", ["c"]),
        ),
        (
            {"prompt": "P:", "question": "Q:", "responses": ["a", "b"], "scores": [1, 2]},
            "'question' holds content, 'Q:', that the form ranked does not use; --ignore_columns question",
            {"prompt_column": "question"}, Example("Q:", ["b"]),
        ),
    ],
)  # fmt: skip
def test_two_columns_for_one_role_need_a_choice(row, words, flags, settled):
    with pytest.raises(UserError, match=rf"^d\.jsonl: {words}"):
        form_of([{**row, "response": None, "question": None} | row, row])
    assert read([row], "sft", **flags) == [settled]


def test_two_columns_with_the_same_values_need_none():
    row = {"prompt": "Q:", "response": "r", "completion": "r"}
    assert read([row, row | {"completion": None}], "sft") == [Example("Q:", ["r"])] * 2


def test_a_difference_in_any_of_the_first_rows_counts():
    same = {"prompt": "Why?", "messages": [user("Why?"), assistant("So.")]}
    assert form_of([same] * 20).name == "messages"
    with pytest.raises(UserError, match="'prompt' holds content, 'Who.'"):
        form_of([same] * 19 + [same | {"prompt": "Who?"}])
    assert form_of([same] * 20 + [same | {"prompt": "Who?"}]).name == "messages"


@pytest.mark.parametrize(
    ("row", "form"),
    [
        # UltraChat: the prompt is the first message of the user
        ({"prompt": "Why?", "messages": [user("Why?"), assistant("So."), user("Oh?"), assistant("Yes.")]}, "messages"),
        ({"question": "Why?", "answer": "So.", "messages": [user("Why?"), assistant("So.")]}, "messages"),
        ({"messages": [ASK, HALL], "conversations": [ASK, HALL]}, "sharegpt"),
        ({"messages": [ASK, HALL], "text": "<s>Where is the lamp?</s> In the hall."}, "messages"),
        ({"chosen": [ASK, HALL], "rejected": [ASK, ROOF], "messages": [ASK, HALL]}, "implicit_preference"),
        ({"prompt": "Q:", "response": "b", "responses": ["a", "b"], "scores": [1, 2]}, "ranked"),
        ({"question": "1+2=", "steps": ["1+2=3"], "labels": [1], "answer": "42"}, "stepwise"),  # for rewards
        ({"user": "Why?", "assistant": "So.", "messages": None}, "user_assistant"),
        ({"prompt": "Q:", "chosen": " yes", "rejected": " no", "text": "Q: yes"}, "preference"),
        ({"prompt": "Q:", "output": "A reference.", "reasoning": "Hm."}, "prompt_response"),  # for rewards
    ],
)
def test_columns_that_repeat_each_other_are_no_second_reading(row, form):
    assert form_of([row]).name == form


def test_a_form_must_read_half_of_the_rows():
    row = {"text": f"{HH} a"}
    assert form_of([row, {"text": "no transcript"}]).name == "hh"
    assert form_of([row, {"text": "no transcript"}, {"text": "none"}]).name == "text"


@pytest.mark.parametrize(
    ("answers", "words"),
    [({"text": ["So"]}, "'answers' is an object"), (["So", "As"], "the answers of 'answers' have no score")],
)
def test_columns_that_only_look_like_a_form_are_warned_of(answers, words):
    """As in SQuAD."""
    row = {"question": "Why?", "answers": answers}
    form = form_of([row])
    assert form.warning.startswith("most of the first rows do not fit the form ranked; --prompt_column")
    with pytest.raises(UserError, match=f"^row 1: {words}"):
        form.read(row, "sft", "row 1")
    assert read([row], "prompt", prompt_column="question") == [Example("Why?", [])]


STRANGERS = [{"from": "customer", "value": "Why?"}, {"from": "agent", "value": "So."}]


@pytest.mark.parametrize(
    ("rows", "name", "words"),
    [
        ([{"conversation": STRANGERS}], "sharegpt", "role 'customer'.*--role_names"),
        ([{"messages": None, "id": 1}] * 9 + [{"messages": TALK, "id": 2}], "messages", "'messages' is null"),
    ],
)
def test_rows_that_no_form_can_read_say_what_is_wrong_with_their_messages(rows, name, words):
    form = form_of(rows)
    assert form.name == name and form.warning.startswith("most of the first rows do not fit")
    with pytest.raises(UserError, match=words):
        form.read(rows[0], form.uses[0], "row 1")


# Prompts and answers without anything between them


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("What is 2+2?", "4"),
        ("Say it", "Yes"),
        ("2", "3"),
        ("谁?", "他"),
        ("你好。", "好"),
        ("何ですか！", "A"),
        ('"Why?"', "So"),
    ],
)
def test_text_whose_answer_is_glued_to_the_prompt_stops_with_both_readings(prompt, answer):
    with pytest.raises(UserError) as caught:
        form_of([{"prompt": prompt, "response": answer}])
    message = str(caught.value)
    assert repr(f"...{prompt}{answer}...") in message
    assert all(flag in message for flag in ("--apply_chat_template True", "False keeps the text"))
    assert "--input_template" in message


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("What is 2+2?", " 4"),
        ("2+2=", "4"),
        ("A:", "b"),
        ("Why? ", "So"),
        ("Why?\n", "So"),
        ("Why", ", so"),
        ("Q\n\nA:", "b"),
    ],
)
def test_text_with_something_between_stays_text_unasked(prompt, answer):
    form = form_of([{"prompt": prompt, "response": answer}])
    assert (form.rendering, form.warning) == ("text", "")


def test_glued_rows_count_from_more_than_half():
    glued, apart = {"prompt": "Why?", "response": "So"}, {"prompt": "Why?", "response": " So"}
    assert form_of([glued, apart]).rendering == "text"
    with pytest.raises(UserError, match="nothing separates"):
        form_of([glued, apart, glued])


@pytest.mark.parametrize(
    "row",
    [{"prompt": "Why?", "chosen": "a", "rejected": "b"}, {"prompt": "Why?", "completion": "a", "label": True},
     {"prompt": "Why?", "responses": ["a", "b"], "scores": [1, 2]}],
)  # fmt: skip
def test_pairs_are_asked_as_well(row):
    with pytest.raises(UserError, match="nothing separates"):
        form_of([row])


@pytest.mark.parametrize(
    ("flags", "prompt"),
    [
        ({"apply_chat_template": True}, [user("Why?")]),
        ({"apply_chat_template": False}, "Why?"),
        ({"input_template": "Q: {} A: "}, "Q: Why? A: "),
        ({"input_template": "Q: {}", "apply_chat_template": True}, [user("Q: Why?")]),
    ],
)
def test_a_flag_chooses_the_rendering_for_all_uses(flags, prompt):
    row = {"prompt": "Why?", "chosen": "a", "rejected": "b"}
    assert read([row], "sft", **flags) == [Example(prompt, ["a"])]
    assert read([row], "preference", **flags) == [Example(prompt, ["a", "b"])]
    assert read([row], "prompt", **flags) == [Example(prompt, [])]


def test_without_a_chat_template_the_form_warns():
    form = form_of([{"prompt": "Why?", "response": "So"}], has_template=False)
    assert form.rendering == "text"
    assert form.warning.startswith("nothing separates prompt and answer: '...Why?So...'; --input_template ")
    assert "nothing" not in form.description


def test_prompts_that_both_answers_repeat_are_read_once():
    row = {"prompt": "Q: a\nA:", "chosen": "Q: a\nA: yes", "rejected": "Q: a\nA: no"}
    for use, answers in (("sft", [" yes"]), ("preference", [" yes", " no"]), ("prompt", [])):
        assert read([row], use) == [Example("Q: a\nA:", answers)]
    apart = row | {"chosen": "yes"}
    assert form_of([row]).read(apart, "preference", "row 2") == [Example("Q: a\nA:", ["yes", row["rejected"]])]
    for empty in ("", None):
        assert read([row | {"prompt": empty}], "preference") == read([row], "preference")


def test_pairs_of_transcripts_beside_a_text_are_read_alike_in_all_steps():
    row = {"chosen": f"{HH} In the hall.", "rejected": f"{HH} No."}
    same = row | {"text": row["chosen"]}
    assert read([same], "preference") == [Example(HH, [" In the hall.", " No."])]
    assert read([same], "sft") == [Example(HH, [" In the hall."])]
    other = row | {"text": "\n\nHuman: Who?\n\nAssistant: Me."}
    with pytest.raises(UserError, match="'text' holds content, .* that the form hh does not use"):
        form_of([other])
    assert read([other], "preference", data_format="hh") == read([same], "preference")
    assert read([other], "sft", messages_column="text") == [Example("\n\nHuman: Who?\n\nAssistant:", [" Me."])]
