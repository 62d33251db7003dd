"""The token ids, spans and labels of every form with every kind of chat template, as they were
recorded. `python tests/data/test_token_record.py` writes the record again: do that only for a
change of tokens that CHANGELOG.md names."""

import json
from pathlib import Path

import pytest
from form_fixtures import (
    ASK,
    CALL,
    FIXTURES,
    HALL,
    KTO,
    TOOL,
    assistant,
    system,
    user,
)
from recorded_tokens import TEMPLATES, tokens_of
from test_deepspeed_chat_sets import EXPECTED

RECORD = Path(__file__).with_name("token_record.json")
# the data sets of DeepSpeed-Chat, which are text, are recorded with these
TEXT = "none", "chatml", "inst"
USES = {  # name -> use, all turns, limit of tokens, truncation
    "sft": ("sft", False, 1000, "left"),
    "turns": ("sft", True, 1000, "left"),
    "cut": ("sft", True, 48, "middle"),
    "pair": ("preference", False, 1000, "left"),
    "paircut": ("preference", False, 40, "left"),
    "kto": ("unpaired", False, 60, "drop"),
    "ppo": ("prompt", False, 1000, "left"),
    "ppocut": ("prompt", False, 20, "right"),
}
TALK = [
    system("Be kind."),
    ASK,
    assistant("<think>\nSo.\n</think>\nIn the hall."),
    user("In the hall."),
    assistant(" Café\n"),
    user("And now?"),
    assistant("On the roof.", reasoning_content="Hm."),
]
CALLS = [
    ASK,
    assistant("", tool_calls=[CALL]),
    {"role": "tool", "content": "hall"},
    HALL,
    user("Sure?"),
    assistant("I look.", tool_calls=[CALL]),
]
WEIGHTED = [
    ASK,
    {**HALL, "weight": 0},
    user("Sure?"),
    {**assistant("Yes."), "weight": 1},
    ASK,
    HALL,
]
MORE = {  # name -> rows, flags
    "KTO": (KTO, {}),
    "KTO as messages": (
        [{"messages": [ASK, HALL], "label": True}, {"messages": [ASK, ASK, HALL], "label": False}],
        {},
    ),
    "better of two": (
        [{"prompt": "Q:", "response_0": " a", "response_1": " b", "better_response_id": 1}],
        {},
    ),
    "user/assistant": ([{"user": "Where is it?", "assistant": "In the hall."}], {}),
    "a talk": ([{"messages": TALK}, {"messages": TALK[:3]}], {}),
    "tools": ([{"messages": CALLS, "tools": [TOOL]}], {}),
    "weights": ([{"messages": WEIGHTED}], {}),
    "texts as messages": (
        [{"prompt": " Where?", "response": "In  the hall. "}],
        {"apply_chat_template": True},
    ),
    "questions as text": (
        [{"question": "Where?", "answer": "Here."}],
        {"input_template": "Question: {} Answer: "},
    ),
    "a system message": ([{"messages": TALK[1:]}], {"system_message": "Be brief."}),
    "texts with their ends": (
        [{"prompt": "<s>Q:", "response": " a</s>\n"}, {"prompt": "Q:", "response": "é"}],
        {},
    ),
    "long texts": ([{"text": "Once upon a time. " * 20}, {"text": "Short one."}], {}),
    "long chat": (
        [
            {
                "messages": [
                    system("Be kind."),
                    user("Where? " * 30),
                    HALL,
                    ASK,
                    assistant("Here. " * 12),
                ]
            }
        ],
        {},
    ),
}
CASES: dict[str, tuple[list[dict], dict]] = {
    **{name: (fixture.rows, {}) for name, fixture in FIXTURES.items()},
    **MORE,
    **{name: ([row], {"data_format": name}) for name, (row, *_) in EXPECTED.items()},
}


def tokens_by_case(template: str) -> dict[str, str]:
    """The cases of which some use has token rows."""
    found = {
        case: tokens_of(rows, flags, template, USES)
        for case, (rows, flags) in CASES.items()
        if case not in EXPECTED or template in TEXT
    }
    return {case: hashes for case, hashes in found.items() if hashes}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tokens_of_every_form_are_those_of_the_record(template):
    assert (
        tokens_by_case(template)
        == json.loads(RECORD.read_text(encoding="utf-8"))["tokens"][template]
    )


if __name__ == "__main__":
    tokens = {template: tokens_by_case(template) for template in TEMPLATES}
    RECORD.write_text(
        json.dumps({"tokens": tokens}, indent=0, ensure_ascii=False), encoding="utf-8"
    )
