"""`python -m dschat_ppo COMMAND ...`: a training step, or a tool of `dschat_ppo.tools`.

python -m dschat_ppo --help                     the commands
python -m dschat_ppo ppo --flag value ...       as `dschat-ppo`
deepspeed --module dschat_ppo ppo --flag value ...
python -m dschat_ppo chat --model M             as `python -m dschat_ppo.tools.chat`

The installed commands, `dschat-COMMAND`, are `installed`.
"""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dschat_ppo.commands import TRAINERS, start_ranks
from dschat_ppo.config.help_text import TITLES
from dschat_ppo.features import hooks
from dschat_ppo.run.launch import leave

TOOLS = {  # the modules of dschat_ppo.tools
    "chat": "chat with a model, or with two to compare them",
    "data": "show what a step would train on",
    "env": "describe this machine and a run for a bug report",
    "evaluate": "evaluate models on prompts, and a reward model on pairs",
    "plan": "plan the memory of a run from its flags",
    "export": "make model folders from a checkpoint",
    "report": "show runs in one HTML page",
    "serve_reward": "serve a reward model over HTTP",
    "toy": "make the toy model and its data",
}
for tools_of_feature in hooks("programs.TOOLS"):
    TOOLS |= tools_of_feature


def main(argv: Sequence[str]) -> int:
    """Run the command that the first word of `argv` names, with the other words; returns its exit
    code."""
    words = list(argv)
    # DeepSpeed's launcher puts it before the command
    while words and words[0].startswith("--local_rank"):
        words = words[1:]
    name = "--help"
    if words:
        name = words[0]
    if name in TRAINERS:
        return start_ranks(name, words[1:])
    if name.replace("-", "_") in TOOLS:
        sys.argv = [f"dschat_ppo {name}", *words[1:]]
        runpy.run_module(
            f"dschat_ppo.tools.{name.replace('-', '_')}", run_name="__main__", alter_sys=True
        )
        return 0
    if name in ("--help", "-h"):
        print(commands())
        return 0
    hint = ""
    near = difflib.get_close_matches(name, [*TRAINERS, *TOOLS], n=1)
    if near:
        hint = f"; did you mean {near[0]}?"
    print(
        f"error: {name}: no such command{hint} (all commands: python -m dschat_ppo --help)",
        file=sys.stderr,
    )
    return 2


def commands() -> str:
    """The text of `--help`: all commands, with a line for each."""
    training = {step: title for step, (title, _) in TITLES.items()}
    width = max(map(len, [*TRAINERS, *TOOLS])) + 2
    lines = [
        "usage: python -m dschat_ppo COMMAND ...",
        "       deepspeed --module dschat_ppo COMMAND ...",
    ]
    for heading, texts in (("training", training), ("tools", TOOLS)):
        lines += ["", f"{heading}:"]
        lines += [f"  {name.ljust(width)}{text}" for name, text in texts.items()]
    return "\n".join([*lines, "", "the flags of a command: python -m dschat_ppo COMMAND --help"])


def installed() -> NoReturn:
    """`dschat-NAME ...`, as `python -m dschat_ppo NAME ...`."""
    leave(main([Path(sys.argv[0]).name.removeprefix("dschat-"), *sys.argv[1:]]))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
