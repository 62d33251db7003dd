"""Shapes of data sets of other projects (`inputs/`), and the rule behind them: no content is left out silently."""

import json
import math
from pathlib import Path

import pytest
from form_fixtures import ASK, assistant, form_of, read, user
from test_docs_examples import SECTIONS
from tiny_tokenizers import tokenizer_of
from transformers import AutoTokenizer

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.batches import collate_sft
from dschat_ppo.data.forms import check_flags_used
from dschat_ppo.data.prepare import prepare
from dschat_ppo.errors import UserError
from dschat_ppo.run.start_and_end import row_sample

INPUTS = Path(__file__).parent / "inputs"
LAMP, COLOUR = "user: Where is the lamp?", "user: And its colour?"
EARLIER = [LAMP, "assistant: In the hall."]
CALL = {"type": "function", "function": {"name": "find_thing", "arguments": {"thing": "lamp"}}}
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


def test_labels_turns_and_calls_of_these_shapes():
    assert [one.labels for one in read(rows_of("kto_messages"), "unpaired")[:2]] == [(1.0,), (0.0,)]
    assert [one.labels for one in read(rows_of("kto_string_labels"), "unpaired")[:2]] == [(0.0,), (1.0,)]
    assert len(read(rows_of("kto_messages"), "sft")) == sum(row["label"] for row in rows_of("kto_messages"))
    assert read(rows_of("tool_call_roles"), "sft")[0].prompt[1]["tool_calls"] == [CALL]
    pairs = read(rows_of("ab_better_id"), "preference", apply_chat_template=True)
    assert pairs[1].answers == ["In the attic.", "Find it."], "the second answer is better"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["turn_weight", "turn_loss_mask", "turn_train_false"])
def test_a_turn_that_its_owner_excluded_is_context_and_no_target(name, streaming, assets, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    given = {"streaming": True, "streaming_rows": 4} if streaming else {}
    flags = DataFlags([str(INPUTS / f"{name}.jsonl")], data_split="1,0,0", data_output_path=str(tmp_path), **given)
    rows = prepare("sft", tokenizer, flags, 400, all_turns=True).train
    for number in range(2):
        batch = collate_sft(rows, [number], 0, train_on_prompt=False)
        assert "WRONG DRAFT" in tokenizer.decode(batch.input_ids[0])
        trained = tokenizer.decode(batch.input_ids[0][batch.loss_mask[0]])
        assert "WRONG" not in trained and "DRAFT" not in trained and trained.startswith("In the ")
        assert "⟦In the " in row_sample(tokenizer, rows[number]) and "⟦WRONG" not in row_sample(tokenizer, rows[number])


def test_an_excluded_turn_is_no_answer_and_may_be_left_out_of_a_prompt():
    kept = [ASK, assistant("In the hall."), user("Sure?"), assistant("No.", train=False)]
    assert read([{"messages": kept}], "prompt")[0].prompt == kept[:3]
    with pytest.raises(UserError, match="the answer of 'messages' is excluded from training"):
        read([{"messages": kept}], "sft")
    answer = [{"prompt": [ASK], "completion": [assistant("No.", loss=0)]}]
    assert read(answer, "prompt")[0].prompt == [ASK]
    found = read([{"messages": [ASK, assistant("Yes.", weight=1), user("b"), assistant("c", weight="1.0")]}], "sft")
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
    assert [turn["role"] for turn in example.prompt] == ["system", "user"] and example.answers == ["Hello."]
    assert example.prompt[0]["content"] == "Be brief."
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hi"}]
    [example] = read([{"messages": [*own, {"role": "assistant", "content": "x"}]}], "sft", system_message="Be brief.")
    assert example.prompt[0]["content"] == "Be long.", "a row's own message counts"
    with pytest.raises(UserError, match="--system_message.*--apply_chat_template True"):
        form_of([{"prompt": "Q: ", "response": "a"}], system_message="Be brief.")
    with pytest.raises(UserError, match="--system_message precedes chat messages, .*; omit it"):
        form_of([{"prompt": "P", "chosen": "c", "rejected": "r"}], name="Dahoas/rm-static", system_message="Be brief.")
    plain = form_of([{"text": "Once."}], system_message="Be brief.")  # in a mixture with chats
    assert "--system_message does not apply" in plain.description
    assert plain.read({"text": "Once."}, "sft", "row")[0].prompt == ""
    with pytest.raises(UserError, match="'system' holds content, .*--ignore_columns system leaves out the column; "):
        form_of([{"text": "Once.", "system": "Be brief."}])
    with pytest.raises(UserError, match="--role_names 'customer='"):
        form_of(rows, role_names=["customer"])


MARK = "stands nowhere else"
OTHERS = {
    "question": MARK, "query": MARK, "input": MARK, "instruction": MARK, "context": MARK, "system": MARK,
    "prompt": MARK, "messages": [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}],
    "history": [[MARK, MARK]], "images": [f"{MARK}.jpg"], "weight": 0.5, "loss_mask": [0, 1], "label": True,
    "thinking": MARK, "reasoning": MARK, "reasoning_content": MARK,
    "rejected": MARK, "chosen": MARK, "response": MARK, "completion": MARK, "output": MARK, "text": MARK,
}  # fmt: skip
OF_REWARDS = {"response", "completion", "output", "label", "thinking", "reasoning", "reasoning_content"}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_column_with_content_is_read_or_named_whatever_the_form(section):
    """Either what the column holds is part of what is read, or the run ends with the column's name and a way out."""
    for column in OTHERS.keys() - section.rows[0].keys():
        rows = [{**row, column: OTHERS[column]} for row in section.rows]
        try:
            form = form_of(rows)
            uses = [use for use in form.uses if use != "unpaired"]
            found = [example for use in uses for example in form.read(rows[0], use, "row 1")]
        except UserError as problem:
            assert "--" in str(problem) or str(problem).startswith("row 1: "), column
            kept = form_of(rows, ignore_columns=[column])
            assert kept.name == form_of(section.rows).name, column
            continue
        of_rewards = set(form.uses) == {"prompt"} and column in OF_REWARDS  # answers beside prompts alone
        of_rewards |= form.name == "text" and column == "label"  # classes of texts
        is_told = f"not '{column}'" in form.description  # SFT learns the response and not the chosen answer
        assert MARK in str(found) or of_rewards or is_told or form.name == "kto", column


