"""Each form on rows of real shape: the examples of each use, and messages about bad rows."""

import math
from typing import Any

import pytest
from datasets import Dataset
from form_fixtures import (
    ALPACA,
    ASK,
    FIXTURES,
    HALL,
    HH,
    KTO,
    PRM800K,
    ROOF,
    SHEPHERD,
    STEPS,
    assistant,
    form_of,
    option,
    read,
    system,
    user,
)  # fmt: skip

from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError


@pytest.mark.parametrize("use", ["sft", "preference", "prompt"])
@pytest.mark.parametrize("name", FIXTURES)
def test_rows_of_real_shape_give_these_examples(name, use):
    fixture = FIXTURES[name]
    expected = fixture.expected[use]
    form = form_of(fixture.rows, fixture.has_template)
    assert (form.name, form.rendering) == (fixture.form, fixture.rendering)
    assert form.description.startswith(f"form {form.name} (") and "\n" not in form.description
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


# name -> (row, use, words of the message), or (row, use, words, first rows or flags that choose the reading)
STEP = {"completions": [], "human_completion": {"rating": 1}}
TWO = ["a", "b"]


def ranked(responses: Any, scores: Any) -> dict:
    return {"prompt": "Q:", "responses": responses, "scores": scores}


def steps(**change: Any) -> dict:
    return {**STEPS, **change}


def prm(step: Any) -> dict:
    return {**PRM800K, "label": {"steps": [PRM800K["label"]["steps"][0], step]}}


