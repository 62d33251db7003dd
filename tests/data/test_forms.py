"""Flags that say how rows are read: formats, columns, rendering, the correct answer, system messages and tools."""

import pickle

import pytest
from form_fixtures import ALPACA, ASK, GSM, HALL, KTO, TOOL, form_of, read, system, user

from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError

QUESTION = {"question": "How many clips?", "answer": GSM}


def test_column_flags_name_prompt_and_answers():
    row = {"ask": {"text": "Q:"}, "good": "c", "bad": "r", "prompt": "other", "margin": 1}
    flags = {"prompt_column": "ask.text", "chosen_column": "good", "rejected_column": "bad"}
    assert read([row], "preference", **flags) == [Example("Q:", ["c", "r"], 1.0)]
    assert read([row], "sft", **flags) == [Example("Q:", ["c"], 1.0)]
    assert read([row], "prompt", **flags) == [Example("Q:", [], 1.0)]


@pytest.mark.parametrize(
    ("row", "column", "name"), [(ALPACA, "output", "alpaca"), (QUESTION, "answer", "question_answer")]
)
def test_a_flag_that_names_the_answer_of_a_form_leaves_the_form(row, column, name):
    form = form_of([row], response_column=column)
    assert (form.name, form.warning) == (name, "")
    assert form.read(row, "sft") == form_of([row]).read(row, "sft")
    assert form_of([row | {"prompt": "Q:"}], response_column=column).name == "prompt_response"
    assert form_of([row | {"response": "other"}], response_column=column).name == name
    with pytest.raises(UserError, match=r"'text' holds content, 'Why\?', that the form .*--ignore_columns text"):
        form_of([row | {"text": "Why?"}], response_column=column)


