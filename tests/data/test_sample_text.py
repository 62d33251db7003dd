"""The text of a sample with its trained parts marked."""

import pytest
from test_encode import chat_tokenizer
from tiny_tokenizers import KINDS

from dschat_ppo.data.encode import encode_examples
from dschat_ppo.data.examples import Example
from dschat_ppo.data.sample_text import render_sample, sample_text

TALK = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "In the hall."},
    {"role": "user", "content": "And now?"},
]


def sample(kind: str, answers: list[str], colour: bool = False, prompt=TALK) -> str:
    tokenizer = chat_tokenizer(kind, "zephyr")
    (encoded,) = encode_examples(tokenizer, [Example(prompt, answers)], True)
    return sample_text(tokenizer, encoded, colour)


@pytest.mark.parametrize("kind", ["bytes", "letters"])
def test_trained_parts_are_marked(kind):
    expected = "<|user|>\nWhere is it?</s>\n<|assistant|>\n⟦In the hall.</s>⟧\n<|user|>\nAnd now?</s>\n<|assistant|>\n"
    assert sample(kind, ["There."]) == expected + "⟦There.</s>⟧"
    assert sample(kind, ["There.", "No."]) == expected + "⟦There.</s>⟧\nor ⟦No.</s>⟧"
    assert sample(kind, []) == expected
    assert sample(kind, ["There."], colour=True) == (
        (expected + "⟦There.</s>⟧").replace("⟦", "\x1b[32m").replace("⟧", "\x1b[0m")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_marks_are_the_only_change(kind):
    tokenizer = chat_tokenizer(kind, "zephyr")
    (encoded,) = encode_examples(tokenizer, [Example("Where is it?", [" In the hall."])], True)
    text = sample_text(tokenizer, encoded)
    assert text.replace("⟦", "").replace("⟧", "") == tokenizer.decode(encoded.prompt + encoded.answers[0])
    assert text.startswith(tokenizer.decode(encoded.prompt) + "⟦")


def test_adjacent_ranges_are_one_part():
    tokenizer = chat_tokenizer("bytes", "zephyr")
    ids = tokenizer.encode("Where is it?")
    assert render_sample(tokenizer, ids, [(0, 1), (1, len(ids))]) == "⟦Where is it?⟧"
    assert render_sample(tokenizer, ids, []) == "Where is it?"


def test_a_character_that_a_boundary_splits():
    tokenizer = chat_tokenizer("bytes", "zephyr")
    ids = tokenizer.encode("ä")
    assert len(ids) == 2
    assert render_sample(tokenizer, ids, [(1, 2)]) == "\ufffd⟦\ufffd⟧"