PAIR = {"prompt": [ASK], "chosen": [ASK, HALL], "rejected": [ASK, ROOF]}
RANKED = [ranked(TWO, [1, 2])]
BAD = {
    "prompt is null": ({"prompt": None, "response": "a"}, "sft", "'prompt' is null"),
    "prompt is a number": ({"prompt": 7, "response": "a"}, "sft", "'prompt' is int"),
    "prompt is no list of messages": ({"prompt": [], "response": "a"}, "sft", "'prompt' is an empty list"),
    "prompt is empty": ({"prompt": "", "response": "a"}, "sft", "the prompt is empty"),
    "response is null": ({"prompt": "p:", "response": None}, "sft", "'response' is null"),
    "response is an object": ({"prompt": "p:", "response": {"a": 3}}, "sft", "'response' is an object"),
    "response ends with a question": ({"prompt": "p:", "response": [ASK]}, "sft", "'response' ends with .* 'user'"),
    "empty answer": ({"prompt": "p:", "response": " \n"}, "sft", "the answer is empty"),
    "empty rejected": ({"prompt": "p:", "chosen": "c", "rejected": ""}, "preference", "rejected is empty"),
    "equal pair": ({"prompt": "p:", "chosen": "c", "rejected": "c"}, "preference", "chosen and rejected are equal"),
    "rejected is null": ({"prompt": "p:", "chosen": "c", "rejected": None}, "preference", "'rejected' is null"),
    "chosen is a list of texts": (
        {"prompt": "p:", "chosen": ["c"], "rejected": "r"}, "preference", "'chosen' is a list",
        [{"prompt": "p:", "chosen": "c", "rejected": "r"}],
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
        "the prompt is not among the messages of 'chosen'", [PAIR],
    ),
    "other messages": (
        {"prompt": [user("What?")], "chosen": [ASK, HALL], "rejected": [ASK, ROOF]}, "sft",
        "the messages of 'chosen' do not start with those of the prompt", [PAIR],
    ),
    "implicit and different": (
        {"chosen": [ASK, HALL], "rejected": [user("What?"), ROOF]}, "preference",
        "the messages of 'rejected' do not start with those of the prompt",
    ),
    "implicit and equal": ({"chosen": [ASK, HALL], "rejected": [ASK, HALL]}, "preference", "are equal"),
    "nothing in common": ({"chosen": "a b", "rejected": "c d"}, "preference", "do not start with the same prompt"),
    "transcripts that differ early": (
        {"chosen": f"{HH} a", "rejected": f"\n\nHuman: b{HH} c"}, "preference", "differ before the last turn",
    ),
    "a transcript that ends with the human": (
        {"text": f"{HH} a\n\nHuman: b"}, "sft", "'text' does not end with a turn that starts with",
    ),
    "a system message twice": (
        {"messages": [system("a"), ASK, HALL], "system": "b"}, "sft", "two different system messages",
    ),
    "history is no list of pairs": (ALPACA | {"history": [["a"]]}, "sft", "'history' holds .*; expected pairs"),
    "history is a number": (
        {"prompt": "Q: ", "response": "a", "history": 7}, "sft", "'history' is int .'7'.; expected pairs",
        [{"prompt": "Q: ", "response": "a", "history": [["b", "c"]]}],
    ),
    "history is a text": ({"prompt": "Q:", "response": "a", "history": "once"}, "sft", "'history' is str .'once'."),
    "every turn is excluded": (
        {"messages": [ASK, assistant("No.", loss=0)]}, "sft", "the answer of 'messages' is excluded from training",
    ),
    "the answer of a pair is excluded": (
        {"chosen": [ASK, assistant("In the hall.", weight=0)], "rejected": [ASK, ROOF]}, "preference",
        "the answer of 'chosen' is excluded",
    ),
    "a weight of one half": (
        {"messages": [ASK, assistant("No.", weight=0.5)]}, "sft",
        "'weight' of message 2 of 'messages' is float .'0.5'.; expected 0 or 1",
    ),
    "a mask": (
        {"messages": [ASK, assistant("No.", mask=0)]}, "sft",
        "'mask' of message 2 of 'messages' is int .'0'.; expected 1, because 0 has two meanings; use 'loss_mask'",
    ),
    "a developer's and a system message": (
        {"messages": [{"role": "developer", "content": "Be long."}, ASK, HALL], "system": "Be brief."}, "sft",
        "two different system messages",
    ),
    "no better answer": (
        {"question": "Where?", "answer_a": "Here.", "answer_b": "No.", "better": 2}, "preference",
        "'better' is '2'; expected 0 or 1 .the place., 'answer_a' or 'answer_b'",
        [{"question": "Where?", "answer_a": "Here.", "answer_b": "No.", "better": 1}],
    ),
    "a chat for a text": (
        {"prompt": [ASK]}, "prompt", "the prompt is a list of chat messages, but those of the first rows are text",
        [{"prompt": "Q:"}],
    ),
    "a column is missing": (
        {"prompt": "Q:", "chosen": "a"}, "preference", "has no 'rejected'",
        [{"prompt": "Q:", "chosen": "a", "rejected": "b"}],
    ),
    "no correct answer": (
        {"prompt": "Q:", "t": None}, "prompt", "'t' is null; expected the correct answer", {"answer_column": "t"},
        [{"prompt": "Q:", "t": "1"}],
    ),
    "no mark in the correct answer": (
        {"question": "How many?", "answer": "24"}, "prompt", "'answer' does not match",
        [{"question": "How many?", "answer": "#### 24"}],
    ),
    "input is a number": (ALPACA | {"input": 3}, "sft", "'input' is int"),
    "an empty answer of a list": (ranked(["a", ""], [1, 2]), "preference", "answer 2 is empty", RANKED),
    "no answer in a list": (ranked(["a", None], [1, 2]), "preference", "answer 2 of 'responses' is null", RANKED),
    "a score too few": (ranked(TWO, [1]), "preference", "'responses' has 2 answers, but 'scores' 1 numbers", RANKED),
    "a score is null": (ranked(TWO, [1, None]), "preference", "an entry of 'scores' is null", RANKED),
    "a score is nan": (ranked(TWO, [1, math.nan]), "preference", "an entry of 'scores' is float .'nan'", RANKED),
    "equal answers of a list": (
        ranked(["a", "a"], [1, 2]), "preference", "answer 2 and answer 1 are equal", RANKED
    ),
    "an empty list of answers": (ranked([], []), "preference", "'responses' has 0 answers", RANKED),
    "scores are null": (ranked(TWO, None), "preference", "'scores' is null", RANKED),
    "a label is null": (
        {"prompt": "Q:", "completion": "a", "label": None}, "sft", "'label' is null; expected true or false", KTO
    ),
    "no answer for KTO": ({"prompt": "Q:", "label": True}, "sft", "has no 'completion'", KTO),
    "no label for KTO": ({"prompt": "Q:", "completion": "a"}, "sft", "has no 'label'", KTO),
    "equal answers for KTO": (
        {"prompt": "Q:", "chosen": "c", "rejected": "c"}, "unpaired", "chosen and rejected are equal",
        {"data_format": "preference"},
    ),
    "a label too few": (steps(labels=[True]), "steps", "'completions' has 2 steps, but 'labels' 1", [STEPS]),
    "a label above 1": (
        steps(labels=[True, 1.5]), "steps", "'labels' is .True, 1.5.; expected true, false, or numbers from 0", [STEPS]
    ),
    "a label below 0": (steps(labels=[True, -1]), "steps", "'labels' is .True, -1.", [STEPS]),
    "a label is a word": (steps(labels=[True, "good"]), "steps", "an entry of 'labels' is str .'good'.", [STEPS]),
    "a step is a number": (steps(completions=["a", 3]), "steps", "step 2 of 'completions' is int", [STEPS]),
    "steps are text": (
        steps(completions="a b"), "steps", "'completions' is str .*; expected a list with an entry for each", [STEPS]
    ),
    "a step without a sign": (
        {**SHEPHERD, "label": SHEPHERD["label"][:-1]}, "steps", r"'label' has 1 \+ or -, but 'input' 2 steps",
        [SHEPHERD],
    ),
    "prm: a step is text": (prm("a"), "steps", "step 2 of 'label.steps' is no step of PRM800K", [PRM800K]),
    "prm: no text": (prm({"completions": [{"rating": 1}]}), "steps", "step 2 of .* .'text'.; expected", [PRM800K]),
    "prm: a text is a number": (prm({"completions": [option(3, 1)]}), "steps", "'text' is no text", [PRM800K]),
    "prm: rating": (prm({"completions": [option("a", 2)]}), "steps", "no step of PRM800K .2.; .*-1, 0, 1", [PRM800K]),
    "prm: choice": (
        prm({"completions": [option("a", 1)], "chosen_completion": 1}), "steps", "list index out of range", [PRM800K],
    ),
    "prm: human": (prm(STEP), "steps", "step 2 of .* .'text'.; expected", [PRM800K]),
    "a conversation that is answered twice": (
        {"conversations": [ASK, HALL], "chosen": "a", "rejected": "b"}, "prompt",
        "the prompt in 'conversations' ends with the assistant's",
    ),
    "a prompt of another column": (
        {"chat": [ASK, HALL]}, "prompt", "the prompt in 'chat' ends with the assistant's", {"prompt_column": "chat"}
    ),
    "a pair of other columns": (
        {"ask": "Who?", "good": [ASK, HALL], "bad": [ASK, ROOF]}, "preference",
        "the prompt is not among the messages of 'good'",
        {"prompt_column": "ask", "chosen_column": "good", "rejected_column": "bad"},
    ),
    "an answer of another column": (
        {"ask": [ASK], "reply": [user("Who?"), HALL]}, "sft",
        "the messages of 'reply' do not start with those of the prompt",
        {"prompt_column": "ask", "response_column": "reply"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named_with_what_is_wrong(name):
    row, use, words, *more = BAD[name]
    flags = {key: value for part in more if isinstance(part, dict) for key, value in part.items()}
    first = next((part for part in more if isinstance(part, list)), [row])
    form = form_of([{"text": f"{HH} a"}, *first] if "text" in row else first, **flags)
    with pytest.raises(UserError, match=rf"^d\.jsonl, row 17: .*{words}") as caught:
        form.read(row, use, "d.jsonl, row 17")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "use", "words"),
    [
        *((STEPS, use, "read as form stepwise; this step needs") for use in ("sft", "preference", "unpaired")),
        ({"prompt": "Q:", "chosen": "a", "rejected": "b"}, "steps", "needs the steps of answers with a label for each"),
        ({"prompt": "Q:", "response": "a"}, "unpaired", "needs answers with labels .*or pairs of answers"),
    ],
)
def test_a_use_that_labels_do_not_serve_is_refused(row, use, words):
    with pytest.raises(UserError, match=words):
        form_of([row]).require(use)