@pytest.mark.parametrize(
    ("column", "empty", "value"),
    [
        ("images", [], ["a.png"]),
        ("loss_mask", None, [0]),
        ("weight", 1, 0),
        ("mask", [1, 1], [0, 1]),
        ("mask", 1, 0),
        ("train", 1, 0),
        ("train", True, "false"),
        ("trainable", True, False),
        ("training", "train", 0),
        ("loss", 0.7, 0),
        ("input", "", MARK),
        ("context", None, MARK),
        ("thinking", "a", MARK),  # a copy in the first rows
        ("input", "Q:", MARK),
    ],
)
@pytest.mark.parametrize("use", ["sft", "prompt"])
def test_content_that_comes_after_the_first_rows_is_refused_too(column, empty, value, use):
    row = {"prompt": "Q: ", "response": "a", column: empty}
    form = form_of([row] * 21)
    assert form.read(row, use, "row 21")
    with pytest.raises(UserError, match=f"row 22: '{column}' holds content, .*--ignore_columns {column}"):
        form.read({**row, column: value}, use, "row 22")
    assert form_of([row] * 21, ignore_columns=[column]).read({**row, column: value}, use, "row 22")


@pytest.mark.parametrize("column", ["history", "input", "system", "tools", "images", "label", "rejected"])
def test_a_column_that_only_later_rows_have_is_refused_too(column):
    """Rows of a stream or of a form of one's own may have columns that the first rows lack."""
    row = {"prompt": "Q: ", "response": "a"}
    late = {**row, column: OTHERS.get(column, MARK)}
    form = form_of([row] * 21)
    assert form.read({**row, column: None}, "sft", "row 22") == form.read(row, "sft", "row 1")
    with pytest.raises(UserError, match=f"row 22: '{column}' holds content, .*--ignore_columns {column}"):
        form.read(late, "sft", "row 22")


def test_a_copy_that_comes_after_the_first_rows_is_none_there_either():
    """Beside `messages`, the columns of their question and answer; the first rows have none."""
    row = {"messages": [user("Where?"), assistant("Here, in the hall.")], "question": None, "answer": None, "input": ""}
    form = form_of([row] * 21, data_format="auto")
    late = {**row, "question": "Where?", "input": "Where?", "answer": "Here, in the hall."}
    for use in ("sft", "prompt"):
        assert form.read(late, use, "row 22") == form.read(row, use, "row 1")
    pair = {"prompt": "Q: ", "chosen": "yes", "rejected": "no", "messages": None}
    form = form_of([pair] * 21)
    late = {**pair, "messages": [user("Q:"), assistant("yes")]}
    for use in ("sft", "preference", "prompt", "unpaired"):
        assert form.read(late, use, "row 22") == form.read(pair, use, "row 22")


