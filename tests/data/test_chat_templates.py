"""Chat templates by name or file, and their variables, as the tokenizer and saved models have them."""

import json
from types import SimpleNamespace

import pytest
from conftest import tiny_config
from tiny_tokenizers import KINDS, encode_answer, tokenizer_of
from transformers import AutoTokenizer, LlamaForCausalLM

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.data.templates import NAMED, answer_ends, template_of_file, turn_end, with_template_flags
from dschat_ppo.errors import UserError
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.saving import save_model

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
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def flags(**settings) -> DataFlags:
    return DataFlags(data_path=["rows.jsonl"], **settings)


def rendered(tokenizer, messages=TALK, opened=True, **variables) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened, **variables)


def with_flags(kind: str, **settings):
    return with_template_flags(tokenizer_of(kind), flags(**settings))


# By name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhere is it?<|im_end|>\n"
            "<|im_start|>assistant\nIn the hall.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama-3",
            "<|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWhere is it?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nIn the hall.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "zephyr",
            "<|system|>\nBe kind.</s>\n<|user|>\nWhere is it?</s>\n<|assistant|>\nIn the hall.</s>\n"
            "<|user|>\nAnd now?</s>\n<|assistant|>\n",
        ),
        (
            "human-assistant",
            " System: Be kind. Human: Where is it? Assistant: In the hall.</s> Human: And now? Assistant:",
        ),
    ],
)
def test_the_text_of_a_named_template(name, expected):
    assert rendered(with_flags("bytes", chat_template=name)) == expected
    assert rendered(with_flags("pieces", chat_template=name)) == "<s>" + expected


def test_human_assistant_gives_the_text_of_deepspeed_chats_data_sets():
    tokenizer = with_flags("bytes", chat_template="human-assistant")
    ids = encode_prompt(tokenizer, ASK) + encode_answer(tokenizer, ASK, "In the hall.")
    assert tokenizer.decode(ids) == " Human: And now? Assistant: In the hall.</s>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_turns_end_with_the_templates_token_or_with_eos(name, kind):
    tokenizer = with_flags(kind, chat_template=name)
    own = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>"}.get(name)
    expected = own if own and kind != "bytes without markers" else "</s>"
    end = tokenizer.convert_tokens_to_ids(expected)
    assert (turn_end(tokenizer).token, turn_end(tokenizer).kept) == (end, expected)
    assert answer_ends(tokenizer) == tuple(dict.fromkeys((tokenizer.eos_token_id, end)))
    ids = encode_prompt(tokenizer, TALK)
    assert ids.count(end) == {"human-assistant": 1}.get(name, 4)  # a question has no end in DeepSpeed-Chat's form


def test_a_missing_token_is_reported(said):
    with_flags("bytes without markers", chat_template="chatml")
    with_flags("bytes", chat_template="chatml")
    without, with_token = [line for line in said if "turns end with" in line]
    assert without.endswith("turns end with </s>") and with_token.endswith("turns end with <|im_end|>")
    assert len([line for line in said if "no token <|im_end|>" in line]) == 1


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([*TALK, {"role": "tool", "content": "4"}], "no form for the role 'tool'"),
        ([*ASK, {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}, *ASK], "no form for tools"),
    ],
)
def test_named_templates_refuse_tools(name, messages, reason):
    with pytest.raises(UserError, match=reason):
        encode_prompt(with_flags("bytes", chat_template=name), messages)


# By file


def test_a_file(tmp_path, said):
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }} ☕]{% endfor %}", encoding="utf-8")
    assert rendered(with_flags("bytes", chat_template=str(path)), ASK) == "[And now? ☕]"
    assert any(str(path) in line for line in said)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{% for m in messages %}\n{{ m.content }\n{% endfor %}", r"own.jinja, line 2: unexpected"),
        (b"{% for m in messages %}\n\n{{ m | shout }}{% endfor %}", r"own.jinja, line 3: No filter named 'shout'"),
        (b"{% for m in messages %}", "line 1: Unexpected end of template"),
        (b"{{ messages }} caf\xe9", "cannot be used: .*utf-8"),
        (b"{{ " + b"[" * 100_000, "cannot be used: "),
        (b"{{ " + b"(" * 150 + b"messages" + b")" * 150 + b" }}", "cannot be used: "),
    ],
)
def test_a_file_that_is_no_template(tmp_path, content, reason):
    path = tmp_path / "own.jinja"
    path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as problem:
        template_of_file(str(path))
    assert str(problem.value).startswith(f"--chat_template {path}")
    assert "\n" not in str(problem.value)


def test_tags_of_transformers_are_syntax(tmp_path):
    path = tmp_path / "own.jinja"
    text = "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    path.write_text(text)
    assert template_of_file(str(path)) == text


@pytest.mark.parametrize("name", ["missing.jinja", "."])
def test_neither_a_file_nor_a_name(name):
    with pytest.raises(UserError, match=r"--chat_template .*neither a file nor one of chatml, llama-3, zephyr"):
        template_of_file(name)


# Variables


