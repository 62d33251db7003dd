"""Tool calls, tools and answers that are messages; what a template leaves out is refused."""

import json

import pytest
from tiny_tokenizers import encode_answer, tokenizer_of

from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.errors import UserError

FIND = {"type": "function", "function": {"name": "find", "arguments": {"what": "lamp ☕"}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [FIND]}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}]
ASK = [{"role": "user", "content": "Where?"}]
SYSTEM = [{"role": "system", "content": "Be kind."}, *ASK]
# In the form of Hermes and Qwen, and with another end after tool calls, as Llama 3.1.
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLED = '<tool_call>{"name": "find", "arguments": {"what": "lamp ☕"}}</tool_call>'


def templated(template: str):
    tokenizer = tokenizer_of("bytes")
    tokenizer.chat_template = template
    return tokenizer


def test_an_answer_with_tool_calls():
    tokenizer = templated(HERMES)
    assert tokenizer.decode(encode_answer(tokenizer, ASK, CALL, TOOLS)) == f"{CALLED}<|im_end|>"
    spoken = {**CALL, "content": "I look.</s>"}
    assert tokenizer.decode(encode_answer(tokenizer, ASK, spoken)) == f"I look.{CALLED}<|im_end|>"


def test_a_message_without_tool_calls_is_its_text():
    tokenizer = templated(HERMES)
    for extra in ({}, {"tool_calls": []}, {"weight": 1}):
        answer = {"role": "assistant", "content": "Here.", **extra}
        assert encode_answer(tokenizer, ASK, answer) == encode_answer(tokenizer, ASK, "Here.")
        assert encode_answer(tokenizer, "Where?", answer) == encode_answer(tokenizer, "Where?", "Here.")


def test_tools_and_tool_messages_are_in_the_prompt():
    tokenizer = templated(HERMES)
    talk = [*ASK, CALL, {"role": "tool", "content": "hall"}]
    assert tokenizer.decode(encode_prompt(tokenizer, talk, TOOLS)) == (
        f"<|im_start|>system\n{json.dumps(TOOLS[0])}\n<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALLED}<|im_end|>\n<|im_start|>tool\nhall<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("content", [None, "", "missing"])
def test_tool_calls_need_no_content(content):
    message = {"role": "assistant", "content": content, "tool_calls": [FIND]}
    if content == "missing":
        del message["content"]
    tokenizer, talk = templated(HERMES), [*ASK, message, {"role": "tool", "content": "hall"}]
    assert "None" not in tokenizer.decode(encode_prompt(tokenizer, talk))


def test_tool_calls_may_end_with_another_token():
    other = "{{ '<|eot_id|>' if m.tool_calls else '<|im_end|>' }}\n{% endfor %}"
    tokenizer = templated(HERMES.replace("<|im_end|>\n{% endfor %}", other).replace("\n<|im_end|>\n{% endif %}", ""))
    assert tokenizer.decode(encode_answer(tokenizer, ASK, CALL)) == f"{CALLED}<|eot_id|>"
    assert tokenizer.decode(encode_answer(tokenizer, ASK, "Here.")) == "Here.<|im_end|>"


@pytest.mark.parametrize("written", ["{{ c.function.arguments }}", "{{ '' + c.function.arguments }}"])
def test_a_template_that_expects_arguments_as_text(written):
    tokenizer = templated(HERMES.replace("{{ c.function.arguments | tojson }}", written))
    assert tokenizer.decode(encode_answer(tokenizer, ASK, CALL)) == f"{CALLED}<|im_end|>"


# Refused


@pytest.mark.parametrize(
    ("template", "prompt", "tools", "reason"),
    [
        (HERMES.replace("{% if tools %}", "{% if false %}"), ASK, TOOLS, "leaves out the tool 'find'"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", [*ASK, CALL, *ASK], None, "the tool call 'find'"),
        ("{{ messages[-1].content }}", SYSTEM, None, r"leaves out the system message 'Be kind.'; take .*--chat_templ"),
        ("{{ messages[0].content }}", SYSTEM, None, "leaves out the user message 'Where"),
    ],
)
def test_a_template_that_leaves_something_out(template, prompt, tools, reason):
    with pytest.raises(UserError, match=reason):
        encode_prompt(templated(template), prompt, tools)


def test_an_answer_whose_tool_calls_are_not_rendered():
    with pytest.raises(UserError, match="leaves out the tool call 'find'"):
        encode_answer(templated("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"), ASK, CALL)


def test_tool_calls_cannot_answer_a_text_prompt():
    with pytest.raises(UserError, match="tool calls, which need chat messages"):
        encode_answer(templated(HERMES), "Where?", CALL)


def test_trimmed_and_quoted_messages_count_as_rendered():
    prompt = [{"role": "user", "content": ' two\n"lines" '}]
    for filters in ("trim", "tojson"):
        assert encode_prompt(
            templated(f"{{% for m in messages %}}{{{{ m.content | {filters} }}}}{{% endfor %}}"), prompt
        )


def test_a_template_that_rejects_messages_says_why():
    refusing = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
    tokenizer = templated(refusing + "{% endif %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="the chat template rejects these messages: .*System role not supported"):
        encode_prompt(tokenizer, SYSTEM)
    assert encode_prompt(tokenizer, ASK)
    with pytest.raises(UserError, match="rejects these messages: TemplateError: Never$"):
        encode_prompt(templated("{{ raise_exception('Never') }}{{ messages }}"), ASK)


# Thinking


OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOPENED{% endif %}"
)


@pytest.mark.parametrize(
    ("opened", "answer", "expected"),
    [
        ("<think>\n", "<think>\nUm.</think>Here.", "Um.</think>Here."),  # as DeepSeek R1: the prompt opens the thinking
        ("<think>\n", "<think>Um.</think>Here.", "Um.</think>Here."),
        ("<think>\n", "Um.</think>Here.", "Um.</think>Here."),
        ("", "<think>\nUm.</think>Here.", "<think>\nUm.</think>Here."),  # its template would drop what is trained
        ("", "Here.", "Here."),
    ],
)
def test_the_thinking_of_an_answer_is_kept_and_opened_once(opened, answer, expected):
    tokenizer = templated(OPENS.replace("OPENED", opened))
    assert tokenizer.decode(encode_answer(tokenizer, ASK, answer)) == f"{expected}<|im_end|>"
