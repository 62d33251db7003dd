"""Chat messages as data sets store them, to plain lists of messages for a chat template.

Accepted are role/content and from/value (ShareGPT), content as text or as text parts, tool calls and tool messages.
Keys whose value is null are dropped, because Arrow adds every key of a column to every message.
"""

from __future__ import annotations

import json
from typing import Any

from dschat_ppo.errors import UserError

Message = dict[str, Any]
Messages = list[Message]
ROLES = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "function", "ipython": "ipython", "human": "user", "gpt": "assistant", "observation": "tool",
    "function_call": "assistant", "tool_call": "assistant", "tool_response": "tool", "model": "assistant",
    "chatgpt": "assistant", "bot": "assistant",
}  # fmt: skip
_EXPECTED = (
    "system, user, assistant or tool (also human, gpt, model, bot, chatgpt, observation, function_call, tool_call, "
    "tool_response); --role_names theirs=ours names others"
)
# Keys by which data sets say whether a turn is trained. A turn of the assistant that is not keeps `WEIGHT`: 0.
WEIGHT = "weight"
_TRAINED = (WEIGHT, "loss_mask", "train", "loss")


def looks_like_messages(value: Any) -> bool:
    """Whether a value is a list of messages, right or wrong, or one message."""
    if isinstance(value, dict):
        return bool({"role", "from"} & set(value))
    if not isinstance(value, list) or any(isinstance(part, list) for part in value):
        return False
    return any(map(looks_like_messages, value))


def read_messages(value: Any, column: str) -> Messages:
    """Normalise the messages of one field.

    Args:
        value: a list of messages, one message, or JSON of either (CSV files hold lists as text).
        column: name of the field, for messages of errors.

    Returns:
        New messages: `role` and `content` (text), then the other keys that are not null. A message of the assistant
        that its owner excluded from training has `WEIGHT` 0.

    Raises:
        UserError: a message cannot be used; the text says which one and why, and does not name the row.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        value = parse_json(value, f"'{column}'")
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise UserError(f"'{column}' is {kind_of(value)}; expected a list of role/content messages")
    if not value:
        raise UserError(f"'{column}' is an empty list; expected role/content messages")
    return [_read_message(message, f"message {number} of '{column}'") for number, message in enumerate(value, start=1)]


def _read_message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{name} is {kind_of(message)}; expected an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    is_sharegpt = "role" not in given and "from" in given
    role, content = (given.pop(key, None) for key in (("from", "value") if is_sharegpt else ("role", "content")))
    role = role.lower() if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{name} has {f'role {role!r}' if role is not None else 'no role'}; expected {_EXPECTED}")
    calls = without_nulls(given.pop("tool_calls", None))
    if role in ("function_call", "tool_call"):
        calls, content = _calls_of(content, name), ""
    if content is None and calls:
        content = ""
    if content is None:
        raise UserError(f"{name} has no {'value' if is_sharegpt else 'content'}")
    if calls:
        given["tool_calls"] = [_with_parsed_arguments(call, name) for call in calls]
    excluded = [key for key in _TRAINED if key in given and not _is_trained(given.pop(key), key, name)]
    if excluded and ROLES[role] == "assistant":
        given[WEIGHT] = 0
    return {"role": ROLES[role], "content": _text_of(content, name), **given}


def _is_trained(value: Any, key: str, name: str) -> bool:
    if str(value).lower() not in ("1", "0", "1.0", "0.0", "true", "false"):
        raise UserError(f"{name} has the {key} {value!r}; a turn is trained (1, true) or not (0, false)")
    return str(value).lower() in ("1", "1.0", "true")


def _text_of(content: Any, name: str) -> str:
    """The text of a message's content, which may be a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"the content of {name} is {kind_of(content)}; expected text or text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{name} has a part of type '{kind}'; only text parts can be used")
        texts.append(part["text"])
    return "".join(texts)


def _calls_of(text: Any, name: str) -> list[Any]:
    """The tool calls of a ShareGPT `function_call` message."""
    found = parse_json(text, f"the function call of {name}")
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise UserError(f"the function call of {name} has no 'name': {str(text)[:60]!r}")
    return [{"type": "function", "function": call} for call in calls]


def _with_parsed_arguments(call: Any, name: str) -> Any:
    """A tool call whose arguments are an object: templates write them as JSON, and would quote a text."""
    if not isinstance(call, dict):
        raise UserError(f"a tool call of {name} is {kind_of(call)}; expected an object")
    inner = call.get("function", call)
    if not isinstance(inner, dict) or not isinstance(inner.get("arguments"), str):
        return call
    inner = {**inner, "arguments": parse_json(inner["arguments"] or "{}", f"the arguments of a tool call of {name}")}
    return {**call, "function": inner} if "function" in call else inner


def read_tools(value: Any, column: str) -> list[Any] | None:
    """The tool descriptions of a row, given as a list or as JSON; None if there are none.

    Raises:
        UserError: the field is neither.
    """
    is_text = isinstance(value, str)
    if is_text:
        value = parse_json(value, f"'{column}'") if value.strip() else None
    if value is not None and not isinstance(value, list):
        raise UserError(f"'{column}' is {kind_of(value)}; expected a list of tool descriptions or its JSON")
    if not is_text:  # nulls of a JSON text are meant
        value = without_nulls(value)
    return [parse_json(tool, f"'{column}'") if isinstance(tool, str) else tool for tool in value or []] or None


def parse_json(text: Any, name: str) -> Any:
    """The value of a JSON text.

    Raises:
        UserError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise UserError(f"{name} is not JSON: {str(text)[:60]!r}") from None


def without_nulls(value: Any) -> Any:
    """A nested value without the keys that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def kind_of(value: Any) -> str:
    """A value in a message: its type and its first characters."""
    return "null" if value is None else f"{type(value).__name__} ({str(value)[:40]!r})"


def to_last_trained(messages: Messages) -> Messages:
    """The messages up to the last one of the assistant that is trained, if they end with one that is not."""
    if messages[-1]["role"] != "assistant" or WEIGHT not in messages[-1]:
        return messages
    answers = [at for at, turn in enumerate(messages, start=1) if turn["role"] == "assistant" and WEIGHT not in turn]
    return messages[: answers[-1]] if answers else messages


def split_answer(messages: Messages, column: str) -> tuple[Messages, str | Message]:
    """Split messages before the answer, which is the last one.

    Returns:
        (messages before the answer, its text; or the message if it has more than text, such as tool calls).

    Raises:
        UserError: the last message is not the assistant's.
    """
    if messages[-1]["role"] != "assistant":
        raise UserError(f"'{column}' ends with a message of role '{messages[-1]['role']}'; expected the assistant's")
    answer = messages[-1]
    if WEIGHT in answer:
        raise UserError(f"the answer of '{column}' is excluded from training ({WEIGHT} 0)")
    return messages[:-1], answer["content"] if set(answer) == {"role", "content"} else answer
