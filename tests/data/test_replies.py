"""The thoughts of a message and what follows them."""

import pytest

from dschat_ppo.data.replies import MARKS, opens_thought, read_reply

CALL = '<tool_call>{"name": "say", "arguments": {"text": "</think>"}}</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>"


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
        ("The tag `</think>` is", True, "The tag `</think>` is", ""),
        # thoughts stand at the beginning: later marks are text
        ("<think>A</think>I look. <think>B", False, "A", "I look. <think>B"),
        ("A</think>I look. <think>B</think>3", True, "A", "I look. <think>B</think>3"),
        ("I look. <think>Um.", False, "", "I look. <think>Um."),
        ("<think>A <think> B</think> C</think> 3", False, "A <think> B", "C</think> 3"),
        ("<think>A</think>Write `<think>`: 42", False, "A", "Write `<think>`: 42"),
        ("<think>A</think>```\n<think>\n```\n42", False, "A", "```\n<think>\n```\n42"),
        ("<think>A</think>Then `</think>` ends it.", False, "A", "Then `</think>` ends it."),
        ("A</think>Then </think> ends it.", True, "A", "Then </think> ends it."),
        # a mark that nothing began, or a mention of it
        ("Write `</think>`. 42", False, "", "Write `</think>`. 42"),
        ("Write </think> at the end. 42", False, "", "Write </think> at the end. 42"),
        ("Write '</think>', (</think>) 42", False, "", "Write '</think>', (</think>) 42"),
        ("Write <think>steps</think> 42", False, "", "Write <think>steps</think> 42"),
        ("So:\n```\na\n</think>\n```\n42", False, "", "So:\n```\na\n</think>\n```\n42"),
        ("So:\n```\na\n</think>", False, "", "So:\n```\na\n</think>"),
        ("I close it by `</think>`.\n  </think>\n42", False, "I close it by `</think>`.", "42"),
        # code in a thought
        ("<think>By `</think>` it ends.</think>42", False, "By `</think>` it ends.", "42"),
        ("By `<think>a</think>`.\n</think>42", True, "By `<think>a</think>`.", "42"),
        ("Um.\n```\n'</think>'\n```\n</think>3", True, "Um.\n```\n'</think>'\n```", "3"),
        ("<think>One ` here</think>It is `3`.", False, "One ` here", "It is `3`."),
        ("<think>`x`</think>`3`", False, "`x`", "`3`"),
        ("<think>\n```\nx\n</think>\n```\n3\n```", False, "```\nx", "```\n3\n```"),
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
        ("Um.<|end|><|start|>assistant<|channel|>final<|message|>3", True, "Um.", "3"),
        (f"{ANALYSIS}A<|end|><|start|>assistant{ANALYSIS}B<|end|>3", False, "A\n\nB", "3"),
        (f"{ANALYSIS}A<|end|><|start|>assistant{ANALYSIS}B", False, "A\n\nB", ""),
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
    answer = f"`{begin}` and `{end}`, or {begin} and {end}, are marks."
    for text, is_opened in (
        (f"{begin}\nUm.{end}\n{answer}", False),
        (f"{begin}\nUm.{end}\n{answer}", True),
    ):
        assert read_reply(text, is_opened).rest == answer
    assert read_reply(f"So {answer}").rest == f"So {answer}"


def test_a_question_about_marks_opens_no_thought():
    assert not opens_thought("<|user|>Think inside <think> tags.<|assistant|>")
