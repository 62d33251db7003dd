"""Flags that say how rows are read: formats, columns, rendering, the correct answer, system messages and tools."""

import pickle

import pytest
from form_fixtures import ALPACA, ASK, GSM, HALL, HH, KTO, TOOL, assistant, form_of, read, system, user

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.examples import Example
from dschat_ppo.data.form_choice import detect_form
from dschat_ppo.data.forms import check_flags_used
from dschat_ppo.errors import UserError

QUESTION = {"question": "How many clips?", "answer": GSM}


def test_columns_of_no_form_are_listed():
    with pytest.raises(
        UserError, match=r"d\.jsonl: has the columns 'a', 'b', which fit no known form; .*--prompt_column"
    ):
        form_of([{"a": 1, "b": 2}])


def test_column_flags_name_prompt_and_answers():
    row = {"ask": {"text": "Q:"}, "good": "c", "bad": "r", "prompt": "other", "margin": 1}
    flags = {"prompt_column": "ask.text", "chosen_column": "good", "rejected_column": "bad"}
    assert read([row], "preference", **flags) == [Example("Q:", ["c", "r"], 1.0)]
    assert read([row], "sft", **flags) == [Example("Q:", ["c"], 1.0)]
    assert read([row], "prompt", **flags) == [Example("Q:", [], 1.0)]


def test_columns_that_flags_name_leave_no_second_reading():
    rows = read([QUESTION], "sft", prompt_column="question", response_column="answer", apply_chat_template=False)
    assert rows == [Example("How many clips?", [GSM])]
    rows = read([ALPACA], "sft", prompt_column="instruction", response_column="output", input_template="Q: {}\nA: ")
    assert rows == [Example("Q: Name the colour.\nA: ", ["Yellow."])]


@pytest.mark.parametrize(
    ("row", "column", "name"), [(ALPACA, "output", "alpaca"), (QUESTION, "answer", "question_answer")]
)
def test_a_flag_that_names_the_answer_of_a_form_leaves_the_form(row, column, name):
    form = form_of([row], response_column=column)
    assert (form.name, form.warning) == (name, "")
    assert form.read(row, "sft", "row") == form_of([row]).read(row, "sft", "row")
    assert form_of([row | {"prompt": "Q:"}], response_column=column).name == "prompt_response"
    assert form_of([row | {"response": "other"}], response_column=column).name == name
    with pytest.raises(UserError, match=r"'text' holds content, 'Why\?', that the form .*--ignore_columns text"):
        form_of([row | {"text": "Why?"}], response_column=column)


@pytest.mark.parametrize("row", [{"question": "Why?"}, {"instruction": "Say."}, {"user": "Why?"}])
def test_a_flag_names_the_answer_to_the_prompt_of_a_form(row):
    [example] = read([row | {"gold": "So."}], "sft", response_column="gold")
    assert example == Example([user(next(iter(row.values())))], ["So."])
    ranked = {"question": "Why? ", "gold": ["So.", "No."], "scores": [1, 0]}
    assert form_of([ranked], response_column="gold").name == "ranked"


def test_a_column_that_a_flag_names_has_no_second_role():
    form = form_of([{"prompt": "a", "response": "b"}], prompt_column="response")
    assert form.uses == ("prompt",)
    assert form.read({"prompt": "a", "response": "b"}, "prompt", "row") == [Example("b", [])]


