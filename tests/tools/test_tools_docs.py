"""docs/tools.md names the commands, flags and defaults of the chat, and commands that parse."""

import re
import shlex
from dataclasses import asdict
from pathlib import Path

from dschat_ppo.tools import chat, evaluate_flags
from dschat_ppo.tools.chat_terminal import HELP
from dschat_ppo.tools.sampling_settings import SamplingSettings

TEXT = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")


def test_commands_and_settings():
    assert re.findall(r"^\| `/(\w+)", TEXT, re.M) == re.findall(r"^/(\w+)", HELP, re.M)
    settings = {name: str(value) for name, value in asdict(SamplingSettings()).items()}
    assert dict(re.findall(r"^\| `--(\w+)` \| ([\d.]+) \|", TEXT, re.M)) == settings


def test_the_commands_parse():
    found = re.findall(r"python -m dschat_ppo\.tools\.(chat|evaluate) ((?:\\\n|[^\n`])*)", TEXT)
    assert len(found) == 6
    for tool, words in found:
        read = chat.read_arguments if tool == "chat" else evaluate_flags.read_arguments
        read(shlex.split(words.replace("\\\n", " ")))
