"""Requests of programs in the form of OpenAI's API: what is read of them, and what is refused.

The front, which imports no large library, imports this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dschat_ppo.features.agents.record import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt

TRAINED_MODEL = "policy"
UNTRAINED_MODEL = "policy-untrained"
MODELS = (TRAINED_MODEL, UNTRAINED_MODEL)
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_STOPS = 4
_LONGEST_STOP = 64  # characters

# Settings of sampling, which are those of the run -> the value that changes nothing in OpenAI's API
# and vLLM's; the run's own value goes first. None: any value is another one.
_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
}
_ASK_AGAIN = "for several answers, ask several times"
_NO_CONSTRAINTS = "the model's tokens are sampled without constraints"
# Fields that would change what the model is asked for -> (values that do not, why others are
# refused)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), _ASK_AGAIN),
    "best_of": ((1,), _ASK_AGAIN),
    "logit_bias": (({},), _NO_CONSTRAINTS),
    "echo": ((False,), "the prompt is not repeated"),
    "suffix": (("",), "the model writes at the end of its prompt alone"),
    "top_logprobs": ((0,), "the log-probs of the chosen tokens alone are known"),
    "audio": ((), "the model writes text"),
    "functions": (([],), "describe tools as 'tools'"),
    "function_call": (("auto", "none"), "describe tools as 'tools'"),
    "web_search_options": ((), "the model searches nothing"),
}
_CONSTRAINTS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_REFUSED |= dict.fromkeys(_CONSTRAINTS, ((), _NO_CONSTRAINTS))


class RequestError(Exception):
    """A request that is refused. `status`: of HTTP; `param`: the field; `code`: for programs."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True)
class CallRequest:
    """What a program asks the model for."""

    is_chat: bool
    prompt: Prompt
    model: str = TRAINED_MODEL
    most_tokens: int | None = None
    stop: tuple[str, ...] = ()
    may_call: bool = False  # whether calls of tools are read in the reply
    streams: bool = False
    streams_usage: bool = False
    wants_logprobs: bool = False
    wants_ids: bool = False
    # settings that are not those of the run -> (asked for, the run's)
    replaced: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """Whether the reply is trained."""
        return self.model == TRAINED_MODEL


def read_request(body: bytes, is_chat: bool, sampling: Mapping[str, Any]) -> CallRequest:
    """The request in a body. `sampling`: settings of the run, which replace those of the request.
    `RequestError` if it cannot be answered as it is."""
    fields = _fields_of(body)
    model = fields.get("model", TRAINED_MODEL)
    if model not in MODELS:
        raise RequestError(
            f"there is no model {_excerpt(model)}; there are {' and '.join(MODELS)}",
            "model",
            "model_not_found",
            404,
        )
    _refuse_fields(fields)
    tools: tuple[Any, ...] = ()
    prompt: Prompt
    if is_chat:
        tools = _tools(fields)
        _check_tool_choice(fields.get("tool_choice", "auto"), tools)
        prompt = ChatPrompt(chat_messages(fields.get("messages")), tools)
    else:
        prompt = _plain_prompt(fields.get("prompt"))
    stream_options = _field_value(fields, "stream_options", dict) or {}
    return CallRequest(
        is_chat=is_chat,
        prompt=prompt,
        model=model,
        most_tokens=_reply_limit(fields),
        stop=_stop_texts(fields.get("stop")),
        may_call=bool(tools) and fields.get("tool_choice") != "none",
        streams=bool(_field_value(fields, "stream", bool)),
        streams_usage=bool(stream_options.get("include_usage")),
        wants_logprobs=_wants_logprobs(fields, is_chat),
        wants_ids=bool(_field_value(fields, "return_token_ids", bool)),
        replaced=_replaced(fields, sampling),
    )


def _fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a request, without those that are null. Texts hold what UTF-8 can write."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"the body is no JSON ({problem})") from None
    if not isinstance(value, dict):
        raise RequestError("the body is no JSON object")
    return {name: each for name, each in clean_texts(value).items() if each is not None}


