"""Requests and replies in OpenAI's form: each field, against the types of the openai package where
it is installed."""

import json

import pytest

from dschat_ppo.features.agents.call_replies import (
    CallReply,
    completion_of,
    error_of,
    events_of,
    models_of,
)
from dschat_ppo.features.agents.call_requests import (
    CallRequest,
    RequestError,
    chat_message,
    read_request,
)
from dschat_ppo.features.agents.record import ChatPrompt, TextPrompt, TokenPrompt

SAMPLING = {"temperature": 0.7, "top_p": 1.0}
ASK = {"role": "user", "content": "Where?"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NO_MESSAGES = object()


def chat_request(**fields) -> CallRequest:
    fields = {"model": "policy", "messages": [ASK], **fields}
    return read_request(json.dumps(fields).encode(), True, SAMPLING)


def text_request(**fields) -> CallRequest:
    fields = {"model": "policy", "prompt": "Where", **fields}
    return read_request(json.dumps(fields).encode(), False, SAMPLING)


def test_a_request_of_the_openai_package():
    request = chat_request(
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}],
            },
            ASK,
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"at": [1]}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "A lamp."},
        ],
        tools=[LOOK],
        tool_choice="auto",
        max_tokens=9,
        stop=["\n", "x"],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=None,
        return_token_ids=True,
        user="me",
    )
    call = {"type": "function", "id": "a", "function": {"name": "look", "arguments": {"at": [1]}}}
    assert request == CallRequest(
        is_chat=True,
        prompt=ChatPrompt(
            (
                {"role": "system", "content": "Be kind."},
                ASK,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "A lamp.", "tool_call_id": "a"},
            ),
            (LOOK,),
        ),
        most_tokens=9,
        stop=("\n", "x"),
        may_call=True,
        streams=True,
        streams_usage=True,
        wants_logprobs=True,
        wants_ids=True,
    )


def test_plain_requests():
    assert text_request().prompt == TextPrompt("Where")
    assert text_request(prompt=[3, 0]).prompt == TokenPrompt((3, 0))
    assert text_request(prompt=[[3, 0]]).prompt == TokenPrompt((3, 0))
    assert text_request(prompt=["a"]).prompt == TextPrompt("a")
    wants = [text_request(logprobs=value).wants_logprobs for value in (None, False, 0, 1, True)]
    assert wants == [False, False, True, True, True]
    assert not text_request(model="policy-untrained").is_trained


def test_a_limit_of_tokens_and_what_may_call():
    assert chat_request().most_tokens is None
    assert chat_request(max_tokens=4, max_completion_tokens=3).most_tokens == 3
    assert not chat_request(tools=[LOOK], tool_choice="none").may_call
    assert not chat_request(tools=[]).may_call


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0]"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {
                "messages": [
                    ASK,
                    {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
                ]
            },
            "messages[1].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{**ASK, "name": 3}]}, "messages[0].name"),
        ({"messages": [{**ASK, "tool_calls": [LOOK]}]}, "messages[0].tool_calls"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "a", "arguments": "{"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"messages": [{"role": "assistant", "function_call": {"name": "a"}}]}, "messages[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": "all"}, "tools"),
        ({"tool_choice": "all"}, "tool_choice"),
        ({"tool_choice": LOOK}, "tool_choice"),  # which is not among its tools
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"functions": [{}]}, "functions"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": "a" * 65}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_names_its_field(fields, param):
    with pytest.raises(RequestError) as problem:
        chat_request(**fields)
    assert (problem.value.status, problem.value.param) == (400, param)
    body = error_of(problem.value)
    assert body["error"]["param"] == param and body["error"]["type"] == "invalid_request_error"
    assert "\n" not in body["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": ["a", "b"]},
        {"prompt": [1, -1]},
        {"prompt": [True]},
        {"prompt": None},
        {"echo": True},
        {"suffix": "a"},
        {"logprobs": 2},
    ],
)
def test_plain_requests_that_are_refused(fields):
    with pytest.raises(RequestError) as problem:
        text_request(**fields)
    assert problem.value.param in fields


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object(body):
    with pytest.raises(RequestError, match="the body is no JSON"):
        read_request(body, True, SAMPLING)


def test_values_that_change_nothing_are_taken():
    chat_request(
        n=1,
        response_format={"type": "text"},
        logit_bias={},
        modalities=["text"],
        top_logprobs=0,
        stop=None,
        max_tokens=None,
        presence_penalty=0,
        parallel_tool_calls=True,
    )


def test_another_model_is_not_found():
    with pytest.raises(RequestError, match="policy and policy-untrained") as problem:
        chat_request(model="gpt-4o")
    assert (problem.value.status, problem.value.code) == (404, "model_not_found")


def test_settings_of_the_run_replace_those_of_a_request():
    assert chat_request(temperature=0.7, top_p=1, top_k=-1).replaced == {}
    assert chat_request(temperature=0, top_k=5, seed=3, frequency_penalty=0.5).replaced == {
        "temperature": (0, 0.7),
        "top_k": (5, 0),
        "seed": (3, None),
        "frequency_penalty": (0.5, 0.0),
    }


