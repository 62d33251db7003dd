"""The token ids, spans and labels of every form with every kind of chat template, as they were
recorded. `python tests/data/test_token_record.py` writes the record again: do that only for a
change of tokens that CHANGELOG.md names."""

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow
import pytest
import torch
from form_fixtures import (
    ASK,
    CALL,
    FIXTURES,
    HALL,
    KTO,
    PRM800K,
    SHEPHERD,
    STEPS,
    TOOL,
    assistant,
    system,
    user,
)
from test_deepspeed_chat_sets import EXPECTED
from tiny_tokenizers import tokenizer_of

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.config.data_flags import DataFlags, StepData
from dschat_ppo.data.examples import SPLIT_SEED
from dschat_ppo.data.form_choice import detect_form
from dschat_ppo.data.forms import check_flags_used
from dschat_ppo.data.templates import NAMED, named_template
from dschat_ppo.data.tokenise import Fitted, TokeniseSettings, features_of, tokenise_batch
from dschat_ppo.errors import UserError

RECORD = Path(__file__).with_name("token_record.json")
INST = (  # without generation marks, and with a space before answers
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content +"
    " eos_token }}{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
THINKS = (  # opens answers with <think>, drops earlier thoughts, renders tools and their calls
    "{% for t in tools or [] %}{{ '<|im_start|>tool\n' + t | tojson + '<|im_end|>\n' }}{% endfor"
    " %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content and"
    " loop.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}{{"
    " m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content"
    " }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson + '</call>' }}{% endfor"
    " %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
TEMPLATES = {  # name -> kind of tokenizer, template (a name of `NAMED`, Jinja text, or None)
    "none": ("pieces", None),
    "chatml": ("bytes", "chatml"),
    "llama-3": ("bytes with BOS", "llama-3"),
    "zephyr": ("bytes without markers", "zephyr"),
    "human-assistant": ("pieces, space everywhere", "human-assistant"),
    "inst": ("pieces", INST),
    "thinks": ("bytes", THINKS),
}
# the data sets of DeepSpeed-Chat, which are text, are recorded with these
TEXT = "none", "chatml", "inst"
USES = {  # name -> use, all turns, limit of tokens, truncation
    "sft": ("sft", False, 1000, "left"),
    "turns": ("sft", True, 1000, "left"),
    "cut": ("sft", True, 48, "middle"),
    "pair": ("preference", False, 1000, "left"),
    "paircut": ("preference", False, 40, "left"),
    "kto": ("unpaired", False, 60, "drop"),
    "steps": ("steps", False, 48, "left"),
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
    "stepwise": ([STEPS], {}),
    "stepwise as messages": ([{**STEPS, "prompt": [ASK]}], {}),
    "PRM800K": ([PRM800K], {}),
    "Math-Shepherd": ([SHEPHERD], {}),
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


@cache
def tokenizer_with(template: str):
    kind, text = TEMPLATES[template]
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = named_template(text, tokenizer) if text in NAMED else text
    return tokenizer


def without_nulls(value):
    if isinstance(value, dict):
        return {
            key: without_nulls(inner) for key, inner in sorted(value.items()) if inner is not None
        }
    return list(map(without_nulls, value)) if isinstance(value, list) else value


def hash_of(rows) -> str:
    """Of token rows without `digest` and `untrained_spans`; of a prompt's columns without those
    that are null."""
    left_out = ("digest", "source", "untrained_spans")
    plain = [{name: value for name, value in row.items() if name not in left_out} for row in rows]
    plain = [
        row | ({"row": without_nulls(json.loads(row["row"]))} if "row" in row else {})
        for row in plain
    ]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]


def tokens_of(case: str, template: str) -> str:
    """For each use of a case: its name and the hash of its token rows unless it is refused, as
    `prepare` refuses it. Without the files and the cache of `prepare`, which take ten times as
    long."""
    given, settings = CASES[case]
    tokenizer, found = tokenizer_with(template), []
    flags = DataFlags(data_path=["d"], **settings)
    columns = list(dict.fromkeys(name for row in given for name in row))
    rows = [dict.fromkeys(columns) | json.loads(json.dumps(row)) for row in given]
    try:
        form = detect_form("d", columns, rows, tokenizer.chat_template is not None, flags)
        check_flags_used([form], flags)
    except UserError:
        return ""
    for name, (use, all_turns, limit, truncation) in USES.items():
        step = StepData(use, replace(flags, truncation=truncation), limit, all_turns=all_turns)
        how = TokeniseSettings(form, "d", columns, tokenizer, step)
        try:
            form.require(use)
        except UserError:  # the form has nothing for this use
            continue
        made = tokenise_batch(rows, [f"d, row {n}" for n in range(len(rows))], how)
        order = torch.randperm(len(rows), generator=shared_generator(SPLIT_SEED)).tolist()
        kept = [
            row
            for number in order
            for row in made
            if row["row_index"] == number and row["fitted"] != Fitted.DROPPED
        ]
        is_bad = any(row["problem"] for row in made)
        if kept and not is_bad and any(row["fitted"] != Fitted.ANSWER_CUT for row in made):
            schema = features_of(step).arrow_schema  # numbers as they are stored
            found.append(f"{name}:{hash_of(pyarrow.Table.from_pylist(kept, schema).to_pylist())}")
    return " ".join(found)


def tokens_by_case(template: str) -> dict[str, str]:
    """The cases of which some use has token rows."""
    found = {
        case: tokens_of(case, template)
        for case in CASES
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
