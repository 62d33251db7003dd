"""Values of rows, messages and tools; the sixteen data sets of DeepSpeed-Chat, from raw rows as the
hub has them."""

import json
import math
from copy import deepcopy

import pytest
from form_fixtures import form_of, read, user

from dschat_ppo.data.examples import Example, field_at, has_value, margin_of, text_at, truth_of
from dschat_ppo.data.form_kinds import SETS, set_named
from dschat_ppo.data.messages import (
    looks_like_messages,
    read_messages,
    read_tools,
)
from dschat_ppo.errors import UserError

ROW = {
    "reward_model": {"ground_truth": "72"},
    "a.b": 1,
    "passages": [{"text": "t"}],
    "empty": None,
    "margin": "1.5",
}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("other", "has no 'other'"),
        ("reward_model.x", "has no 'reward_model.x'"),
        ("empty.x", "has no 'empty.x': 'empty' is null"),
    ],
)
def test_a_dot_leads_into_a_column_and_a_missing_field_is_named_with_its_path(path, words):
    assert [field_at(ROW, path) for path in ("a.b", "passages.0.text", "empty")] == [1, "t", None]
    assert not has_value(ROW, path)
    with pytest.raises(UserError, match=words):
        field_at(ROW, path)


def test_a_column_of_whole_numbers_that_lacks_one_holds_floats():
    """As pandas stores 3, 4 and a missing value: 3.0, 4.0 and NaN."""
    inside = {"n": 72.0, "none": math.nan}
    row = {"n": 3.0, "none": math.nan, "half": 2.5, "yes": True, "inside": inside, "far": -math.inf}
    assert [text_at(row, path) for path in ("n", "half", "yes", "inside.n")] == [
        "3",
        "2.5",
        "true",
        "72",
    ]
    assert str(truth_of(row, "inside.n", None)) == "72" and truth_of(row, "n", r"^(\d+)$") == "3"
    for path in ("none", "inside.none"):
        assert not has_value(row, path)
        with pytest.raises(UserError, match=f"'{path}' is null; expected text"):
            text_at(row, path)
        with pytest.raises(UserError, match=f"'{path}' is null; expected the correct answer"):
            truth_of(row, path, None)
    with pytest.raises(UserError, match="'far' is float .'-inf'.; expected text"):
        text_at(row, "far")
    with pytest.raises(UserError, match=r"'n' does not match 'x\(\.\)'"):
        truth_of(row, "n", "x(.)")


def test_a_margin_is_a_finite_number_and_zero_if_it_is_missing():
    given = ({}, {"margin": None}, {"margin": ""}, {"margin": math.nan}, ROW)
    assert [margin_of(row) for row in given] == [0, 0, 0, 0, 1.5]
    for value in ("big", "nan", math.inf, [1]):
        with pytest.raises(UserError, match="'margin' is"):
            margin_of({"margin": value})


CALLED = {"name": "g", "arguments": {}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"from": "human", "value": "a"}, {"role": "user", "content": "a"}),
        ({"from": "observation", "value": "a"}, {"role": "tool", "content": "a"}),
        (
            {"role": "user", "content": "a", "from": None, "value": None},
            {"role": "user", "content": "a"},
        ),
        (
            {"role": None, "content": None, "from": "user", "value": "a"},
            {"role": "user", "content": "a"},
        ),
        ({"role": "developer", "content": ""}, {"role": "developer", "content": ""}),
        (
            {"from": "function_call", "value": '{"name": "g", "arguments": ""}'},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": CALLED}],
            },
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a", "image": None},
                    {"type": "text", "text": "b"},
                ],
            },
            {"role": "user", "content": "ab"},
        ),
    ],
)
def test_one_message(given, expected):
    before = deepcopy(given)
    # as in CSV files
    assert read_messages([given], "m") == read_messages(json.dumps([given]), "m") == [expected]
    assert looks_like_messages([given]) and given == before


def test_a_list_of_json_texts_holds_messages_and_a_list_of_other_texts_turns():
    texts = ['{"role": "user", "content": "a"}', '{"role": "assistant", "content": "b"}']
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read_messages(texts, "m") == read_messages(["a", "b"], "m") == turns
    assert not any(
        map(looks_like_messages, ("text", [], ["a"], {"text": "a"}, None, [[{"role": "x"}]]))
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[1", "'m' is str"),
        ([], "'m' is an empty list"),
        ([{"role": "user", "content": {"bytes": 9}}], "the content of message 1 of 'm' is 9 bytes"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "message 1 of 'm' has a part of type 'image_url'; only text parts can be used",
        ),
        (
            [{"from": "function_call", "value": "{}"}],
            "a tool call of message 1 of 'm' has no 'name'",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "'arguments' of a tool call of message 1 of 'm' is str",
        ),
    ],
)
def test_the_message_that_cannot_be_used_is_named(value, words):
    with pytest.raises(UserError, match=words):
        read_messages(value, "m")