@pytest.mark.parametrize(
    ("row", "form", "prompt", "answer", "unused"),
    [
        ({"text": "A fine film.", "label": 1}, "text", "", "A fine film.", "label"),  # as in IMDB
        ({"text": "A dull film.", "label": "negative"}, "text", "", "A dull film.", "label"),
        ({"prompt": "Q:", "response": "a", "loss_mask": [1, 1.0]}, "prompt_response", "Q:", "a", "loss_mask"),
        ({"prompt": "Q:", "response": "a", "weights": [[1], True]}, "prompt_response", "Q:", "a", "weights"),
        ({"prompt": "Q:", "response": "a", "weight": "1"}, "prompt_response", "Q:", "a", "weight"),
        ({"prompt": "Q:", "response": "a", "weight": math.nan}, "prompt_response", "Q:", "a", "weight"),
        ({"prompt": "Q:", "response": "a", "context": math.nan}, "prompt_response", "Q:", "a", "context"),
        ({"prompt": "Q:", "response": "a", "train": True}, "prompt_response", "Q:", "a", "train"),
        ({"prompt": "Q:", "response": "a", "training": "train"}, "prompt_response", "Q:", "a", "training"),
        ({"prompt": "Q:", "response": "a", "loss": 1.37}, "prompt_response", "Q:", "a", "loss"),
        ({"prompt": "Q:", "response": "a", "reasoning": "on"}, "prompt_response", "Q:", "a", "reasoning"),
        ({"prompt": "Q:", "response": "a", "thinking": False}, "prompt_response", "Q:", "a", "thinking"),
    ],
)  # fmt: skip
def test_columns_that_change_nothing_are_named_as_unused(row, form, prompt, answer, unused):
    found = form_of([row])
    assert found.name == form and f"columns that training does not use: '{unused}'" in found.description
    assert [(one.prompt, one.answers) for one in found.read(row, "sft", "row")] == [(prompt, [answer])]


def test_a_text_beside_a_prompt_is_an_answer_if_a_flag_says_so():
    row = {"prompt": "Tell of lamps:", "text": " They shine."}  # as in Cosmopedia
    with pytest.raises(UserError, match="'text' holds content, .*--response_column"):
        form_of([row])
    assert read([row], "sft", response_column="text")[0].answers == [" They shine."]


def test_a_text_that_repeats_its_prompt_is_no_answer_to_it():
    row = {"prompt": "Q: a\nA:", "text": "Q: a\nA: yes"}
    form = form_of([row])
    assert form.read(row, "prompt", "row")[0].prompt == row["prompt"] and form.uses == ("prompt",)
    assert read([row], "sft", data_format="text")[0].answers == [row["text"]]


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


@pytest.mark.parametrize("asked", [{}, {"prompt": [ASK, assistant("Hm."), user("So?")]}])
def test_a_pair_may_exclude_a_turn_of_one_answer_alone(asked):
    turns = [ASK, assistant("Hm.", weight=0), user("So?")]
    row = {
        **asked,
        "chosen": [*turns, assistant("Here.")],
        "rejected": [ASK, assistant("Hm."), *turns[2:], assistant("No.")],
    }
    [pair] = read([row], "preference")
    assert pair.prompt == [ASK, assistant("Hm."), user("So?")] and pair.answers == ["Here.", "No."]
    assert read([row], "sft")[0].context == (1,)


@pytest.mark.parametrize(
    "answer",
    ['{"role": "admin", "name": "Ann"}', '[{"role": "admin"}, {"role": "user"}]', '{"from": "Rome", "value": 3}'],
)
def test_an_answer_that_is_json_with_a_role_is_an_answer(answer):
    assert read([{"prompt": "Give JSON:", "response": answer}], "sft")[0].answers == [answer]
    assert read([{"prompt": "Give JSON:", "chosen": answer, "rejected": "x"}], "preference")[0].answers == [answer, "x"]


@pytest.mark.parametrize("content", [{"parts": [{"text": "hi"}]}, {"text": "hi"}])
def test_json_text_of_turns_without_content_is_refused_and_no_prose(content):
    turns = [{"role": role, **content} for role in ("user", "assistant")]
    with pytest.raises(UserError, match="has no content"):
        read([{"prompt": json.dumps(turns[:1]), "response": "x"}], "sft")
    other = json.dumps([turns[0], {"role": "assistant", "text": "bye", "parts": []}])
    with pytest.raises(UserError, match="has no content"):
        read([{"chosen": json.dumps(turns), "rejected": other}], "preference")


