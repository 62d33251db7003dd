"""The text of a sample with its trained parts marked."""

import pytest
from chat_tokenizers import chat_tokenizer
from datasets import Dataset

from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError
from dschat_ppo.run.start_and_end import MOST_CHARACTERS, log_samples, row_sample

TALK = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "In the hall."},
    {"role": "user", "content": "And now?"},
]


def row_of(encoded) -> dict:
    return {"prompt_ids": encoded.prompt, "answers": encoded.answers, "prompt_spans": encoded.prompt_spans}


def sample(kind: str, answers: list[str], prompt=TALK) -> str:
    tokenizer = chat_tokenizer(kind, "zephyr")
    encoded = encode_example(tokenizer, Example(prompt, answers), True)
    return row_sample(tokenizer, row_of(encoded))


@pytest.mark.parametrize("kind", ["bytes", "letters"])
def test_trained_parts_are_marked(kind):
    expected = "<|user|>\nWhere is it?</s>\n<|assistant|>\n⟦In the hall.</s>⟧\n<|user|>\nAnd now?</s>\n<|assistant|>\n"
    assert sample(kind, ["There."]) == expected + "⟦There.</s>⟧"
    assert sample(kind, ["There.", "No."]) == expected + "⟦There.</s>⟧\nor ⟦No.</s>⟧"
    text = sample(kind, ["c" * 3000 + "b"])
    assert text.startswith("<|user|>") and text.endswith("cb</s>⟧") and len(text) == MOST_CHARACTERS + len(" [...] ")
    assert sample(kind, []) == expected.replace("⟦", "").replace("⟧", "")


def test_the_first_row_of_each_data_set_is_logged(said):
    tokenizer = chat_tokenizer("letters", "zephyr")
    encoded = [row_of(encode_example(tokenizer, Example(letter, ["x"]))) for letter in "abcd"]
    rows = Dataset.from_list([row | {"source": source} for row, source in zip(encoded, (1, 1, 0, 0), strict=True)])
    for count, shown in ((1, ["first c", "second a"]), (3, ["first c", "first d", "second a", "second b"])):
        said.clear()
        log_samples(tokenizer, rows, ("first", "second"), count)
        lines = [text.split() for text in shown]
        assert said == [f"data: {name}: a sample, answers in ⟦ ⟧:\n{prompt}⟦x</s>⟧" for name, prompt in lines]


def test_a_sample_and_a_refusal_do_not_control_the_terminal(capsys):
    tokenizer = chat_tokenizer("bytes", "zephyr")
    evil = "a\x1b[2Jb\x9b1mc\r\u202ed\te"
    encoded = encode_example(tokenizer, Example([{"role": "user", "content": evil}], [evil]), True)
    log_samples(tokenizer, Dataset.from_list([row_of(encoded) | {"source": 0}]), ["d"])
    for shown in (capsys.readouterr().out, str(UserError(f"row 1: {evil}"))):
        assert "a\\x1b[2Jb\\x9b1mc\\r\\u202ed\te" in shown
        assert not set(shown) & set("\x1b\x9b\r\u202e")