@pytest.mark.parametrize(
    ("value", "tools"),
    [
        (None, None),
        ("", None),
        ("[]", None),
        ([], None),
        ('[{"a": null}]', [{"a": None}]),
        (['{"a": 1}'], [{"a": 1}]),
        ([{"a": {"b": None, "c": [{"d": None}]}}], [{"a": {"c": [{}]}}]),
    ],
)
def test_tools_are_a_list_or_its_json(value, tools):
    assert read_tools(value, "tools") == tools
    for other in ("prose", '{"a": 1}', 7):
        with pytest.raises(UserError, match="'tools' is"):
            read_tools(other, "tools")


HH = "\n\nHuman: What is a lamp?\n\nAssistant:"
PAIR = {"prompt": HH, "response": " A light.", "chosen": " A light.", "rejected": " No idea."}
WEBGPT = {
    "question": {"dataset": "eli5", "id": "1", "full_text": "Why is it red?"},
    "quotes_0": {"title": [], "extract": []},
    "answer_0": "Because of iron [1] (see [2]).",
    "tokens_0": {},
    "score_0": 0.5,
    "quotes_1": {},
    "answer_1": "It is (not) red[1, 3].",
    "tokens_1": {},
    "score_1": -0.5,
}
FIRST, SECOND = " Because of iron).", " It is red."  # "(see [2]" ends at the first closing bracket
SHP = {
    "history": "How?",
    "human_ref_A": "So.",
    "human_ref_B": "Thus.",
    "labels": 1,
    "score_A": 9,
    "score_B": 2,
}
MIRACL = {
    "query_id": "1",
    "query": "何?",
    "positive_passages": [{"docid": "1#0", "text": "答", "title": "t"}, {"text": "b"}],
    "negative_passages": [{"docid": "2#0", "text": "否", "title": "u"}],
    "emb": [0.5],
}
MKQA = {
    "example_id": 1,
    "queries": {"zh_cn": "谁?", "ja": "誰?", "en": "who?"},
    "query": "who?",
    "answers": {
        lang: [{"type": 0, "entity": "Q1", "text": text, "aliases": []}]
        for lang, text in (("zh_cn", "他"), ("ja", "彼"), ("en", "he"))
    },
}
# name -> (raw row, prompt, chosen, rejected or None)
EXPECTED = {
    "Dahoas/rm-static": (PAIR, HH, " A light.", " No idea."),
    "Dahoas/full-hh-rlhf": (PAIR, HH, " A light.", " No idea."),
    "Dahoas/synthetic-instruct-gptj-pairwise": (
        {"prompt": "Name a colour.", "chosen": "Red.", "rejected": "Seven."},
        " Human: Name a colour. Assistant:",
        " Red.",
        " Seven.",
    ),
    "yitingxie/rlhf-reward-datasets": (
        {
            "prompt": "Human: Hi?\n\n",
            "chosen": "Assistant: Hello.",
            "rejected": "Assistant: Go. Assistant: away",
        },
        "Human: Hi?\n\nAssistant:",
        " Hello.",
        " away",
    ),
    "openai/webgpt_comparisons": (WEBGPT, " Human: Why is it red? Assistant:", FIRST, SECOND),
    "stanfordnlp/SHP": (SHP, " Human: How? Assistant:", " So.", " Thus."),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": (
        {"prompt": "USER: Hi ASSISTANT:", "label": "Hello</s>"},
        "Human: Hi Assistant:",
        " Hello</s>",
        None,
    ),
    "wangrui6/Zhihu-KOL": (
        {"INSTRUCTION": "怎么?", "RESPONSE": "这样。", "SOURCE": "Zhihu", "METADATA": "{}"},
        " Human: 怎么? Assistant:",
        " 这样。",
        None,
    ),
    "Cohere/miracl-zh-queries-22-12": (MIRACL, " Human: 何? Assistant:", " 答", " 否"),
    "Cohere/miracl-ja-queries-22-12": (MIRACL, " Human: 何? Assistant:", " 答", " 否"),
    "Hello-SimpleAI/HC3-Chinese": (
        {"id": "0", "question": "什么?", "human_answers": ["人", "b"], "chatgpt_answers": ["机"]},
        " Human: 什么? Assistant:",
        " 人",
        None,
    ),
    "mkqa-Chinese": (MKQA, " Human: 谁? Assistant:", " 他", None),
    "mkqa-Japanese": (MKQA, " Human: 誰? Assistant:", " 彼", None),
    "lmqg/qg_jaquad": (
        {"question": "何?", "sentence": "文。", "paragraph": "段落。", "answer": "文"},
        " Human: 何? Assistant:",
        " 文。",
        None,
    ),
    "lmqg/qag_jaquad": (
        {"questions": ["何?", "誰?"], "paragraph": "段落。", "answers": ["a", "b"]},
        " Human: 何? Assistant:",
        " 段落。",
        None,
    ),
    "local/jsonfile": ({"prompt": "Hi", "chosen": "Yes", "rejected": "No"}, " Hi", " Yes", " No"),
}


