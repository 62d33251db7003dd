"""Tool calls beside thoughts and JSON, in the one reading of a reply."""

import json
import re
from pathlib import Path

import pytest
import torch
from chat_tokenizers import EACH, EVERY, WITH_TOOLS, opened_by, shaped, special_tokenizer
from tiny_tokenizers import tokenizer_of

from dschat_ppo.config.feature_flags import FeatureFlags
from dschat_ppo.data.encode import encode_after
from dschat_ppo.data.model_replies import reply_of_text, reply_of_tokens
from dschat_ppo.data.reply_tokens import ends_in_thought
from dschat_ppo.errors import UserError
from dschat_ppo.features.environments.environment_forms import _Agent, _Gym
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.features.environments.rollouts import tools_of
from dschat_ppo.features.environments.shown_sections import sections_of
from dschat_ppo.features.environments.tool_calls import check_calls_read_back
from dschat_ppo.features.environments.turns import action_message
from dschat_ppo.types import Rollout

DOCS = Path(__file__).parents[3] / "docs/environments.md"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
JSON = '{"name": "add", "arguments": {"a": 1}}'
CALL = f"<tool_call>{JSON}</tool_call>"
TAGS = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"


def content_and_calls(text, is_opened=False, tools=TOOLS, tokenizer=None):
    reply = reply_of_text(tokenizer or tokenizer_of("bytes"), text, tools, is_opened)
    assert reply.malformed == ""
    calls = [call["function"] for call in reply.calls]
    assert all(call == {"name": "add", "arguments": {"a": 1}} for call in calls)
    return reply.content, len(calls)


def said_and_called(text):
    """As an answer is shown, whose tools are not known."""
    reply = reply_of_text(tokenizer_of("bytes"), text, None)
    return reply.said, reply.called


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        TAGS,
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
        f"[TOOL_CALLS][{JSON}]",
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
        f"<|python_tag|>{JSON}",
        f"<|python_tag|>{JSON}<|eom_id|>",
    ],
)
@pytest.mark.parametrize(
    ("text", "is_opened", "content", "calls"),
    [
        ("<think>\nMaybe CALL?\n</think>\nCALL", False, "", 1),
        ("<think>\nMaybe CALL?\n</think>\nI add. CALL", False, "I add.", 1),
        ("<think>\nMaybe CALL?\n</think>\nIt is 3.", False, "It is 3.", 0),
        ("Maybe CALL?\n</think>\nIt is 3.", False, "It is 3.", 0),
        ("Maybe CALL?\n</think>\nIt is 3.", True, "It is 3.", 0),
        ("Maybe CALL", True, "", 0),  # the limit, or an end token, cut the thought
        ("<think>\nMaybe CALL", False, "", 0),
        ("<think>A</think>First. CALL\n\nCALL", False, "First.", 2),
        # text after calls is content, as text before them is
        ("<think>A</think>CALL\nIt is on.", False, "It is on.", 1),
        ("I add.\nCALL Then\nCALL\n\nI wait.", False, "I add.\nThen\n\nI wait.", 2),
        ("I write `<tool_call>` or `<|python_tag|>` once: CALL", False, None, 1),
        ("`<tool_call>` is a tag, `<|python_tag|>` too.", False, None, 0),
    ],
)
def test_a_call_counts_outside_of_thoughts_and_text_around_it_stays(
    call, text, is_opened, content, calls
):
    if content is None:
        content = text.removesuffix(" CALL")
    assert content_and_calls(text.replace("CALL", call), is_opened) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Bob", "age": 3}',
        '{"arguments": {"for": 1}}',
        "{not JSON}",
        '{"name": "Bob", ',
        "[1, 2]",
        "{}",
        '{"name": 3, "arguments": {}}',
    ],
)
def test_json_that_is_no_call_is_an_answer(text):
    assert content_and_calls(text) == (text, 0)
    assert content_and_calls(f"<think>Um.</think>\n{text}") == (text, 0)
    assert said_and_called(text) == (text, "")


