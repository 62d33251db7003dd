"""Each form on rows of real shape: the examples of each use, and messages about bad rows."""

import math
from typing import Any

import pytest
from form_fixtures import (
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
        with pytest.raises(UserError, match=r"d\.jsonl|ends with a message of role 'user'"):
            read(fixture.rows, use, has_template=fixture.has_template)
    else:
        assert read(fixture.rows, use, has_template=fixture.has_template) == expected


TURNS = [user("Where is the lamp?"), assistant("Which one?"), user("The red one.")]
KIND, ASKED = system("Be kind."), [assistant("Which?"), user("Red.")]


@pytest.mark.parametrize(("row", "flags", "prompt", "answers"), [
    ({"prompt": "a", "chosen": "b", "worse": "c"}, {"rejected_column": "worse", "apply_chat_template": False}, "a",
     ["b", "c"]),
    ({"chosen": f"{HH} In the hall.", "rejected": f"{HH} No."}, {"apply_chat_template": True}, TURNS,
     ["In the hall.", "No."]),
    # an answer given as messages is their last turn, and those before it belong to the prompt
    ({"prompt": [ASK], "chosen": [ASK, HALL], "rejected": "No."}, {}, [ASK], ["In the hall.", "No."]),
    ({"prompt": [ASK], "chosen": [KIND, ASK, HALL], "rejected": [KIND, ASK, ROOF]}, {}, [KIND, ASK],
     ["In the hall.", "On the roof."]),
    ({"prompt": [ASK], "chosen": [*ASKED, HALL], "rejected": [*ASKED, ROOF]}, {}, [ASK, *ASKED],
     ["In the hall.", "On the roof."]),
    # prompts that both answers repeat are read once
    ({"prompt": "Q: a\nA:", "chosen": "Q: a\nA: yes", "rejected": "Q: a\nA: no"}, {}, "Q: a\nA:", [" yes", " no"]),
    # implicit prompts are cut where TRL cuts them: characters, not words
    ({"chosen": "The sky is blue", "rejected": "The sky is black"}, {}, "The sky is bl", ["ue", "ack"]),
    ({"chosen": "Q: a", "rejected": "Q: a b"}, {}, "Q: ", ["a", "a b"]),
])  # fmt: skip
def test_prompts_and_answers_of_pairs(row, flags, prompt, answers):
    assert read([row], "preference", **flags) == [Example(prompt, answers)]
    assert read([row], "sft", **flags) == [Example(prompt, answers[:1])]
    assert read([row], "prompt", **flags) == [Example(prompt, [])]


def test_the_response_of_preference_rows_is_what_sft_learns():
    row = {"prompt": "Q:", "response": "r", "chosen": "c", "rejected": "x"}
    assert [read([row], use)[0].answers for use in ("sft", "preference")] == [["r"], ["c", "x"]]
    assert "SFT learns 'response', not 'chosen'" in form_of([row]).description


# row, use, words of the message; first rows that choose the reading, if not the row itself
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
BAD = [
    ({"prompt": None, "response": "a"}, "sft", "'prompt' is null"),
    ({"prompt": "", "response": "a"}, "sft", "the prompt is empty"),
    ({"prompt": "p:", "response": {"a": 3}}, "sft", "'response' is an object"),
    ({"prompt": "p:", "response": " \n"}, "sft", "the answer is empty"),
    ({"messages": [HALL]}, "sft", "'messages' has nothing before"),
    ({"messages": [ASK, ROOF, HALL]}, "prompt", "'messages' ends with the assistant's message"),
    ({"messages": [ASK, HALL, {"role": "narrator", "content": "b"}]}, "sft",
     "message 3 of 'messages' has role 'narrator'; expected system, user, .*--role_names"),
    ({"prompt": [ASK], "chosen": [ASK, HALL], "rejected": [ASK, ROOF, ASK, HALL]}, "preference",
     "chosen and rejected answer different prompts"),
    ({"prompt": "What?", "chosen": [ASK, HALL], "rejected": [ASK, ROOF]}, "sft",
     "the prompt is not among the messages of 'chosen'", [PAIR]),
    ({"prompt": [user("What?")], "chosen": [ASK, HALL], "rejected": [ASK, ROOF]}, "sft",
     "the messages of 'chosen' do not start with those of the prompt", [PAIR]),
    ({"chosen": "a b", "rejected": "c d"}, "preference", "do not start with the same prompt"),
    ({"chosen": f"{HH} a", "rejected": f"\n\nHuman: b{HH} c"}, "preference", "differ before the last turn"),
    ({"text": f"{HH} a\n\nHuman: b"}, "sft", "'text' does not end with a turn that starts with"),
    ({"chosen": [ASK, assistant("In the hall.", weight=0)], "rejected": [ASK, ROOF]}, "preference",
     "the answer of 'chosen' is excluded"),
    ({"messages": [ASK, assistant("No.", mask=0)]}, "sft",
     "'mask' of message 2 of 'messages' is int .'0'.; expected 1, because 0 has two meanings; use 'loss_mask'"),
    ({"messages": [{"role": "developer", "content": "Be long."}, ASK, HALL], "system": "Be brief."}, "sft",
     "two different system messages"),
    ({"question": "Where?", "answer_a": "Here.", "answer_b": "No.", "better": 2}, "preference",
     "'better' is '2'; expected 0 or 1 .the place., 'answer_a' or 'answer_b'",
     [{"question": "Where?", "answer_a": "Here.", "answer_b": "No.", "better": 1}]),
    ({"prompt": [ASK]}, "prompt", "the prompt is a list of chat messages, but those of the first rows are text",
     [{"prompt": "Q:"}]),
    ({"prompt": "Q:", "chosen": "a"}, "preference", "has no 'rejected'",
     [{"prompt": "Q:", "chosen": "a", "rejected": "b"}]),
    (ranked(TWO, [1]), "preference", "'responses' has 2 answers, but 'scores' 1 numbers", RANKED),
    (ranked(TWO, [1, math.nan]), "preference", "an entry of 'scores' is float .'nan'", RANKED),
    (ranked(["a", "a"], [1, 2]), "preference", "answer 2 and answer 1 are equal", RANKED),
    ({"prompt": "Q:", "label": True}, "sft", "has no 'completion'", KTO),
    (steps(labels=[True]), "steps", "'completions' has 2 steps, but 'labels' 1", [STEPS]),
    ({**SHEPHERD, "label": SHEPHERD["label"][:-1]}, "steps", r"'label' has 1 \+ or -, but 'input' 2 steps", [SHEPHERD]),
    (prm({"completions": [option("a", 2)]}), "steps", "no step of PRM800K .2.; .*-1, 0, 1", [PRM800K]),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[2][:40])
def test_bad_rows_are_named_with_what_is_wrong(case):
    row, use, words, first = case if len(case) == 4 else (*case, [case[0]])
    form = form_of([{"text": f"{HH} a"}, *first] if "text" in row else first)
    with pytest.raises(UserError, match=words) as caught:
        form.read(row, use)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("row", "use", "words"), [
    ({"text": "Once."}, "preference", "has the columns 'text', read as form text; this step needs a prompt and"),
    (STEPS, "sft", "read as form stepwise; this step needs"),
    (KTO[0], "preference", "needs a prompt and two answers; answers with labels are for --objective kto$"),
    ({"prompt": "Q:", "chosen": "a", "rejected": "b"}, "steps", "needs the steps of answers with a label for each"),
    ({"prompt": "Q:", "response": "a"}, "unpaired", "needs answers with labels .*or pairs of answers"),
])  # fmt: skip
def test_a_use_that_the_form_does_not_serve_is_refused(row, use, words):
    with pytest.raises(UserError, match=rf"^d\.jsonl: .*{words}"):
        form_of([row]).require(use)
    with pytest.raises(UserError, match=words):
        read([row], use)
