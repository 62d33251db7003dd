"""Chat messages as data sets store them, with their tools and calls of tools.

Messages become plain lists for a chat template. Accepted are role/content and from/value
(ShareGPT), content as text or as text parts, tool calls and tool messages, pairs of a question and
an answer, and lists of texts, which alternate between user and assistant. Keys whose value is null
are dropped, because Arrow adds every key of a column to every message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from dschat_ppo.data.examples import Message, Messages, checked, json_value, kind_of
from dschat_ppo.errors import UserError

ROLES = {  # in lower case
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "function",
    "ipython": "ipython",
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool_calls": "assistant",
}
SAID_BY_TOOLS = ("tool", "function", "ipython")  # roles
_CALLS = ("function_call", "tool_call", "tool_calls")  # roles whose content is the JSON of calls
_EXPECTED = (
    "system, user, assistant or tool (also human, gpt, ...); --role_names 'theirs=ours' names"
    " others"
)
# Keys of messages, and columns, that leave something out of the training (0) or train it (1)
WEIGHTS = ("weight", "weights", "loss_mask", "mask", "train", "trainable", "training", "loss")
# keys of messages, and columns, of what precedes an answer
THOUGHTS = "reasoning_content", "thinking", "reasoning"
_NUMBERS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
# keys of an object that is a turn of the user and one of the assistant
TURNS = (
    ("input", "output"),
    ("user", "assistant"),
    ("human", "assistant"),
    ("human", "gpt"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("instruction", "output"),
)
# the last words of the name of a column or key that holds thoughts
_OF_THOUGHTS = re.compile(
    r"(^|_)(rationale|cot|chain_of_thought|reasoning|thinking|thought|scratchpad)s?"
    r"(_(trace|process|path|chain|text|content|step|log|block)(e?s)?)?$"
)
# a key of messages that their data set excludes from training; it never reaches a template
CONTEXT = "_context"


# Messages


def from_json(value: Any) -> Any:
    """The messages that a JSON text holds, alone or in an object with the key `messages`; any other
    value as it is, such as an answer that is JSON with its own `role`."""
    parsed = json_value(value)
    if parsed is value:
        return value
    return _messages_in(parsed) or value


def _messages_in(parsed: Any) -> Any:
    """A list of messages, the one in an object with the key `messages`, or one message, each as it
    is; None in anything else."""
    if isinstance(parsed, dict) and isinstance(parsed.get("messages"), list):
        parsed = parsed["messages"]
    is_list = isinstance(parsed, list)
    messages = parsed if is_list else [parsed]
    if not all(isinstance(entry, dict) and {"role", "from"} & set(entry) for entry in messages):
        return None
    has_texts = all({"content", "value", "tool_calls"} & set(entry) for entry in messages)
    roles = [str(entry.get("role", entry.get("from"))).strip().lower() for entry in messages]
    has_roles = all(role in ROLES for role in roles)
    # of three signs one may fail: messages without content, or with other roles, are refused later
    if [is_list, has_texts, has_roles].count(True) < 2:
        return None
    return parsed


def looks_like_messages(value: Any) -> bool:
    """Whether a value is a list of messages, right or wrong, or one message."""
    if isinstance(value, list) and not any(isinstance(entry, list) for entry in value):
        return any(map(looks_like_messages, value))
    return isinstance(value, dict) and not {"role", "from"}.isdisjoint(value)


def words_of_name(name: str) -> str:
    """The name of a column or key in lower case, its words joined by `_`, without a number at its
    end."""
    words = re.sub(r"([a-z])([A-Z][a-z])", r"\1_\2", name).lower()
    return re.sub(r"[\W_\d]+$", "", re.sub(r"\W", "_", words))


@cache
def names_thoughts(name: str) -> bool:
    """Whether the name of a column or key tells of thoughts: `Complex_CoT`, `reasoning_trace`."""
    return bool(_OF_THOUGHTS.search(words_of_name(name)))


def turns_in(value: Any) -> list[Any]:
    """The texts of the user and the assistant in a list of pairs: objects with two keys, such as
    `input` and `output`, or lists of two texts; [] if a value is no such list. The last pair may
    lack its answer."""
    if not isinstance(value, list):
        return []
    texts = list[Any]()
    for pair in value:
        if isinstance(pair, dict):
            keys = {key for key, inner in pair.items() if inner is not None}
            fitting = [names for names in TURNS if names[0] in keys and keys <= set(names)]
            if not fitting:
                return []
            texts += [pair.get(name) for name in fitting[0]]
        elif isinstance(pair, list) and len(pair) == 2:
            texts += pair
        else:
            return []
    if texts and texts[-1] is None:
        texts.pop()
    if all(isinstance(text, str) for text in texts):
        return texts
    return []


def leaves_out(weight: Any) -> bool:
    """Whether the value of a column of `WEIGHTS`, perhaps a list, says something else than that all
    is trained."""
    if isinstance(weight, list):
        return any(map(leaves_out, weight))
    return weight not in (None, "") and not _NUMBERS.get(str(weight).strip().lower(), False)


def read_messages(value: Any, column: str, role_names: dict[str, str] | None = None) -> Messages:
    """Normalise the messages of one field: a list of messages or texts, one message, or JSON of
    these (CSV files hold lists as text). New messages have `role` and `content` (text), then the
    other keys that are not null. A turn of the assistant that its data set excludes from training
    has the key `CONTEXT`. Errors do not name the row. `role_names`: further names of roles, in
    lower case."""
    value = json_value(value)
    if isinstance(value, dict):
        if isinstance(value.get("messages"), list):
            value = value["messages"]
        else:
            value = [value]
    if isinstance(value, list):
        value = [from_json(message) for message in value]
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind_of(value)
        raise UserError(f"'{column}' is {what}; expected a list of role/content messages")
    if all(isinstance(entry, list) and looks_like_messages(entry) for entry in value):
        if len(value) > 1:
            raise UserError(
                f"'{column}' holds {len(value)} conversations; --messages_column {column}.0 reads"
                " the first one"
            )
        value = value[0]
    roles = ROLES | (role_names or {})
    if _are_roles_and_texts(value, roles):
        value = [{"role": role, "content": text} for role, text in value]
    if not _has_role(value[0]):
        value = turns_in(value) or value
    if all(isinstance(text, str) for text in value):
        value = [
            {"role": ("user", "assistant")[index % 2], "content": text}
            for index, text in enumerate(value)
        ]
    return [
        _read_message(message, roles, f"message {position} of '{column}'")
        for position, message in enumerate(value, start=1)
    ]


def _are_roles_and_texts(value: list[Any], roles: dict[str, str]) -> bool:
    """Whether a list holds pairs of a role and a text: `[["user", "Where?"], ["assistant", ...]]`.
    In a list of questions and answers, the first text of each pair is no role."""
    return all(
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and pair[0].strip().lower() in roles
        for pair in value
    )


def _has_role(message: Any) -> bool:
    """Whether a value is a message that says who speaks."""
    return isinstance(message, dict) and (
        message.get("role") is not None or message.get("from") is not None
    )


def _read_message(message: Any, roles: dict[str, str], name: str) -> Message:
    """Normalise one message. `roles`: names of roles in lower case -> roles; `name`: of the message
    in errors."""
    checked(message, dict, name, "an object with role and content")
    rest = {key: inner for key, inner in message.items() if inner is not None}
    role_key = "role"
    content_key = "content"
    if "role" not in rest and "from" in rest:  # as in ShareGPT
        role_key = "from"
        content_key = "value"
    role_name = rest.pop(role_key, None)
    content = rest.pop(content_key, None)
    role = None
    if isinstance(role_name, str):
        role = roles.get(role_name.strip().lower())
    if not isinstance(role_name, str) or role is None:
        has = "no role" if role_name is None else f"role {role_name!r}"
        raise UserError(f"{name} has {has}; expected {_EXPECTED}")
    calls = rest.pop("tool_calls", None)
    if role_name.strip().lower() in _CALLS:
        functions = json_value(content)
        if not isinstance(functions, list):
            functions = [functions]
        calls = [{"type": "function", "function": function} for function in functions]
        content = ""
    if calls:
        rest["tool_calls"] = [_with_parsed_arguments(call, name) for call in calls]
    elif content is None:
        raise UserError(f"{name} has no {content_key}")
    weights = {key: rest.pop(key) for key in WEIGHTS if key in rest}
    if weights and _excluded(weights, role, name):
        rest[CONTEXT] = True
    if content is None:
        content = ""
    if not isinstance(content, str):
        content = _joined_texts(content, name)
    return {"role": role, "content": content, **rest}


def _excluded(weights: dict[str, Any], role: str, name: str) -> bool:
    """Whether the weights of a turn of the assistant leave it out of the training."""
    for key, weight in weights.items():
        if str(weight).lower() not in _NUMBERS or (
            key == "mask" and role == "assistant" and leaves_out(weight)
        ):
            expected = "0 or 1, which leave it out or train it"
            if key == "mask":
                expected = (
                    "1, because 0 has two meanings; use 'loss_mask', with 1 for what is trained"
                )
            raise UserError(f"'{key}' of {name} is {kind_of(weight)}; expected {expected}")
    return role == "assistant" and any(map(leaves_out, weights.values()))


def _joined_texts(content: Any, name: str) -> str:
    """The text of a message's content that is a list of text parts."""
    texts = list[str]()
    for block in checked(content, list, f"the content of {name}", "text or text parts"):
        kind: Any = type(block).__name__
        if isinstance(block, dict):
            kind = block.get("type")
        if kind != "text" or not isinstance(block.get("text"), str):
            raise UserError(f"{name} has a part of type '{kind}'; only text parts can be used")
        texts.append(block["text"])
    return "".join(texts)