def test_json_that_is_a_call_follows_thoughts_too():
    text = f"<think>Um.</think>\n{JSON}"
    assert content_and_calls(text) == ("", 1)
    assert said_and_called(text) == ("<think>Um.</think>", JSON)
    cut = '{"name": "add", "parameters": {"a": 1'
    reply = reply_of_text(tokenizer_of("bytes"), cut, TOOLS)
    assert "not valid JSON" in reply.malformed
    assert (reply.content, reply.calls) == (cut, [])


MARKS_OF_CALLS = (
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<tool_call>{}</tool_call>",
    "<|eom_id|>",
    "</think>",
    "<function=a></function>",
    "`<think>",
)


@pytest.mark.parametrize("cited", MARKS_OF_CALLS)
@pytest.mark.parametrize(
    "form",
    [
        "<tool_call>JSON</tool_call>",
        "[TOOL_CALLS][JSON]",
        "[TOOL_CALLS]put[ARGS]ARGUMENTS",
        "<|python_tag|>JSON",
        "JSON",
        "<tool_call>\n<function=put>\n<parameter=text>\nTEXT\n</parameter>\n</function>\n</tool_call>",
        "<function=put><parameter=text>TEXT</parameter></function>",
    ],
)
def test_marks_inside_the_arguments_of_a_call_are_text(form, cited):
    tools = [{"type": "function", "function": {"name": "put", "parameters": {}}}]
    arguments = {"text": f"a {cited} b"}
    call = form.replace("TEXT", arguments["text"])
    call = call.replace("JSON", json.dumps({"name": "put", "arguments": arguments}))
    call = call.replace("ARGUMENTS", json.dumps(arguments))
    reply = reply_of_text(tokenizer_of("bytes"), f"{call}\nDone.", tools)
    assert [each["function"] for each in reply.calls] == [{"name": "put", "arguments": arguments}]
    assert reply.content == "Done."


@pytest.mark.parametrize("between", ["; ", ";", " ;\n", "\n"])
@pytest.mark.parametrize(
    "form", ["JSON", "<|python_tag|>JSON<|eom_id|>", CALL.replace(JSON, "JSON")]
)
def test_several_calls_in_json_stand_between_semicolons_or_lines(form, between):
    assert content_and_calls(form.replace("JSON", between.join([JSON] * 3))) == ("", 3)
    assert content_and_calls(form.replace("JSON", f"{JSON};")) == ("", 1)


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL[:-12]}}}</tool_call>",
        f"<tool_call>{JSON} and more</tool_call>",
        "<tool_call>add(1)</tool_call>",
        "<tool_call>",
        f"[TOOL_CALLS][{JSON}",
        f"[TOOL_CALLS][{JSON}]]",
        f"<|python_tag|>{JSON}; {{",
        f"{JSON}; {{",
        f"{JSON}}}",
        "<tool_call><function=add><parameter=a>1</function></tool_call>",
        "<function=add><parameter=a>1",
        "<function=add>",
        '[TOOL_CALLS]add[ARGS]{"a": ',
        f"{CALL} <tool_call>{{",
    ],
)
def test_a_call_that_is_cut_or_broken_is_malformed(text):
    reply = reply_of_text(tokenizer_of("bytes"), text, TOOLS)
    assert "not valid" in reply.malformed
    if "</tool_call> <tool_call>" in text:
        assert (reply.content, len(reply.calls)) == ("<tool_call>{", 1)
    else:
        assert (reply.content, reply.calls) == (text, [])
    message, answer = action_message(reply)
    assert message == {"role": "assistant", "content": text}, "none of its calls is carried out"
    assert answer.failed_calls == 1 and reply.malformed in answer.messages[0]["content"]
    assert said_and_called(f"Now. {text}")[0] == "Now." or text.startswith("{")


def test_tags_in_prose_are_no_call():
    text = "A call is <function=NAME>, with its parameters, or `[TOOL_CALLS]` and JSON."
    assert content_and_calls(text) == (text, 0)


