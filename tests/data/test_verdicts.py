"""Two answers and what says which one is better, in the shapes of public data sets; lists of
answers; and that the advice of a message, followed to the letter, reads the rows."""

import json
import re

import pytest
from form_fixtures import ASK, HH, assistant, form_of, read, user
from test_deepspeed_chat_sets import EXPECTED
from ways_out import ways_of

from dschat_ppo.data.form_kinds import SETS
from dschat_ppo.errors import UserError

Q = "Where is the lamp?"
GOOD, BAD = "In the hall.", "Find it."


def sides(first: str, second: str, good_first: bool, **more) -> dict:
    """A row with a good and a bad answer in the columns `first` and `second`."""
    answers = (GOOD, BAD) if good_first else (BAD, GOOD)
    return {"prompt": Q, first: answers[0], second: answers[1], **more}


def talk(answer: str) -> list[dict]:
    return [user(Q), assistant(answer)]


def one_hot(first: str, second: str, a: object, b: object, tie: object) -> dict:
    """A row of Chatbot Arena's 55k, whose lists are JSON text."""
    row = {"prompt": json.dumps([Q]), "response_a": json.dumps([first])}
    row["response_b"] = json.dumps([second])
    return row | {"winner_model_a": a, "winner_model_b": b, "winner_tie": tie}


