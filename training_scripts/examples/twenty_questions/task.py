"""Games of twenty questions, played by a player without a plan.

It asks up to four of the questions at random, none twice, and guesses any thing that the answers
allow. SFT so teaches what may be asked and what the answers mean; which questions are worth their
cost is for RL to find.

    python training_scripts/examples/twenty_questions/task.py FOLDER
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from game import QUESTIONS, THINGS, TwentyQuestions

from dschat_ppo.tools.toy import make_tokenizer, task_command, untrained_llama, write_task

COUNTS = {"sft": 16000, "prompts": 1024, "heldout": 64}
MOST_QUESTIONS = 4
PROMPT = "Let us play."  # the environment adds what `reset` returns


def demonstration(rng: random.Random) -> dict[str, Any]:
    """A row of SFT: a whole game."""
    game, possible = TwentyQuestions(), list(THINGS)
    opening, _ = game.reset(seed=rng.randrange(2**31))
    messages = [{"role": "user", "content": f"{PROMPT}\n\n{opening}"}]
    for question in rng.sample(list(QUESTIONS), k=rng.randint(0, MOST_QUESTIONS)):
        said, *_ = game.step(question)
        messages += [{"role": "assistant", "content": question}, {"role": "user", "content": said}]
        possible = [
            thing for thing in possible if (thing in QUESTIONS[question].split()) == (said == "yes")
        ]
    return {
        "messages": [
            *messages,
            {"role": "assistant", "content": f"It is the {rng.choice(possible)}."},
        ]
    }


def make(folder: Path, seed: int) -> None:
    """Write `folder/model`, a Llama of 0.25 M parameters with random weights, and
    `folder/data/*.jsonl`."""
    rng = random.Random(seed)
    prompt = {"prompt": [{"role": "user", "content": PROMPT}]}
    rows = {part: [prompt] * count for part, count in COUNTS.items()}
    rows["sft"] = [demonstration(rng) for _ in range(COUNTS["sft"])]
    tokenizer = make_tokenizer([turn["content"] for row in rows["sft"] for turn in row["messages"]])
    shape = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    write_task(
        folder,
        rows,
        tokenizer,
        untrained_llama(tokenizer, seed, **shape, max_position_embeddings=256),
    )


if __name__ == "__main__":
    task_command("Make the model, tokenizer and games of twenty questions.", make)