def test_tags_hold_several_calls_and_the_schema_says_what_is_a_string():
    schema = {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "put", "parameters": schema}}]
    first = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
    values = {"text": "42", "count": "42", "other": "[1]"}
    parameters = "".join(
        f"<parameter={key}>\n{each}\n</parameter>\n" for key, each in values.items()
    )
    second = f"<function=put>\n{parameters}</function>"
    cited = "<function=put><parameter=text></function></parameter></function>"
    text = f"<tool_call>\n{first}\n{second}\n{cited}\n</tool_call>"
    reply = reply_of_text(tokenizer_of("bytes"), text, tools)
    assert [call["function"] for call in reply.calls] == [
        {"name": "add", "arguments": {"a": 1}},
        {"name": "put", "arguments": {"text": "42", "count": 42, "other": [1]}},
        {"name": "put", "arguments": {"text": "</function>"}},
    ]


RESPONSE = {
    "start_anchor": "assistant",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}
THINKING = RESPONSE["fields"] | {"thinking": {"open": "<muse>", "close": "</muse>"}}


@pytest.mark.parametrize(
    ("fields", "text", "is_opened", "calls"),
    [
        (RESPONSE["fields"], "<think>CALL</think>It is 3.", False, 0),
        (RESPONSE["fields"], "CALL</think>It is 3.", True, 0),
        (RESPONSE["fields"], "<think>CALL</think>It is 3.CALL", False, 1),
        (THINKING, "<muse>CALL</muse>It is 3.", False, 0),  # marks that the tokenizer alone knows
    ],
)
def test_a_response_template_reads_what_follows_the_thoughts(fields, text, is_opened, calls):
    tokenizer = tokenizer_of("bytes")
    tokenizer.response_template = RESPONSE | {"fields": fields}
    text = text.replace("CALL", '<call add>{"a": 1}</call>')
    found = content_and_calls(text, is_opened, tokenizer=tokenizer)
    assert found == ("It is 3.", calls)


def ids_of(tokenizer, text):
    return encode_after(tokenizer, "", text)


def test_an_environment_reads_what_follows_the_thoughts():
    """SkyRL-Gym and OpenRLHF define their action as all that the model wrote."""

    class Game:
        def reset(self):
            pass

        def step(self, action):
            self.seen = action
            return "", 0.0, False, False, {}

    class SkyRL(Game):
        def init(self, prompt):
            pass

    class Agent:
        def reset(self, states):
            return {"observation": "Say."}

        def step(self, states):
            self.seen = states["action_text"]
            return {}

    tokenizer, _ = shaped("ChatML")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    thought = ids_of(tokenizer, "[THINK]Is it 3?[/THINK] 4<|im_end|>")
    action = reply_of_tokens(tokenizer, thought, []).message
    agent = Agent()
    environments = [_Gym(Game), _Gym(SkyRL), _Agent(agent)]
    for environment in environments:
        environment.reset({}, 0, "Say.", None)
        environment.step(action)
    assert environments[0].instance.seen == "4"
    assert environments[1].instance.seen == agent.seen == "Is it 3? 4"
    plain = reply_of_tokens(tokenizer, ids_of(tokenizer, "4<|im_end|>"), []).message
    assert plain == {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("opening", "is_opened"), [("<think>\n", True), ("<think></think>", False)]
)
def test_what_precedes_an_action_opens_its_thought(opening, is_opened):
    tokenizer, _ = shaped("ChatML")
    before = ids_of(tokenizer, f"<|im_start|>assistant\n{opening}")
    assert ends_in_thought(tokenizer, before) == is_opened
    action, seen, end = (ids_of(tokenizer, text) for text in (CALL, f"No.{opening}", "Four."))
    ids = torch.tensor([[*action, *seen, *end]])
    chosen = [True] * len(action) + [False] * len(seen) + [True] * len(end)
    rollout = Rollout(
        prompt_ids=torch.tensor([before]),
        prompt_mask=torch.ones(1, len(before), dtype=torch.bool),
        response_ids=ids,
        response_mask=torch.tensor([chosen]),
        rollout_logprobs=torch.zeros(ids.shape),
        finish_reason=torch.zeros(1, dtype=torch.long),
        episode_lengths=torch.tensor([len(chosen)]),
    )
    first = {"role": "model" if is_opened else "call", "text": CALL}
    assert sections_of(tokenizer, rollout)[0][0] == first


