"""Chat templates by name or file, their variables, tools and tool calls; what a template leaves out
is refused."""

import json
from types import SimpleNamespace

import pytest
from chat_tokenizers import templated
from conftest import tiny_config
from tiny_tokenizers import encode_answer, tokenizer_of
from transformers import AutoTokenizer, LlamaForCausalLM

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.data.templates import NAMED, template_of_file, turn_end, with_template_flags
from dschat_ppo.errors import UserError
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.wrapped_models import PolicyModel

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "In the hall."},
    {"role": "user", "content": "And now?"},
]
ASK = TALK[3:]
# As that of Qwen 3: an empty thought is written if thinking is off.
THINKING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def flags(**settings) -> DataFlags:
    return DataFlags(data_path=["rows.jsonl"], **settings)


def rendered(tokenizer, messages=TALK, opened=True, **variables) -> str:
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=opened, **variables
    )


def with_flags(kind: str, **settings):
    return with_template_flags(tokenizer_of(kind), flags(**settings))


# By name


# the text of each turn, and what opens an answer
TURNS = {
    "chatml": ("<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama-3": (
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "zephyr": ("<|{role}|>\n{content}</s>\n", "<|assistant|>\n"),
}
TEXTS = {
    name: "".join(turn.format(**m) for m in TALK) + opening
    for name, (turn, opening) in TURNS.items()
}
TEXTS["human-assistant"] = (
    " System: Be kind. Human: Where is it? Assistant: In the hall.</s> Human: And now? Assistant:"
)


@pytest.mark.parametrize(("name", "expected"), TEXTS.items())
def test_the_text_of_a_named_template(name, expected, said):
    assert rendered(with_flags("bytes", chat_template=name)) == expected
    assert rendered(with_flags("pieces", chat_template=name)) == "<s>" + expected
    own = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>"}.get(name, "</s>")
    # messages end with EOS there
    for kind, end in (("bytes", own), ("bytes without markers", "</s>")):
        said.clear()
        tokenizer = with_flags(kind, chat_template=name)
        assert said[0].endswith(f"messages end with {end}")
        assert any(f"no token {own}" in line for line in said) == (own != end)
        assert (turn_end(tokenizer).kept, tokenizer.decode([turn_end(tokenizer).token_id])) == (
            end,
            end,
        )
        assert rendered(tokenizer) == expected.replace(own, end)


@pytest.mark.parametrize("name", NAMED)
def test_named_templates_refuse_tools(name):
    tokenizer = with_flags("bytes", chat_template=name)
    with pytest.raises(UserError, match="no form for the role 'tool'"):
        encode_prompt(tokenizer, [*TALK, {"role": "tool", "content": "4"}])
    with pytest.raises(UserError, match="no form for tools"):
        encode_prompt(tokenizer, [*ASK, CALL, *ASK])


# By file


def test_a_file(tmp_path, said):
    path = tmp_path / "own.jinja"
    text = (
        "{% for m in messages %}[{{ m.content }} ☕]{% generation %}{% endgeneration %}{% break"
        " %}{% endfor %}"
    )
    path.write_text(text, encoding="utf-8")  # with tags of transformers
    tokenizer = with_flags("bytes", chat_template=str(path))
    assert tokenizer.chat_template == text and encode_prompt(tokenizer, ASK) == tokenizer.encode(
        "[And now? ☕]"
    )
    assert any(str(path) in line for line in said)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{% for m in messages %}\n{{ m.content }\n{% endfor %}", r", line 2: unexpected"),
        (
            b"{% for m in messages %}\n\n{{ m | shout }}{% endfor %}",
            r", line 3: No filter named 'shout'",
        ),
        (b"{{ messages }} caf\xe9", ": cannot be used: .*utf-8"),
        (b"{{ " + b"[" * 100_000, ": cannot be used: "),
        (None, ": neither a file nor one of chatml, llama-3, zephyr"),
    ],
)
def test_a_file_that_is_no_template(tmp_path, content, reason):
    path = tmp_path / "own.jinja"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=f"^--chat_template {path}{reason}") as problem:
        template_of_file(str(path))
    assert "\n" not in str(problem.value)


# Variables


def test_variables_are_part_of_the_template_and_a_later_value_replaces_an_earlier_one():
    plain, tokenizer = (templated(THINKING) for _ in range(2))
    lengths = set()
    for value in (False, True, False):
        with_template_flags(
            tokenizer, flags(chat_template_kwargs=json.dumps({"enable_thinking": value}))
        )
        assert rendered(tokenizer) == rendered(plain, enable_thinking=value)
        assert ("<think>" in rendered(tokenizer)) != value
        lengths.add(len(tokenizer.chat_template) + value)
    assert len(lengths) == 1


VALUES = [None, -3, 1e-7, "a \"b\" 'c' \\n\n\t%} {{ x }} {# 😀 \u2028", {"k": [1, {"l": None}]}]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_keep_their_meaning(value):
    tokenizer = templated("{{ messages | length }}{{ own | tojson }}{{ other }}")
    with_template_flags(
        tokenizer, flags(chat_template_kwargs=json.dumps({"own": value, "other": 7}))
    )
    assert rendered(tokenizer, ASK) == f"1{json.dumps(value, ensure_ascii=False)}7"


@pytest.mark.parametrize(
    "start", ["", "\n\n", "  ", " {% if true %}x{% endif %}", "{%- if true %}\n\ny{% endif %}"]
)
def test_variables_do_not_change_the_text_at_the_start(start):
    """Jinja drops the line break after a block and the spaces before one at the start of a line."""
    before, after = (templated(start + "{{ messages[0].content }}{{ own }}") for _ in range(2))
    with_template_flags(after, flags(chat_template_kwargs='{"own": "!"}'))
    assert rendered(after, ASK) == rendered(before, ASK) + "!"


