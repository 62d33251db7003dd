"""Both tasks as a program, with nothing but the standard library: it reads the row, asks the model
by HTTP, and writes the reward into a file.

    --agent_command "python program.py calculator"
    --agent_command "python program.py twenty_questions"
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent
sys.path += [str(EXAMPLES / "calculator"), str(EXAMPLES / "twenty_questions")]
from calculator import calculate, right_sum  # noqa: E402
from game import TwentyQuestions  # noqa: E402

PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOL = {"type": "function", "function": {"name": "calculate", "parameters": PARAMETERS}}


def ask(messages, **fields):
    """The model's next message and why it ends; None and "" beyond a limit of the run."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **fields}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request) as response:
            choice = json.load(response)["choices"][0]
    except urllib.error.HTTPError as problem:
        if problem.code != 400:
            raise
        return None, ""
    return choice["message"], choice["finish_reason"]


def calculator(row):
    """The reward of a sum."""
    messages = list(row["prompt"])
    said = ""
    while True:
        message, reason = ask(messages, tools=[TOOL])
        if message is None:
            break
        said = message["content"] or ""
        messages.append(message)
        if reason != "tool_calls":
            break
        for call in message["tool_calls"]:
            try:
                content = str(calculate(**json.loads(call["function"]["arguments"])))
            except (TypeError, ValueError, AttributeError) as problem:
                content = f"error: {type(problem).__name__}: {problem}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return float(right_sum(said, row["answer"]))


def twenty_questions(row):
    """The reward of a game, and its numbers."""
    game = TwentyQuestions()
    opening, numbers = game.reset(seed=int(os.environ["DSCHAT_SEED"]))
    *before, last = row["prompt"]
    messages = [*before, {**last, "content": f"{last['content']}\n\n{opening}"}]
    reward = 0.0
    is_over = False
    while not is_over:
        message, reason = ask(messages)
        if message is None or reason == "length":
            break
        answer, reward, is_over, _, numbers = game.step(message["content"] or "")
        messages += [message, {"role": "user", "content": answer}]
    return {"reward": reward, **numbers}


if __name__ == "__main__":
    play = {"calculator": calculator, "twenty_questions": twenty_questions}[sys.argv[1]]
    Path(os.environ["DSCHAT_RESULT"]).write_text(json.dumps(play(json.load(sys.stdin))))
