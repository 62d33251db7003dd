"""Prompts and answers as token ids: BOS and EOS exactly once, for text and for chat messages."""

import pytest
from tiny_tokenizers import encode_answer
from tokenizers.processors import TemplateProcessing

from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.errors import UserError
from dschat_ppo.tools.toy import make_tokenizer
from dschat_ppo.tools.toy_model import EOS

BOS = "<|system|>"  # a special token of the small tokenizer, used as BOS
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


def test_messages_without_a_template_are_rejected():
    tokenizer = tokenizer_without_bos()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="chat template"):
        encode_prompt(tokenizer, ASK)
