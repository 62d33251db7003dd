"""Each form on rows of real shape: the examples of each use, one prompt for all uses, and messages about bad rows."""

import pytest
from datasets import Dataset
from form_fixtures import ALPACA, ASK, FIXTURES, HALL, HH, ROOF, assistant, form_of, read, system, user

from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError


@pytest.mark.parametrize("use", ["sft", "preference", "prompt"])
@pytest.mark.parametrize("name", FIXTURES)
def test_rows_of_real_shape_give_these_examples(name, use):
    fixture = FIXTURES[name]
    expected = fixture.expected[use]
    form = form_of(fixture.rows, fixture.has_template)
    assert (form.name, form.rendering) == (fixture.form, fixture.rendering)
    if expected is None:
        with pytest.raises(UserError, match=r"d\.jsonl"):
            read(fixture.rows, use, has_template=fixture.has_template)
    else:
        assert read(fixture.rows, use, has_template=fixture.has_template) == expected


@pytest.mark.parametrize("name", [name for name in FIXTURES if name != "messages without an answer"])
def test_rows_read_the_same_from_an_arrow_table(name):
    fixture = FIXTURES[name]
    rows = Dataset.from_list([*fixture.rows, *fixture.rows], on_mixed_types="use_json").to_list()
    form = form_of(rows, fixture.has_template)
    for use, expected in fixture.expected.items():
        if expected is not None:
            assert [example for row in rows for example in form.read(row, use, "row")] == [*expected, *expected]


@pytest.mark.parametrize("name", FIXTURES)
def test_all_uses_read_the_same_prompt(name):
    fixture = FIXTURES[name]
    form = form_of(fixture.rows, fixture.has_template)
    prompts = []
    for use in ("sft", "preference", "prompt"):
        if fixture.expected[use] is not None:
            found = [form.read(row, use, "row") for row in fixture.rows]
            prompts.append([[example.prompt for example in some][:1] for some in found])
    assert prompts and all(part == prompts[0] for part in prompts)


@pytest.mark.parametrize("name", ["plain text", "messages", "question/answer (GSM8K)", "prompt/response"])
def test_a_use_that_the_form_does_not_serve_is_refused_with_the_columns(name):
    fixture = FIXTURES[name]
    with pytest.raises(UserError) as caught:
        read(fixture.rows, "preference")
    with pytest.raises(UserError, match="this step needs") as again:
        form_of(fixture.rows).require("preference")
    assert str(again.value) == str(caught.value)
    form_of(fixture.rows).require("sft")
    assert f"d.jsonl: has the columns {', '.join(map(repr, fixture.rows[0]))}" in str(caught.value)
    assert f"read as form {fixture.form}; this step needs a prompt and two answers" in str(caught.value)


def test_a_column_that_is_missing_can_be_named_by_a_flag():
    rows = [{"prompt": "a", "chosen": "b", "worse": "c"}]
    with pytest.raises(UserError, match="this step needs .*; name its columns with .* and --rejected_column$"):
        read(rows, "preference", apply_chat_template=False)
    assert read(rows, "preference", apply_chat_template=False, rejected_column="worse")[0].answers == ["b", "c"]


def test_transcripts_become_messages_if_the_chat_template_is_asked_for():
    rows = [{"chosen": f"{HH} In the hall.", "rejected": f"{HH} No."}]
    turns = [user("Where is the lamp?"), assistant("Which one?"), user("The red one.")]
    assert read(rows, "preference", apply_chat_template=True) == [Example(turns, ["In the hall.", "No."])]


def test_the_response_of_preference_rows_is_what_sft_learns():
    rows = [{"prompt": "Q:", "response": "r", "chosen": "c", "rejected": "x"}]
    assert read(rows, "sft") == [Example("Q:", ["r"])]
    assert read(rows, "preference") == [Example("Q:", ["c", "x"])]
    assert "SFT learns 'response', not 'chosen'" in form_of(rows).description


def test_an_answer_given_as_messages_is_their_last_turn():
    rows = [{"prompt": [ASK], "chosen": [ASK, HALL], "rejected": "No."}]
    assert read(rows, "preference") == [Example([ASK], ["In the hall.", "No."])]


def test_the_prompt_may_lack_the_system_message_of_the_answers():
    rows = [{"prompt": [ASK], "chosen": [system("Be kind."), ASK, HALL], "rejected": [system("Be kind."), ASK, ROOF]}]
    for use in ("sft", "preference", "prompt"):
        assert read(rows, use)[0].prompt == [system("Be kind."), ASK]


def test_turns_before_the_answer_belong_to_the_prompt():
    turns = [assistant("Which?"), user("Red.")]
    rows = [{"prompt": [ASK], "chosen": [*turns, HALL], "rejected": [*turns, ROOF]}]
    for use in ("sft", "preference", "prompt"):
        assert read(rows, use)[0].prompt == [ASK, *turns]


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("The sky is blue", "The sky is black", ("The sky is bl", "ue", "ack")),  # TRL cuts characters, not words
        ("Q: yes", "Q: no", ("Q:", " yes", " no")),
        ("Q: a", "Q: a b", ("Q: ", "a", "a b")),  # one text starts with the other
    ],
)
def test_implicit_text_prompts_are_cut_where_trl_cuts_them(chosen, rejected, expected):
    [example] = read([{"chosen": chosen, "rejected": rejected}], "preference")
    assert (example.prompt, *example.answers) == expected