@pytest.mark.parametrize("name", SETS)
def test_prompts_and_answers_are_those_of_deepspeed_chat(name):
    row, prompt, chosen, rejected = EXPECTED[name]
    given = {"data_format": name} if rejected is None else {"name": f"data/{name}/"}
    form = form_of([row], **given)
    assert (form.name, form.rendering) == (name, "text")
    assert read([row], "sft", **given) == [Example(prompt, [chosen])]
    assert read([row], "prompt", **given) == [Example(prompt, [])]
    if rejected is None:
        with pytest.raises(UserError, match="this step needs a prompt and two answers"):
            read([row], "preference", **given)
    else:
        assert read([row], "preference", **given) == [Example(prompt, [chosen, rejected])]


@pytest.mark.parametrize(
    ("name", "changes", "pair"),
    [
        ("openai/webgpt_comparisons", {"score_0": -1}, [SECOND, FIRST]),
        (
            "openai/webgpt_comparisons",
            {"score_0": "-0.5"},
            [FIRST, SECOND],
        ),  # equal scores: the first one
        ("stanfordnlp/SHP", {"labels": 0}, [" Thus.", " So."]),
    ],
)
def test_scores_and_labels_choose_the_better_answer(name, changes, pair):
    assert read([EXPECTED[name][0] | changes], "preference", name=name)[0].answers == pair


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("wangrui6/Zhihu-KOL", {"INSTRUCTION": None}, "'INSTRUCTION' is null"),
        (
            "mkqa-Chinese",
            {"answers": {"zh_cn": [{"text": None}]}},
            r"'answers\.zh_cn\.0\.text' is null",
        ),
        ("Hello-SimpleAI/HC3-Chinese", {"human_answers": []}, r"has no 'human_answers\.0'"),
        ("openai/webgpt_comparisons", {"score_0": None}, "'score_0' is null; expected a number"),
    ],
)
def test_rows_without_the_texts_are_bad(name, changes, words):
    row = EXPECTED[name][0]
    with pytest.raises(UserError, match=f"^{words}"):
        form_of([row], name=name).read(row | changes, "sft")


def test_a_name_is_a_whole_part_of_a_path():
    assert (
        set_named("/data/Dahoas/rm-static")
        == set_named("Dahoas/rm-static/data")
        == "Dahoas/rm-static"
    )
    assert set_named("Dahoas/rm-static-2") is None and set_named("my-Dahoas/rm-static") is None


def test_other_columns_than_those_of_the_hub_are_refused():
    with pytest.raises(
        UserError,
        match="do not fit the form Dahoas/rm-static .*; --data_format FORM reads it in another",
    ):
        form_of([{"messages": [user("a")]}], name="Dahoas/rm-static")
    assert (
        form_of([{"messages": [user("a")]}], name="Dahoas/rm-static", data_format="messages").name
        == "messages"
    )


def test_the_name_decides_unless_flags_do():
    row = {"q": "Hi:", "chosen": "a", "rejected": "b"}
    assert read([row], "prompt", name="local/jsonfile", prompt_column="q") == [Example("Hi:", [])]
    name = "Dahoas/rm-static"
    for more in ({"system": "Be kind."}, {"tools": "a hammer"}):  # other columns change nothing
        assert read([PAIR | more], "prompt", name=name) == [Example(HH, [])]
    with pytest.raises(
        UserError, match="the form Dahoas/rm-static is text, so --apply_chat_template True"
    ):
        form_of([PAIR], name=name, apply_chat_template=True)
    with pytest.raises(UserError, match="^Dahoas/rm-static: 'persona' holds content, 'Be kind.'"):
        form_of([PAIR | {"persona": "Be kind."}], name=name, system_column="persona")
    assert (
        "--input_template does not apply"
        in form_of([PAIR], name=name, input_template="{}").description
    )
