"""Rows to examples: by the flags that say how, for each form on rows of real shape, with labels;
messages about bad rows."""

import math
import pickle
from typing import Any

import pytest
from form_fixtures import (
    ALPACA,
    ASK,
    FIXTURES,
    GSM,
    HALL,
    HH,
    KTO,
    ROOF,
    TOOL,
    assistant,
    form_of,
    read,
    system,
    user,
)

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
    ("row", "column", "name"),
    [(ALPACA, "output", "alpaca"), (QUESTION, "answer", "question_answer")],
)
def test_a_flag_that_names_the_answer_of_a_form_leaves_the_form(row, column, name):
    form = form_of([row], response_column=column)
    assert (form.name, form.warning) == (name, "")
    assert form.read(row, "sft") == form_of([row]).read(row, "sft")
    assert form_of([row | {"prompt": "Q:"}], response_column=column).name == "prompt_response"
    assert form_of([row | {"response": "other"}], response_column=column).name == name
    with pytest.raises(
        UserError, match=r"'text' holds content, 'Why\?', that the form .*--ignore_columns text"
    ):
        form_of([row | {"text": "Why?"}], response_column=column)


@pytest.mark.parametrize(
    ("row", "flags", "expected"),
    [
        *(
            (
                {column: "Why?", "gold": "So."},
                {"response_column": "gold"},
                Example([user("Why?")], ["So."]),
            )
            for column in ("question", "instruction", "user")
        ),
        (
            QUESTION,
            {
                "prompt_column": "question",
                "response_column": "answer",
                "apply_chat_template": False,
            },
            Example("How many clips?", [GSM]),
        ),
        (
            {"chat": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"messages_column": "chat"},
            Example([user("a")], ["b"]),
        ),
        (
            {"task": "Sing.", "result": "La."},
            {"data_format": "alpaca", "prompt_column": "task", "response_column": "result"},
            Example([user("Sing.")], ["La."]),
        ),
    ],
)
def test_flags_name_what_the_columns_are(row, flags, expected):
    assert read([row], "sft", **flags) == [expected]


def test_a_flag_names_the_text_that_ppo_takes_as_prompt():
    rows = [{"text": "Once upon"}]
    assert read(rows, "prompt", prompt_column="text") == [Example("Once upon", [])]
    with pytest.raises(
        UserError, match="'text' holds content, .* that the form prompt_response does not use"
    ):
        form_of([{"ask": "Why?", "text": "So."}], prompt_column="ask")
    with pytest.raises(UserError, match="this step needs a prompt"):
        read(rows, "prompt")


# Rendering


@pytest.mark.parametrize(
    ("row", "flags", "has_template", "prompt"),
    [
        (QUESTION, {}, True, [user("How many clips?")]),
        (QUESTION, {"apply_chat_template": False}, True, "How many clips?"),
        (
            QUESTION,
            {"input_template": "Q: {} A:", "apply_chat_template": True},
            True,
            [user("Q: How many clips? A:")],
        ),
        (ALPACA, {"input_template": "<{}>"}, True, "<Name the colour.\n\na lemon>"),
        ({"prompt": "Why?", "response": "a"}, {"input_template": "Q: {} A: "}, True, "Q: Why? A: "),
        ({"prompt": "Why?", "response": "a"}, {"apply_chat_template": False}, True, "Why?"),
        ({"prompt": "a b"}, {"apply_chat_template": True}, True, [user("a b")]),
        ({"prompt": "a {b}"}, {"input_template": "{}:"}, False, "a {b}:"),
        (
            {"prompt": [ASK]},
            {"apply_chat_template": False},
            True,
            [ASK],
        ),  # the flag is about prompts that are text
    ],
)
def test_the_rendering_follows_template_and_flags(row, flags, has_template, prompt):
    [example] = read([row], "prompt", has_template=has_template, **flags)
    assert example.prompt == prompt


