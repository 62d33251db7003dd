"""Each way out that a message names is tried: followed to the letter, it reads the rows, and drops
no content of the prompt."""

import json
import re

import pytest
from form_fixtures import ASK, assistant, form_of, read, system, user
from ways_out import read_by_ways

from dschat_ppo.errors import UserError

Q = "Where is the lamp?"
GOOD, BAD = "In the hall.", "Find it."
POST = "A long post about the lamp in the hall, and about its colour."
PASSAGE = "The lamp is in the hall. It is red."
SQUAD = {"answers": {"text": [GOOD], "answer_start": [12]}}
CALLS = json.dumps([{"name": "find", "arguments": {"thing": "lamp"}}])
TOOLS = json.dumps([{"name": "find", "description": "Finds.", "parameters": {}}])
TALK = {"dialogue": "Ann: Where is it?\r\nBo: There!", "summary": "It is there."}
SAMPLES = [{"text": BAD}, {"text": GOOD}]
SWITCH = [
    {"input": [ASK], "output": GOOD, "reasoning": "off", "system_prompt": "Be brief."},
    {"input": [ASK], "output": GOOD, "reasoning": "on", "system_prompt": "Be brief."},
]
LONG_SWITCH = [
    {"Question": Q, "Answer": GOOD, "thinking": f"detailed thinking {word}"}
    for word in ("on", "off") * 4
]


def sides(first: str, second: str, **more) -> dict:
    """A row of two answers without a known prompt's name."""
    return {"post": POST, first: GOOD, second: BAD, **more}


