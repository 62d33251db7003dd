"""Shapes of data sets of other projects (`inputs/`), and the rule behind them: no content is left out silently."""

import json
import math
from pathlib import Path

import pytest
from form_fixtures import ASK, assistant, form_of, read, user
from test_docs_examples import SECTIONS
from transformers import AutoTokenizer

from dschat_ppo.config.data_flags import DataFlags, StepData
from dschat_ppo.data.batches import collate_sft
from dschat_ppo.data.prepare import prepare
from dschat_ppo.errors import UserError
from dschat_ppo.run.start_and_end import row_sample

INPUTS = Path(__file__).parent / "inputs"
LAMP, COLOUR = "user: Where is the lamp?", "user: And its colour?"
EARLIER = [LAMP, "assistant: In the hall."]
# File -> (flags, use, the prompt of its first row, and its answers).
SHAPES = {
    "question_pairs_plain": ({}, "preference", [LAMP], ["The lamp is in the hall.", "The lamp is lost."]),
    "input_pairs": ({}, "preference", ["system: Be brief.", LAMP], ["It is in the hall.", "It is lost."]),
    "prompt_response_history": ({}, "sft", [*EARLIER, COLOUR + "\n"], ["red."]),
    "query_response_history": ({}, "sft", ["system: Be brief.", *EARLIER, COLOUR], ["red."]),
    "images_placeholder": (
        {"ignore_columns": ["images"]}, "sft", ["user: <image>What is the lamp's colour?"], ["red."]
    ),
    "kto_messages": ({}, "unpaired", [LAMP], ["In the hall."]),
    "kto_string_labels": ({}, "unpaired", "Where is the lamp?\n", ["In the hall."]),
    "rejected_messages": ({}, "preference", [LAMP], ["In the hall.", "Find it."]),
    "ab_better_id": ({"apply_chat_template": True}, "preference", [LAMP], ["In the hall.", "Find it."]),
    "roles_capital": ({}, "sft", [LAMP], ["In the hall."]),
    "roles_model": ({}, "sft", [LAMP], ["In the hall."]),
    "tool_call_roles": ({}, "sft", [LAMP, "assistant: ", 'tool: {"room": "hall"}'], ["In the hall."]),
    "user_assistant": ({}, "sft", [LAMP], ["In the hall."]),
    "dialogue_list": ({}, "sft", [LAMP], ["In the hall."]),
    "mixed_output_types": ({}, "sft", ["user: What is 0 + 1?"], ["1"]),
    "alpaca_empty_instruction": ({}, "sft", [LAMP], ["In the hall."]),
    "json_string_pairs": ({}, "preference", [LAMP], ["In the hall.", "Find it."]),
    "turn_weight": ({}, "sft", [LAMP, "assistant: WRONG DRAFT", "user: Sure?"], ["In the hall."]),
    "turn_loss_mask": ({}, "sft", [LAMP, "assistant: WRONG DRAFT", "user: Sure?"], ["In the hall."]),
    "turn_train_false": ({}, "sft", [LAMP, "assistant: WRONG DRAFT", "user: Sure?"], ["In the hall."]),
}  # fmt: skip


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (INPUTS / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_of_another_project_is_read(name):
    flags, use, prompt, answers = SHAPES[name]
    example = read(rows_of(name), use, **flags)[0]
    found = example.prompt if isinstance(example.prompt, str) else [
        f"{turn['role']}: {turn['content']}" for turn in example.prompt
    ]  # fmt: skip
    assert found == prompt and example.answers == answers
    if isinstance(example.prompt, list):
        assert all(set(turn) <= {"role", "content", "tool_calls"} for turn in example.prompt)


@pytest.mark.parametrize(("name", "streaming"), [("turn_weight", False), ("turn_loss_mask", True)])
def test_a_turn_that_its_owner_excluded_is_context_and_no_target(name, streaming, assets, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    given = {"streaming": True, "streaming_rows": 4} if streaming else {}
    flags = DataFlags([str(INPUTS / f"{name}.jsonl")], data_split="1,0,0", data_output_path=str(tmp_path), **given)
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
        [{"messages": [ASK, assistant("Yes.", weight=1), {**ASK, "weight": 0}, assistant("c", weight="1.0")]}], "sft"
    )
    assert "weight" not in str(found) and found[0].context == ()
    for key in ("trainable", "training", "weights"):
        turns = [ASK, assistant("No.", **{key: False}), user("Sure?"), assistant("Yes.", **{key: "true"})]
        assert [one.context for one in read([{"messages": turns}], "sft")] == [(1,)]
    assert read([{"messages": [ASK, assistant("Yes.", mask=1)]}], "sft")[0].answers == ["Yes."]
    asked = [ASK, assistant("No.", weight=0), user("Sure?")]
    assert len(read([{"messages": asked}], "prompt")[0].prompt) == 3, "a prompt after an excluded turn"


def test_other_roles_are_named_by_a_flag_and_a_message_of_the_system_too():
    rows = [{"messages": [{"role": "Customer", "content": "Hi"}, {"role": "agent", "content": "Hello."}]}]
    with pytest.raises(UserError, match="role 'Customer'.*--role_names"):
        read(rows, "sft")
    [example] = read(rows, "sft", role_names=["customer=user", "agent=assistant"], system_message="Be brief.")
    assert example.prompt == [{"role": "system", "content": "Be brief."}, user("Hi")] and example.answers == ["Hello."]
    for role in ("system", "developer"):  # a row's own message counts
        turns = [{"role": role, "content": "Be long."}, ASK]
        [example] = read([{"messages": [*turns, assistant("x")]}], "sft", system_message="Be brief.")
        assert example.prompt == turns
    with pytest.raises(UserError, match="--system_message precedes chat messages, .*; omit it"):
        form_of([{"prompt": "P", "chosen": "c", "rejected": "r"}], name="Dahoas/rm-static", system_message="Be brief.")
    plain = form_of([{"text": "Once."}], system_message="Be brief.")  # in a mixture with chats
    assert "--system_message does not apply" in plain.description
    assert plain.read({"text": "Once."}, "sft")[0].prompt == ""


MARK = "stands nowhere else"
OTHERS = {
    "question": MARK, "input": MARK, "context": MARK, "system": MARK, "prompt": MARK, "images": [f"{MARK}.jpg"],
    "messages": [user(MARK), assistant(MARK)], "history": [[MARK, MARK]], "loss_mask": [0, 1], "label": True,
    "reasoning": MARK, "chosen": MARK, "response": MARK, "text": MARK,
}  # fmt: skip
OF_REWARDS = {"response", "label", "reasoning"}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_column_with_content_is_read_or_named_whatever_the_form(section):
    """Either what the column holds is part of what is read, or the run ends with the column's name and a way out."""
    for column in OTHERS.keys() - section.rows[0].keys():
        rows, form = [{**row, column: OTHERS[column]} for row in section.rows], None
        try:
            form = form_of(rows)
            uses = [use for use in form.uses if use != "unpaired"]
            found = [example for use in uses for example in form.read(rows[0], use)]
        except UserError as problem:
            assert form is not None or "--" in str(problem), column
            kept = form_of(rows, ignore_columns=[column])
            assert kept.name == form_of(section.rows).name, column
            continue
        of_rewards = set(form.uses) == {"prompt"} and column in OF_REWARDS  # answers beside prompts alone
        of_rewards |= form.name == "text" and column == "label"  # classes of texts
        is_told = f"not '{column}'" in form.description  # SFT learns the response and not the chosen answer
        assert MARK in str(found) or of_rewards or is_told or form.name == "kto", column


@pytest.mark.parametrize(("column", "empty", "value"), [
    ("images", [], ["a.png"]), ("loss_mask", None, [0]), ("weight", 1, 0), ("train", True, "false"), ("loss", 0.7, 0),
    ("input", "", MARK),
    ("thinking", "a", MARK),  # a copy in the first rows
    ("input", "Q:", MARK),
])  # fmt: skip
@pytest.mark.parametrize("use", ["sft", "prompt"])
def test_content_that_comes_after_the_first_rows_is_refused_too(column, empty, value, use):
    row = {"prompt": "Q: ", "response": "a", column: empty}
    form = form_of([row] * 21)
    assert form.read(row, use)
    with pytest.raises(UserError, match=f"^'{column}' holds content, .*--ignore_columns {column}"):
        form.read({**row, column: value}, use)
    assert form_of([row] * 21, ignore_columns=[column]).read({**row, column: value}, use)


def test_a_copy_that_comes_after_the_first_rows_is_none_there_either():
    """Beside `messages`, the columns of their question and answer; the first rows have none."""
    row = {"messages": [user("Where?"), assistant("Here, in the hall.")], "question": None, "answer": None, "input": ""}
    late = {**row, "question": "Where?", "input": "Where?", "answer": "Here, in the hall."}
    pair = {"prompt": "Q: ", "chosen": "yes", "rejected": "no", "messages": None}
    for one, other in ((row, late), (pair, {**pair, "messages": [user("Q:"), assistant("yes")]})):
        form = form_of([one] * 21)
        for use in form.uses:
            assert form.read(other, use) == form.read(one, use)


@pytest.mark.parametrize("more", [
    {"loss_mask": [1, 1.0]}, {"weights": [[1], True]}, {"weight": "1"}, {"weight": math.nan}, {"context": math.nan},
    {"train": True}, {"training": "train"}, {"loss": 1.37}, {"reasoning": "on"}, {"thinking": False},
    {"id": 7, "category": "maths", "score_chosen": 2.5},
])  # fmt: skip
def test_columns_that_change_nothing_are_named_as_unused(more):
    row = {"prompt": "Q:", "response": "a"}
    found = form_of([row | more])
    assert f"columns that training does not use: {', '.join(map(repr, more))}" in found.description
    assert found.read(row | more, "sft") == form_of([row]).read(row, "sft")
    for label in (1, "negative"):  # as in IMDB
        found = form_of([{"text": "A fine film.", "label": label}])
        assert found.name == "text" and "columns that training does not use: 'label'" in found.description


def test_tools_beside_messages_in_one_object_are_used():
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    good, bad = (
        {"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": text}], "tools": tools}
        for text in ("Here.", "No.")
    )
    for rows in ([{"messages": good}], [{"chosen": json.dumps(good), "rejected": json.dumps(bad)}]):
        assert [example.tools for example in read(rows, "sft")] == [tools]
    other = json.dumps({**bad, "tools": [{"type": "function", "function": {"name": "other"}}]})
    with pytest.raises(UserError, match="'rejected' describes other tools"):
        read([{"chosen": json.dumps(good), "rejected": other}], "preference")


