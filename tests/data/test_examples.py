"""Rows and templates: column layouts, bad rows, BOS and EOS exactly once."""

import pytest
from tokenizers.processors import TemplateProcessing

from dschat_ppo.data.examples import layout_of, read_example
from dschat_ppo.data.templates import encode_answer, encode_prompt, is_messages
from dschat_ppo.errors import UserError
from dschat_ppo.tools.toy import EOS, make_tokenizer

BOS = "<|system|>"  # an ordinary special token of the small tokenizer, put to this use
CHATML = (
    "{% for message in messages %}<|user|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
ASK = [{"role": "user", "content": "Where is the lamp?"}]


def tokenizer_without_bos():
    return make_tokenizer(["Where is the lamp? It is in the hall."])


def tokenizer_with(single: str):
    """A tokenizer that adds special tokens as in `single`, as those of Llama do."""
    tokenizer = tokenizer_without_bos()
    tokenizer.add_special_tokens({"bos_token": BOS})
    specials = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, EOS)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    return tokenizer


def chat_tokenizer(template: str):
    tokenizer = tokenizer_without_bos()
    tokenizer.chat_template = template
    return tokenizer


# Text prompts


def test_text_prompt_is_taken_as_it_stands():
    tokenizer = tokenizer_without_bos()
    ids = encode_prompt(tokenizer, "Where is the lamp?")
    assert tokenizer.decode(ids) == "Where is the lamp?"


def test_text_prompt_gets_the_tokenizers_bos_once():
    tokenizer = tokenizer_with(f"{BOS} $A")
    for prompt in ("Where is it?", f"{BOS}Where is it?"):
        ids = encode_prompt(tokenizer, prompt)
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
        assert tokenizer.decode(ids[1:]) == "Where is it?"


def test_text_prompt_never_ends_with_eos():
    tokenizer = tokenizer_with(f"{BOS} $A {EOS}")
    assert tokenizer.eos_token_id not in encode_prompt(tokenizer, "Where is it?")


@pytest.mark.parametrize("single", ["$A", f"{BOS} $A", f"{BOS} $A {EOS}"])
@pytest.mark.parametrize("answer", ["In the hall.", f"In the hall.{EOS}", f"In the hall.{EOS}{EOS}"])
def test_text_answer_ends_with_eos_once_and_has_no_bos(single, answer):
    tokenizer = tokenizer_with(single)
    ids = encode_answer(tokenizer, "Where?", answer)
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.decode(ids[:-1]) == "In the hall."


def test_an_empty_answer_is_eos_alone():
    tokenizer = tokenizer_without_bos()
    assert encode_answer(tokenizer, "Where?", "") == [tokenizer.eos_token_id]


# Chat messages


def test_messages_open_the_assistants_turn():
    tokenizer = tokenizer_without_bos()
    ids = encode_prompt(tokenizer, ASK)
    assert tokenizer.decode(ids) == "<|user|>Where is the lamp?<|assistant|>"


def test_messages_with_a_bos_in_the_template_get_it_once():
    tokenizer = tokenizer_with(f"{BOS} $A")
    tokenizer.chat_template = BOS + tokenizer.chat_template
    ids = encode_prompt(tokenizer, ASK)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_prompt_and_answer_together_read_as_the_template_renders_the_chat():
    tokenizer = tokenizer_without_bos()
    ids = encode_prompt(tokenizer, ASK) + encode_answer(tokenizer, ASK, "In the hall.")
    whole = tokenizer.apply_chat_template(
        [*ASK, {"role": "assistant", "content": "In the hall."}], tokenize=False, add_generation_prompt=False
    )
    assert tokenizer.decode(ids) == whole
    assert ids.count(tokenizer.eos_token_id) == 1