BAD = {
    "prompt is null": ({"prompt": None, "response": "a"}, "sft", "'prompt' is null"),
    "prompt is a number": ({"prompt": 7, "response": "a"}, "sft", "'prompt' is int"),
    "prompt is no list of messages": ({"prompt": [], "response": "a"}, "sft", "'prompt' is an empty list"),
    "prompt is empty": ({"prompt": "", "response": "a"}, "sft", "the prompt is empty"),
    "response is null": ({"prompt": "p:", "response": None}, "sft", "'response' is null"),
    "response is an object": ({"prompt": "p:", "response": {"a": 3}}, "sft", "'response' is dict"),
    "response ends with a question": ({"prompt": "p:", "response": [ASK]}, "sft", "'response' ends with .* 'user'"),
    "empty answer": ({"prompt": "p:", "response": " \n"}, "sft", "the answer is empty"),
    "empty rejected": ({"prompt": "p:", "chosen": "c", "rejected": ""}, "preference", "rejected answer is empty"),
    "equal pair": ({"prompt": "p:", "chosen": "c", "rejected": "c"}, "preference", "chosen and rejected are equal"),
    "rejected is null": ({"prompt": "p:", "chosen": "c", "rejected": None}, "preference", "'rejected' is null"),
    "chosen is a list of texts": (
        {"prompt": "p:", "chosen": ["c"], "rejected": "r"}, "preference", "'chosen' is list",
    ),
    "margin is text": (
        {"prompt": "p:", "chosen": "c", "rejected": "r", "margin": "big"}, "preference", "'margin' is str",
    ),
    "messages end with the user": ({"messages": [ASK]}, "sft", "'messages' ends with a message of role 'user'"),
    "answer alone": ({"messages": [HALL]}, "sft", "'messages' has nothing before"),
    "two answers": ({"messages": [ASK, ROOF, HALL]}, "prompt", "'messages' ends with the assistant's message"),
    "unknown role": (
        {"messages": [ASK, HALL, {"role": "narrator", "content": "b"}]}, "sft",
        "message 3 of 'messages' has role 'narrator'; expected system, user, .*--role_names",
    ),
    "no content": ({"messages": [{"role": "user", "text": "a"}]}, "prompt", "message 1 of 'messages' has no content"),
    "different prompts": (
        {"prompt": [ASK], "chosen": [ASK, HALL], "rejected": [ASK, ROOF, ASK, HALL]}, "preference",
        "chosen and rejected answer different prompts",
    ),
    "another prompt": (
        {"prompt": "What?", "chosen": [ASK, HALL], "rejected": [ASK, ROOF]}, "sft",
        "the prompt is not among the messages of 'chosen'",
    ),
    "other messages": (
        {"prompt": [user("What?")], "chosen": [ASK, HALL], "rejected": [ASK, ROOF]}, "sft",
        "the messages of 'chosen' do not start with those of the prompt",
    ),
    "implicit and different": (
        {"chosen": [ASK, HALL], "rejected": [user("What?"), ROOF]}, "preference", "answer different prompts",
    ),
    "implicit and equal": ({"chosen": [ASK, HALL], "rejected": [ASK, HALL]}, "preference", "are equal"),
    "nothing in common": ({"chosen": "a b", "rejected": "c d"}, "preference", "do not start with the same prompt"),
    "transcripts that differ early": (
        {"chosen": f"{HH} a", "rejected": f"\n\nHuman: b{HH} c"}, "preference", "differ before the last turn",
    ),
    "a transcript that ends with the human": (
        {"text": f"{HH} a\n\nHuman: b"}, "sft", "'text' ends with a turn of the human",
    ),
    "a system message twice": (
        {"messages": [system("a"), ASK, HALL], "system": "b"}, "sft", "two different system messages",
    ),
    "history is no list of pairs": (ALPACA | {"history": [["a"]]}, "sft", "'history' holds .*; expected pairs"),
    "input is a number": (ALPACA | {"input": 3}, "sft", "'input' is int"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named_with_what_is_wrong(name):
    row, use, words = BAD[name]
    form = form_of([{"text": f"{HH} a"}, row] if "text" in row else [row])
    with pytest.raises(UserError, match=rf"^d\.jsonl, row 17: .*{words}") as caught:
        form.read(row, use, "d.jsonl, row 17")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "use", "flags", "words"),
    [
        ({"chat": [ASK, HALL]}, "prompt", {"prompt_column": "chat"}, "the prompt in 'chat' ends with the assistant's"),
        (
            {"ask": "Who?", "good": [ASK, HALL], "bad": [ASK, ROOF]}, "preference",
            {"prompt_column": "ask", "chosen_column": "good", "rejected_column": "bad"},
            "the prompt is not among the messages of 'good'",
        ),
        (
            {"ask": [ASK], "reply": [user("Who?"), HALL]}, "sft",
            {"prompt_column": "ask", "response_column": "reply"},
            "the messages of 'reply' do not start with those of the prompt",
        ),
    ],
)  # fmt: skip
def test_a_bad_row_is_explained_by_the_names_of_its_columns(row, use, flags, words):
    with pytest.raises(UserError, match=words):
        read([row], use, **flags)