def test_lists_that_are_stored_as_json_text_are_read():
    """As in CSV files."""
    for history in ([["Where is the lamp?", "In the hall."]], [ASK, assistant("In the hall.")]):
        [example] = read([{"prompt": "And its colour?", "response": "red.", "history": json.dumps(history)}], "sft")
        assert [turn["content"] for turn in example.prompt] == ["Where is the lamp?", "In the hall.", "And its colour?"]
    empty = {"prompt": "Q:", "response": "a", "history": ""}
    assert [turn["content"] for turn in read([empty], "sft", apply_chat_template=True)[0].prompt] == ["Q:"]
    ranked = {"prompt": "Q:", "responses": '["a", "b"]', "scores": "[1, 2]"}
    assert [one.answers for one in read([ranked], "preference")] == [["b", "a"]]
    steps = {"prompt": "Q:", "completions": '["a", "b"]', "labels": "[true, null]"}
    assert [list(one.answers) for one in read([steps], "steps")] == [["a", "b"]]


def test_the_better_answer_is_named_by_its_place_the_end_of_its_column_or_the_column():
    places = (0.0, 1.0, 1, "a", "B", "Answer_b")
    rows = [{"question": "Where?", "answer_a": "Here.", "answer_b": "No.", "better": place} for place in places]
    assert [one.answers[0] for one in read(rows, "preference")] == ["Here.", "No.", "No.", "Here.", "No.", "No."]


def test_a_message_of_the_developer_is_a_system_message():
    turns = [{"role": "developer", "content": "Be long."}, ASK, assistant("In the hall.")]
    [example] = read([{"messages": turns}], "sft", system_message="Be brief.")
    assert example.prompt == turns[:2]


def test_picture_parts_of_messages_are_refused_also_without_their_column():
    parts = [{"type": "image"}, {"type": "text", "text": "Where?"}]
    rows = [
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "Here."}], "images": ["a"]}
    ]
    with pytest.raises(UserError, match="--ignore_columns images leaves out the column;"):
        read(rows, "sft")
    with pytest.raises(UserError, match="message 1 of 'messages' has a part of type 'image'; only text parts"):
        read(rows, "sft", ignore_columns=["images"])


def test_who_answered_is_no_content_and_a_question_with_a_response_is_read():
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
    form = form_of([{"conversation": turns, "model": "m-1", "user": "u7"}])  # as in WildChat
    assert form.name == "sharegpt" and "'model'" in form.description
    [example] = read([{"id": "1", "system_prompt": "Be brief.", "question": "Where?", "response": "Here."}], "sft")
    assert [turn["content"] for turn in example.prompt] == ["Be brief.", "Where?"]  # as in OpenOrca
    assert example.answers == ["Here."]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_other_columns_are_listed_once_and_change_nothing(section):
    rows = [{**row, "id": 7, "category": "maths", "score_chosen": 2.5, "difficulty": "low"} for row in section.rows]
    form, plain = form_of(rows), form_of(section.rows)
    assert form.name == plain.name and form.rendering == plain.rendering
    assert "'category'" in form.description and "'difficulty'" in form.description


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("Count to 10."), assistant("It is 10.")], "weight": 0},
        {"messages": [user("Count to 10."), assistant("It is 10.")], "loss_mask": [0, 1]},
        {"messages": [user("a"), assistant("b")], "functions": '[{"name": "f"}]'},
        {"prompt": "Why?", "chosen": " So.", "rejected": " No.", "history": ["Hi", "Hello", "Why?"]},
        {"question": "the hill", "answer": "Brocken", "context": "We speak of the hill in the Harz."},
    ],
)
def test_what_stands_in_the_texts_by_chance_is_no_copy_of_them(row):
    """Digits of a weight are in a number, and the prompt is in what surrounds it; the rest would be lost."""
    with pytest.raises(UserError, match="--ignore_columns"):
        form_of([row])


def test_a_named_data_set_may_have_a_column_of_tools_in_prose():
    row = {"prompt": "Hi", "chosen": "Yes", "rejected": "No", "tools": "a hammer"}
    assert form_of([row], name="local/jsonfile", data_format="local/jsonfile").name == "local/jsonfile"


def test_ignored_columns_must_exist_and_the_name_of_deepspeed_chats_files_leads_to_them(tmp_path):
    rows, flags = [{"prompt": "Q: ", "response": "a"}], {"ignore_columns": ["picture"]}
    forms = [form_of(rows, paths=paths, **flags) for paths in (1, 2)]
    with pytest.raises(UserError, match="--ignore_columns picture: no .*has the columns 'prompt', 'response'"):
        check_flags_used(forms, DataFlags(["a", "b"], **flags))
    check_flags_used([*forms, form_of([{**rows[0], "picture": "a"}], **flags)], DataFlags(["a", "b"], **flags))
    with pytest.raises(UserError, match=r"local/jsonfile.*data/train\.json.*--data_format local/jsonfile"):
        prepare("sft", tokenizer_of("bytes"), DataFlags(["local/jsonfile"], data_output_path=str(tmp_path)), 64)