@pytest.mark.parametrize(("row", "flags", "expected"), [
    *(({column: "Why?", "gold": "So."}, {"response_column": "gold"}, Example([user("Why?")], ["So."]))
      for column in ("question", "instruction", "user")),
    (QUESTION, {"prompt_column": "question", "response_column": "answer", "apply_chat_template": False},
     Example("How many clips?", [GSM])),
    ({"chat": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, {"messages_column": "chat"},
     Example([user("a")], ["b"])),
    ({"task": "Sing.", "result": "La."},
     {"data_format": "alpaca", "prompt_column": "task", "response_column": "result"},
     Example([user("Sing.")], ["La."])),
])  # fmt: skip
def test_flags_name_what_the_columns_are(row, flags, expected):
    assert read([row], "sft", **flags) == [expected]


def test_a_flag_names_the_text_that_ppo_takes_as_prompt():
    rows = [{"text": "Once upon"}]
    assert read(rows, "prompt", prompt_column="text") == [Example("Once upon", [])]
    with pytest.raises(UserError, match="'text' holds content, .* that the form prompt_response does not use"):
        form_of([{"ask": "Why?", "text": "So."}], prompt_column="ask")
    with pytest.raises(UserError, match="this step needs a prompt"):
        read(rows, "prompt")


# Rendering


@pytest.mark.parametrize(("row", "flags", "has_template", "prompt"), [
    (QUESTION, {}, True, [user("How many clips?")]),
    (QUESTION, {"apply_chat_template": False}, True, "How many clips?"),
    (QUESTION, {"input_template": "Q: {} A:", "apply_chat_template": True}, True, [user("Q: How many clips? A:")]),
    (ALPACA, {"input_template": "<{}>"}, True, "<Name the colour.\n\na lemon>"),
    ({"prompt": "Why?", "response": "a"}, {"input_template": "Q: {} A: "}, True, "Q: Why? A: "),
    ({"prompt": "Why?", "response": "a"}, {"apply_chat_template": False}, True, "Why?"),
    ({"prompt": "a b"}, {"apply_chat_template": True}, True, [user("a b")]),
    ({"prompt": "a {b}"}, {"input_template": "{}:"}, False, "a {b}:"),
    ({"prompt": [ASK]}, {"apply_chat_template": False}, True, [ASK]),  # the flag is about prompts that are text
])  # fmt: skip
def test_the_rendering_follows_template_and_flags(row, flags, has_template, prompt):
    [example] = read([row], "prompt", has_template=has_template, **flags)
    assert example.prompt == prompt


@pytest.mark.parametrize(("row", "flags", "words"), [
    ({"a": 1, "b": 2}, {}, "has the columns 'a', 'b', which fit no known form; .*--prompt_column"),
    ({"prompt": "Q:", "a": "x"}, {"response_column": "b"}, "has no such column; it has 'prompt', 'a'"),
    ({"prompt": "Q:"}, {"data_format": "alpaca"}, "has the columns 'prompt', which do not fit the form alpaca"),
    ({"messages": [ASK], "c": "x"}, {"data_format": "messages", "chosen_column": "c"}, "do not fit the form"),
    ({"messages": [ASK]}, {"has_template": False}, "has no chat template; --chat_template chatml"),
    ({"prompt": "a"}, {"apply_chat_template": True, "has_template": False}, "has no chat template"),
    ({"text": "Once."}, {"apply_chat_template": True}, "form text is text, so --apply_chat_template True does not"),
    ({"prompt": "Q: ", "response": "a"}, {"system_message": "Be."}, "--system_message.*--apply_chat_template True"),
    ({"messages": [ASK]}, {"role_names": ["customer"]}, "--role_names 'customer='"),
    ({"prompt": "a", "meta": {"s": "Be."}}, {"system_column": "meta.s"}, r"'meta\.s' holds content"),
    ({"text": "Once.", "system": "Be."}, {}, "'system' holds content, .*--ignore_columns system leaves"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(row, flags, words):
    with pytest.raises(UserError, match=words):
        form_of([row], **flags)


# System messages and tools


def test_the_system_column_precedes_chat_messages():
    for column in ("system", "system_prompt", "system_message"):
        assert read([{"messages": [ASK], column: "Be kind."}], "prompt")[0].prompt == [system("Be kind."), ASK]
        with pytest.raises(UserError, match=f"'{column}' holds content, 'Be kind.'"):
            form_of([{"prompt": "Q:", "response": " r", column: "Be kind."}])
    row = {"messages": [ASK, HALL], "system": "Be kind.", "other": "Be brief."}
    assert read([row], "prompt", system_column="other")[0].prompt == [system("Be brief."), ASK]
    assert read([row], "prompt", system_column="")[0].prompt == [ASK]
    for empty in (None, ""):
        assert read([row | {"system": empty}], "prompt")[0].prompt == [ASK]
    same = {"messages": [system("Be kind."), ASK], "system": "Be kind."}
    assert read([same], "prompt")[0].prompt == [system("Be kind."), ASK]


def test_text_prompts_have_no_place_for_a_system_message_or_tools():
    for column, value, found in (("system", "Be kind.", [system("Be kind."), user("a b")]), ("tools", [TOOL], None)):
        row = {"prompt": "a b", column: value}
        with pytest.raises(UserError, match=f"'{column}' holds .*_columns {column}.*--apply_chat_template True"):
            form_of([row])
        [example] = read([row], "prompt", apply_chat_template=True)
        assert example.prompt == (found or [user("a b")]) and example.tools == (None if found else value)
        assert read([row], "prompt", ignore_columns=[column]) == [Example("a b", [])]
        form = form_of([{"prompt": "a b", column: None}])
        with pytest.raises(UserError, match=f"^'{column}' holds content"):
            form.read(row, "prompt")
    with pytest.raises(UserError, match="^'tools' is str .'a hammer'.; .*; --ignore_columns tools"):
        form_of([{"prompt": [ASK], "tools": []}]).read({"prompt": [ASK], "tools": "a hammer"}, "prompt")


# The correct answer


@pytest.mark.parametrize(("row", "flags", "truth"), [
    (QUESTION, {}, "24"), (QUESTION | {"answer": "1 #### 2\n####  1,000 \n"}, {}, "1,000"),
    (QUESTION, {"answer_column": "answer"}, GSM),
    ({"prompt": "Q:", "meta": {"truth": 7}}, {"answer_column": "meta.truth"}, 7),
    ({"prompt": "Q:", "label": "x = 7"}, {"answer_column": "label", "answer_pattern": "= (.*)"}, "7"),
    ({"prompt": "Q:", "response": GSM}, {"answer_column": "response", "answer_pattern": "#### (.*)"}, "24"),
    ({"messages": [ASK], "answer": "72"}, {"answer_column": "answer"}, "72"),
    ({"messages": [ASK], "answer": "72"}, {}, None),  # the column itself reaches reward functions
])  # fmt: skip
def test_the_correct_answer(row, flags, truth):
    assert [example.truth for example in read([row], "prompt", **flags)] == [truth]


# What others need of a form


def test_a_form_can_be_pickled_and_identified():
    forms = [form_of([QUESTION]), form_of([QUESTION], apply_chat_template=False), form_of(KTO), form_of([ALPACA])]
    for form in forms:
        again = pickle.loads(pickle.dumps(form))
        assert again.identity == form.identity
    assert again.read(ALPACA, "sft") == form.read(ALPACA, "sft")
    assert len({form.identity for form in forms}) == 4
    assert form_of([QUESTION]).identity == forms[0].identity
