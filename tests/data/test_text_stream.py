"""Tokens to text as they arrive: the pieces make the text of all tokens, and no piece holds half a character."""

import random

import pytest
from tiny_tokenizers import KINDS, tokenizer_of

from dschat_ppo.data.text_stream import INCOMPLETE, TextStream

TEXTS = ["Where is the lamp? It is in the hall.", "Café ☕ and naïve 😀 emoji, line\nbreaks\n\nand   spaces.", " x", ""]


def pieces_of(tokenizer, ids) -> tuple[list[str], str]:
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in ids]
    return pieces, stream.rest()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_text(kind, text):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, rest = pieces_of(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=True)
    assert INCOMPLETE not in "".join(pieces)
    assert len(ids) < 8 or len([piece for piece in pieces if piece]) > 3, "the text arrives in parts"


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens(kind):
    """Also bytes that are no characters, and special tokens."""
    tokenizer, rng = tokenizer_of(kind), random.Random(3)
    for _ in range(20):
        ids = [rng.randrange(len(tokenizer)) for _ in range(12)]
        pieces, rest = pieces_of(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=True)


def test_half_a_character_waits():
    tokenizer = tokenizer_of("bytes")
    ids = tokenizer.encode("é", add_special_tokens=False)
    if len(ids) == 1:
        ids = tokenizer.convert_tokens_to_ids(["Ã", "©"])
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in ids] == ["", "é"]
    assert stream.add(ids[0]) == "" and stream.rest() == INCOMPLETE