R12, R01, RAB = ("response_1", "response_2"), ("response_0", "response_1"), ("answer_a", "answer_b")
MODELS = {"model_a": "llama-2", "model_b": "vicuna-1"}
ARENA = {"conversation_a": talk(BAD), "conversation_b": talk(GOOD)}
# Rows of which each has the pair (GOOD, BAD), but for ties
PAIRS = {
    "strength (HelpSteer2)": [
        sides(*R12, True, preference_strength=-1),
        sides(*R12, False, preference_strength=1),
        sides(*R12, False, preference_strength=3),
    ],
    "strength that is never negative": [sides(*R12, False, preference_strength=1)],
    "strength in a CSV file": [
        sides(*R12, True, overall_preference="-2.0"),
        sides(*R12, False, overall_preference="1.0"),
    ],
    "strength by its numbers": [
        sides(*RAB, True, human_preference=-1.5),
        sides(*RAB, False, human_preference=0.5),
    ],
    "numbers of columns from 1": [
        sides(*R12, True, preference=1),
        sides(*R12, False, preference=2),
    ],
    "numbers of columns from 0": [
        sides(*R01, True, better_response_id=0),
        sides(*R01, False, better_response_id=1.0),
    ],
    "a label with the numbers of columns": [
        sides(*R01, True, label=0),
        sides(*R01, False, label=1),
    ],
    "places from 0": [sides(*RAB, True, better=0), sides(*RAB, False, better="1")],
    "places from 1": [sides(*RAB, True, preference=1), sides(*RAB, False, preference=2)],
    "words": [
        sides(*RAB, True, winner="model_a"),
        sides(*RAB, False, winner="b"),
        sides(*RAB, False, winner="Response B"),
        sides(*RAB, False, winner="answer_b"),
        sides(*RAB, False, winner="[[B]]"),
        sides(*RAB, True, winner="first"),
    ],
    "names of columns": [sides(*R12, False, choice="response_2")],
    "names of models": [
        sides(*RAB, True, winner="llama-2", **MODELS),
        sides(*RAB, False, winner="Vicuna-1", **MODELS),
    ],
    "one of several columns": [
        one_hot(GOOD, BAD, 1, 0, 0),
        one_hot(BAD, GOOD, False, True, False),
        one_hot(BAD, GOOD, "False", "True", "False"),
    ],
    "a number of each": [
        sides(*RAB, True, score_a=2, score_b=1.5),
        sides(*RAB, False, score_a=-1, score_b=0),
    ],
    "conversations (Chatbot Arena)": [{**ARENA, "winner": "model_b"}],
    "messages and two answers (HelpSteer3)": [
        {"context": [ASK], "response1": BAD, "response2": GOOD, "overall_preference": 2}
    ],
    "instruction and input (AlpacaFarm)": [
        {
            "instruction": "Where is",
            "input": "it?",
            "output_1": BAD,
            "output_2": GOOD,
            "preference": 2,
        }
    ],
    "a list of rejected answers": [{"prompt": Q, "chosen": GOOD, "rejected": [BAD]}],
    "ratings of a list (UltraFeedback)": [
        {"instruction": Q, "generations": [BAD, GOOD], "rating": [1, 5]}
    ],
}
CHAT = {"apply_chat_template": True}
# A column beside `chosen` and `rejected`, and its value where `chosen` is better and where it is
# not
BESIDE_NAMES = {
    "is_chosen_better": (True, False),
    "isChosenBetter": ("yes", "no"),
    "chosen_wins": (1, 0),
    "rejected_is_better": (False, True),
    "is_rejected_worse": ("true", "false"),
    "winner": ("chosen", "rejected"),
    "preference": ("Chosen", "Rejected"),
    "label": ("chosen", "rejected"),
    "annotator": ("chosen", "rejected"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_better_answer_is_chosen(name):
    rows = PAIRS[name]
    form = form_of(rows, **CHAT)
    for row in rows:
        [pair] = form.read(row, "preference")
        assert list(pair.answers) == [GOOD, BAD]
        assert [list(one.answers) for one in form.read(row, "sft")] == [[GOOD]]
        assert [one.labels for one in form.read(row, "unpaired")] == [(1.0,), (0.0,)]
        asked = "Where is\n\nit?" if "instruction and" in name else Q
        assert form.read(row, "prompt")[0].prompt == pair.prompt == [user(asked)]


@pytest.mark.parametrize(
    ("first", "tie"),
    [
        (PAIRS["strength (HelpSteer2)"], sides(*R12, True, preference_strength=0)),
        (PAIRS["words"], sides(*RAB, True, winner="tie (bothbad)")),
        (PAIRS["words"], sides(*RAB, True, winner="both_good")),
        (PAIRS["one of several columns"], one_hot(GOOD, BAD, 0, 0, 1)),
    ],
)
def test_a_tie_is_a_prompt_and_no_pair(first, tie):
    form = form_of([*first, tie], **CHAT)
    assert form.read(tie, "preference") == form.read(tie, "sft") == form.read(tie, "unpaired") == []
    assert form.read(tie, "prompt")[0].prompt == [ASK]


def test_a_tie_of_two_conversations_that_part_early_is_no_bad_row():
    turns = [user(Q), assistant(GOOD), ASK, assistant(GOOD)]
    others = [user(Q), assistant(BAD), ASK, assistant(BAD)]
    tie = {"conversation_a": turns, "conversation_b": others, "winner": "tie"}
    form = form_of([{**ARENA, "winner": "model_b"}, tie], **CHAT)
    assert form.read(tie, "preference") == form.read(tie, "sft") == form.read(tie, "unpaired") == []


@pytest.mark.parametrize("values", [(True, False), ("yes", "No"), (1, 0), ("True", "False")])
@pytest.mark.parametrize(
    ("name", "is_of_first"),
    [
        ("is_a_better", True),
        ("first_is_better", True),
        ("answer_a_wins", True),
        ("aBeatsB", True),
        ("b_better_than_a", False),
        ("is_second_preferred", False),
        ("first_is_worse", False),
    ],
)
def test_a_flag_reads_a_verdict_of_two_values_whose_name_says_of_which_answer(
    name, is_of_first, values
):
    of_good_first, of_bad_first = values if is_of_first else values[::-1]
    rows = [
        sides(*RAB, True, **{name: of_good_first}),
        sides(*RAB, False, **{name: of_bad_first}),
        sides(*RAB, True, **{name: "tie"}),
    ]
    with pytest.raises(UserError, match=f"if '{name}' says .* --better_column {name}$") as caught:
        form_of(rows, **CHAT, use="preference")
    pairs = read(rows, "preference", **CHAT, **flags_in(str(caught.value)))
    assert [list(pair.answers) for pair in pairs] == [[GOOD, BAD]] * 2
    flags = {"chosen_column": RAB[0], "rejected_column": RAB[1]}
    with pytest.raises(UserError, match=f"'{name}' (holds|is) .*--better_column {name}"):
        form_of(rows, **CHAT, **flags)  # and no pair is trained upside down


def test_true_and_false_without_a_name_that_says_of_which_answer_need_a_choice():
    rows = [sides(*RAB, True, verdict=True), sides(*RAB, False, verdict=False)]
    with pytest.raises(UserError, match="'verdict' holds true and false") as caught:
        form_of(rows, **CHAT, use="preference")
    ways = str(caught.value).split("if ")[1:]
    assert [way.split(" is for")[0] for way in ways] == ["true", "false"]
    good_first = [read(rows, "preference", **CHAT, **flags_in(way)) for way in ways]
    assert [[one.answers[0] for one in each] for each in good_first] == [[GOOD] * 2, [BAD] * 2]
    form = form_of(rows, **CHAT, **flags_in(ways[0]))
    with pytest.raises(UserError, match=r"'verdict' is 'maybe'; expected true or false \(whether"):
        form.read(sides(*RAB, True, verdict="maybe"), "preference")


@pytest.mark.parametrize(
    ("rows", "low", "high"),
    [
        ([sides(*RAB, True, label=0), sides(*RAB, True, label=1)], 0, 1),
        ([sides(*R12, True, preference=0), sides(*R12, True, preference=1)], 0, 1),
        ([sides(*R01, True, preference=1), sides(*R01, True, preference=2)], 1, 2),
        ([sides(*RAB, True, label=-1), sides(*RAB, True, label=1)], -1, 1),
    ],
)
def test_a_number_that_can_mean_two_things_is_refused_with_the_flags_of_both(rows, low, high):
    with pytest.raises(UserError) as caught:
        form_of(rows, **CHAT)
    message = str(caught.value)
    ways = message.split("if ")[1:]
    assert [way.split(" is for")[0] for way in ways] == [str(low), str(high)]
    winners = []
    for way in ways:
        form = form_of(rows, **CHAT, **flags_in(way))
        winners.append([form.read(row, "preference")[0].answers[0] for row in rows])
    assert winners == [[GOOD, BAD], [BAD, GOOD]]


@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 5), (-1, 0, 1), (0.2, 0.7)])
def test_numbers_that_say_nothing_are_refused_without_flags_of_columns(numbers):
    rows = [sides(*RAB, True, winner=number) for number in numbers]
    with pytest.raises(
        UserError, match="'winner' holds .*--data_format FILE.py:FUNCTION"
    ) as caught:
        form_of(rows, **CHAT)
    assert "_column" not in str(caught.value)