@pytest.mark.parametrize(
    ("template", "variables", "reason"),
    [
        (
            THINKING,
            '{"enable_thinkin": false}',
            "reads no variable 'enable_thinkin' of yours; it reads enable_thinkin",
        ),
        (THINKING, '{"messages": []}', "reads no variable 'messages' of yours; it"),
        (None, '{"own": 1}', "no chat template; give one with --chat_template"),
        (
            {"default": "{{ own }}", "tool_use": "{{ own }}"},
            '{"own": 7}',
            "several chat templates; give one with --cha",
        ),
    ],
)
def test_variables_that_cannot_be_used(template, variables, reason):
    tokenizer = templated(template)
    with pytest.raises(UserError, match=reason):
        with_template_flags(tokenizer, flags(chat_template_kwargs=variables))
    assert tokenizer.chat_template == template


# Saved with the model


@pytest.mark.parametrize("name", ["llama-3", "own"])
def test_plain_transformers_renders_a_saved_model_in_the_same_way(name, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(THINKING, encoding="utf-8")
    settings = {"chat_template_kwargs": '{"enable_thinking": false}'} if name == "own" else {}
    tokenizer = with_flags("bytes", chat_template=str(path) if name == "own" else name, **settings)
    module = PolicyModel(LlamaForCausalLM(tiny_config()))
    save_model(SimpleNamespace(module=module), tokenizer, tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.apply_chat_template(
        TALK, tokenize=True, return_dict=False, add_generation_prompt=True
    ) == (encode_prompt(tokenizer, TALK))
    assert (tmp_path / "saved" / "chat_template.jinja").exists()


FIND = {"type": "function", "function": {"name": "find", "arguments": {"what": "lamp ☕"}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [FIND]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "description": "d", "parameters": {"type": "object"}},
    }
]
SYSTEM = [{"role": "system", "content": "Be kind."}, *ASK]
# In the form of Hermes and Qwen, and with another end after tool calls, as Llama 3.1.
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor"
    " %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{%"
    ' for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{'
    " c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLED = '<tool_call>{"name": "find", "arguments": {"what": "lamp ☕"}}</tool_call>'


def test_an_answer_with_tool_calls():
    tokenizer = templated(HERMES)
    assert tokenizer.decode(encode_answer(tokenizer, ASK, CALL, TOOLS)) == f"{CALLED}<|im_end|>"
    spoken = {**CALL, "content": "I look.</s>"}
    assert tokenizer.decode(encode_answer(tokenizer, ASK, spoken)) == f"I look.{CALLED}<|im_end|>"


def test_tools_and_tool_messages_are_in_the_prompt():
    tokenizer = templated(HERMES)
    talk = [*ASK, CALL, {"role": "tool", "content": "hall"}]
    assert (
        tokenizer.decode(encode_prompt(tokenizer, talk, TOOLS))
        == f"<|im_start|>system\n{json.dumps(TOOLS[0])}\n<|im_end|>\n<|im_start|>user\nAnd"
        " now?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALLED}<|im_end|>\n<|im_start|>tool\nhall<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_calls_may_end_with_another_token():
    other = "{{ '<|eot_id|>' if m.tool_calls else '<|im_end|>' }}\n{% endfor %}"
    tokenizer = templated(
        HERMES.replace("<|im_end|>\n{% endfor %}", other).replace("\n<|im_end|>\n{% endif %}", "")
    )
    assert tokenizer.decode(encode_answer(tokenizer, ASK, CALL)) == f"{CALLED}<|eot_id|>"
    assert tokenizer.decode(encode_answer(tokenizer, ASK, "Here.")) == "Here.<|im_end|>"


@pytest.mark.parametrize(
    "written", ["{{ c.function.arguments }}", "{{ '' + c.function.arguments }}"]
)
def test_a_template_that_expects_arguments_as_text(written):
    tokenizer = templated(HERMES.replace("{{ c.function.arguments | tojson }}", written))
    assert tokenizer.decode(encode_answer(tokenizer, ASK, CALL)) == f"{CALLED}<|im_end|>"


def test_trimmed_and_quoted_messages_count_as_rendered():
    for written in ("m.content | trim", "m.content | tojson"):
        tokenizer = templated(f"{{% for m in messages %}}{{{{ {written} }}}}{{% endfor %}}")
        assert encode_prompt(tokenizer, [{"role": "user", "content": ' two\n"lines" '}])


@pytest.mark.parametrize(
    ("template", "prompt", "answer", "reason"),
    [
        (
            HERMES.replace("{% if tools %}", "{% if false %}"),
            ASK,
            "a",
            "leaves out the tool 'find'",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            [*ASK, CALL, *ASK],
            "a",
            "the tool call 'find'",
        ),
        (
            "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}",
            ASK,
            CALL,
            "leaves out the tool call 'find'",
        ),
        (
            "{{ messages[-1].content }}",
            SYSTEM,
            "a",
            r"leaves out the system message 'Be kind.'; take .*--chat_templ",
        ),
        ("{{ messages[0].content }}", SYSTEM, "a", "leaves out the user message 'And"),
        (HERMES, "Where?", CALL, "tool calls, which need chat messages"),
        (
            "{{ raise_exception('No system') }}{{ messages }}",
            ASK,
            "a",
            "rejects these messages: .*No system",
        ),
        (None, ASK, "a", "no chat template"),
    ],
)
def test_a_template_that_rejects_or_leaves_out_something(template, prompt, answer, reason):
    with pytest.raises(UserError, match=reason):
        encode_answer(templated(template), prompt, answer, TOOLS)
