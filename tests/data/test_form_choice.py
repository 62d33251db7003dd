"""What is read, and that no content is left out silently: the examples of docs/data.md, each as its
section shows it; shapes of data sets of other projects (`inputs/`); rows that can be read in two
ways."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from data_page import (
    MARK,
    PAGE,
    PARTS,
    SECTIONS,
    check_section,
    check_that_no_content_is_lost,
    spans,
)
from form_fixtures import ASK, HALL, HH, ROOF, assistant, form_of, read, user
from transformers import AutoTokenizer

from dschat_ppo.config.data_flags import DATA_FORMATS, DataFlags, StepData
from dschat_ppo.data.batches import collate_sft
from dschat_ppo.data.examples import Example
from dschat_ppo.data.form_kinds import SETS
from dschat_ppo.data.prepare import prepare
from dschat_ppo.errors import UserError
from dschat_ppo.run.start_and_end import row_sample

FORMS = set(get_args(DATA_FORMATS)) - {"auto"} - set(SETS)  # without those of features


def test_the_page_has_every_form():
    assert {section.name for section in SECTIONS} >= FORMS
    listed = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \|.*\| ([^|]*) \|$", PARTS[0], flags=re.M)
    assert [line[:2] for line in listed] == [(section.name, section.name) for section in SECTIONS]
    for section, (_, _, steps) in zip(SECTIONS, listed, strict=True):
        assert section.uses_of(steps.split(";")[0]) <= section.uses, section.name
        assert section.uses == section.uses_of(steps) or ";" in steps, section.name


CORE_SECTIONS = pytest.mark.parametrize(
    "section", [one for one in SECTIONS if one.name in FORMS], ids=lambda section: section.name
)


@CORE_SECTIONS
def test_an_example_is_read_as_the_page_shows(section):
    check_section(section)


def test_the_page_lists_the_data_sets_of_deepspeed_chat():
    table = PAGE.read_text(encoding="utf-8").split("## Data sets of DeepSpeed-Chat\n")[1]
    lines = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    found = {spans(cells[0])[0]: (tuple(spans(cells[1])), cells[-1].strip()) for cells in lines}
    steps = {True: "1, 2, 3", False: "1, 3"}
    columns = {name: tuple(known.columns.split()) for name, known in SETS.items()}
    assert found == {
        name: (columns[name], steps[known.rejected is not None]) for name, known in SETS.items()
    }


INPUTS = Path(__file__).parent / "inputs"
LAMP, COLOUR = "user: Where is the lamp?", "user: And its colour?"
EARLIER = [LAMP, "assistant: In the hall."]
CHAT = {"apply_chat_template": True}
IN_THE_HALL, LOOK = "The lamp is in the hall.", "Look for the lamp yourself."
# File -> (flags, use, the prompt of its first row, and its answers).
SHAPES = {
    "question_pairs_plain": (
        {},
        "preference",
        [LAMP],
        ["The lamp is in the hall.", "The lamp is lost."],
    ),
    "input_pairs": (
        {},
        "preference",
        ["system: Be brief.", LAMP],
        ["It is in the hall.", "It is lost."],
    ),
    "prompt_response_history": ({}, "sft", [*EARLIER, COLOUR + "\n"], ["red."]),
    "query_response_history": ({}, "sft", ["system: Be brief.", *EARLIER, COLOUR], ["red."]),
    "images_placeholder": (
        {"ignore_columns": ["images"]},
        "sft",
        ["user: <image>What is the lamp's colour?"],
        ["red."],
    ),
    "kto_messages": ({}, "unpaired", [LAMP], ["In the hall."]),
    "kto_string_labels": ({}, "unpaired", "Where is the lamp?\n", ["In the hall."]),
    "rejected_messages": ({}, "preference", [LAMP], ["In the hall.", "Find it."]),
    "ab_better_id": (
        {"apply_chat_template": True},
        "preference",
        [LAMP],
        ["In the hall.", "Find it."],
    ),
    "roles_capital": ({}, "sft", [LAMP], ["In the hall."]),
    "roles_model": ({}, "sft", [LAMP], ["In the hall."]),
    "tool_call_roles": (
        {},
        "sft",
        [LAMP, "assistant: ", 'tool: {"room": "hall"}'],
        ["In the hall."],
    ),
    "user_assistant": ({}, "sft", [LAMP], ["In the hall."]),
    "question_solution_answer": (
        {},
        "sft",
        [LAMP],
        ["LONG REASONING: The lamp is in the hall. So \\boxed{hall}."],
    ),
    "unsloth_gsm8k": (
        {"prompt_column": "prompt", "ignore_columns": ["question"]},
        "prompt",
        [
            "system: Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n"
            "...\n</answer>",
            LAMP,
        ],
        [],
    ),
    "turns_input_output": (
        {},
        "sft",
        [LAMP, "assistant: The lamp is in the hall.", COLOUR],
        ["Red."],
    ),
    "dialogue_list": ({}, "sft", [LAMP], ["In the hall."]),
    "mixed_output_types": ({}, "sft", ["user: What is 0 + 1?"], ["1"]),
    "alpaca_empty_instruction": ({}, "sft", [LAMP], ["In the hall."]),
    "json_string_pairs": ({}, "preference", [LAMP], ["In the hall.", "Find it."]),
    "preference_strength": (CHAT, "preference", [LAMP], [IN_THE_HALL, LOOK]),
    "arena_conversations": ({}, "preference", [LAMP], [IN_THE_HALL, LOOK]),
    "is_safe": ({**CHAT, "label_column": "is_safe"}, "unpaired", [LAMP], [IN_THE_HALL]),
    "shp_other_name": (
        {"data_format": "stanfordnlp/SHP"},
        "preference",
        " Human: Where is the lamp? Assistant:",
        [f" {IN_THE_HALL}", f" {LOOK}"],
    ),
    "alpaca_dpo_list": (
        {"chosen_column": "output.0", "rejected_column": "output.1"},
        "preference",
        [LAMP],
        ["In the hall.", "Find it."],
    ),
    "openai_preference_tools": ({}, "preference", [LAMP], ["In the hall.", "No idea."]),
    "turn_weight": ({}, "sft", [LAMP, "assistant: WRONG DRAFT", "user: Sure?"], ["In the hall."]),
    "turn_loss_mask": (
        {},
        "sft",
        [LAMP, "assistant: WRONG DRAFT", "user: Sure?"],
        ["In the hall."],
    ),
    "turn_train_false": (
        {},
        "sft",
        [LAMP, "assistant: WRONG DRAFT", "user: Sure?"],
        ["In the hall."],
    ),
}


WHERE, HERE, NEXT, RED = TURNS = ["Where is the lamp?", "In the hall.", "And its colour?", "Red."]
REST = [assistant(HERE), user(NEXT), assistant(RED)]


@pytest.mark.parametrize(
    "row",
    [
        {"conversation": [{"input": WHERE, "output": HERE}, {"input": NEXT, "output": RED}]},
        {"messages": [{"human": WHERE, "assistant": HERE}, {"human": NEXT, "assistant": RED}]},
        {"messages": [{"question": WHERE, "answer": HERE}, {"question": NEXT, "answer": RED}]},
        {"conversations": [[WHERE, HERE], [NEXT, RED]]},
        {"messages": [[ASK, *REST]]},
        {"prompt": [ASK], "completion": REST},
        {"prompt": WHERE, "completion": REST},
        {"question": WHERE, "answer": REST},
    ],
)
def test_turns_are_pairs_or_lists_and_an_answer_may_be_several_messages(row):
    [example] = read([row], "sft")
    assert [turn["content"] for turn in example.prompt] + example.answers == TURNS
    assert [turn["role"] for turn in example.prompt] == ["user", "assistant", "user"]


def test_turns_are_not_read_where_something_would_be_lost():
    asked = {"input": "Where?", "output": "Here."}
    assert read([{"conversation": [asked, {"input": "And?", "output": None}]}], "prompt")
    for lost in ({**asked, "weight": 0}, {**asked, "system": "Be brief."}):
        with pytest.raises(UserError, match="message 1 of 'conversation' has no role"):
            read([{"conversation": [lost]}], "sft")
    named = [["user", "Where is the lamp?"], ["Assistant", "In the hall."]]
    [pair] = read([{"messages": named}], "sft")
    assert pair == Example([ASK], ["In the hall."])
    row = {"messages": [[ASK, HALL], [ASK, ROOF]]}
    with pytest.raises(UserError, match="holds 2 conversations; --messages_column messages.0"):
        read([row], "sft")
    assert read([row], "sft", messages_column="messages.0")[0].answers == ["In the hall."]


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (INPUTS / f"{name}.jsonl").read_text().splitlines()]


def test_messages_of_a_tree_are_refused_and_the_page_makes_conversations_of_them(tmp_path):
    rows = rows_of("oasst_flat")
    with pytest.raises(
        UserError, match="a tree .*best_paths.py in docs/data.md.*--ignore_columns role "
    ):
        read(rows, "sft")
    assert read(rows, "sft", ignore_columns=["role"])
    [script] = re.findall(r"```python\n(# best_paths.py.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "best_paths.py").write_text(script)
    made = tmp_path / "made.jsonl"
    command = [sys.executable, tmp_path / "best_paths.py", INPUTS / "oasst_flat.jsonl", made]
    subprocess.run(command, check=True)
    examples = read([json.loads(line) for line in made.read_text().splitlines()], "sft")
    assert examples[0] == Example([ASK], ["The lamp is in the hall."])
    assert len(examples) == sum(row["parent_id"] is None for row in rows)


@pytest.mark.parametrize(
    ("text", "role"), [("text", "author"), ("content", "role"), ("message", "speaker")]
)
def test_rows_of_one_message_each_are_refused(text, role):
    rows = [{"id": 1, role: "User", text: "Where?"}, {"id": 2, role: "assistant", text: "There."}]
    with pytest.raises(UserError, match=f"'{text}' is one message, which '{role}' says") as caught:
        read(rows, "sft")
    *_, flags = ways_of(str(caught.value))
    assert [one.answers for one in read(rows, "sft", **flags)] == [["Where?"], ["There."]]
    rows[0][role] = "Ann"  # no role, so perhaps who wrote a text
    assert read([{**row, "text": "A text."} for row in rows], "sft")


def test_a_conversation_in_one_text_is_told_what_to_do_with():
    rows = rows_of("glaive_chat_text")
    with pytest.raises(UserError, match="--data_format FILE.py:FUNCTION makes messages") as caught:
        read(rows, "sft")
    [flags] = ways_of(str(caught.value))
    assert read(rows, "sft", **flags)[0].answers == [rows[0]["chat"]]


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_of_another_project_is_read(name):
    flags, use, prompt, answers = SHAPES[name]
    example = read(rows_of(name), use, **flags)[0]
    found = (
        example.prompt
        if isinstance(example.prompt, str)
        else [f"{turn['role']}: {turn['content']}" for turn in example.prompt]
    )
    assert found == prompt and example.answers == answers
    if isinstance(example.prompt, list):
        assert all(set(turn) <= {"role", "content", "tool_calls"} for turn in example.prompt)


@pytest.mark.parametrize("name", ["turn_weight", "turn_loss_mask"])
def test_a_turn_that_its_owner_excluded_is_context_and_no_target(name, assets, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    flags = DataFlags(
        [str(INPUTS / f"{name}.jsonl")], data_split="1,0,0", data_output_path=str(tmp_path)
    )
    rows = prepare(StepData("sft", flags, 400, all_turns=True), tokenizer).train
    for number in range(2):
        batch = collate_sft(rows, [number], 0, train_on_prompt=False)
        assert "WRONG DRAFT" in tokenizer.decode(batch.input_ids[0])
        trained = tokenizer.decode(batch.input_ids[0][batch.loss_mask[0]])
        assert "WRONG" not in trained and "DRAFT" not in trained and trained.startswith("In the ")
        assert "⟦WRONG" not in row_sample(tokenizer, rows[number])


def test_an_excluded_turn_is_no_answer_and_may_be_left_out_of_a_prompt():
    kept = [ASK, assistant("In the hall."), user("Sure?"), assistant("No.", train=False)]
    assert read([{"messages": kept}], "prompt")[0].prompt == kept[:3]
    with pytest.raises(UserError, match="the answer of 'messages' is excluded from training"):
        read([{"messages": kept}], "sft")
    answer = [{"prompt": [ASK], "completion": [assistant("No.", loss=0)]}]
    assert read(answer, "prompt")[0].prompt == [ASK]
    found = read(
        [
            {
                "messages": [
                    ASK,
                    assistant("Yes.", weight=1),
                    {**ASK, "weight": 0},
                    assistant("c", weight="1.0"),
                ]
            }
        ],
        "sft",
    )
    assert "weight" not in str(found) and found[0].context == ()
    for key in ("trainable", "training", "weights"):
        turns = [
            ASK,
            assistant("No.", **{key: False}),
            user("Sure?"),
            assistant("Yes.", **{key: "true"}),
        ]
        assert [one.context for one in read([{"messages": turns}], "sft")] == [(1,)]
    assert read([{"messages": [ASK, assistant("Yes.", mask=1)]}], "sft")[0].answers == ["Yes."]
    asked = [ASK, assistant("No.", weight=0), user("Sure?")]
    assert len(read([{"messages": asked}], "prompt")[0].prompt) == 3, (
        "a prompt after an excluded turn"
    )


def test_other_roles_are_named_by_a_flag_and_a_message_of_the_system_too():
    rows = [
        {
            "messages": [
                {"role": "Customer", "content": "Hi"},
                {"role": "agent", "content": "Hello."},
            ]
        }
    ]
    with pytest.raises(UserError, match="role 'Customer'.*--role_names"):
        read(rows, "sft")
    [example] = read(
        rows, "sft", role_names=["customer=user", "agent=assistant"], system_message="Be brief."
    )
    assert example.prompt == [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
    ] and example.answers == ["Hello."]
    for role in ("system", "developer"):  # a row's own message counts
        turns = [{"role": role, "content": "Be long."}, ASK]
        [example] = read(
            [{"messages": [*turns, assistant("x")]}], "sft", system_message="Be brief."
        )
        assert example.prompt == turns
    with pytest.raises(UserError, match="--system_message precedes chat messages, .*; omit it"):
        form_of(
            [{"prompt": "P", "chosen": "c", "rejected": "r"}],
            name="Dahoas/rm-static",
            system_message="Be brief.",
        )
    plain = form_of([{"text": "Once."}], system_message="Be brief.")  # in a mixture with chats
    assert "--system_message does not apply" in plain.description
    assert plain.read({"text": "Once."}, "sft")[0].prompt == ""


@CORE_SECTIONS
def test_a_column_with_content_is_read_or_named_whatever_the_form(section):
    check_that_no_content_is_lost(section)


@pytest.mark.parametrize(
    ("column", "empty", "value"),
    [
        ("images", [], ["a.png"]),
        ("loss_mask", None, [0]),
        ("weight", 1, 0),
        ("train", True, "false"),
        ("loss", 0.7, 0),
        ("input", "", MARK),
        ("thinking", "a", MARK),  # a copy in the first rows
        ("input", "Q:", MARK),
    ],
)
@pytest.mark.parametrize("use", ["sft", "prompt"])
def test_content_that_comes_after_the_first_rows_is_refused_too(column, empty, value, use):
    row = {"prompt": "Q: ", "response": "a", column: empty}
    form = form_of([row] * 21)
    assert form.read(row, use)
    if column == "thinking" and use == "prompt":  # what reward functions get
        assert form.read({**row, column: value}, use)
        return
    with pytest.raises(UserError, match=f"^'{column}' holds content, .*--ignore_columns {column}"):
        form.read({**row, column: value}, use)
    assert form_of([row] * 21, ignore_columns=[column]).read({**row, column: value}, use)


def test_a_copy_that_comes_after_the_first_rows_is_none_there_either():
    """Beside `messages`, the columns of their question and answer; the first rows have none."""
    row = {
        "messages": [user("Where?"), assistant("Here, in the hall.")],
        "question": None,
        "answer": None,
        "input": "",
    }
    late = {**row, "question": "Where?", "input": "Where?", "answer": "Here, in the hall."}
    pair = {"prompt": "Q: ", "chosen": "yes", "rejected": "no", "messages": None}
    for one, other in ((row, late), (pair, {**pair, "messages": [user("Q:"), assistant("yes")]})):
        form = form_of([one] * 21)
        for use in form.uses:
            assert form.read(other, use) == form.read(one, use)


@pytest.mark.parametrize(
    "more",
    [
        {"loss_mask": [1, 1.0]},
        {"weights": [[1], True]},
        {"weight": "1"},
        {"weight": math.nan},
        {"context": math.nan},
        {"train": True},
        {"training": "train"},
        {"loss": 1.37},
        {"reasoning": "on"},
        {"thinking": False},
        {"id": 7, "category": "maths", "score_chosen": 2.5},
    ],
)
def test_columns_that_change_nothing_are_named_as_unused(more):
    row = {"prompt": "Q:", "response": "a"}
    found = form_of([row | more])
    assert f"other columns: {', '.join(map(repr, more))}" in found.description
    assert found.read(row | more, "sft") == form_of([row]).read(row, "sft")
    for label in (1, "negative"):  # as in IMDB
        found = form_of([{"text": "A fine film.", "label": label}])
        assert found.name == "text" and "other columns: 'label'" in found.description


def test_tools_beside_messages_in_one_object_are_used():
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    good, bad = (
        {
            "messages": [
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": text},
            ],
            "tools": tools,
        }
        for text in ("Here.", "No.")
    )
    for rows in ([{"messages": good}], [{"chosen": json.dumps(good), "rejected": json.dumps(bad)}]):
        assert [example.tools for example in read(rows, "sft")] == [tools]
    other = json.dumps({**bad, "tools": [{"type": "function", "function": {"name": "other"}}]})
    with pytest.raises(UserError, match="'rejected' describes other tools"):
        read([{"chosen": json.dumps(good), "rejected": other}], "preference")


def test_tools_beside_messages_that_a_dot_leads_to_are_used():
    """As in OpenAI's preference fine-tuning; by the columns' names, and by flags."""
    rows = rows_of("openai_preference_tools")
    tools = [row["input"]["tools"] for row in rows]
    flags = {"prompt_column": "input.messages", "chosen_column": "preferred_output"}
    flags["rejected_column"] = "non_preferred_output"
    for given in ({}, flags):
        assert [example.tools for example in read(rows, "preference", **given)] == tools


def test_a_pair_may_exclude_a_turn_of_one_answer_alone():
    whole = [ASK, assistant("Hm."), user("So?")]
    chosen = [ASK, assistant("Hm.", weight=0), user("So?"), assistant("Here.")]
    for asked in ({}, {"prompt": whole}):
        row = {**asked, "chosen": chosen, "rejected": [*whole, assistant("No.")]}
        [pair] = read([row], "preference")
        assert pair.prompt == whole and pair.answers == ["Here.", "No."] and pair.context == (1,)


def test_an_answer_that_is_json_with_a_role_is_an_answer():
    for answer in (
        '{"role": "admin", "name": "Ann"}',
        '[{"role": "admin"}]',
        '{"from": "Rome", "value": 3}',
    ):
        row = {"prompt": "Give JSON:", "chosen": answer, "rejected": "x"}
        assert read([row], "preference")[0].answers == [answer, "x"]


def test_lists_that_are_stored_as_json_text_are_read():
    """As in CSV files."""
    for history in ([["Where is the lamp?", "In the hall."]], [ASK, assistant("In the hall.")]):
        [example] = read(
            [{"prompt": "And its colour?", "response": "red.", "history": json.dumps(history)}],
            "sft",
        )
        assert [turn["content"] for turn in example.prompt] == [
            "Where is the lamp?",
            "In the hall.",
            "And its colour?",
        ]
    ranked = {"prompt": "Q:", "responses": '["a", "b"]', "scores": "[1, 2]"}
    assert [one.answers for one in read([ranked], "preference")] == [["b", "a"]]


def test_the_better_answer_is_named_by_its_place_the_end_of_its_column_or_the_column():
    places = (0.0, 1.0, 1, "a", "B", "Answer_b")
    rows = [
        {"question": "Where?", "answer_a": "Here.", "answer_b": "No.", "better": place}
        for place in places
    ]
    assert [one.answers[0] for one in read(rows, "preference")] == [
        "Here.",
        "No.",
        "No.",
        "Here.",
        "No.",
        "No.",
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("Count to 10."), assistant("It is 10.")], "weight": 0},
        {"messages": [user("a"), assistant("b")], "functions": '[{"name": "f"}]'},
        {
            "prompt": "Why?",
            "chosen": " So.",
            "rejected": " No.",
            "history": ["Hi", "Hello", "Why?"],
        },
        {
            "question": "the hill",
            "answer": "Brocken",
            "context": "We speak of the hill in the Harz.",
        },
    ],
)
def test_what_stands_in_the_texts_by_chance_is_no_copy_of_them(row):
    """Digits of a weight are in a number, and the prompt is in what surrounds it; the rest would be
    lost."""
    with pytest.raises(UserError, match="--ignore_columns"):
        form_of([row])


TALK = [user("Why?"), assistant("So.")]


def ways_of(message: str) -> list[dict]:
    """The flags of each way out that a message says to read the rows."""
    ways = []
    for way in re.findall(r"; (--[^;]*?) reads ", message):
        flags: dict = {}
        for flag in way.removeprefix("--").split(" --"):
            name, *values = flag.split(" ")
            flags[name] = values if name == "ignore_columns" else values[0]
        ways.append(flags)
    return ways


LONG = "The lamp was seen in the hall.\nSo it is in the hall."
Q = {"question": "Where is the lamp?", "answer": "hall"}
PROMPT = [{"role": "system", "content": "Think first."}, ASK]
OF_ANSWERS = [  # rows, use, and for each way out the prompt and the answer
    ({**Q, "rationale": LONG}, "sft", [("question", "rationale"), ("question", "answer")]),
    ({**Q, "cot": LONG}, "sft", [("question", "cot"), ("question", "answer")]),
    ({**Q, "Complex_CoT": LONG}, "sft", [("question", "Complex_CoT"), ("question", "answer")]),
    (
        {**Q, "reasoning_trace": LONG},
        "sft",
        [("question", "reasoning_trace"), ("question", "answer")],
    ),
    (
        {**Q, "modelExplanation": LONG},
        "sft",
        [("question", "modelExplanation"), ("question", "answer")],
    ),
    (
        {**Q, "answer": LONG, "solution": "in the hall, I think"},
        "sft",
        [("question", "solution"), ("question", "answer")],
    ),
    (
        {"prompt": "Add. ", "response": "a", "code": "f(1)"},
        "sft",
        [("prompt", "code"), ("prompt", "response")],
    ),
    (
        {"text": "Add numbers.", "code": "a+b = c", "test_list": ["t"]},
        "sft",
        [("text", "code"), (None, "text")],
    ),
    (
        {
            "problem": "Why?",
            "solution": LONG,
            "answer": "so",
            "generations": ["So it is.", "No it is."],
        },
        "sft",
        [("problem", "generations.0"), ("problem", "answer"), ("problem", "solution")],
    ),
    (
        {"source": "Where is it?", "rationale": LONG, "target": "hall"},
        "sft",
        [("source", "target"), ("source", "rationale")],
    ),
    (
        {"question": "Write it.", "solutions": '["print(1)", "print(2)"]', "difficulty": "easy"},
        "sft",
        [("question", "solutions.0")],
    ),
    (
        {"prompt": "Write it.", "canonical_solution": "return a\n"},
        "sft",
        [("prompt", "canonical_solution")],
    ),
    ({"prompt": [ASK], "answer": "hall"}, "sft", [("prompt", "answer")]),
    (
        {**Q, "question": "q lamp", "prompt": PROMPT},
        "prompt",
        [("prompt", None), ("question", None)],
    ),
    ({"input": "Where?", "output": "Here."}, "sft", [("input", "output")]),
    ({"Problem": "Why?", "Answer": 4}, "prompt", [("Problem", None)]),
]


@pytest.mark.parametrize(("row", "use", "readings"), OF_ANSWERS)
def test_each_way_out_of_a_message_reads_what_it_says(row, use, readings):
    """Columns of answers and thoughts, in step 1; the question beside its prompt, in step 3."""
    with pytest.raises(UserError) as caught:
        read([row, row], use)
    ways = ways_of(str(caught.value))
    assert len(ways) == len(readings), caught.value
    for flags, (prompt, answer) in zip(ways, readings, strict=True):
        [example, _] = read([row, row], use, **flags)
        asked, said = example.prompt, list(example.answers)
        if prompt is not None and prompt != "prompt":
            asked = asked if isinstance(asked, str) else asked[-1]["content"]
        assert asked == (row[prompt] if prompt else "")
        if answer is not None and "." not in answer:
            assert said == [row[answer]]
        elif answer is not None:
            assert said in (["So it is."], ["print(1)"])


@pytest.mark.parametrize(
    ("row", "use", "prompt", "answers", "truth"),
    [
        ({**Q, "solution": LONG}, "sft", [ASK], [LONG], "hall"),
        ({**Q, "solution": LONG}, "prompt", [ASK], [], "hall"),
        ({"problem": ASK["content"], "solution": LONG}, "sft", [ASK], [LONG], LONG),
        ({"problem": ASK["content"], "answer": "hall"}, "prompt", [ASK], [], "hall"),
        (
            {"problem": ASK["content"], "answer": "hall", "solution": ""},
            "sft",
            [ASK],
            ["hall"],
            "hall",
        ),
        ({**Q, "rationale": LONG, "generations": [LONG]}, "prompt", [ASK], [], "hall"),
        ({**Q, "prompt": PROMPT}, "prompt", PROMPT, [], "hall"),
        ({**Q, "prompt": PROMPT, "solution": LONG}, "prompt", PROMPT, [], "hall"),
        (
            {"messages": [ASK, assistant(LONG)], "problem": ASK["content"], "solution": LONG},
            "sft",
            [ASK],
            [LONG],
            LONG,
        ),
        # names of countries, languages and kinds, and switches
        (
            {**Q, "country_code": "US", "cot_type": "long text", "solution_is_valid": "Yes it is"},
            "sft",
            [ASK],
            ["hall"],
            "hall",
        ),
    ],
)
def test_a_solution_is_the_answer_and_what_only_rewards_use_is_no_loss(
    row, use, prompt, answers, truth
):
    [example, _] = read([row, row], use)
    assert (example.prompt, list(example.answers), example.truth) == (prompt, answers, truth)


@pytest.mark.parametrize(
    ("row", "column", "form", "other"),
    [
        (
            {"prompt": "Q:", "question": "Why?", "answer": "So."},
            "prompt",
            "question_answer",
            "prompt_response",
        ),
        (
            {"prompt": "Q:", "response": "r", "messages": TALK},
            "prompt",
            "messages",
            "prompt_response",
        ),
        (
            {"prompt": "Q:", "response": "r", "responses": ["a", "b"], "scores": [1, 2]},
            "response",
            "ranked",
            "prompt_response",
        ),
        (
            {"prompt": "Why?", "chosen": " So.", "rejected": " No.", "messages": [ASK, HALL]},
            "messages",
            "preference",
            "messages",
        ),
        ({"messages": [ASK, HALL], "text": "Something else."}, "text", "messages", "text"),
    ],
)
def test_a_column_that_another_form_reads_stops_with_the_flags_that_choose(
    row, column, form, other
):
    with pytest.raises(UserError) as caught:
        form_of([row])
    message = str(caught.value)
    assert message.startswith("d.jsonl: '") and "\n" not in message
    assert f"that the form {form} does not use" in message
    assert f"'{column}' holds content, " in message
    assert len(ways_of(message)) >= (1 if other == "text" else 2)
    for flags in ways_of(message):
        assert form_of([row], **flags)
    for name in (form, other) if other != "text" else (form,):
        assert form_of([row], data_format=name).name == name


@pytest.mark.parametrize(
    ("row", "column", "flags", "answer"),
    [
        (
            {"prompt": "Q:", "response": "r", "completion": "c"},
            "completion",
            {"response_column": "completion"},
            "c",
        ),
        (
            {"prompt": "P:", "question": "Q:", "responses": ["a", "b"], "scores": [1, 2]},
            "question",
            {"prompt_column": "question"},
            "b",
        ),
        (
            {"prompt": "Q:", "response": "r", "messages": TALK},
            "prompt",
            {"messages_column": "messages"},
            "So.",
        ),
        (
            {"prompt": "Tell of lamps:", "text": " They shine."},
            "text",
            {"response_column": "text"},
            " They shine.",
        ),
    ],
)
def test_two_columns_for_one_role_need_a_choice(row, column, flags, answer):
    with pytest.raises(
        UserError, match=rf"^d\.jsonl: '{column}' holds .* does not use.*--ignore_columns {column}"
    ):
        form_of([{**row, "response": None, "question": None} | row, row])
    assert [example.answers for example in read([row], "sft", **flags)] == [[answer]]


def test_a_difference_in_any_of_the_first_rows_counts():
    # a form must read half of them
    transcripts = [{"text": f"{HH} a"}, {"text": "no transcript"}, {"text": "none"}]
    assert [form_of(transcripts[:count]).name for count in (2, 3)] == ["hh", "text"]
    same = {"prompt": "Why?", "messages": [user("Why?"), assistant("So.")]}
    assert form_of([same] * 20).name == "messages"
    with pytest.raises(UserError, match="'prompt' holds content, 'Who.'"):
        form_of([same] * 19 + [same | {"prompt": "Who?"}])
    assert form_of([same] * 20 + [same | {"prompt": "Who?"}]).name == "messages"


@pytest.mark.parametrize(
    ("row", "form"),
    [
        (
            {"conversation": TALK, "model": "m-1", "user": "u7"},
            "sharegpt",
        ),  # WildChat: who asked and answered
        (
            {"id": "1", "system_prompt": "Be.", "question": "Why?", "response": "So."},
            "question_answer",
        ),  # OpenOrca
        # UltraChat: the prompt is the first message of the user
        (
            {
                "prompt": "Why?",
                "messages": [user("Why?"), assistant("So."), user("Oh?"), assistant("Yes.")],
            },
            "messages",
        ),
        ({"messages": [ASK, HALL], "text": "<s>Where is the lamp?</s> In the hall."}, "messages"),
        (
            {"chosen": [ASK, HALL], "rejected": [ASK, ROOF], "messages": [ASK, HALL]},
            "implicit_preference",
        ),
        ({"prompt": "Q:", "chosen": " yes", "rejected": " no", "text": "Q: yes"}, "preference"),
        ({"prompt": "Q:", "response": "b", "responses": ["a", "b"], "scores": [1, 2]}, "ranked"),
        (
            {"prompt": "Q:", "output": "A reference.", "reasoning": "Hm."},
            "prompt_response",
        ),  # for rewards
    ],
)
def test_columns_that_repeat_each_other_are_no_second_reading(row, form):
    assert form_of([row]).name == form


@pytest.mark.parametrize(
    ("rows", "name", "words"),
    [
        (
            [{"question": "Why?", "answers": {"text": ["So"]}}],
            "ranked",
            "'answers' is an object",
        ),  # as in SQuAD
        (
            [{"conversation": [{"from": "customer", "value": "Why?"}]}],
            "sharegpt",
            "role 'customer'.*--role_names",
        ),
        (
            [{"messages": None, "id": 1}] * 9 + [{"messages": TALK, "id": 2}],
            "messages",
            "'messages' is null",
        ),
    ],
)
def test_rows_that_no_form_can_read_are_warned_of_and_say_what_is_wrong(rows, name, words):
    form = form_of(rows)
    assert form.name == name
    assert form.warning.startswith(
        f"most of the first rows do not fit the form {name}; --prompt_column"
    )
    with pytest.raises(UserError, match=words):
        form.read(rows[0], form.uses[0])


# Prompts and answers without anything between them


@pytest.mark.parametrize(
    ("glued", "apart"),
    [
        (("What is 2+2?", "4"), ("What is 2+2?", " 4")),
        (("你好。", "好"), ("2+2=", "4")),
        (('"Why?"', "So"), ("Why", ", so")),
    ],
)
def test_text_whose_answer_is_glued_to_the_prompt_stays_text_with_a_warning(glued, apart):
    row = {"prompt": glued[0], "response": glued[1]}
    form = form_of([row])
    assert form.read(row, "sft")[0] == Example(glued[0], [glued[1]])
    assert repr(f"...{''.join(glued)}...") in form.warning
    assert "the text is used as it is; --apply_chat_template True" in form.warning
    for flags in ({"apply_chat_template": True}, {"input_template": "Q: {} A: "}):
        assert form_of([row], **flags).warning == "", flags
    form = form_of([{"prompt": apart[0], "response": apart[1]}])  # something is between them
    assert (form.rendering, form.warning) == ("text", "")


def test_the_row_of_the_readme_is_read_with_and_without_a_chat_template():
    page = (PAGE.parent.parent / "README.md").read_text(encoding="utf-8")
    [row] = [json.loads(row) for row in re.findall(r'`({"prompt": [^`]*})`', page)]
    for has_template in (False, True):
        for use, answers in (
            ("sft", [row["chosen"]]),
            ("preference", [row["chosen"], row["rejected"]]),
            ("prompt", []),
        ):
            found = read([row], use, has_template=has_template)
            assert found == [Example(row["prompt"], answers)], (has_template, use)


def test_glued_rows_count_from_more_than_half():
    glued, apart = {"prompt": "Why?", "response": "So"}, {"prompt": "Why?", "response": " So"}
    assert form_of([glued, apart]).rendering == "text"
    pair, ranked = (
        {"prompt": "Why?", "chosen": "a", "rejected": "b"},
        {"responses": ["a", "b"], "scores": [1, 2]},
    )
    warning = form_of([glued], has_template=False).warning
    assert warning.startswith("nothing separates prompt and answer: '...Why?So...'; ")
    assert "--input_template" in warning and "--apply_chat_template" not in warning
    for rows in (
        [glued, apart, glued],
        [pair],
        [{**glued, "label": True}],
        [{"prompt": "Why?", **ranked}],
    ):
        form = form_of(rows)
        assert form.rendering == "text" and form.warning.startswith("nothing separates")
