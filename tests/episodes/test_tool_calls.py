"""Tool calls beside thoughts and JSON, in the one reading of a reply."""

import pytest
import torch
from chat_tokenizers import shaped
from tiny_tokenizers import tokenizer_of

from dschat_ppo.data.encode import encode_after
from dschat_ppo.episodes.environments import _Agent, _Gym
from dschat_ppo.episodes.shown_turns import turns_of
from dschat_ppo.episodes.tool_calls import MalformedCallError, parse_action, said_and_called
from dschat_ppo.episodes.turns import ends_in_thought, read_action
from dschat_ppo.types import Rollout

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
JSON = '{"name": "add", "arguments": {"a": 1}}'
CALL = f"<tool_call>{JSON}</tool_call>"
TAGS = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"


def content_and_calls(text, is_opened=False, tools=TOOLS, tokenizer=None):
    message = parse_action(tokenizer or tokenizer_of("bytes"), text, tools, is_opened)
    calls = [call["function"] for call in message.get("tool_calls", [])]
    assert all(call == {"name": "add", "arguments": {"a": 1}} for call in calls)
    return message["content"], len(calls)


@pytest.mark.parametrize("call", [CALL, TAGS, f"[TOOL_CALLS][{JSON}]", f"<|python_tag|>{JSON}"])
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
        ("<think>A</think>First. CALL<think>B: CALL</think>CALL", False, "First.", 2),
    ],
)
def test_a_call_in_a_thought_is_none(call, text, is_opened, content, calls):
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
    with pytest.raises(MalformedCallError, match="not valid JSON"):
        content_and_calls('{"name": "add", "parameters": {"a": 1')


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
    action, _ = read_action(tokenizer, ids_of(tokenizer, "[THINK]Is it 3?[/THINK] 4<|im_end|>"), [])
    agent = Agent()
    environments = [_Gym(Game), _Gym(SkyRL), _Agent(agent)]
    for environment in environments:
        environment.reset({}, 0, "Say.", None)
        environment.step(action)
    assert environments[0].instance.seen == "4"
    assert environments[1].instance.seen == agent.seen == "Is it 3? 4"
    plain, _ = read_action(tokenizer, ids_of(tokenizer, "4<|im_end|>"), [])
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
    assert turns_of(tokenizer, rollout)[0][0] == first
