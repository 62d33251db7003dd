"""The tokens at which steps end, for tokenizers that merge separators with other text."""

import math

import pytest
from tiny_tokenizers import KINDS, tokenizer_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dschat_ppo.data.encode import encode_example, joined_steps, labelled_ends, step_ends
from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError

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


def test_tokens_without_labels_are_left_out(merging):
    answer = ids("a", "\n", "b", "\n", "c", "</s>")
    assert labelled_ends(merging, answer, (1.0, math.nan, 0.25), "\n") == ([1, 5], [1.0, 0.25])


def test_a_tokenizer_that_loses_the_separator_is_named(merging):
    with pytest.raises(UserError, match=r"have 1 steps and not 2: the tokenizer does not keep .*--step_separator"):
        labelled_ends(merging, ids("a", "b", "</s>"), (1.0, 0.0), "\n")


def test_separators_at_the_ends_of_a_step_are_removed_in_linear_time():
    steps = ["\n\na\n\n\n", "a" + "\n" * 10**5 + "b"]
    assert joined_steps(Example("Q:", steps[:1], labels=(1.0,)), "\n\n").answers == ["a\n"]
    with pytest.raises(UserError, match="step 2 contains the separator"):
        joined_steps(Example("Q:", steps, labels=(1.0, 1.0)), "\n\n")


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


def test_separators_at_the_ends_of_steps_are_removed():
    example = joined_steps(Example("Q:", ["\na\n\n", "b\n", " c"], labels=(1.0, 0.0, 1.0)), "\n")
    assert example.answers == ["a\nb\n c"]
    assert example.labels == (1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("steps", "labels", "problem"),
    [
        (["a", "b\nc"], (1.0, 0.0), "step 2 contains the separator .* choose another --step_separator"),
        (["a", "\n \n"], (1.0, 0.0), "step 2 is empty"),
        (["a", "b"], (math.nan, math.nan), "no step has a label"),
        ([], (), "no step has a label"),
    ],
)
def test_steps_that_cannot_be_joined(steps, labels, problem):
    with pytest.raises(UserError, match=problem):
        joined_steps(Example("Q:", steps, labels=labels), "\n")