@pytest.mark.parametrize("verdict", [None, "", "unknown", 2, "c", True])
def test_a_row_whose_verdict_says_nothing_is_bad(verdict):
    rows = [sides(*RAB, True, winner="a"), sides(*RAB, True, winner=verdict)]
    form = form_of(rows[:1] * 20, **CHAT)
    with pytest.raises(UserError, match="^'winner' is .*; expected .*'answer_a' or 'answer_b', or"):
        form.read(rows[1], "preference")
    assert form.read(rows[1], "prompt")[0].prompt == [ASK]


def flags_in(message: str) -> dict:
    """The flags of columns that a message names."""
    return dict(re.findall(r"--(\w+_column) ([^ ;]+)", message))


STRENGTH = PAIRS["strength (HelpSteer2)"]
LISTED = {"prompt": Q, "replies": [BAD, GOOD], "preferred": 1}
SUMMARIES = {"info": {"post": Q}, "summaries": [{"text": BAD}, {"text": GOOD}], "choice": 1}
OTHER = {"prompt": Q, "option_a": BAD, "option_b": GOOD, "winner": "b"}
THREE = {"instruction": Q, "input": "", "output": [GOOD, BAD, "No.", "So?"]}


@pytest.mark.parametrize(
    ("rows", "given", "use", "named"),
    [
        (
            STRENGTH,
            {"chosen_column": "response_1", "rejected_column": "response_2"},
            "preference",
            {},
        ),
        ([OTHER], {}, "preference", {}),
        ([LISTED], {}, "preference", {}),
        ([SUMMARIES], {}, "preference", {"PROMPT": "info.post"}),
        ([sides(*RAB, True, text="")], {}, "preference", {}),
        ([sides(*RAB, False, liked="b")], {}, "preference", {"COLUMN": "liked"}),
        ([{"instruction": Q, "output": [GOOD, BAD]}], {}, "preference", {}),
        ([THREE], {}, "preference", {}),
        ([{"question": Q, "answers": [GOOD, BAD]}], {}, "preference", {}),
        ([{"instruction": Q, "output": [GOOD, BAD]}], {}, "sft", {}),
        ([{"prompt": Q, "response": GOOD, "thumbs_up": "👍"}], {}, "unpaired", {}),
    ],
)
def test_the_advice_of_a_message_reads_the_rows(rows, given, use, named):
    with pytest.raises(UserError) as caught:
        read(rows, use, **CHAT, **given)
    message = str(caught.value)
    for word, column in named.items():
        message = message.replace(f" {word}", f" {column}")
    if "COLUMN" not in named:
        message = message.split("; if a column")[0]
    flags = flags_in(message)
    if use == "sft":
        assert "such as output.0" in message
        flags = {"response_column": "output.0"}
    examples = read(rows, use, **CHAT, **flags)
    assert {example.answers[0] for example in examples} == {GOOD}
    if use == "preference":
        rejected = THREE["output"][1:] if rows == [THREE] else [BAD] * len(rows)
        assert [example.answers[1] for example in examples] == rejected


