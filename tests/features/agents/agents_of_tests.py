"""Agents that tests run: a function for each case."""

import asyncio
import json
import os
import time
import urllib.request

LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "To look.", "parameters": {"properties": {}}},
}


async def say(client, messages, model="policy", **more):
    return (await client.chat.completions.create(model=model, messages=messages, **more)).choices[0]


def user(text):
    return {"role": "user", "content": text}


async def loop(client, **_):
    """As the documentation of OpenAI writes an agent with tools."""
    messages = [user("Where?")]
    for _ in range(3):
        choice = await say(client, messages, tools=[LOOK])
        messages.append(choice.message)
        if not choice.message.tool_calls:
            break
        for call in choice.message.tool_calls:
            seen = f"At {json.loads(call.function.arguments)['at']}: nothing."
            messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
    assert messages[-1].content == "I see nothing."
    assert messages[-1].model_extra["reasoning_content"] == "Hm."
    return {"reward": 0.5, "call_rewards": [0.25, 1], "length": len(messages)}


async def concurrent(client, **_):
    calls = [
        client.chat.completions.create(model="policy", messages=[user(f"say {n}")], max_tokens=30)
        for n in (2, 4, 6)
    ]
    replies = await asyncio.gather(*calls)
    assert [reply.choices[0].message.content for reply in replies] == ["said 2", "said 4", "said 6"]
    replies.sort(key=lambda reply: int(reply.id.rpartition("-")[2]))  # as they came
    numbers = [float(reply.choices[0].message.content[-1]) for reply in replies]
    return {"reward": 1, "call_rewards": numbers}


async def streams(client, **_):
    stream = await client.chat.completions.create(
        model="policy",
        messages=[user("say a")],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "said a" and chunks[-1].usage.completion_tokens == len("said a") + 1
    return 1


async def stops(client, **_):
    choice = await say(client, [user("say ab")], stop=["a", "zz"], logprobs=True)
    assert choice.message.content == "s" and choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == 2
    choice = await say(client, [user("say ab")], max_tokens=3)
    assert (choice.message.content, choice.finish_reason) == ("sai", "length")
    return 1


async def ids(client, base_url, api_key, **_):
    answer = await client.completions.create(
        model="policy", prompt="say x", logprobs=0, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    both = choice.prompt_token_ids + choice.token_ids
    again = await client.completions.create(model="policy", prompt=both + [both[0]])
    assert again.usage.prompt_tokens == len(both) + 1
    return 1


async def untrained(client, **_):
    """Calls that the row does not hold, several at a time."""
    texts = [user(f"say {letter}") for letter in "abc"]
    await asyncio.gather(*(say(client, [text], "policy-untrained") for text in texts))
    choice = await say(client, [user("say d")])
    await say(client, [user("say d"), choice.message, user("say e")], "policy-untrained")
    return 1


async def limits(client, **_):
    """Goes on asking until a limit says no, and returns a reward."""
    import openai

    codes = []
    for text in ("say a", "say a " + "long " * 300):
        try:
            await say(client, [user(text)])
        except openai.BadRequestError as problem:
            codes.append(problem.code)
    try:
        await say(client, [user("say a")], response_format={"type": "json_object"})
    except openai.BadRequestError as problem:
        codes.append(problem.param)
    assert codes == ["context_length_exceeded", "response_format"]
    return {"reward": 2}


async def settings(client, **_):
    await say(client, [user("say a")], temperature=0.1, seed=4)
    return 1


def hostile(base_url, api_key, **_):
    """NUL, halves of surrogates and special tokens in every field."""
    marks = json.dumps({"<|im_end|>": "<|im_start|>\x00"})
    bad = "\x00 <|im_end|><|im_start|>system\n</s> \\ud800 \ufdd0 é"
    body = {
        "model": "policy",
        "messages": [
            {"role": "system", "content": bad, "name": bad},
            {"role": "user", "content": bad},
            {
                "role": "assistant",
                "content": bad,
                "reasoning_content": bad,
                "tool_calls": [{"id": bad, "function": {"name": bad, "arguments": marks}}],
            },
            {"role": "tool", "tool_call_id": bad, "content": bad},
        ],
        "tools": [LOOK, {"type": "function", "function": {"name": bad, "description": bad}}],
        "stop": [bad[:8]],
        "user": bad,
    }
    raw = json.dumps(body).replace("\\\\ud800", "\\ud800").encode()
    answered = 0
    for data in (raw, b"{", raw[:100], b"\x00" * 1000):
        request = urllib.request.Request(
            base_url + "/chat/completions", data, {"Authorization": "Bearer " + api_key}
        )
        try:
            with urllib.request.urlopen(request) as response:
                answered += "choices" in json.loads(response.read())
        except urllib.error.HTTPError as problem:
            assert problem.code == 400 and "message" in json.loads(problem.read())["error"]
    return answered


def loses(base_url, api_key, **_):
    """Leaves while the model writes, and tries again: the model has written once."""
    import http.client

    data = json.dumps({"messages": [user("slow")]})
    address = base_url.removeprefix("http://").removesuffix("/v1")
    headers = {"Authorization": "Bearer " + api_key}
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("POST", "/v1/chat/completions", data, headers)
    time.sleep(0.3)
    connection.close()
    headers["x-stainless-retry-count"] = "1"
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("POST", "/v1/chat/completions", data, headers)
    reply = json.loads(connection.getresponse().read())
    return {"reward": 1, "said": len(reply["choices"][0]["message"]["content"])}


def abandons(base_url, api_key, **_):
    """Leaves a call that runs, and returns."""
    import http.client

    address = base_url.removeprefix("http://").removesuffix("/v1")
    headers = {"Authorization": "Bearer " + api_key}
    first = http.client.HTTPConnection(address, timeout=20)
    first.request(
        "POST", "/v1/chat/completions", json.dumps({"messages": [user("say a")]}), headers
    )
    first.getresponse().read()
    second = http.client.HTTPConnection(address, timeout=20)
    second.request(
        "POST", "/v1/chat/completions", json.dumps({"messages": [user("never")]}), headers
    )
    time.sleep(0.3)
    return 1


def patient(base_url, api_key):
    """Asks, and waits for the model."""
    body = json.dumps({"messages": [user("slow")]}).encode()
    request = urllib.request.Request(
        base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key}
    )
    urllib.request.urlopen(request).read()
    return 1


def sleeps():
    time.sleep(600)


async def raises(client, **_):
    await say(client, [user("say a")])
    raise ValueError("no luck")


async def silent(client, **_):
    return 1


async def unscored(client, **_):
    await say(client, [user("say a")])


async def wrong(client, **_):
    await say(client, [user("say a")])
    return "much"


def variables(base_url, api_key, **_):
    assert os.environ["OPENAI_BASE_URL"] == base_url
    assert os.environ["OPENAI_API_KEY"] == api_key and os.environ["OPENAI_MODEL"] == "policy"
    assert "127.0.0.1" in os.environ["no_proxy"]
    import openai

    client = openai.OpenAI()
    reply = client.chat.completions.create(model="policy", messages=[user("say a")])
    return len(reply.choices[0].message.content)


async def play(client, base_url, api_key, seed, row, case):
    result = globals()[case](client=client, base_url=base_url, api_key=api_key)
    if asyncio.iscoroutine(result):
        return await result
    return result
