"""The tokens of a row as pieces of text, as a person reads them."""

from __future__ import annotations

import re
from functools import cache
from itertools import groupby

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

INCOMPLETE = "\ufffd"  # what decoders write for a part of a character
# tokens before a token that its text may depend on (spaces of SentencePiece)
_CONTEXT = 4
_FEW_REPEATS = 4
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte in the vocabulary of SentencePiece


def pieces_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text of each token of `ids`. A special token is its name in angle brackets, as ⟨im_end⟩;
    a token that is a part of a character is its bytes, as \\xe2\\x80; an id that the tokenizer does
    not have is its number in such brackets."""
    special = set(tokenizer.all_special_ids)  # of those with a role, such as EOS
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    pieces = []
    for position, token in enumerate(ids):
        name = tokenizer.convert_ids_to_tokens(token)
        if name is None:  # the vocabulary of the model is larger than that of the tokenizer
            pieces.append(f"⟨{token}⟩")
            continue
        if token in special:
            pieces.append(f"⟨{str(name).strip('<|>')}⟩")
            continue
        before = ids[max(0, position - _CONTEXT) : position]
        text_before = _decode_tokens(tokenizer, before)
        text = _decode_tokens(tokenizer, [*before, token])
        if text.startswith(text_before) and not text.endswith(INCOMPLETE):
            pieces.append(text[len(text_before) :])
        else:
            pieces.append(_byte_text(str(name)))
    return pieces


def with_counted_repeats(pieces: list[str]) -> list[str]:
    """The pieces with one in place of a special token that stands there four times or more on end,
    as that of an image does: its name and their number."""
    counted_pieces = list[str]()
    for piece, run in groupby(pieces):
        times = len(list(run))
        if times >= _FEW_REPEATS and piece.startswith("⟨"):
            counted_pieces.append(f"{piece}[{times} times]")
        else:
            counted_pieces += [piece] * times
    return counted_pieces


def _decode_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _byte_text(name: str) -> str:
    """The bytes of a token by its name in the vocabulary; the name where it is no bytes."""
    byte = _BYTE.fullmatch(name)
    if byte:
        return f"\\x{byte[1].lower()}"
    alphabet = _byte_of_character()
    if not all(character in alphabet for character in name):
        return name
    return "".join(f"\\x{alphabet[character]:02x}" for character in name)


@cache
def _byte_of_character() -> dict[str, int]:
    """The characters with which byte-level vocabularies write bytes."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