def test_flags_of_columns_beside_a_verdict_are_refused():
    flags = {"chosen_column": "response_1", "rejected_column": "response_2"}
    with pytest.raises(
        UserError, match="'preference_strength' holds .*--better_column preference_"
    ):
        form_of(STRENGTH, **CHAT, **flags)
    ignored = form_of(STRENGTH, **CHAT, **flags, ignore_columns=["preference_strength"])
    assert [ignored.read(row, "preference")[0].answers[0] for row in STRENGTH] == [GOOD, BAD, BAD]
    rows = PAIRS["one of several columns"]
    flags = {"chosen_column": "response_a", "rejected_column": "response_b"}
    with pytest.raises(UserError, match="--better_column winner_model_a,winner_model_b"):
        form_of(rows, **CHAT, **flags)
    found = read(rows, "preference", better_column="winner_model_a,winner_model_b", **CHAT, **flags)
    assert [list(pair.answers) for pair in found] == [[GOOD, BAD]] * 3
    with pytest.raises(UserError, match="--better_column other: d.jsonl has no such column"):
        form_of(rows, better_column="winner_model_a,other", **CHAT, **flags)
    for names in ("winner_model_a,", "a,b,c"):
        with pytest.raises(
            UserError, match=f"--better_column '{names}': expected a column, or two"
        ):
            form_of(rows, better_column=names)


def test_flags_of_columns_beside_the_number_of_the_better_column_are_refused():
    rows = [sides("answer_1", "answer_2", side == 1, choice=side) for side in (2, 1)]
    flags = {"chosen_column": "answer_1", "rejected_column": "answer_2"}
    with pytest.raises(UserError, match="'choice' is 2, by which 'answer_2' is .*_column choice;"):
        form_of(rows, **CHAT, **flags)
    pairs = read(rows, "preference", better_column="choice", **CHAT, **flags)
    assert [list(pair.answers) for pair in pairs] == [[GOOD, BAD]] * 2


