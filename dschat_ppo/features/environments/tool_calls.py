"""Whether the calls of tools that a chat template writes can be read."""

from __future__ import annotations

import json
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Message
from dschat_ppo.data.messages import functions_of
from dschat_ppo.data.model_replies import argument_types, reply_of_text
from dschat_ppo.data.rendered import check_calls
from dschat_ppo.data.replies import without_open_thought
from dschat_ppo.data.templates import render, turn_end, without_final
from dschat_ppo.errors import UserError


def check_calls_read_back(tokenizer: PreTrainedTokenizerBase, tools: list[Any]) -> None:
    """Render a call of the first tool and read it back. `UserError` if the chat template leaves out
    the tool or its call, or writes the call in a form that `reply_of_text` does not read: no call
    of the model would ever be carried out."""
    [schema, *_] = functions_of([{"tool_calls": tools}])
    arguments = _example_arguments(schema)
    function = {"name": schema["name"], "arguments": arguments}
    call = {"type": "function", "id": "call00000", "function": function}
    ask: Message = {"role": "user", "content": "A question."}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    check_calls(tokenizer, [ask], answer, tools)
    opening = without_open_thought(render(tokenizer, [ask], open_answer=True, tools=tools))
    conversation = render(tokenizer, [ask, answer], open_answer=False, tools=tools)
    start = len(commonprefix([opening, conversation]))
    turn = conversation[start:].removesuffix(turn_end(tokenizer).dropped)
    text, _ = without_final(tokenizer, turn)
    reply = reply_of_text(tokenizer, text, tools)
    problem = reply.malformed or "no call is found in it"
    for read_call in reply.calls:
        read = read_call["function"]
        problem = f"it is read as {read['name']} {json.dumps(read['arguments'])}"
        if (read["name"], read["arguments"]) == (schema["name"], arguments):
            return
    raise UserError(
        f"a call that the chat template writes cannot be read back ({problem}): {turn!r}; give the"
        " tokenizer a `response_template` that reads it (docs/environments.md, Tokens), or take a"
        " template that writes calls as Hermes, Qwen, Llama 3 or Mistral do (--chat_template FILE)"
    )


def _example_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Values for the arguments of a tool that are plain texts, numbers or booleans."""
    values = {"string": "x", "integer": 1, "number": 1, "boolean": True}
    return {
        name: values[kind]
        for name, kind in argument_types(schema).items()
        if isinstance(kind, str) and kind in values
    }