def clean_texts(value: Any) -> Any:
    """A value of JSON without halves of surrogates in its texts."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [clean_texts(each) for each in value]
    if isinstance(value, dict):
        return {clean_texts(name): clean_texts(each) for name, each in value.items()}
    return value


def _excerpt(value: Any) -> str:
    """The start of a value, for messages."""
    return repr(value)[:80]


def _field_value(fields: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """The value of a field; None without it."""
    value = fields.get(name)
    is_wrong = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
    if value is not None and is_wrong:
        raise RequestError(f"{name} is {_excerpt(value)}; expected {kind.__name__}", name)
    return value


def _refuse_fields(fields: Mapping[str, Any]) -> None:
    """Refuse fields that would change what the model is asked for."""
    for name, (harmless, reason) in _REFUSED.items():
        if name in fields and fields[name] not in harmless:
            raise RequestError(f"{name} {_excerpt(fields[name])} is not offered: {reason}", name)
    for name in ("response_format", "modalities"):
        value = fields.get(name)
        is_text = value == ["text"] or (isinstance(value, dict) and value.get("type") == "text")
        if value is not None and not is_text:
            raise RequestError(f"{name} {_excerpt(value)} is not offered: {_NO_CONSTRAINTS}", name)


def _tools(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """The tools of a chat request, each with a function."""
    tools = _field_value(fields, "tools", list) or []
    for index, tool in enumerate(tools):
        function = _function_in(tool)
        if function is None:
            raise RequestError(
                f"tools[{index}] is {_excerpt(tool)}; expected"
                ' {"type": "function", "function": {"name": ..., "parameters": ...}}',
                f"tools[{index}]",
            )
        if not isinstance(function.get("parameters", {}), dict | None):
            raise RequestError("expected a JSON schema", f"tools[{index}].function.parameters")
    return tuple(tools)


def _check_tool_choice(choice: Any, tools: Sequence[Any]) -> None:
    """Refuse a choice that names none of the tools. `required` and a named tool are replaced by
    `auto` (`_replaced`): some clients ask for them by default, and the agent's reward teaches the
    model to call."""
    if choice in ("auto", "none", "required"):
        return
    named = _function_in(choice)
    if named is None or named["name"] not in [tool["function"]["name"] for tool in tools]:
        raise RequestError(
            f"tool_choice is {_excerpt(choice)}; expected 'auto', 'none', 'required' or one of the"
            " tools",
            "tool_choice",
        )


def _function_in(value: Any) -> dict[str, Any] | None:
    """The function of a tool or of a call, if it has a name."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        function: dict[str, Any] = value["function"]
        if isinstance(function.get("name"), str):
            return function
    return None


