"""Texts to ids on many tokenizers: equal to the rendered conversation; the tokens at which labelled steps end."""

import math
import random

import pytest
from chat_tokenizers import CASES, chat_tokenizer
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
from dschat_ppo.data.templates import NAMED, turn_end
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


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_prompt_and_answer_equal_the_rendered_conversation(kind, name):
    """Unless a token would span the end of the prompt: in step 3 the prompt ends there."""
    tokenizer, equal = chat_tokenizer(kind, name), 0
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


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_bos_and_the_final_token_occur_once(kind, name):
    tokenizer = chat_tokenizer(kind, name)
    has_bos = tokenizer.encode("a")[0] == tokenizer.bos_token_id
    for prompt in ("Where?", "<s>Where?", [{"role": "user", "content": "Where?"}]):
        ids = encode_prompt(tokenizer, prompt)
        is_chat = isinstance(prompt, list)
        expected = has_bos if is_chat and name in NAMED else name.startswith("BOS") if is_chat else None
        count = int(has_bos or prompt.startswith("<s>")) if expected is None else int(expected)
        assert ids.count(tokenizer.bos_token_id) == count
        for answer in ("lamp", "lamp</s>", ""):
            found = encode_answer(tokenizer, prompt, answer)
            end = turn_end(tokenizer).token if is_chat else tokenizer.eos_token_id
            assert (found.count(end), found[-1]) == (1, end)
            assert tokenizer.bos_token_id not in found


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


@pytest.mark.parametrize(
    ("tokens", "separator", "ends"),
    [
        (["a", "\n", "b", "</s>"], "\n", [1, 3]),
        (["a", ".\n", "b", ".", "</s>"], "\n", [1, 4]),  # the token has more than the separator
        (["a", "\n", "\n", "b", "</s>"], "\n", [1, 4]),  # no step between the line breaks
        (["a", "\n\n", "b", "</s>"], "\n", [1, 3]),
        (["a", "\n", "\n", "b", "</s>"], "\n\n", [2, 4]),  # completed by the second token
        (["\n", "a", "\n", "b"], "\n", [2, 3]),  # cut off: no final token
        (["a", "\n", "b", "\n", "</s>"], "\n", [1, 4]),  # the final token alone is no step
        (["a", "\n", "b", "\n"], "\n", [1, 3]),
        (["a", "\n", "b", "\n", " ", "</s>"], "\n", [1, 5]),
        (["a", "b", "</s>"], "\n", [2]),
        (["</s>"], "\n", [0]),
        ([], "\n", []),
    ],
)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("separator", ["\n", "\n\n", " and "])
def test_every_step_of_an_encoded_answer_ends_where_its_text_ends(kind, separator):
    if "\n" in separator and kind.startswith("pieces") and "\n" not in tokenizer_of(kind).get_vocab():
        pytest.skip("the vocabulary has no line break")
    tokenizer = tokenizer_of(kind)
    steps = ["Where is the lamp.", " In the hall Café 😀" if kind.startswith("bytes") else " In the hall", "Human"]
    example = joined_steps(Example("Q:", steps, labels=(1.0, 0.0, 1.0)), separator)
    encoded = encode_example(tokenizer, example)
    answer = encoded.answers[0]
    ends = step_ends(tokenizer, answer, separator)
    assert len(ends) == 3 and ends[-1] == len(answer) - 1
    text = separator.join(steps)
    for number, end in enumerate(ends[:-1], start=1):
        length = len((separator.join(steps[:number]) + separator).rstrip(" "))
        shorter, longer = (tokenizer.decode(answer[:count]).lstrip() for count in (end, end + 1))
        assert len(shorter) < length <= len(longer), "the token that completes the separator"
        assert text.startswith(longer) or longer.startswith(text[:length])


def test_labels_belong_to_the_ends_of_steps(merging):
    answer = ids("a", "\n", "b", "\n", "c", "</s>")
    assert labelled_ends(merging, answer, (1.0, math.nan, 0.25), "\n") == ([1, 5], [1.0, 0.25])  # NaN: no label
    with pytest.raises(UserError, match=r"have 1 steps and not 2: the tokenizer does not keep .*--step_separator"):
        labelled_ends(merging, ids("a", "b", "</s>"), (1.0, 0.0), "\n")


@pytest.mark.parametrize(
    ("steps", "labels", "problem"),
    [
        (
            ["a", "b" + "\n" * 10**5 + "c"],
            (1.0, 0.0),
            "step 2 contains the separator .* choose another --step_separator",
        ),
        (["a", "\n \n"], (1.0, 0.0), "step 2 is empty"),
        (["a", "b"], (math.nan, math.nan), "no step has a label"),
        ([], (), "no step has a label"),
    ],
)
def test_separators_at_the_ends_of_steps_are_removed_and_other_steps_cannot_be_joined(steps, labels, problem):
    joined = joined_steps(Example("Q:", ["\na\n\n", "b\n", " c"], labels=(1.0, 0.0, 1.0)), "\n")
    assert (joined.answers, joined.labels) == (["a\nb\n c"], (1.0, 0.0, 1.0))
    assert joined_steps(Example("Q:", ["\n\na\n\n\n"], labels=(1.0,)), "\n\n").answers == ["a\n"]
    with pytest.raises(UserError, match=problem):
        joined_steps(Example("Q:", steps, labels=labels), "\n")