def test_a_difference_may_be_of_either_answer():
    rows = [sides(*RAB, lead > 0, margin=lead) for lead in (-2.0, 1.5)]  # score_a - score_b
    with pytest.raises(UserError) as caught:
        read(rows, "preference", **CHAT)
    below, above = ways_of(str(caught.value))
    assert "if 'margin' is above 0 where 'answer_a' is better: --" in str(caught.value)
    for flags, answers in ((below, [BAD, GOOD]), (above, [GOOD, BAD])):
        pairs = read(rows, "preference", **CHAT, **flags)
        assert [list(pair.answers) for pair in pairs] == [answers] * 2


def test_the_messages_of_the_prompt_are_kept_where_a_verdict_is_left_out():
    rows = [
        {"context": [user(Q)], "response1": GOOD, "response2": BAD, "overall_preference": -3},
        {"context": [user(Q)], "response1": BAD, "response2": GOOD, "overall_preference": 2},
    ]
    flags = {"chosen_column": "response1", "rejected_column": "response2"}
    with pytest.raises(UserError) as caught:
        form_of(rows, use="preference", **CHAT, **flags)
    assert str(caught.value).endswith("--prompt_column context --ignore_columns overall_preference")
    *_, ignoring = ways_of(str(caught.value))
    pairs = read(rows, "preference", **CHAT, **flags, **ignoring)
    assert [pair.prompt for pair in pairs] == [[user(Q)]] * 2


def test_each_rejected_answer_makes_a_pair_and_a_bad_answer():
    row = {"prompt": "Q:", "chosen": " a", "rejected": [" b", " c", " d"]}
    pairs = read([row], "preference")
    assert [list(pair.answers) for pair in pairs] == [[" a", " b"], [" a", " c"], [" a", " d"]]
    assert [pair.suffix[-17:] for pair in pairs] == [f"rejected answer {n}" for n in (1, 2, 3)]
    labelled = [(one.answers[0], one.labels[0]) for one in read([row], "unpaired")]
    assert labelled == [(" a", 1.0), (" b", 0.0), (" c", 0.0), (" d", 0.0)]


def test_turns_of_conversations_may_part_before_the_last_answer():
    turns = {"prompt": ["a?", "b?"], "response_a": ["x", GOOD], "response_b": ["x", BAD]}
    first = {**turns, "winner": "a"}
    form = form_of([first])
    [pair] = form.read(first, "preference")
    assert pair.prompt == [user("a?"), assistant("x"), user("b?")] and pair.answers == [GOOD, BAD]
    [pair] = form.read({**first, "response_b": ["y", BAD], "winner": "b"}, "preference")
    better, worse = [
        [assistant(one), user("b?"), assistant(two)] for one, two in (("y", BAD), ("x", GOOD))
    ]
    assert pair.prompt == [user("a?")] and list(pair.answers) == [better, worse]
    with pytest.raises(UserError, match="'response_b' has 1 text, but 'prompt' 2"):
        form.read({**first, "response_b": [BAD]}, "preference")


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "lmqg/qg_jaquad"])
def test_a_set_of_deepspeed_chat_in_another_file_is_read_or_its_name_is_said(name):
    row = EXPECTED[name][0]
    use = "sft" if SETS[name].rejected is None else "preference"
    try:
        form = form_of([row])
        form.require(use)
    except UserError as problem:
        said = str(problem)
    else:  # pairs that are read as they are, with a word where a space is missing
        said = form.warning
        if SETS[name].chosen != " {chosen}":
            assert SETS[name].columns == "prompt chosen rejected" and not said
            return
    [named] = re.findall(r"--data_format (\S+)(?: or (\S+))? reads", said)
    assert name in named


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": Q, "completion": GOOD}, Q),
        ({"question": Q, "answer": GOOD}, Q),
        ({"instruction": "Where is", "input": "it?", "output": GOOD}, "Where is\n\nit?"),
        ({"messages": talk(GOOD)}, Q),
    ],
)
@pytest.mark.parametrize("good", [True, "safe", "Thumbs_Up", 1, "👍"])
def test_a_flag_names_the_label_of_single_answers(row, prompt, good):
    row = {**row, "liked": good}
    with pytest.raises(UserError, match="if 'liked' says .*--label_column liked"):
        form_of([row], **CHAT).require("unpaired")
    [example] = read([row], "unpaired", label_column="liked", **CHAT)
    assert example.prompt == [user(prompt)]
    assert (example.answers, example.labels) == ([GOOD], (1.0,))
    bad = {**row, "liked": "Thumbs_down"}
    assert read([bad], "unpaired", label_column="liked", **CHAT)[0].labels == (0.0,)
    assert read([bad], "sft", label_column="liked", **CHAT) == []


