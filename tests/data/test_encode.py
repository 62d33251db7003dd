"""Texts to ids on many tokenizers: equal to the rendered conversation; the tokens at which labelled steps end."""

import math
import random

import pytest
from chat_tokenizers import CASES, SHAPES, chat_tokenizer, shaped
from tiny_tokenizers import KINDS, encode_answer, tokenizer_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dschat_ppo.data import encode
from dschat_ppo.data.encode import (
    encode_example,
    encode_finished,
    encode_prompt,
    joined_steps,
    labelled_ends,
    step_ends,
)
from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import turn_end
from dschat_ppo.errors import UserError

WORDS = [
    "Where", " lamp", "hall.", "\n", "\n\n", "  ", " ", "😀", "é", "☕", "Human:", " Assistant:", "<|im_end|>",
    "<|eot_id|>", "</s>", "<|im_start|>", "<|user|>", "user", ":",
]  # fmt: skip


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, 7)))


def random_chat(rng: random.Random) -> list[dict]:
    roles = rng.choice(
        (["user"], ["system", "user"], ["user", "assistant", "user"], ["user", "assistant"] * 2 + ["user"])
    )
    return [{"role": role, "content": random_text(rng)} for role in roles]


@pytest.mark.parametrize(("kind", "name"), [*CASES, *(("toy", name) for name in SHAPES)])
def test_prompt_and_answer_equal_the_rendered_conversation(kind, name):
    """Unless a token would span the end of the prompt: in step 3 the prompt ends there."""
    tokenizer, equal = shaped(name)[0] if kind == "toy" else chat_tokenizer(kind, name), 0
    end = turn_end(tokenizer)
    rng = random.Random(1)
    for _ in range(20):
        chat, answer = random_chat(rng), f"{random_text(rng)}lamp{rng.choice(('', ' ', '😀'))}"
        prompt = encode_prompt(tokenizer, chat)
        found = prompt + encode_answer(tokenizer, chat, answer)
        text = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": answer}], tokenize=False)
        whole = tokenizer.encode(text.removesuffix(end.dropped), add_special_tokens=False)
        whole += [end.token] * (not end.kept)
        equal += found == whole
        assert found == whole or whole[: len(prompt)] != prompt or name == "opening ends with a token"
    assert equal > 10 or name == "opening ends with a token"


def test_an_answer_whose_first_token_would_span_the_end_of_the_prompt_is_encoded_alone():
    backend = Tokenizer(models.BPE({"a": 0, "\n": 1, "\n\n": 2, ":": 3}, [("\n", "\n")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ':\\n' }}"
    found = encode_example(tokenizer, Example([{"role": "user", "content": "a"}], ["\na"]))
    assert (found.prompt, found.answers) == ([0, 3, 1], [[1, 0, tokenizer.eos_token_id]])


@pytest.mark.parametrize("single", ["$A", "<s> $A", "<s> $A </s>"])
def test_what_a_tokenizer_adds_to_every_text_is_no_part_of_answers(single):
    tokenizer = tokenizer_of("bytes")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single, special_tokens=[("<s>", 1), ("</s>", 2)])
    for answer in ("In the hall.", "In the hall.</s>", "In the hall.</s></s>"):
        ids = encode_answer(tokenizer, "Where?", answer)
        assert (tokenizer.decode(ids[:-1]), ids[-1], ids.count(2), ids.count(1)) == ("In the hall.", 2, 1, 0)
    assert 2 not in encode_prompt(tokenizer, "Where is it?")
    own = encode_prompt(tokenizer, "<s>Where is it?</s>")  # a text that brings both
    assert (own[0], own[-1], own.count(1), own.count(2)) == (1, 2, 1, 1)
    assert encode_finished(tokenizer, "Where?</s>") == [*encode_prompt(tokenizer, "Where?"), 2]


def test_a_fast_tokenizer_that_encodes_in_its_own_way_is_called():
    class Lower(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **more):
            return super()._encode_plus(text.lower(), **more)

    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer = Lower(tokenizer_object=backend, eos_token="</s>")
    assert encode_prompt(tokenizer, "aB") == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", [" In the hall.", "lamp", "  two", "\nA line.", "\n\nHuman"])
def test_a_text_answer_continues_its_prompt_character_for_character(kind, answer):
    tokenizer = tokenizer_of(kind)
    for prompt in ("Where is it? Answer:", "Where is it? Answer: "):
        found = encode_example(tokenizer, Example(prompt, [answer]))
        text = tokenizer.decode([*found.prompt, *found.answers[0]], skip_special_tokens=True)
        assert text == tokenizer.decode(tokenizer.encode(prompt + answer), skip_special_tokens=True)


