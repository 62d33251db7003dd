"""The thoughts of a message and what follows them."""

import pytest

from dschat_ppo.data.replies import MARKS, opens_thought, read_reply

CALL = '<tool_call>{"name": "say", "arguments": {"text": "</think>"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_opened", "thoughts", "rest"),
    [
        ("It is 3.", False, "", "It is 3."),
        (" It is 3.\n", False, "", " It is 3.\n"),
        ("<think>\nUm.\n</think>\n\nIt is 3.\n", False, "Um.", "It is 3.\n"),
        ("<think>\n\n</think>\n\nIt is 3.", False, "", "It is 3."),
        # the template has opened the thought, known or not
        ("Um.\n</think>\nIt is 3.", True, "Um.", "It is 3."),
        ("Um.\n</think>\nIt is 3.", False, "Um.", "It is 3."),
        ("<think>\nUm.</think>It is 3.", True, "Um.", "It is 3."),
        ("[THINK]Um.[/THINK]It is 3.", True, "Um.", "It is 3."),
        # a limit has cut it
        ("<think>\nUm. It is 3", False, "Um. It is 3", ""),
        ("Um. It is 3", True, "Um. It is 3", ""),
        ("I look. <think>Um.", False, "Um.", ""),
        # several thoughts
        ("<think>A</think>I look. <think>B</think>It is 3.", False, "A\n\nB", "I look. It is 3."),
        ("A</think>I look. <think>B</think>It is 3.", True, "A\n\nB", "I look. It is 3."),
        ("<think>A <think> B</think> C</think> It is 3.", False, "A <think> B\n\nC", "It is 3."),
        # marks inside a call are its text
        (CALL, False, "", CALL),
        (f"<think>A</think>{CALL}", False, "A", CALL),
        (f"Say {CALL}?</think>It is 3.", False, f"Say {CALL}?", "It is 3."),
        (f"Some <tool_call> perhaps</think>{CALL}", False, "Some <tool_call> perhaps", CALL),
        (
            "<|channel|>analysis<|message|>Um.<|end|><|start|>assistant<|channel|>final<|message|>3",
            False,
            "Um.",
            "3",
        ),
        ("<|channel|>final<|message|>3", False, "", "3"),
        ("It is 3.<|end|>", False, "", "It is 3.<|end|>"),
    ],
)
def test_thoughts_and_what_follows(text, is_opened, thoughts, rest):
    reply = read_reply(text, is_opened)
    assert (reply.thoughts, reply.rest) == (thoughts, rest)


@pytest.mark.parametrize(("begin", "end"), MARKS.items())
def test_each_kind_of_marks(begin, end):
    assert opens_thought(f"<|assistant|>{begin}\n")
    assert not opens_thought(f"<|assistant|>{begin}\n\n{end}\n\n")
    reply = read_reply(f"{begin}\nUm.{end}\n\nIt is 3.")
    assert (reply.thoughts, reply.rest) == ("Um.", "It is 3.")
    assert [reply.text[start:stop].strip() for start, stop in reply.outside] == ["", "It is 3."]


def test_a_question_about_marks_opens_no_thought():
    assert not opens_thought("<|user|>Think inside <think> tags.<|assistant|>")