@pytest.mark.parametrize(
    ("row", "flags", "words"),
    [
        (
            {"a": 1, "b": 2},
            {},
            "has the columns 'a', 'b', which fit no known form; .*--prompt_column",
        ),
        (
            {"prompt": "Q:", "a": "x"},
            {"response_column": "b"},
            "has no such column; it has 'prompt', 'a'",
        ),
        (
            {"prompt": "Q:"},
            {"data_format": "alpaca"},
            "has the columns 'prompt', which do not fit the form alpaca",
        ),
        (
            {"messages": [ASK], "c": "x"},
            {"data_format": "messages", "chosen_column": "c"},
            "do not fit the form",
        ),
        (
            {"messages": [ASK]},
            {"has_template": False},
            "has no chat template; --chat_template chatml",
        ),
        (
            {"prompt": "a"},
            {"apply_chat_template": True, "has_template": False},
            "has no chat template",
        ),
        (
            {"text": "Once."},
            {"apply_chat_template": True},
            "form text is text, so --apply_chat_template True does not",
        ),
        (
            {"prompt": "Q: ", "response": "a"},
            {"system_message": "Be."},
            "--system_message.*--apply_chat_template True",
        ),
        ({"messages": [ASK]}, {"role_names": ["customer"]}, "--role_names 'customer='"),
        (
            {"prompt": "a", "meta": {"s": "Be."}},
            {"system_column": "meta.s"},
            r"'meta\.s' holds content",
        ),
        (
            {"text": "Once.", "system": "Be."},
            {},
            "'system' holds content, .*--ignore_columns system",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(row, flags, words):
    with pytest.raises(UserError, match=words):
        form_of([row], **flags)


# System messages and tools


def test_the_system_column_precedes_chat_messages():
    for column in ("system", "system_prompt", "system_message"):
        assert read([{"messages": [ASK], column: "Be kind."}], "prompt")[0].prompt == [
            system("Be kind."),
            ASK,
        ]
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
    for column, value, found in (
        ("system", "Be kind.", [system("Be kind."), user("a b")]),
        ("tools", [TOOL], None),
    ):
        row = {"prompt": "a b", column: value}
        with pytest.raises(
            UserError,
            match=f"'{column}' holds .*--apply_chat_template True .*_columns {column} reads",
        ):
            form_of([row])
        [example] = read([row], "prompt", apply_chat_template=True)
        assert example.prompt == (found or [user("a b")]) and example.tools == (
            None if found else value
        )
        assert read([row], "prompt", ignore_columns=[column]) == [Example("a b", [])]
        form = form_of([{"prompt": "a b", column: None}])
        with pytest.raises(UserError, match=f"^'{column}' holds content"):
            form.read(row, "prompt")
    with pytest.raises(UserError, match="^'tools' is str .'a hammer'.; .*; --ignore_columns tools"):
        form_of([{"prompt": [ASK], "tools": []}]).read(
            {"prompt": [ASK], "tools": "a hammer"}, "prompt"
        )


# The correct answer


@pytest.mark.parametrize(
    ("row", "flags", "truth"),
    [
        (QUESTION, {}, "24"),
        (QUESTION | {"answer": "1 #### 2\n####  1,000 \n"}, {}, "1,000"),
        (QUESTION, {"answer_column": "answer"}, GSM),
        ({"prompt": "Q:", "meta": {"truth": 7}}, {"answer_column": "meta.truth"}, 7),
        (
            {"prompt": "Q:", "label": "x = 7"},
            {"answer_column": "label", "answer_pattern": "= (.*)"},
            "7",
        ),
        (
            {"prompt": "Q:", "response": GSM},
            {"answer_column": "response", "answer_pattern": "#### (.*)"},
            "24",
        ),
        ({"messages": [ASK], "answer": "72"}, {"answer_column": "answer"}, "72"),
        ({"messages": [ASK], "answer": "72"}, {}, "72"),
        ({"prompt": [ASK], "ground_truth": "72", "answer": GSM}, {}, "72"),
        ({"prompt": "Q:", "answer": GSM}, {}, "24"),
        ({"prompt": [ASK], "solution": r"So \boxed{72}."}, {}, r"So \boxed{72}."),
        ({"problem": "Q:", "solution": r"So \boxed{72}."}, {}, r"So \boxed{72}."),
        ({"prompt": "Q:", "reward_model": {"ground_truth": 72}}, {}, 72),
        ({"question": ASK["content"], "prompt": [ASK], "answer": "72"}, {}, "72"),
        ({"prompt": "Q:", "answer": "72", "ground_truth": "7"}, {"answer_column": "answer"}, "72"),
        ({"prompt": "Q:", "response": "72"}, {}, None),
    ],
)
def test_the_correct_answer(row, flags, truth):
    assert [example.truth for example in read([row], "prompt", **flags)] == [truth]


def test_transcripts_may_part_before_the_last_turn_if_they_become_messages():
    first, second = [
        f"\n\nHuman: Where is the lamp?\n\nAssistant: {early}\n\nHuman: So?\n\nAssistant: {late}"
        for early, late in (("Here.", "Yes."), ("There.", "No."))
    ]
    rows = [{"chosen": first, "rejected": second}]
    with pytest.raises(UserError, match="before the last turn; --apply_chat_template True"):
        read(rows, "preference")
    [pair] = read(rows, "preference", apply_chat_template=True)
    assert pair.prompt == [ASK]
    assert list(pair.answers) == [
        [assistant("Here."), user("So?"), assistant("Yes.")],
        [assistant("There."), user("So?"), assistant("No.")],
    ]


def test_a_correct_answer_that_a_name_tells_of_may_be_missing_and_is_no_reason_to_drop_it():
    """Rows without it are prompts, and step 1 does not lose a solution to it."""
    rows = [{"prompt": "Q:", "answer": "72"}, {"prompt": "Q:", "answer": None}]
    assert [example.truth for example in read(rows, "prompt")] == ["72", None]
    assert "the correct answer from 'answer'" in form_of(rows).description
    row = {"prompt": "Q:", "response": "72.", "solution": "So it is 72."}
    with pytest.raises(UserError, match="'solution' holds content"):
        form_of([row], use="sft")
    assert read([row], "prompt")[0].truth == "So it is 72."


# What others need of a form


def test_a_form_can_be_pickled_and_identified():
    forms = [
        form_of([QUESTION]),
        form_of([QUESTION], apply_chat_template=False),
        form_of(KTO),
        form_of([ALPACA]),
    ]
    for form in forms:
        again = pickle.loads(pickle.dumps(form))
        assert again.identity == form.identity
    assert again.read(ALPACA, "sft") == form.read(ALPACA, "sft")
    assert len({form.identity for form in forms}) == 4
    assert form_of([QUESTION]).identity == forms[0].identity


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


@pytest.mark.parametrize(
    ("row", "flags", "prompt", "answers"),
    [
        (
            {"prompt": "a", "chosen": "b", "worse": "c"},
            {"rejected_column": "worse", "apply_chat_template": False},
            "a",
            ["b", "c"],
        ),
        (
            {"chosen": f"{HH} In the hall.", "rejected": f"{HH} No."},
            {"apply_chat_template": True},
            TURNS,
            ["In the hall.", "No."],
        ),
        # an answer given as messages is their last turn, and those before it belong to the prompt
        (
            {"prompt": [ASK], "chosen": [ASK, HALL], "rejected": "No."},
            {},
            [ASK],
            ["In the hall.", "No."],
        ),
        (
            {"prompt": [ASK], "chosen": [KIND, ASK, HALL], "rejected": [KIND, ASK, ROOF]},
            {},
            [KIND, ASK],
            ["In the hall.", "On the roof."],
        ),
        (
            {"prompt": [ASK], "chosen": [*ASKED, HALL], "rejected": [*ASKED, ROOF]},
            {},
            [ASK, *ASKED],
            ["In the hall.", "On the roof."],
        ),
        # prompts that both answers repeat are read once
        (
            {"prompt": "Q: a\nA:", "chosen": "Q: a\nA: yes", "rejected": "Q: a\nA: no"},
            {},
            "Q: a\nA:",
            [" yes", " no"],
        ),
        # implicit prompts are cut where TRL cuts them: characters, not words
        (
            {"chosen": "The sky is blue", "rejected": "The sky is black"},
            {},
            "The sky is bl",
            ["ue", "ack"],
        ),
        ({"chosen": "Q: a", "rejected": "Q: a b"}, {}, "Q: ", ["a", "a b"]),
    ],
)
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


PAIR = {"prompt": [ASK], "chosen": [ASK, HALL], "rejected": [ASK, ROOF]}
RANKED = [ranked(TWO, [1, 2])]
BAD = [
    ({"prompt": None, "response": "a"}, "sft", "'prompt' is null"),
    ({"prompt": "", "response": "a"}, "sft", "the prompt is empty"),
    ({"prompt": "p:", "response": {"a": 3}}, "sft", "'response' is an object"),
    ({"prompt": "p:", "response": " \n"}, "sft", "the answer is empty"),
    ({"messages": [HALL]}, "sft", "'messages' has nothing before"),
    ({"messages": [ASK, ROOF, HALL]}, "prompt", "'messages' ends with the assistant's message"),
    (
        {"messages": [ASK, HALL, {"role": "narrator", "content": "b"}]},
        "sft",
        "message 3 of 'messages' has role 'narrator'; expected system, user, .*--role_names",
    ),
    (
        {"chosen": [ASK, HALL, ASK, HALL], "rejected": [ASK, HALL, user("So?"), HALL]},
        "preference",
        "chosen and rejected answer different prompts: they part at message 3, which is not the",
    ),
    (
        {"chosen": [ASK, HALL], "rejected": [user("So?"), HALL]},
        "preference",
        "chosen and rejected answer different prompts",
    ),
    (
        {"prompt": "What?", "chosen": [ASK, HALL], "rejected": [ASK, ROOF]},
        "sft",
        "the prompt is not among the messages of 'chosen'",
        [PAIR],
    ),
    (
        {"prompt": [user("What?")], "chosen": [ASK, HALL], "rejected": [ASK, ROOF]},
        "sft",
        "the messages of 'chosen' do not start with those of the prompt",
        [PAIR],
    ),
    ({"chosen": "a b", "rejected": "c d"}, "preference", "do not start with the same prompt"),
    (
        {"chosen": f"{HH} a", "rejected": f"\n\nHuman: b{HH} c"},
        "preference",
        "differ before the last turn",
    ),
    ({"text": f"{HH} a\n\nHuman: b"}, "sft", "'text' does not end with a turn that starts with"),
    (
        {"chosen": [ASK, assistant("In the hall.", weight=0)], "rejected": [ASK, ROOF]},
        "preference",
        "the answer of 'chosen' is excluded",
    ),
    (
        {"messages": [ASK, assistant("No.", mask=0)]},
        "sft",
        (
            "'mask' of message 2 of 'messages' is int .'0'.; expected 1, because 0 has two"
            " meanings; use 'loss_mask'"
        ),
    ),
    (
        {
            "messages": [{"role": "developer", "content": "Be long."}, ASK, HALL],
            "system": "Be brief.",
        },
        "sft",
        "two different system messages",
    ),
    (
        {"question": "Where?", "answer_a": "Here.", "answer_b": "No.", "better": 2},
        "preference",
        "'better' is '2'; expected 0 or 1 .the place., 'answer_a' or 'answer_b'",
        [{"question": "Where?", "answer_a": "Here.", "answer_b": "No.", "better": 1}],
    ),
    (
        {"prompt": [ASK]},
        "prompt",
        "the prompt is a list of chat messages, but those of the first rows are text",
        [{"prompt": "Q:"}],
    ),
    (
        {"prompt": "Q:", "chosen": "a"},
        "preference",
        "has no 'rejected'",
        [{"prompt": "Q:", "chosen": "a", "rejected": "b"}],
    ),
    (ranked(TWO, [1]), "preference", "'responses' has 2 answers, but 'scores' 1 numbers", RANKED),
    (ranked(TWO, [1, math.nan]), "preference", "an entry of 'scores' is float .'nan'", RANKED),
    (ranked(["a", "a"], [1, 2]), "preference", "answer 2 and answer 1 are equal", RANKED),
    ({"prompt": "Q:", "label": True}, "sft", "has no 'completion'", KTO),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[2][:40])
def test_bad_rows_are_named_with_what_is_wrong(case):
    row, use, words, first = case if len(case) == 4 else (*case, [case[0]])
    form = form_of([{"text": f"{HH} a"}, *first] if "text" in row else first)
    with pytest.raises(UserError, match=words) as caught:
        form.read(row, use)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "use", "words"),
    [
        (
            {"text": "Once."},
            "preference",
            "has the columns 'text', read as form text; this step needs a prompt and",
        ),
        (
            KTO[0],
            "preference",
            "needs a prompt and two answers; answers with labels are for --objective kto$",
        ),
        (
            {"prompt": "Q:", "response": "a"},
            "unpaired",
            "needs answers with labels .*or pairs of answers",
        ),
    ],
)
def test_a_use_that_the_form_does_not_serve_is_refused(row, use, words):
    with pytest.raises(UserError, match=rf"^d\.jsonl: .*{words}"):
        form_of([row]).require(use)
    with pytest.raises(UserError, match=words):
        read([row], use)


@pytest.mark.parametrize(
    ("row", "pairs"),
    [
        ({"answers": ["a", "b"], "ranks": [2, 1]}, [["b", "a"]]),
        ({"responses": ["a", "b", "c"], "scores": [0, 0, 1]}, [["c", "a"], ["c", "b"]]),
        ({"responses": ["a", "b"], "scores": [1, 1]}, []),
        ({"responses": [{"text": "a", "score": -1}, {"text": "b", "score": 0.5}]}, [["b", "a"]]),
        # raw UltraFeedback; a rank comes before a score
        (
            {
                "completions": [
                    {"response": "a", "overall_score": 3},
                    {"response": "b", "overall_score": 8},
                ]
            },
            [["b", "a"]],
        ),
        (
            {
                "answers": [
                    {"answer": "a", "rank": 1, "score": 0},
                    {"answer": "b", "rank": 2, "score": 9},
                ]
            },
            [["a", "b"]],
        ),
    ],
)
def test_every_pair_of_different_rank(row, pairs):
    row = {"prompt": "Q:", **row}
    assert form_of([row]).name == "ranked"
    assert [list(example.answers) for example in read([row], "preference")] == pairs
    if pairs:
        assert read([row], "sft") == [Example("Q:", [pairs[0][0]])]


def test_kto_rows_give_their_good_answers_all_prompts_and_all_single_answers():
    assert read(KTO, "sft") == [
        Example(f"Q{n}:", [f" {a}"]) for n, a in ((1, "good"), (2, "fine"), (2, "best"))
    ]
    assert read(KTO, "prompt") == [Example(f"Q{n}:", []) for n in (1, 2, 1, 1, 2)]
    assert [(one.prompt, *one.answers, *one.labels) for one in read(KTO[:3], "unpaired")] == [
        ("Q1:", " good", 1.0),
        ("Q2:", " fine", 1.0),
        ("Q1:", " bad", 0.0),
    ]


def test_kto_rows_as_messages():
    row = {"prompt": "Where is the lamp?", "completion": [HALL], "label": True}
    assert read([row], "unpaired") == [Example([ASK], ["In the hall."], labels=(1.0,))]
    assert read([row], "prompt") == [Example([ASK], [])], "for all uses, and it needs no answer"
    assert form_of(KTO).read({"prompt": "Where?"}, "prompt") == [Example("Where?", [])]
    conversation = {
        "messages": [ASK, HALL],
        "label": True,
        "prompt": ASK["content"],
        "completion": HALL["content"],
    }
    assert read([conversation], "unpaired") == read([row], "unpaired")


@pytest.mark.parametrize(
    ("label", "is_good"), [(1, True), (0.0, False), (-1, False), ("True", True), ("0.0", False)]
)
def test_labels_may_be_numbers_or_text(label, is_good):
    assert form_of([{"prompt": "Q:", "completion": "a", "label": label}]).name == "kto"
    assert len(read([{"prompt": "Q:", "completion": "a", "label": label}], "sft")) == is_good
    assert form_of([{"prompt": "Q:", "completion": "a", "label": "spam"}]).name == "prompt_response"


def test_of_a_ranked_list_the_best_and_the_worst_answer_are_taken():
    rows = [
        {"prompt": "Q:", "responses": ["a", "b", "c"], "scores": [2, 9, 1]},
        {"prompt": "R:", "responses": ["x", "y"], "scores": [3, 3]},
    ]
    assert [(one.answers[0], one.labels, one.suffix) for one in read(rows, "unpaired")] == [
        ("b", (1.0,), ", answer 2"),
        ("c", (0.0,), ", answer 3"),
    ]
