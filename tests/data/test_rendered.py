"""What a chat template leaves out of a row, in the shapes of published templates."""

from copy import deepcopy

import pytest
from chat_tokenizers import EACH, EVERY, opened_by, special_tokenizer
from prepared import flags_for, write_jsonl

from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import Example
from dschat_ppo.data.prepare import prepare
from dschat_ppo.errors import UserError

ASK = {"role": "user", "content": "Where may I find it?"}
CALL = {
    "role": "assistant",
    "content": "I find it.",
    "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": {"what": "it"}}}],
}
SEEN = {"role": "tool", "name": "find", "content": "hall"}
TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "To find.", "parameters": {}}}
]
ENDS = ("<|im_start|>", "<|im_end|>", "<|call|>", "<|observation|>")
LISTED = "{% if tools %}{{ tools | tojson }}{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n"
OPENED = opened_by("<|im_start|>assistant\n")
# how a template writes the calls of a message
WRITTEN = {
    "Qwen3": "{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}",
    "Kimi K2": "{% for c in m.tool_calls %}<|call_begin|>functions.{{ c.function.name }}:0"
    "<|argument_begin|>{{ c.function.arguments | tojson }}<|call_end|>{% endfor %}",
    "DeepSeek V3": "{% for c in m.tool_calls %}<call>function<sep>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments | tojson }}\n```{% endfor %}",
    "Granite 3": "{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | map(attribute='function') "
    "| list | tojson }}{% endif %}",
    "GLM-4.5": "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}{% for k, v in "
    "c.function.arguments | items %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>"
    "{% endfor %}</tool_call>{% endfor %}",
    "first call alone": "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}",
}


def tokenizer_of(calls="", tools=LISTED, turn=TURN, opened=OPENED):
    template = tools + EACH + turn.replace("CALLS", calls) + EVERY + opened
    return special_tokenizer(template, "</s>", ENDS)


def encoded(tokenizer, prompt, answer, tools=None):
    return encode_example(tokenizer, Example(prompt, [answer], tools=tools), all_turns=True)


@pytest.mark.parametrize("calls", WRITTEN.values(), ids=WRITTEN)
def test_templates_that_write_tools_and_calls(calls):
    tokenizer = tokenizer_of(calls)
    assert encoded(tokenizer, [ASK, CALL, SEEN], "There.", TOOLS).remarks == ()
    assert encoded(tokenizer, [ASK], CALL, TOOLS).remarks == ()


TWO_CALLS = CALL | {"tool_calls": [CALL["tool_calls"][0], *deepcopy(CALL["tool_calls"])]}
ANSWERED = "{{ m.content if m.content else '' }}{% if not m.content %}CALLS{% endif %}"


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "answer", "what"),
    [
        # the words of the messages and the names of results hold the name of the tool
        (tokenizer_of(), [ASK, CALL, SEEN], "There.", "the tool call 'find'"),
        (tokenizer_of(), [ASK], CALL, "the tool call 'find'"),
        (tokenizer_of(WRITTEN["Qwen3"], tools=""), [ASK], "There.", "the tool 'find'"),
        (tokenizer_of(WRITTEN["Qwen3"], tools=""), [ASK, CALL, SEEN], "It.", "the tool 'find'"),
        (tokenizer_of(WRITTEN["Qwen3"], tools=""), [ASK], CALL, "the tool 'find'"),
        (tokenizer_of(WRITTEN["first call alone"]), [ASK], TWO_CALLS, "the tool call 'find'"),
        (
            tokenizer_of(turn=TURN.replace("{{ m.content }}CALLS", ANSWERED)),
            [ASK],
            CALL,
            "the tool call 'find'",
        ),
        (
            tokenizer_of(WRITTEN["Qwen3"], turn="{% if m.role != 'tool' %}" + TURN + "{% endif %}"),
            [ASK, CALL, SEEN],
            "There.",
            "the tool message 'hall'",
        ),
    ],
)
def test_what_a_template_leaves_out(tokenizer, prompt, answer, what):
    with pytest.raises(UserError, match=f"^the chat template leaves out {what}"):
        encoded(tokenizer, prompt, answer, TOOLS)