def without_context(messages: Messages) -> Messages:
    """Messages without the marks of those that are excluded from training."""
    bare_messages = Messages()
    for message in messages:
        bare_messages.append({key: value for key, value in message.items() if key != CONTEXT})
    return bare_messages


# Tools and their calls


def read_tools(value: Any, column: str) -> list[Any] | None:
    """The tool descriptions of a row, given as a list or as JSON; None if there are none."""
    if isinstance(value, str):
        value = json_value(value.strip() or None)
    else:
        value = _without_nulls(value)
    way = ""
    if column == "tools":  # and not what holds messages too
        way = "; --ignore_columns tools leaves it out"
    if value is None:
        value = []
    expected = f"a list of tool descriptions or its JSON{way}"
    listed_tools = checked(value, list, f"'{column}'", expected)
    tools = [
        checked(json_value(tool), dict, f"a tool of '{column}'", f"an object{way}")
        for tool in listed_tools
    ]
    return tools or None


def _without_nulls(value: Any) -> Any:
    """Nested tools without the keys that are null, such as `strict`, but for values of a schema."""
    if isinstance(value, dict):
        return {
            key: _without_nulls(inner)
            for key, inner in value.items()
            if inner is not None or key in ("default", "const")
        }
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def tools_beside(value: Any) -> Any:
    """The tools in an object that holds them and `messages`, given as it is or as JSON text; None
    without them."""
    value = json_value(value)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return value.get("tools")
    return None


