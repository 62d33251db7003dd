"""Twenty questions, as an agent: the game of `--environment game.py:TwentyQuestions` as a loop with
OpenAI's SDK."""

import sys
from pathlib import Path

import openai

sys.path.append(str(Path(__file__).resolve().parent.parent / "twenty_questions"))
from game import TwentyQuestions  # noqa: E402


async def play(client, prompt, seed):
    """Play a game; `seed` is equal for all answers to a row, so they are about one thing."""
    game = TwentyQuestions()
    opening, numbers = game.reset(seed=seed)
    *before, last = prompt
    messages = [*before, {**last, "content": f"{last['content']}\n\n{opening}"}]
    reward = 0.0
    is_over = False
    while not is_over:
        try:
            reply = await client.chat.completions.create(model="policy", messages=messages)
        except openai.BadRequestError:  # a limit of the run, such as --max_turns
            break
        choice = reply.choices[0]
        if choice.finish_reason == "length":  # of the episode: it ends inside a message
            break
        said = choice.message.content or ""
        answer, reward, is_over, _, numbers = game.step(said)
        messages.append(choice.message)
        messages.append({"role": "user", "content": answer})
    return {"reward": reward, **numbers}