def test_messages_may_lie_in_another_column():
    rows = [{"chat": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    assert read(rows, "sft", messages_column="chat") == [Example([user("a")], ["b"])]


def test_a_flag_names_the_text_that_ppo_takes_as_prompt():
    rows = [{"text": "Once upon"}]
    assert read(rows, "prompt", prompt_column="text") == [Example("Once upon", [])]
    with pytest.raises(UserError, match="'text' holds content, .* that the form prompt_response does not use"):
        form_of([{"ask": "Why?", "text": "So."}], prompt_column="ask")
    with pytest.raises(UserError, match="this step needs a prompt"):
        read(rows, "prompt")


def test_a_column_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(UserError, match=r"--response_column b: d\.jsonl has no such column; it has 'prompt', 'a'"):
        form_of([{"prompt": "Q:", "a": "x"}], prompt_column="prompt", response_column="b")


def test_in_a_mixture_a_flag_applies_to_the_data_sets_with_its_column():
    row = {"prompt": "Q:", "response": "a"}
    form = form_of([row], paths=2, prompt_column="ask", response_column="response")
    assert "--prompt_column ask: it has no such column" in form.description
    assert form.read(row, "sft", "row") == [Example("Q:", ["a"])]


def test_flags_that_name_a_column_of_no_data_set_are_refused():
    row = {"prompt": "Q:", "response": "a"}
    flags = DataFlags(data_path=["a", "b"], prompt_column="ask")
    other = form_of([row], paths=2, prompt_column="ask")
    check_flags_used([other, form_of([{"ask": "Q:", "response": "a"}], paths=2, prompt_column="ask")], flags)
    with pytest.raises(UserError, match="--prompt_column ask: no data set has such a column"):
        check_flags_used([other], flags)
    check_flags_used([other], DataFlags(data_path=["a"], system_column=""))


def test_a_forced_form_needs_its_columns_and_roles():
    with pytest.raises(
        UserError, match=r"d\.jsonl: has the columns 'prompt', which do not fit the form alpaca .instruction, "
    ):
        form_of([{"prompt": "Q:"}], data_format="alpaca")
    with pytest.raises(
        UserError, match="has the columns 'messages', 'c', which do not fit the form messages .messages, "
    ):
        form_of([{"messages": [ASK], "c": "x"}], data_format="messages", chosen_column="c")
    rows = [{"task": "Sing.", "result": "La."}]
    flags = {"data_format": "alpaca", "prompt_column": "task", "response_column": "result"}
    assert read(rows, "sft", **flags) == [Example([user("Sing.")], ["La."])]


# Rendering


@pytest.mark.parametrize(
    ("row", "flags", "has_template", "prompt"),
    [
        (QUESTION, {}, True, [user("How many clips?")]),
        (QUESTION, {"apply_chat_template": False}, True, "How many clips?"),
        (QUESTION, {"input_template": "Q: {} A:"}, True, "Q: How many clips? A:"),
        (QUESTION, {"input_template": "Q: {} A:", "apply_chat_template": True}, True, [user("Q: How many clips? A:")]),
        (ALPACA, {"input_template": "<{}>"}, True, "<Name the colour.\n\na lemon>"),
        (
            ALPACA,
            {"input_template": "<{}>", "apply_chat_template": True},
            True,
            [user("<Name the colour.\n\na lemon>")],
        ),
        ({"prompt": "a b"}, {"apply_chat_template": True}, True, [user("a b")]),
        ({"prompt": "a {b}"}, {"input_template": "{}:"}, False, "a {b}:"),
        ({"prompt": [ASK]}, {"apply_chat_template": False}, True, [ASK]),  # the flag is about prompts that are text
    ],
)
def test_the_rendering_follows_template_and_flags(row, flags, has_template, prompt):
    [example] = read([row], "prompt", has_template=has_template, **flags)
    assert example.prompt == prompt


def test_chat_without_a_chat_template_is_refused():
    for row, flags in (({"messages": [ASK]}, {}), ({"prompt": "a"}, {"apply_chat_template": True})):
        with pytest.raises(UserError, match=r"has no chat template; --chat_template chatml"):
            form_of([row], has_template=False, **flags)


def test_plain_text_takes_no_chat_template():
    with pytest.raises(UserError, match="the form text is text, so --apply_chat_template True does not apply"):
        form_of([{"text": "Once."}], apply_chat_template=True)


@pytest.mark.parametrize("row", [{"messages": [ASK]}, {"text": f"{HH} a"}, {"chosen": "a b", "rejected": "a c"}])
def test_an_input_template_that_does_not_apply_is_logged(row):
    assert "--input_template does not apply" in form_of([row], input_template="{}:").description


# System messages and tools


def test_the_system_column_precedes_chat_messages():
    row = {"messages": [ASK, HALL], "system": "Be kind.", "other": "Be brief."}
    assert read([row], "prompt")[0].prompt == [system("Be kind."), ASK]
    assert read([row], "prompt", system_column="other")[0].prompt == [system("Be brief."), ASK]
    assert read([row], "prompt", system_column="")[0].prompt == [ASK]
    for empty in (None, ""):
        assert read([row | {"system": empty}], "prompt")[0].prompt == [ASK]
    same = {"messages": [system("Be kind."), ASK], "system": "Be kind."}
    assert read([same], "prompt")[0].prompt == [system("Be kind."), ASK]


def test_system_messages_of_text_prompts_need_a_choice():
    row = {"prompt": "a b", "system": "Be kind."}
    with pytest.raises(
        UserError,
        match=r"'system' holds content, .*--ignore_columns system.*--apply_chat_template True uses it",
    ):
        form_of([row])
    assert read([row], "prompt", system_column="") == [Example("a b", [])]
    assert read([row], "prompt", apply_chat_template=True)[0].prompt == [system("Be kind."), user("a b")]
    nested = {"prompt": "a b", "meta": {"system": "Be kind."}}
    with pytest.raises(UserError, match=r"'meta\.system' holds content"):
        form_of([nested], system_column="meta.system")
    form = form_of([{"prompt": "a b", "system": ""}])
    with pytest.raises(UserError, match="^row 30: 'system' holds content"):
        form.read(row, "prompt", "row 30")


def test_tools_need_chat_messages():
    with pytest.raises(UserError, match="'tools' holds content, .*--apply_chat_template True uses it"):
        read([{"prompt": "a b", "tools": [TOOL]}], "prompt")
    assert read([{"prompt": "a b", "tools": []}], "prompt") == [Example("a b", [])]
    with pytest.raises(UserError, match="row 2: 'tools' is str .'a hammer'.; .*; --ignore_columns tools"):
        form_of([{"prompt": [ASK], "tools": []}]).read({"prompt": [ASK], "tools": "a hammer"}, "prompt", "row 2")
    assert read([{"prompt": [ASK], "tools": [TOOL]}], "prompt")[0].tools == [TOOL]


# The correct answer


@pytest.mark.parametrize(
    ("row", "flags", "truth"),
    [
        (QUESTION, {}, "24"),
        (QUESTION | {"answer": "1 #### 2\n####  1,000 \n"}, {}, "1,000"),
        (QUESTION | {"answer": "24"}, {}, "24"),
        (QUESTION, {"answer_column": "answer"}, GSM),
        ({"prompt": "Q:", "meta": {"truth": 7}}, {"answer_column": "meta.truth"}, 7),
        ({"prompt": "Q:", "label": "x = 7"}, {"answer_column": "label", "answer_pattern": "= (.*)"}, "7"),
        ({"prompt": "Q:", "response": GSM}, {"answer_column": "response", "answer_pattern": "#### (.*)"}, "24"),
        ({"messages": [ASK], "answer": "72"}, {"answer_column": "answer"}, "72"),
        ({"messages": [ASK], "answer": "72"}, {}, None),  # the column itself reaches reward functions
    ],
)
def test_the_correct_answer(row, flags, truth):
    assert [example.truth for example in read([row], "prompt", **flags)] == [truth]


# What others need of a form


def test_a_form_can_be_pickled_and_identified():
    forms = [form_of([QUESTION]), form_of([QUESTION], apply_chat_template=False), form_of(KTO), form_of([ALPACA])]
    for form in forms:
        again = pickle.loads(pickle.dumps(form))
        assert again.identity == form.identity
    assert again.read(ALPACA, "sft", "row") == form.read(ALPACA, "sft", "row")
    assert len({form.identity for form in forms}) == 4
    assert form_of([QUESTION]).identity == forms[0].identity


def test_only_the_first_rows_are_read():
    rows = [{"prompt": "Q:"}] * 20 + [{"prompt": 7}]
    form = detect_form("d", ["prompt"], rows, True, DataFlags(data_path=["d"]))
    with pytest.raises(UserError, match="^row 21: 'prompt' is int"):
        form.read(rows[20], "prompt", "row 21")


def test_an_assistant_message_with_more_than_text_stays_a_message():
    answer = assistant("Here.", reasoning_content="Hm.")
    assert read([{"prompt": [ASK], "completion": [answer]}], "sft") == [Example([ASK], [answer])]


def test_the_prompts_of_deepspeed_chat_take_no_system_message():
    row = {"prompt": "P", "chosen": "c", "rejected": "r", "persona": "Be kind."}
    assert form_of([row], name="Dahoas/rm-static", system_column="").rendering == "text"
    with pytest.raises(UserError, match="^Dahoas/rm-static: 'persona' holds content, 'Be kind.'"):
        form_of([row], name="Dahoas/rm-static", system_column="persona")


@pytest.mark.parametrize("column", ["system", "system_prompt", "system_message"])
def test_common_names_of_the_system_message_are_not_ignored(column):
    chat = {"messages": [ASK, assistant("In the hall.")], column: "Be kind."}
    assert read([chat], "sft") == [Example([system("Be kind."), ASK], ["In the hall."])]
    assert read([chat], "sft", system_column="") == [Example([ASK], ["In the hall."])]
    with pytest.raises(UserError, match=f"'{column}' holds content, 'Be kind.'"):
        form_of([{"prompt": "Q:", "response": " r", column: "Be kind."}])