def thinking(**variables):
    tokenizer = tokenizer_of("bytes")
    tokenizer.chat_template = THINKING
    return with_template_flags(tokenizer, flags(chat_template_kwargs=json.dumps(variables)))


def test_variables_are_part_of_the_template():
    plain = tokenizer_of("bytes")
    plain.chat_template = THINKING
    for value in (False, True):
        assert rendered(thinking(enable_thinking=value)) == rendered(plain, enable_thinking=value)
    assert "<think>" in rendered(thinking(enable_thinking=False))
    assert "<think>" not in rendered(thinking(enable_thinking=True))


def test_a_later_value_replaces_an_earlier_one():
    tokenizer = thinking(enable_thinking=False)
    length = len(tokenizer.chat_template)
    with_template_flags(tokenizer, flags(chat_template_kwargs='{"enable_thinking": true}'))
    assert "<think>" not in rendered(tokenizer)
    with_template_flags(tokenizer, flags(chat_template_kwargs='{"enable_thinking": false}'))
    assert "<think>" in rendered(tokenizer)
    assert len(tokenizer.chat_template) == length


VALUES = [None, True, False, -3, 1e-7, "a \"b\" 'c' \\n\n\t%} {{ x }} {# 😀 \u2028", [1, ["x"]], {"k": {"l": None}}]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_keep_their_meaning(value):
    tokenizer = tokenizer_of("bytes")
    tokenizer.chat_template = "{{ messages | length }}{{ own | tojson }}{{ other }}"
    with_template_flags(tokenizer, flags(chat_template_kwargs=json.dumps({"own": value, "other": 7})))
    assert rendered(tokenizer, ASK) == f"1{json.dumps(value, ensure_ascii=False)}7"


@pytest.mark.parametrize(
    "start", ["", "\n", "\n\n", "  ", " {% if true %}x{% endif %}", "{%- if true %}\n\ny{% endif %}", "a\n"]
)
def test_variables_do_not_change_the_text_at_the_start(start):
    """Jinja drops the line break after a block and the spaces before one at the start of a line."""
    before, after = tokenizer_of("bytes"), tokenizer_of("bytes")
    before.chat_template = after.chat_template = start + "{{ messages[0].content }}{{ own }}"
    with_template_flags(after, flags(chat_template_kwargs='{"own": "!"}'))
    assert rendered(after, ASK) == rendered(before, ASK) + "!"


def test_variables_reach_macros_and_defaults():
    tokenizer = tokenizer_of("bytes")
    tokenizer.chat_template = (
        "{% if not day is defined %}{% set day = 'today' %}{% endif %}"
        "{% macro show(m) %}{{ m.content }} {{ day }}{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}"
    )
    assert rendered(tokenizer, ASK) == "And now? today"
    with_template_flags(tokenizer, flags(chat_template_kwargs='{"day": "Monday"}'))
    assert rendered(tokenizer, ASK) == "And now? Monday"


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ('{"enable_thinkin": false}', "reads no variable 'enable_thinkin' of yours; it reads enable_thinking$"),
        ('{"messages": []}', "reads no variable 'messages' of yours; it"),
    ],
)
def test_variables_that_cannot_be_used(variables, reason):
    tokenizer = tokenizer_of("bytes")
    tokenizer.chat_template = THINKING
    with pytest.raises(UserError, match=reason):
        with_template_flags(tokenizer, flags(chat_template_kwargs=variables))
    assert tokenizer.chat_template == THINKING


def test_variables_without_a_template():
    with pytest.raises(UserError, match="no chat template; give one with --chat_template"):
        with_flags("bytes", chat_template_kwargs='{"own": 1}')


def test_a_tokenizer_with_several_templates():
    tokenizer = tokenizer_of("bytes")
    tokenizer.chat_template = {"default": "{{ messages[0].content }}{{ own }}", "tool_use": "{{ messages }}"}
    with pytest.raises(UserError, match="several chat templates; give one with --chat_template"):
        with_template_flags(tokenizer, flags(chat_template_kwargs='{"own": 7}'))
    assert encode_prompt(tokenizer, ASK)


def test_without_flags_the_tokenizer_keeps_its_template():
    tokenizer = tokenizer_of("bytes")
    tokenizer.chat_template = THINKING
    assert with_template_flags(tokenizer, flags()) is tokenizer
    assert tokenizer.chat_template == THINKING


# Saved with the model


@pytest.mark.parametrize("name", [*NAMED, "own"])
def test_plain_transformers_renders_a_saved_model_in_the_same_way(name, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(THINKING, encoding="utf-8")
    settings = {"chat_template_kwargs": '{"enable_thinking": false}'} if name == "own" else {}
    tokenizer = with_flags("bytes", chat_template=str(path) if name == "own" else name, **settings)
    module = PolicyModel(LlamaForCausalLM(tiny_config()))
    save_model(SimpleNamespace(module=module), tokenizer, tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.apply_chat_template(TALK, tokenize=True, return_dict=False, add_generation_prompt=True) == (
        encode_prompt(tokenizer, TALK)
    )
    assert (tmp_path / "saved" / "chat_template.jinja").exists()