def _with_parsed_arguments(call: Any, name: str) -> Any:
    """A tool call whose arguments are an object: templates write them as JSON, and would quote a
    text."""
    call = _without_null_keys(call)
    inner = call
    if isinstance(call, dict) and "function" in call:
        inner = call["function"] = _without_null_keys(call["function"])
    if "name" not in checked(inner, dict, f"a tool call of {name}", "an object with 'name'"):
        raise UserError(f"a tool call of {name} has no 'name'")
    if isinstance(inner.get("arguments"), str):
        arguments = json_value(inner["arguments"] or "{}")
        where = f"'arguments' of a tool call of {name}"
        inner["arguments"] = checked(arguments, dict, where, "a JSON object")
    return call


def _without_null_keys(value: Any) -> Any:
    """A copy of an object without its keys that are null; what is inside of others stays, such as
    an argument that is null. Any other value as it is."""
    if not isinstance(value, dict):
        return value
    return {key: inner for key, inner in value.items() if inner is not None}


def functions_of(messages: Messages) -> Iterator[dict[str, Any]]:
    """The dictionaries that hold `name` and `arguments`: of OpenAI's form, inside `function`, or
    the calls alone."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call
            if isinstance(call, dict):
                function = call.get("function", call)
            if isinstance(function, dict):
                yield function
