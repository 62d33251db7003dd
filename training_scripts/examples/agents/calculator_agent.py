"""Sums with a calculator, as an agent: the loop that people write with OpenAI's SDK.

`play` does what `--tools calculator.py:calculate` does with the reward `right_sum`.
"""

import json
import sys
from pathlib import Path

import openai

sys.path.append(str(Path(__file__).resolve().parent.parent / "calculator"))
from calculator import calculate, right_sum  # noqa: E402

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Add numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "the sum, such as 12+7+30."}
            },
            "required": ["expression"],
        },
        "return": {"type": "integer"},
    },
}


def result_of(call):
    """What a call of the tool returns, or why it fails, for the model."""
    if call.function.name != "calculate":
        return f"error: there is no tool '{call.function.name}'; there are: calculate"
    try:
        return str(calculate(**json.loads(call.function.arguments)))
    except (TypeError, ValueError, AttributeError) as problem:
        return f"error: {type(problem).__name__}: {problem}"


async def play(client, prompt, answer):
    """Ask the model, carry out its calls, and ask again, until it calls nothing."""
    messages = list(prompt)
    calls = 0
    said = ""
    while True:
        try:
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL]
            )
        except openai.BadRequestError:  # a limit of the run, such as --max_turns
            break
        choice = reply.choices[0]
        said = choice.message.content or ""
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls:
            calls += 1
            result = {"role": "tool", "tool_call_id": call.id, "content": result_of(call)}
            messages.append(result)
    return {"reward": float(right_sum(said, answer)), "tool_calls": calls}