# rows, use, and for each way out the last message of the prompt and the answers, row by row
CASES = {
    "summaries with a label": (
        [sides("summary1", "summary2", label=0), sides("summary1", "summary2", label=1)],
        "preference",
        [[(POST, [GOOD, BAD]), (POST, [BAD, GOOD])], [(POST, [BAD, GOOD]), (POST, [GOOD, BAD])]],
    ),
    "summaries with a choice in a field": (
        [{"info": {"id": "t3", "post": POST}, "summaries": SAMPLES, "choice": 1}],
        "preference",
        [[(POST, [GOOD, BAD])]],
    ),
    "summaries with a verdict in words": (
        [sides("summary_a", "summary_b", human_vote="a")],
        "preference",
        [[(POST, [GOOD, BAD])]],
    ),
    "a verdict under another name": (
        [sides("option_x", "option_y", liked="y") | {"option_x": BAD, "option_y": GOOD}],
        "preference",
        [[(POST, [GOOD, BAD])]],
    ),
    "SQuAD": (
        [{"context": PASSAGE, "question": Q, **SQUAD}] * 2,
        "sft",
        [[(f"{Q}\n\n{PASSAGE}", [GOOD])] * 2, [(Q, [GOOD])] * 2],
    ),
    "SQuAD, prompts": (
        [{"context": PASSAGE, "question": Q, **SQUAD}] * 2,
        "prompt",
        [[(f"{Q}\n\n{PASSAGE}", [])] * 2, [(Q, [])] * 2],
    ),
    "a passage and an answer": (
        [{"passage": PASSAGE, "question": Q, "answer": GOOD}],
        "sft",
        [[(f"{Q}\n\n{PASSAGE}", [GOOD])], [(Q, [GOOD])]],
    ),
    "xLAM": ([{"id": 1, "query": Q, "tools": TOOLS, "answers": CALLS}], "sft", [[(Q, [CALLS])]]),
    "StackExchange": (
        [{"question": Q, "response_j": GOOD, "response_k": BAD}],
        "preference",
        [[(Q, [GOOD, BAD])]],
    ),
    "names of the better one": (
        [{"question": Q, "bad_answer": BAD, "good_answer": GOOD}],
        "preference",
        [[(Q, [GOOD, BAD])]],
    ),
    "a switch of thoughts": (SWITCH, "sft", [[(Q, [GOOD])] * 2]),
    "a switch of two words": (LONG_SWITCH, "sft", [[(Q, [GOOD])] * 8]),
    "messages and a verdict of true and false": (
        [
            {"prompt": Q, "response_a": GOOD, "response_b": BAD, "is_first_better": True},
            {"prompt": Q, "response_a": BAD, "response_b": GOOD, "is_first_better": False},
        ],
        "preference",
        [[(Q, [GOOD, BAD])] * 2],
    ),
    "an article and its highlights": (
        [{"id": "1", "article": PASSAGE, "highlights": "It is there."}],
        "sft",
        [[(PASSAGE, ["It is there."])]],
    ),
    "SAMSum": ([{"id": "1", **TALK}], "sft", [[(TALK["dialogue"], ["It is there."])]]),
    "SAMSum, prompts": ([{"id": "1", **TALK}], "prompt", [[(TALK["dialogue"], [])]]),
    "DialogSum": (
        [{"id": "1", **TALK, "topic": "a lost lamp"}],
        "sft",
        [[(TALK["dialogue"], ["It is there."])]],
    ),
    "messages and tools in an object": (
        [{"input": {"messages": [ASK], "tools": []}, "output": [assistant(GOOD)]}],
        "sft",
        [[(Q, [GOOD])]],
    ),
    "a question that is short beside messages, prompts": (
        [{"question": "Row 7", "prompt": [system("Be kind."), ASK], "ground_truth": "42"}],
        "prompt",
        [[(Q, [])], [("Row 7", [])]],  # what leaves out less comes first
    ),
    "names of both answers and a verdict": (
        [
            {"prompt": Q, "chosen_response": one, "rejected_response": two, "human_choice": choice}
            for one, two, choice in ((GOOD, BAD, "chosen"), (BAD, GOOD, "rejected"))
        ],
        "preference",
        [[(Q, [GOOD, BAD])] * 2],
    ),
    "a number for each answer": (
        [{"prompt": Q, "response_A": BAD, "response_B": GOOD, "helpful_A": 1, "helpful_B": 4.5}],
        "preference",
        [[(Q, [GOOD, BAD])]],
    ),
    "a list of answers beside messages": (
        [{"messages": [ASK], "responses": [{"content": BAD}, {"content": GOOD}], "best_index": 1}],
        "preference",
        [[(Q, [GOOD, BAD])]],
    ),
    "pairs of roles and texts in a column of transcripts": (
        [{"dialogue": [["human", Q], ["gpt", GOOD]]}],
        "sft",
        [[(Q, [GOOD])]],
    ),
    "prompts beside pairs": (
        [{"question": Q, "response_j": GOOD, "response_k": BAD}],
        "prompt",
        [[(Q, [])]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_way_out_reads_the_rows(name):
    rows, use, expected = CASES[name]
    assert read_by_ways(rows, use) == expected


def test_a_system_message_beside_an_instruction_is_kept():
    rows = [{"instruction": Q, "answer": "42", "system": "Be brief."}]
    with pytest.raises(UserError) as caught:
        read(rows, "prompt")
    assert str(caught.value).endswith(
        "--apply_chat_template True reads 'instruction' as chat messages"
    )
    [example] = read(rows, "prompt", prompt_column="instruction", apply_chat_template=True)
    assert example.prompt == [system("Be brief."), user(Q)]


def test_ratings_of_single_answers_are_told_what_can_read_them():
    with pytest.raises(UserError, match="--data_format FILE.py:FUNCTION. can read others$"):
        read([{"messages": [ASK, assistant(GOOD)], "rating": 4}], "unpaired")


def test_what_a_question_is_about_is_left_out_only_by_name_and_last():
    rows = [{"question": Q, "choices": ["hall", "roof"], "answer": "hall"}]
    with pytest.raises(UserError) as caught:
        read(rows, "sft")
    *_, own, ignoring = str(caught.value).split("; ")
    assert own.startswith("--data_format FILE.py:FUNCTION can put 'choices' into the prompt")
    assert ignoring == "--ignore_columns choices reads 'question' and 'answer', without 'choices'"


@pytest.mark.parametrize("use", ["sft", "preference", "unpaired"])
@pytest.mark.parametrize(
    "row",
    [
        {"data_source": "d", "prompt": [ASK], "reward_model": {"ground_truth": "34"}},
        {"prompt": Q},
        {"messages": [ASK], "ground_truth": "34"},
    ],
)
def test_prompts_without_a_response_are_for_step_3(row, use):
    with pytest.raises(UserError) as caught:
        read([row, row], use)
    message = str(caught.value)
    way = "rows of prompts alone are for step 3 (--response_column names the column of a response"
    assert f"; {way} if there is one)" in message or ("messages" in row and use != "sft")
    assert re.search("no .*response .*to train on; ", message) or use != "sft"
    assert "prompt.0" not in message and "\n" not in message
    assert read([row, row], "prompt")


def test_a_conversation_with_a_response_among_prompts_is_for_step_1():
    rows = [{"messages": [ASK]}, {"messages": [ASK, assistant(GOOD)]}]
    form = form_of(rows, use="sft")
    assert form.read(rows[1], "sft")[0].answers == [GOOD]
    rows = [{"messages": [ASK], "tools": None}, {"messages": [ASK, assistant(GOOD), user("So?")]}]
    with pytest.raises(UserError, match="are for step 3"):
        form_of(rows, use="sft")