# Calls that the template writes

NAMED = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "To add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "to": {"type": ["string", "null"]}},
            },
        },
    }
]
LISTED = "{% if tools %}{{ tools | tojson }}{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n"
OPENED = opened_by("<|im_start|>assistant\n")


def calling(calls, turn=TURN, opened=OPENED):
    """A tokenizer whose template writes `calls` for the calls of a message."""
    template = LISTED + EACH + turn.replace("CALLS", calls) + EVERY + opened
    return special_tokenizer(template, "</s>", ("<|im_start|>", "<|im_end|>"))


QWEN = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)
CODER = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}"
)
GRANITE = (
    "{% if m.tool_calls %}<|tool_call|>"
    "{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}"
)
GLM = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
)
KIMI = (
    "{% for c in m.tool_calls or [] %}<|tool_call_begin|>functions.{{ c.function.name }}:0"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
)
DEEPSEEK = (
    "{% for c in m.tool_calls or [] %}<|tool_call_begin|>function<|tool_sep|>{{ c.function.name }}"
    "\n```json\n{{ c.function.arguments | tojson }}\n```<|tool_call_end|>{% endfor %}"
)
HARMONY = (
    "{% for c in m.tool_calls or [] %}<|channel|>commentary to=functions.{{ c.function.name }}"
    "<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
)
PHI = GRANITE.replace("{% endif %}", "<|/tool_call|>{% endif %}")
THINKS = TURN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)
OPEN = opened_by("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize(
    "tokenizer",
    [
        *(shaped(name, WITH_TOOLS)[0] for name in WITH_TOOLS),
        calling(QWEN),
        calling(CODER),
        calling(QWEN, THINKS, OPEN),  # Qwen3
        calling(QWEN, TURN, OPEN),  # as that of QwQ, whose history has no thoughts
    ],
)
def test_calls_that_can_be_read_back(tokenizer):
    check_calls_read_back(tokenizer, NAMED)


@pytest.mark.parametrize("calls", [GRANITE, GLM, KIMI, DEEPSEEK, HARMONY, PHI])
def test_calls_that_cannot_be_read_back(calls):
    with pytest.raises(UserError, match=r"cannot be read back.*response_template.*--chat_template"):
        check_calls_read_back(calling(calls), NAMED)


def test_a_template_without_calls():
    with pytest.raises(UserError, match="leaves out the tool call 'add'"):
        check_calls_read_back(calling(""), NAMED)


def test_the_response_template_of_the_documentation_reads_the_calls_of_kimi_k2():
    tokenizer = calling(KIMI)
    text = DOCS.read_text(encoding="utf-8")
    [written] = re.findall(r"```json\n(\{\n  \"response_template\".*?)```", text, re.DOTALL)
    tokenizer.response_template = json.loads(written)["response_template"]
    check_calls_read_back(tokenizer, NAMED)
    call = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    assert content_and_calls(f"<think>{call}</think>Sum:{call}", tokenizer=tokenizer) == ("Sum:", 1)


def test_it_is_said_before_the_processes_of_a_run_begin(tmp_path):
    file = tmp_path / "own.py"
    described = '    """Add.\n\n    Args:\n        a: the number.\n    """\n'
    file.write_text(f"def add(a: int) -> int:\n{described}    return a\n")
    flags = FeatureFlags((EnvironmentFlags(tools=[f"{file}:add"]),))
    with pytest.raises(UserError, match=r"--tools .*own.py:add.*cannot be read back"):
        tools_of(flags, calling(GRANITE), 100)
    assert tools_of(flags, calling(QWEN), 100)[0]["function"]["name"] == "add"