def test_answer_keeps_the_space_that_the_template_puts_before_it():
    tokenizer = chat_tokenizer(
        "{% for m in messages %}{{ m['role'] }}:{{ ' ' + m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert tokenizer.decode(encode_answer(tokenizer, ASK, "In the hall.")) == f" In the hall.{EOS}"


@pytest.mark.parametrize("template", [tokenizer_without_bos().chat_template, CHATML])
@pytest.mark.parametrize("answer", ["In the hall.", "", "end", "|", "a\nb\n", f"In the hall.{EOS}"])
def test_chat_answer_is_the_answer_and_one_eos(template, answer):
    tokenizer = chat_tokenizer(template)
    ids = encode_answer(tokenizer, ASK, answer)
    assert tokenizer.decode(ids) == answer.removesuffix(EOS) + EOS
    assert ids.count(tokenizer.eos_token_id) == 1


def test_messages_without_a_template_name_the_remedy():
    tokenizer = chat_tokenizer(None)
    with pytest.raises(UserError, match="chat template"):
        encode_prompt(tokenizer, ASK)


@pytest.mark.parametrize(
    "value", [[], "text", None, [1], [{"role": "user"}], [{"role": "user", "content": None}], {"role": "user"}]
)
def test_what_is_no_list_of_messages(value):
    assert not is_messages(value)


# Layouts


@pytest.mark.parametrize(
    ("columns", "use", "layout"),
    [
        (["prompt", "response"], "sft", ("prompt", "response")),
        (["messages", "source"], "sft", ("messages",)),
        (["prompt", "chosen", "rejected"], "sft", ("prompt", "chosen")),
        (["prompt", "response", "chosen", "rejected"], "sft", ("prompt", "response")),
        (["prompt", "chosen", "rejected", "margin"], "preference", ("prompt", "chosen", "rejected")),
        (["prompt", "chosen", "rejected"], "prompt", ("prompt",)),
        (["messages"], "prompt", ("messages",)),
    ],
)
def test_layout_is_found_from_the_columns(columns, use, layout):
    assert layout_of(columns, use, "data.jsonl") == layout


@pytest.mark.parametrize("use", ["sft", "preference", "prompt"])
def test_wrong_columns_are_named_with_those_that_would_do(use):
    with pytest.raises(UserError) as problem:
        layout_of(["question", "reply"], use, "data.jsonl")
    message = str(problem.value)
    assert "data.jsonl" in message
    assert "'question', 'reply'" in message
    assert "prompt" in message


# Rows


def test_deepspeed_chat_rows_serve_sft_with_their_chosen_answer():
    row = {"prompt": "Human: hi Assistant:", "chosen": " Hello.", "rejected": " Go away."}
    parsed = read_example(row, layout_of(list(row), "sft", "d"), "sft", "d, row 0")
    assert (parsed.prompt, parsed.answers) == ("Human: hi Assistant:", [" Hello."])


def test_pairs_keep_both_answers_and_the_margin():
    row = {"prompt": "p", "chosen": "c", "rejected": "r", "margin": 2}
    parsed = read_example(row, ("prompt", "chosen", "rejected"), "preference", "d, row 0")
    assert (parsed.prompt, parsed.answers, parsed.margin) == ("p", ["c", "r"], 2.0)


@pytest.mark.parametrize("row", [{}, {"margin": None}])
def test_a_missing_margin_is_zero(row):
    row = {"prompt": "p", "chosen": "c", "rejected": "r", **row}
    assert read_example(row, ("prompt", "chosen", "rejected"), "preference", "d, row 0").margin == 0.0


def test_messages_are_divided_before_the_last_answer():
    messages = [*ASK, {"role": "assistant", "content": "In the hall."}]
    parsed = read_example({"messages": messages}, ("messages",), "sft", "d, row 0")
    assert (parsed.prompt, parsed.answers) == (ASK, ["In the hall."])


def test_messages_as_ppo_prompts_lose_their_answer():
    messages = [*ASK, {"role": "assistant", "content": "In the hall."}]
    assert read_example({"messages": messages}, ("messages",), "prompt", "d, row 0").prompt == ASK
    assert read_example({"messages": ASK}, ("messages",), "prompt", "d, row 0").prompt == ASK


def test_answers_given_as_messages_are_their_last_turn():
    row = {"prompt": ASK, "chosen": [*ASK, {"role": "assistant", "content": "Here."}], "rejected": "No."}
    parsed = read_example(row, ("prompt", "chosen", "rejected"), "preference", "d, row 0")
    assert parsed.answers == ["Here.", "No."]


def test_empty_fields_that_a_table_adds_to_messages_are_left_out():
    turn = {"role": "user", "content": "hi", "tool_calls": None}
    read = read_example({"prompt": [turn]}, ("prompt",), "prompt", "d, row 0")
    assert read.prompt == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "use", "column"),
    [
        ({"prompt": None, "response": "a"}, "sft", "prompt"),
        ({"prompt": 7, "response": "a"}, "sft", "prompt"),
        ({"prompt": [], "response": "a"}, "sft", "prompt"),
        ({"prompt": "p", "response": None}, "sft", "response"),
        ({"prompt": "p", "response": 3.5}, "sft", "response"),
        ({"prompt": "p", "response": ASK}, "sft", "response"),
        ({"messages": ASK}, "sft", "messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "sft", "messages"),
        ({"messages": [{"role": "user", "text": "a"}]}, "prompt", "messages"),
        ({"prompt": "p", "chosen": "c", "rejected": None}, "preference", "rejected"),
        ({"prompt": "p", "chosen": ["c"], "rejected": "r"}, "preference", "chosen"),
        ({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "big"}, "preference", "margin"),
    ],
)
def test_bad_rows_are_named_with_their_column(row, use, column):
    with pytest.raises(UserError) as problem:
        read_example(row, layout_of(list(row), use, "data.jsonl"), use, "data.jsonl, row 17")
    assert "data.jsonl, row 17" in str(problem.value)
    assert f"'{column}'" in str(problem.value)