THINKS = TURN.replace(
    "{{ m.content }}",
    "{% if m.KEY and loop.last %}<think>{{ m.KEY }}</think>{% endif %}{{ m.content }}",
)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning", "thought", "cot"])
@pytest.mark.parametrize("is_known", [True, False])
def test_thoughts_that_the_template_does_not_know(key, is_known):
    """A template may drop the thoughts of earlier answers."""
    tokenizer = tokenizer_of(turn=THINKS.replace("KEY", key if is_known else "nothing"))
    answer = {"role": "assistant", "content": "There.", key: "Um,\n I think."}
    remarks = encoded(tokenizer, [ASK], answer).remarks
    earlier = encoded(tokenizer, [ASK, answer, ASK], "There.").remarks
    assert len(remarks) == (not is_known) and remarks == earlier
    assert not remarks or f"leaves out the thoughts in '{key}'" in remarks[0]
    assert encoded(tokenizer, [ASK], {**answer, key: " "}).remarks == ()


OPENS = opened_by("<|im_start|>assistant\n<think>\n")
CLOSES = TURN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)


@pytest.mark.parametrize(
    ("turn", "opened", "answer", "is_told"),
    [
        (TURN, OPENS, "There.", True),
        (TURN, OPENS, "<think>\nUm.</think>There.", False),
        (TURN, OPENS, "<think>\nUm.", True),
        (CLOSES, OPENS, "There.", False),  # Qwen3
        (TURN, OPENED, "There.", False),
        (TURN, opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n"), "There.", False),
    ],
)
def test_an_open_thought_that_the_answer_does_not_close(turn, opened, answer, is_told):
    remarks = encoded(tokenizer_of(turn=turn, opened=opened), [ASK], answer).remarks
    assert len(remarks) == is_told and all("do not close" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("content", "is_told"),
    [
        ("<tool_call>\n{'name': 'find', 'arguments': {'what': 'it'}}\n</tool_call>", True),
        ("[TOOL_CALLS] [{'name': 'find'}]", True),
        ('<tool_call>\n{"name": "find", "arguments": {"what": "it\'s"}}\n</tool_call>', False),
        ("A dictionary of Python: {'name': 'find'}", False),
    ],
)
def test_calls_that_are_python_text(content, is_told):
    said = {"role": "assistant", "content": content}
    for prompt, answer in (([ASK], content), ([ASK, said, ASK], "There.")):
        remarks = encoded(tokenizer_of(), prompt, answer).remarks
        assert len(remarks) == is_told and all("written as Python" in each for each in remarks)


def test_remarks_are_counted_in_the_log(tmp_path, said):
    answer = {"role": "assistant", "content": "There.", "thinking": "Um."}
    told = [{"messages": [ASK, answer]}] * 2
    plain = [{"messages": [ASK, {"role": "assistant", "content": "There."}]}]
    path = write_jsonl(tmp_path / "a.jsonl", told + plain)
    flags = flags_for(tmp_path, path, apply_chat_template=None)
    found = prepare(StepData(use="sft", flags=flags, limit=100, eval_fraction=0.0), tokenizer_of())
    assert len(found.train) == 3 and found.train[0]["prompt_ids"]
    assert any("2" in line and "the thoughts in 'thinking'" in line for line in said)


RESULT = "<tool_response>\n{{ m.content }}\n</tool_response>"


@pytest.mark.parametrize("content", ["hall", "<tool_response>\nhall\n</tool_response>", "a\n\nb"])
@pytest.mark.parametrize("is_marked", [True, False])
def test_the_marks_of_a_result_stand_once(content, is_marked):
    """Hermes' data have them in the content; a template that writes none keeps them."""
    turn = TURN.replace(
        "{{ m.content }}", "{% if m.role == 'tool' %}RESULT{% else %}{{ m.content }}{% endif %}"
    )
    turn = turn.replace("RESULT", RESULT if is_marked else "{{ m.content }}")
    tokenizer = tokenizer_of(WRITTEN["Qwen3"], turn=turn)
    prompt = [ASK, CALL, {**SEEN, "content": content}]
    text = tokenizer.decode(encoded(tokenizer, prompt, "There.").prompt)
    marked = f"<tool_response>\n{content}\n</tool_response>"
    is_wrapped = content.startswith("<") or not is_marked
    assert (content if is_wrapped else marked) in text
    assert text.count("<tool_response>") == (is_marked or content.startswith("<"))