def test_an_input_beside_a_labelled_prompt_is_not_dropped():
    row = {"prompt": Q, "completion": GOOD, "label": True, "input": "Hm."}
    with pytest.raises(UserError, match="'input' holds content"):
        read([row], "unpaired", **CHAT)
    assert read([row], "unpaired", ignore_columns=["input"], **CHAT)[0].answers == [GOOD]


@pytest.mark.parametrize("column", BESIDE_NAMES)
def test_a_verdict_that_contradicts_the_names_of_the_answers_is_refused(column):
    agrees, contradicts = BESIDE_NAMES[column]
    agreeing = sides("chosen", "rejected", True, **{column: agrees})
    turned = sides("chosen", "rejected", False, **{column: contradicts})
    for use in ("sft", "preference"):
        with pytest.raises(UserError) as caught:
            form_of([agreeing, turned], use=use, **CHAT)
    flags = f"--chosen_column chosen --rejected_column rejected --better_column {column};"
    assert f"if '{column}' says which answer is better: {flags}" in str(caught.value)
    for named in ({}, {"chosen_column": "chosen", "rejected_column": "rejected"}):
        pairs = read([agreeing, turned], "preference", better_column=column, **named, **CHAT)
        assert [list(pair.answers) for pair in pairs] == [[GOOD, BAD]] * 2
    [prompt, _] = read([agreeing, turned], "prompt", **CHAT)  # which needs no verdict
    assert prompt.prompt == [user(Q)]


@pytest.mark.parametrize("column", BESIDE_NAMES)
def test_a_verdict_that_agrees_with_the_names_of_the_answers_is_none(column):
    agrees, contradicts = BESIDE_NAMES[column]
    row = sides("chosen", "rejected", True, **{column: agrees})
    form = form_of([row] * 2, use="preference", **CHAT)
    assert list(form.read(row, "preference")[0].answers) == [GOOD, BAD]
    with pytest.raises(UserError, match=f"'{column}' is .*, by which 'rejected' is the better"):
        form.read({**row, column: contradicts}, "preference")  # a later row


def test_a_tie_beside_the_names_of_the_answers_is_no_pair():
    rows = [sides("chosen", "rejected", True, winner=word) for word in ("chosen", "tie")]
    with pytest.raises(UserError, match="--better_column winner"):
        form_of(rows, use="preference", **CHAT)
    assert len(read(rows, "preference", better_column="winner", **CHAT)) == 1


def test_a_verdict_beside_two_transcripts_is_read():
    rows = [
        {"chosen": f"{HH} {GOOD}", "rejected": f"{HH} {BAD}", "winner": "chosen"},
        {"chosen": f"{HH} {BAD}", "rejected": f"{HH} {GOOD}", "winner": "rejected"},
    ]
    with pytest.raises(UserError, match="--better_column winner;"):
        form_of(rows, use="preference")
    pairs = read(rows, "preference", better_column="winner")
    assert [(pair.prompt, list(pair.answers)) for pair in pairs] == [
        (HH, [f" {GOOD}", f" {BAD}"])
    ] * 2


def test_no_data_set_without_a_verdict_is_advised_beside_one():
    row = sides("chosen", "rejected", False, winner="rejected")
    warning = form_of([row], better_column="winner").warning
    assert "nothing separates" in warning and "local/jsonfile" not in warning
