"""Replies to programs in the form of OpenAI's API: completions, their pieces as events, errors.

The front, which imports no large library, imports this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dschat_ppo.features.agents.call_requests import MODELS, CallRequest, RequestError
from dschat_ppo.features.agents.record import Message


@dataclass(frozen=True)
class CallReply:
    """What the model wrote. `message`: with `content`, `tool_calls` and `reasoning_content`; of a
    completion of a plain prompt the `content` alone. `token_texts`: of each id."""

    message: Message
    finish_reason: str  # "stop", "length" or "tool_calls"
    prompt_ids: Sequence[int] = ()
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    token_texts: Sequence[str] = field(default_factory=list)


def completion_of(
    reply: CallReply, request: CallRequest, number: int, created: int
) -> dict[str, Any]:
    """The object that answers a request. `number`: of the call, for its id; `created`: seconds
    since 1970."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": reply.finish_reason, "logprobs": None}
    completion: dict[str, Any] = {
        "id": f"cmpl-{number}",
        "object": "text_completion",
        "created": created,
        "model": request.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(reply.prompt_ids),
            "completion_tokens": len(reply.ids),
            "total_tokens": len(reply.prompt_ids) + len(reply.ids),
        },
    }
    has_prompt_ids = choice  # as in vLLM
    if request.is_chat:
        completion["id"] = f"chatcmpl-{number}"
        completion["object"] = "chat.completion"
        choice["message"] = _sent_message(reply.message)
        has_prompt_ids = completion
    else:
        choice["text"] = reply.message["content"]
    if request.wants_logprobs and request.is_chat:
        choice["logprobs"] = _chat_logprobs(reply)
    elif request.wants_logprobs:
        choice["logprobs"] = _text_logprobs(reply)
    if request.wants_ids:
        choice["token_ids"] = list(reply.ids)
        has_prompt_ids["prompt_token_ids"] = list(reply.prompt_ids)
    return completion


def _sent_message(message: Message) -> Message:
    """A message of the assistant as it is sent: arguments are JSON in a text."""
    calls = list[dict[str, Any]]()
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append(
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    sent: Message = {"role": "assistant", "content": message["content"], "refusal": None}
    if calls:
        sent["tool_calls"] = calls
        sent["content"] = message["content"] or None
    if message.get("reasoning_content"):
        sent["reasoning_content"] = message["reasoning_content"]
    return sent


def _chat_logprobs(reply: CallReply) -> dict[str, Any]:
    """The log-probs of the tokens of a chat reply."""
    tokens = list[dict[str, Any]]()
    for text, logprob in zip(reply.token_texts, reply.logprobs, strict=True):
        tokens.append(
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        )
    return {"content": tokens, "refusal": None}


def _text_logprobs(reply: CallReply) -> dict[str, Any]:
    """The log-probs of the tokens of a completion."""
    offsets = list[int]()
    offset = 0
    for text in reply.token_texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": list(reply.token_texts),
        "token_logprobs": list(reply.logprobs),
        "text_offset": offsets,
        "top_logprobs": None,
    }


def events_of(completion: dict[str, Any], streams_usage: bool) -> Iterator[bytes]:
    """A completion as server-sent events: the role, thoughts, content and calls, each in one piece,
    the reason of the end, usage if asked for, and `[DONE]`."""
    [choice] = completion["choices"]
    usage = completion["usage"]
    common = {key: completion[key] for key in ("id", "object", "created", "model")}
    pieces = list[dict[str, Any]]()
    if "message" in choice:
        common["object"] = "chat.completion.chunk"
        pieces += [{"delta": delta} for delta in _deltas(choice["message"])]
        last: dict[str, Any] = {"delta": {}}
    else:
        pieces.append({"text": choice["text"]})
        last = {"text": ""}
    for name in ("logprobs", "token_ids", "prompt_token_ids"):
        if choice.get(name) is not None:
            pieces[-1][name] = choice[name]
    pieces = [{"index": 0, "logprobs": None, "finish_reason": None, **piece} for piece in pieces]
    pieces.append({"index": 0, "logprobs": None, "finish_reason": choice["finish_reason"], **last})
    for index, piece in enumerate(pieces):
        chunk = {**common, "choices": [piece]}
        if streams_usage:
            chunk["usage"] = None
        if index == 0 and "prompt_token_ids" in completion:
            chunk["prompt_token_ids"] = completion["prompt_token_ids"]
        yield _event(chunk)
    if streams_usage:
        yield _event({**common, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    """The pieces of a message."""
    yield {"role": "assistant", "content": ""}
    if message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}
    if message.get("content"):
        yield {"content": message["content"]}
    calls = message.get("tool_calls") or []
    if calls:
        yield {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def error_of(problem: RequestError) -> dict[str, Any]:
    """The body of an error; its message is one line."""
    kind = "invalid_request_error"
    if problem.status == 401:
        kind = "authentication_error"
    elif problem.status >= 500:
        kind = "server_error"
    message = " ".join(str(problem).split())
    return {
        "error": {"message": message, "type": kind, "param": problem.param, "code": problem.code}
    }


def models_of(created: int) -> dict[str, Any]:
    """The list of models."""
    models = [
        {"id": name, "object": "model", "created": created, "owned_by": "dschat_ppo"}
        for name in MODELS
    ]
    return {"object": "list", "data": models}
