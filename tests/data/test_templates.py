"""Prompts and answers as token ids: BOS and EOS exactly once, for text and for chat messages."""

import pytest
from tiny_tokenizers import encode_answer
from tokenizers.processors import TemplateProcessing

from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.data.templates import is_messages
from dschat_ppo.errors import UserError
from dschat_ppo.tools.toy import make_tokenizer
from dschat_ppo.tools.toy_model import EOS

BOS = "<|system|>"  # a special token of the small tokenizer, used as BOS
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


def test_a_text_prompt_is_encoded_unchanged():
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


def test_prompt_and_answer_together_equal_the_rendered_chat():
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


def test_messages_without_a_template_are_rejected():
    tokenizer = chat_tokenizer(None)
    with pytest.raises(UserError, match="chat template"):
        encode_prompt(tokenizer, ASK)


@pytest.mark.parametrize(
    "value", [[], "text", None, [1], [{"role": "user"}], [{"role": "user", "content": None}], {"role": "user"}]
)
def test_other_values_are_not_messages(value):
    assert not is_messages(value)
