"""Token rows as text: pieces by loss mask, special tokens, line breaks and control characters."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dschat_ppo.tools import toy
from dschat_ppo.tools.data_display import Piece, indented, pieces_of, shortened, text_of, visible


@pytest.fixture(scope="module")
def tokenizer():
    return toy.make_tokenizer(["where is the lamp", "in the hall"])


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Decodes the first token of a text without its space, as Llama's tokenizer does."""
    words = {"</s>": 0, "▁in": 1, "▁the": 2, "▁hall": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def test_pieces_follow_the_mask_and_the_special_tokens(tokenizer):
    prompt = tokenizer.encode("where?", add_special_tokens=False)
    answer = [*tokenizer.encode("in the hall", add_special_tokens=False), tokenizer.eos_token_id]
    mask = [False] * len(prompt) + [True] * len(answer)
    found = pieces_of(tokenizer, prompt + answer, mask, len(prompt))
    assert found == (
        [Piece("where?", False, False)],
        [Piece("in the hall", True, False), Piece(tokenizer.eos_token, True, True)],
    )


def test_a_trained_part_of_the_prompt_is_a_piece_of_the_prompt(tokenizer):
    ids = tokenizer.encode("abcdef", add_special_tokens=False)
    assert len(ids) == 6
    prompt, answer = pieces_of(tokenizer, ids, [False, True, True, False, True, True], 4)
    assert [(piece.text, piece.trained) for piece in prompt] == [("a", False), ("bc", True), ("d", False)]
    assert [(piece.text, piece.trained) for piece in answer] == [("ef", True)]


def test_a_piece_keeps_the_space_that_its_first_token_has_in_the_whole_text():
    tokenizer = sentencepiece_like()
    assert tokenizer.decode([2, 3]) == "the hall"
    prompt, answer = pieces_of(tokenizer, [1, 2, 3, 0], [False, True, True, True], 1)
    assert "".join(piece.text for piece in prompt + answer).startswith("in the hall")
    assert answer[0].text == " the hall"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a⏎\nb"),
        ("a\tb", "a⇥b"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\r\x00", "\\r\\x00"),
        ("\u202eabc\u200b", "\\u202eabc\\u200b"),
        ("نمی\u200cخواهم", "نمی\u200cخواهم"),
        ("\ud800", "\\ud800"),
        ("héllo 日本", "héllo 日本"),
    ],
)
def test_what_a_terminal_would_not_show_is_visible(text, shown):
    assert visible(text) == shown


PIECES = [Piece("a ", False, False), Piece("b\nc", True, False), Piece("</s>", True, True), Piece("d", False, False)]


def test_brackets_enclose_trained_text():
    assert text_of(PIECES, colour=False) == "a ⟦b⏎\nc</s>⟧d"


def test_colours_start_again_on_each_line_and_end_with_it():
    lines = text_of(PIECES, colour=True).split("\n")
    assert lines == ["a \x1b[30;42mb⏎\x1b[0m", "\x1b[30;42mc\x1b[0m\x1b[95;42m</s>\x1b[0md"]
    assert text_of([Piece("<s>", False, True)], colour=True) == "\x1b[35m<s>\x1b[0m"


def test_long_texts_lose_their_middle():
    (short,) = shortened([Piece("x" * 30 + "y" * 30, True, False)], most=20)
    assert short == Piece("x" * 10 + " [... 40 characters not shown ...] " + "y" * 10, True, False)
    assert shortened([PIECES[0]], most=20) == [PIECES[0]]


def test_lines_stand_behind_their_title():
    assert indented("prompt", "a⏎\nb⏎\n", colour=False) == ["    prompt       | a⏎", "                 | b⏎"]