def test_a_pair_may_exclude_a_turn_of_one_answer_alone():
    whole = [ASK, assistant("Hm."), user("So?")]
    chosen = [ASK, assistant("Hm.", weight=0), user("So?"), assistant("Here.")]
    for asked in ({}, {"prompt": whole}):
        row = {**asked, "chosen": chosen, "rejected": [*whole, assistant("No.")]}
        [pair] = read([row], "preference")
        assert pair.prompt == whole and pair.answers == ["Here.", "No."] and pair.context == (1,)


def test_an_answer_that_is_json_with_a_role_is_an_answer():
    for answer in ('{"role": "admin", "name": "Ann"}', '[{"role": "admin"}]', '{"from": "Rome", "value": 3}'):
        row = {"prompt": "Give JSON:", "chosen": answer, "rejected": "x"}
        assert read([row], "preference")[0].answers == [answer, "x"]


def test_lists_that_are_stored_as_json_text_are_read():
    """As in CSV files."""
    for history in ([["Where is the lamp?", "In the hall."]], [ASK, assistant("In the hall.")]):
        [example] = read([{"prompt": "And its colour?", "response": "red.", "history": json.dumps(history)}], "sft")
        assert [turn["content"] for turn in example.prompt] == ["Where is the lamp?", "In the hall.", "And its colour?"]
    ranked = {"prompt": "Q:", "responses": '["a", "b"]', "scores": "[1, 2]"}
    assert [one.answers for one in read([ranked], "preference")] == [["b", "a"]]
    steps = {"prompt": "Q:", "completions": '["a", "b"]', "labels": "[true, null]"}
    assert [list(one.answers) for one in read([steps], "steps")] == [["a", "b"]]


def test_the_better_answer_is_named_by_its_place_the_end_of_its_column_or_the_column():
    places = (0.0, 1.0, 1, "a", "B", "Answer_b")
    rows = [{"question": "Where?", "answer_a": "Here.", "answer_b": "No.", "better": place} for place in places]
    assert [one.answers[0] for one in read(rows, "preference")] == ["Here.", "No.", "No.", "Here.", "No.", "No."]


@pytest.mark.parametrize("row", [
    {"messages": [user("Count to 10."), assistant("It is 10.")], "weight": 0},
    {"messages": [user("a"), assistant("b")], "functions": '[{"name": "f"}]'},
    {"prompt": "Why?", "chosen": " So.", "rejected": " No.", "history": ["Hi", "Hello", "Why?"]},
    {"question": "the hill", "answer": "Brocken", "context": "We speak of the hill in the Harz."},
])  # fmt: skip
def test_what_stands_in_the_texts_by_chance_is_no_copy_of_them(row):
    """Digits of a weight are in a number, and the prompt is in what surrounds it; the rest would be lost."""
    with pytest.raises(UserError, match="--ignore_columns"):
        form_of([row])