def test_a_text_that_takes_too_many_bytes_is_refused(monkeypatch):
    monkeypatch.setattr(encode, "MOST_BYTES", 10)
    assert encode_prompt(tokenizer_of("bytes"), "é" * 5)
    with pytest.raises(UserError, match="^a text of 6 characters is too long for the tokenizer"):
        encode_prompt(tokenizer_of("bytes"), "é" * 5 + "a")


@pytest.mark.parametrize("prompt", ["half a pair: \ud83d", [{"role": "user", "content": "\ud83d"}]])
def test_a_text_that_the_tokenizer_rejects(prompt):
    with pytest.raises(UserError, match="^the tokenizer rejects this text"):
        encode_prompt(chat_tokenizer("bytes", "chatml"), prompt)


VOCABULARY = ["<unk>", "</s>", "a", "b", "c", ".", "\n", ".\n", "\n\n", " ", "."]


@pytest.fixture(scope="module")
def merging():
    """A tokenizer whose tokens are those of VOCABULARY; ids are given by hand."""
    backend = Tokenizer(models.WordLevel({token: at for at, token in enumerate(VOCABULARY[:-1])}, "<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY.index(token) for token in tokens]


@pytest.mark.parametrize(("tokens", "separator", "ends"), [
    (["a", "\n", "b", "</s>"], "\n", [1, 3]),
    (["a", ".\n", "b", ".", "</s>"], "\n", [1, 4]),  # the token has more than the separator
    (["a", "\n", "\n", "b", "</s>"], "\n", [1, 4]),  # no step between the line breaks
    (["a", "\n", "\n", "b", "</s>"], "\n\n", [2, 4]),  # completed by the second token
    (["\n", "a", "\n", "b"], "\n", [2, 3]),  # cut off: no final token
    (["a", "\n", "b", "\n", "</s>"], "\n", [1, 4]),  # the final token alone is no step
    (["a", "\n", "b", "\n"], "\n", [1, 3]), (["a", "b", "</s>"], "\n", [2]), (["</s>"], "\n", [0]), ([], "\n", []),
])  # fmt: skip
def test_ends_by_hand(merging, tokens, separator, ends):
    assert step_ends(merging, ids(*tokens), separator) == ends


def test_a_character_of_several_byte_tokens_before_the_separator():
    """Half of it decodes to several characters, as in the SentencePiece tokenizers of Llama 2 and Mistral."""
    pieces = ["<unk>", "</s>", "a", "\n", *(f"<0x{byte:02X}>" for byte in "😀".encode())]
    backend = Tokenizer(models.WordLevel({piece: at for at, piece in enumerate(pieces)}, "<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    answer = [2, 4, 5, 6, 7, 3, 2, 1]  # a 😀 line break a </s>
    assert tokenizer.decode(answer) == "a😀\na</s>" and len(tokenizer.decode(answer[:4])) == 4
    assert step_ends(tokenizer, answer, "\n") == [5, 7]
    assert step_ends(tokenizer, answer, "😀") == [4, 7], "the token that completes it"


def test_labels_belong_to_the_ends_of_steps(merging):
    answer = ids("a", "\n", "b", "\n", "c", "</s>")
    assert labelled_ends(merging, answer, (1.0, math.nan, 0.25), "\n") == ([1, 5], [1.0, 0.25])  # NaN: no label
    with pytest.raises(UserError, match=r"have 1 steps and not 2: the tokenizer does not keep .*--step_separator"):
        labelled_ends(merging, ids("a", "b", "</s>"), (1.0, 0.0), "\n")


@pytest.mark.parametrize(("steps", "labels", "problem"), [
    (["a", "b" + "\n" * 10**5 + "c"], (1.0, 0.0), "step 2 contains the separator .* choose another --step_sep"),
    (["a", "\n \n"], (1.0, 0.0), "step 2 is empty"), (["a", "b"], (math.nan, math.nan), "no step has a label"),
    ([], (), "no step has a label"),
])  # fmt: skip
def test_separators_at_the_ends_of_steps_are_removed_and_other_steps_cannot_be_joined(steps, labels, problem):
    joined = joined_steps(Example("Q:", ["\na\n\n", "b\n", " c"], labels=(1.0, 0.0, 1.0)), "\n")
    assert (joined.answers, joined.labels) == (["a\nb\n c"], (1.0, 0.0, 1.0))
    assert joined_steps(Example("Q:", ["\n\na\n\n\n"], labels=(1.0,)), "\n\n").answers == ["a\n"]
    with pytest.raises(UserError, match=problem):
        joined_steps(Example("Q:", steps, labels=labels), "\n")