def _plain_prompt(prompt: Any) -> Prompt:
    """The prompt of a request for completions: a text, or token ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    is_ids = isinstance(prompt, list) and all(type(each) is int and each >= 0 for each in prompt)
    if not is_ids or not prompt:
        raise RequestError(
            f"prompt is {_excerpt(prompt)}; expected a text, or token ids; {_ASK_AGAIN}", "prompt"
        )
    return TokenPrompt(tuple(prompt))


def _reply_limit(fields: Mapping[str, Any]) -> int | None:
    """Most tokens of the reply; None for as many as the run allows."""
    for name in ("max_completion_tokens", "max_tokens"):
        most = _field_value(fields, name, int)
        if most is not None:
            if most < 1:
                raise RequestError(f"{name} is {most}; expected at least 1", name)
            return int(most)
    return None


def _stop_texts(stop: Any) -> tuple[str, ...]:
    """The texts that end the reply."""
    texts = stop
    if stop is None:
        texts = []
    if isinstance(stop, str):
        texts = [stop]
    is_right = isinstance(texts, list) and len(texts) <= _MOST_STOPS
    if not is_right or not all(
        isinstance(text, str) and 0 < len(text) <= _LONGEST_STOP for text in texts
    ):
        raise RequestError(
            f"stop is {_excerpt(stop)}; expected up to {_MOST_STOPS} texts of up to"
            f" {_LONGEST_STOP} characters",
            "stop",
        )
    return tuple(texts)


def _wants_logprobs(fields: Mapping[str, Any], is_chat: bool) -> bool:
    """Whether the log-probs of the chosen tokens are asked for. Completions ask with a number, that
    of further tokens: 0, or 1 for the likeliest, which is the chosen one as a rule."""
    if is_chat:
        return bool(_field_value(fields, "logprobs", bool))
    count = fields.get("logprobs")
    if count not in (None, 0, 1):
        reason = _REFUSED["top_logprobs"][1]
        raise RequestError(
            f"logprobs {_excerpt(count)} is not offered: {reason}; use 0", "logprobs"
        )
    return count is not None and count is not False


def _replaced(fields: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings of a request that are not those of the run."""
    replaced = dict[str, tuple[Any, Any]]()
    for name, neutral in _SAMPLING.items():
        if name not in fields:
            continue
        asked = fields[name]
        if name == "top_k" and asked == -1:  # vLLM's 0
            asked = 0
        used = sampling.get(name, neutral)
        if asked != used:
            replaced[name] = (asked, used)
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        replaced["tool_choice"] = (choice, "auto")
    return replaced


# Messages


def chat_messages(messages: Any) -> tuple[Message, ...]:
    """Chat messages in one form: `role`, `content` as text, and, where they have them, `tool_calls`
    with arguments as objects, `tool_call_id`, `name` and `reasoning_content`."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages is {_excerpt(messages)}; expected a list of them", "messages")
    return tuple(
        chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)
    )


def chat_message(message: Any, name: str = "message") -> Message:
    """One message in that form; `name`: of the message in errors."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise RequestError(
            f"{name} is {_excerpt(message)}; expected an object whose role is one of"
            f" {', '.join(_ROLES)}",
            name,
        )
    role = message["role"]
    if role == "developer":
        role = "system"
    read: Message = {"role": role, "content": _content(message.get("content"), f"{name}.content")}
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(key)
        if not isinstance(value, str | None):
            raise RequestError(
                f"{name}.{key} is {_excerpt(value)}; expected a text", f"{name}.{key}"
            )
        if value:
            read[key] = value
    if message.get("function_call") is not None or message.get("audio") is not None:
        raise RequestError(f"{name}: calls are 'tool_calls', and the model reads text", name)
    calls = message.get("tool_calls") or []
    if calls and (role != "assistant" or not isinstance(calls, list)):
        raise RequestError(
            f"{name}.tool_calls: expected a list of the assistant's calls", f"{name}.tool_calls"
        )
    if calls:
        read["tool_calls"] = [
            _call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return read


def _content(content: Any, name: str) -> str:
    """The text of a message, which may be in parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{name} is {_excerpt(content)}; expected text or text parts", name)
    texts = list[str]()
    for index, block in enumerate(content):
        is_text = isinstance(block, dict) and block.get("type") == "text"
        if not is_text or not isinstance(block.get("text"), str):
            raise RequestError(
                f"{name}[{index}] is {_excerpt(block)}; the model reads text parts alone",
                f"{name}[{index}]",
            )
        texts.append(block["text"])
    return "".join(texts)


def _call(call: Any, name: str) -> dict[str, Any]:
    """A call of a tool, with its arguments as an object."""
    function = _function_in(call)
    if function is None:
        raise RequestError(f"{name} is {_excerpt(call)}; expected a function with a name", name)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = clean_texts(json.loads(arguments))
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"{name}.function.arguments: expected a JSON object",
            f"{name}.function.arguments",
        )
    return {
        "type": "function",
        "id": str(call.get("id") or ""),
        "function": {"name": function["name"], "arguments": arguments},
    }