def test_a_tool_that_must_be_called_is_one_that_may():
    named = {"type": "function", "function": {"name": LOOK["function"]["name"]}}
    for choice in ("required", named):
        request = chat_request(tools=[LOOK], tool_choice=choice)
        assert request.may_call and request.replaced == {"tool_choice": (choice, "auto")}
    assert chat_request(tools=[LOOK], tool_choice="none").replaced == {}


def test_texts_are_such_as_utf8_can_write():
    body = b'{"messages": [{"role": "user", "content": "a\\ud800b\\u0000"}]}'
    request = read_request(body, True, SAMPLING)
    assert request.prompt.messages[0]["content"] == "a?b\x00"


# Replies

CALL = {
    "type": "function",
    "id": "call00000",
    "function": {"name": "look", "arguments": {"at": "Café"}},
}
REPLIES = {
    "text": {"role": "assistant", "content": "Hi."},
    "thoughts": {"role": "assistant", "content": "Hi.", "reasoning_content": "Um."},
    "calls": {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "b"}]},
    "all": {"role": "assistant", "content": "I.", "reasoning_content": "Um.", "tool_calls": [CALL]},
    "nothing": {"role": "assistant", "content": ""},
}
IDS = [5, 6, 7]


def reply_of(name, finish_reason="stop") -> CallReply:
    return CallReply(
        REPLIES[name], finish_reason, [1, 2], IDS, [-0.5, -1.0, -0.25], ["H", "é", "."]
    )


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_comes_back_as_the_message_that_it_is(name):
    """So the conversation goes on from it: JSON, then what a program sends back."""
    completion = completion_of(reply_of(name), chat_request(), 3, 17)
    message = json.loads(json.dumps(completion))["choices"][0]["message"]
    assert chat_message(message) == REPLIES[name]


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("with_all", [False, True])
def test_chat_completions_are_those_of_the_openai_package(name, with_all):
    types = pytest.importorskip("openai.types.chat")
    more = {}
    if with_all:
        more = {"logprobs": True, "return_token_ids": True}
    request = chat_request(**more)
    completion = completion_of(reply_of(name, "length"), request, 3, 17)
    parsed = types.ChatCompletion.model_validate(completion, strict=True)
    choice = parsed.choices[0]
    assert choice.finish_reason == "length" and parsed.usage.total_tokens == 5
    calls = choice.message.tool_calls or []
    for call in calls:
        assert json.loads(call.function.arguments) == {"at": "Café"}
    assert len(calls) == len(REPLIES[name].get("tool_calls", []))
    assert (choice.message.content or "") == REPLIES[name]["content"]
    if with_all:
        assert [token.logprob for token in choice.logprobs.content] == [-0.5, -1.0, -0.25]
        assert bytes(choice.logprobs.content[1].bytes).decode() == "é"
        assert choice.token_ids == IDS and parsed.prompt_token_ids == [1, 2]
    chunks = chunks_of(completion, True)
    assert chunks.pop() == "[DONE]"
    chunks = [types.ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
    assert joined(chunks) == (
        REPLIES[name]["content"],
        REPLIES[name].get("reasoning_content", ""),
        [call.model_dump() for call in calls],
    )
    assert chunks[-1].usage.completion_tokens == 3 and chunks[-1].choices == []
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 2
    ) + ["length"]


def chunks_of(completion, streams_usage):
    """The data of the events."""
    events = b"".join(events_of(completion, streams_usage)).split(b"\n\n")
    assert events.pop() == b"" and all(event.startswith(b"data: ") for event in events)
    values = [event.removeprefix(b"data: ") for event in events]
    return [json.loads(value) for value in values[:-1]] + [values[-1].decode()]


def joined(chunks):
    """What a program makes of chunks: content, thoughts, calls."""
    content = thoughts = ""
    calls = []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            thoughts += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                calls.append(call.model_dump(exclude={"index"}))
    return content, thoughts, calls


def test_plain_completions_are_those_of_the_openai_package():
    types = pytest.importorskip("openai.types")
    request = text_request(logprobs=0, return_token_ids=True)
    completion = completion_of(reply_of("text"), request, 3, 17)
    parsed = types.Completion.model_validate(completion, strict=True)
    assert parsed.choices[0].text == "Hi."
    assert parsed.choices[0].logprobs.token_logprobs == [-0.5, -1.0, -0.25]
    assert parsed.choices[0].logprobs.text_offset == [0, 1, 2]
    assert parsed.choices[0].token_ids == IDS and parsed.choices[0].prompt_token_ids == [1, 2]
    chunks = chunks_of(completion, False)
    assert chunks.pop() == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Hi."
    assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
    assert choices[0]["token_ids"] == IDS


def test_usage_is_streamed_where_it_is_asked_for():
    completion = completion_of(reply_of("text"), chat_request(), 3, 17)
    assert not any("usage" in chunk for chunk in chunks_of(completion, False)[:-1])


def test_the_models():
    types = pytest.importorskip("openai.types")
    models = [types.Model.model_validate(model, strict=True) for model in models_of(17)["data"]]
    assert [model.id for model in models] == ["policy", "policy-untrained"]
