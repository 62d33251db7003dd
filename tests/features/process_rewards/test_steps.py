"""The steps of an answer: joined to one text, and found in its tokens."""

import math

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError
from dschat_ppo.features.process_rewards.steps import joined_steps, labelled_ends, step_ends

VOCABULARY = ["<unk>", "</s>", "a", "b", "c", ".", "\n", ".\n", "\n\n", " ", "."]


@pytest.fixture(scope="module")
def merging():
    """A tokenizer whose tokens are those of VOCABULARY; ids are given by hand."""
    backend = Tokenizer(
        models.WordLevel({token: at for at, token in enumerate(VOCABULARY[:-1])}, "<unk>")
    )
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
        (["a", "\n", "\n", "b", "</s>"], "\n\n", [2, 4]),  # completed by the second token
        (["\n", "a", "\n", "b"], "\n", [2, 3]),  # cut off: no final token
        (["a", "\n", "b", "\n", "</s>"], "\n", [1, 4]),  # the final token alone is no step
        (["a", "\n", "b", "\n"], "\n", [1, 3]),
        (["a", "b", "</s>"], "\n", [2]),
        (["</s>"], "\n", [0]),
        ([], "\n", []),
    ],
)
def test_ends_by_hand(merging, tokens, separator, ends):
    assert step_ends(merging, ids(*tokens), separator) == ends


def test_a_character_of_several_byte_tokens_before_the_separator():
    """Half of it decodes to several characters, as in the SentencePiece tokenizers of Llama 2 and
    Mistral."""
    pieces = ["<unk>", "</s>", "a", "\n", *(f"<0x{byte:02X}>" for byte in "😀".encode())]
    backend = Tokenizer(models.WordLevel({piece: at for at, piece in enumerate(pieces)}, "<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    answer = [2, 4, 5, 6, 7, 3, 2, 1]  # a 😀 line break a </s>
    assert tokenizer.decode(answer) == "a😀\na</s>" and len(tokenizer.decode(answer[:4])) == 4
    assert step_ends(tokenizer, answer, "\n") == [5, 7]
    assert step_ends(tokenizer, answer, "😀") == [4, 7], "the token that completes it"


def test_labels_belong_to_the_ends_of_steps(merging):
    answer = ids("a", "\n", "b", "\n", "c", "</s>")
    # NaN: no label
    assert labelled_ends(merging, answer, (1.0, math.nan, 0.25), "\n") == ([1, 5], [1.0, 0.25])
    with pytest.raises(
        UserError, match=r"have 1 steps and not 2: the tokenizer does not keep .*--step_separator"
    ):
        labelled_ends(merging, ids("a", "b", "</s>"), (1.0, 0.0), "\n")


@pytest.mark.parametrize(
    ("steps", "labels", "problem"),
    [
        (
            ["a", "b" + "\n" * 10**5 + "c"],
            (1.0, 0.0),
            "step 2 contains the separator .* choose another --step_sep",
        ),
        (["a", "\n \n"], (1.0, 0.0), "step 2 is empty"),
        (["a", "b"], (math.nan, math.nan), "no step has a label"),
        ([], (), "no step has a label"),
    ],
)
def test_separators_at_the_ends_of_steps_are_removed_and_other_steps_cannot_be_joined(
    steps, labels, problem
):
    joined = joined_steps(Example("Q:", ["\na\n\n", "b\n", " c"], labels=(1.0, 0.0, 1.0)), "\n")
    assert (joined.answers, joined.labels) == (["a\nb\n c"], (1.0, 0.0, 1.0))
    assert joined_steps(Example("Q:", ["\n\na\n\n\n"], labels=(1.0,)), "\n\n").answers == ["a\n"]
    with pytest.raises(UserError, match=problem):
        joined_steps(Example("Q:", steps, labels=labels), "\n")
