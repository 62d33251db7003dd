"""Each command in the documents is run by a test that a comment names, needs a GPU, or parses.

A comment directly above a block is one of

    <!-- run by tests/FOLDER/test_NAME.py -->     the test has the page's name, or that of each script of the block
    <!-- needs a GPU -->

The commands of a block without one are parsed by the parser of their program, so a flag that does not exist fails here.
"""

import argparse
import ast
import re
import runpy
import shlex
import sys

import pytest
from bash_blocks import BLOCKS, PAGES, ROOT, Block

from dschat_ppo.config.cli import parse
from dschat_ppo.tools.data import read_words

STEP = {"step1_sft": "sft", "step2_reward": "reward", "step2_dpo": "dpo", "step3_ppo": "ppo"}
GPU = "needs a GPU"
FLAGS_OF_STEP_3 = "# flags of training/step3_ppo/main.py"  # first line of a block of flags
_NEEDED = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"


class ParsedError(Exception):
    """Ends a program after it has parsed its command line."""


def parse_alone(name: str, words: list[str], is_module: bool) -> None:
    """Run a program until it has parsed its command line."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *given, **settings):
        real(self, *given, **settings)
        raise ParsedError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ParsedError):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", [name, *words])
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        if is_module:
            runpy.run_module(name, run_name="__main__")
        else:
            runpy.run_path(str(ROOT / name), run_name="__main__")


def program(words: list[str]) -> str:
    """What a command runs: a script or module, or the name of a program."""
    if words[0] == "deepspeed":
        return next(word for word in words if word.endswith(".py"))
    if words[0] == "python":
        return words[2] if words[1] == "-m" else words[1]
    return words[1] if words[0] == "bash" else words[0]


def last_program(words: list[str]) -> list[str]:
    """The words of the last program of a pipe, without settings of environment variables."""
    if "|" in words:
        words = words[len(words) - words[::-1].index("|") :]
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


def extras() -> set[str]:
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    [found] = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "extras_require"]
    return set(ast.literal_eval(found))


def check_parses(words: list[str]) -> None:
    """Fail unless the command could run: its script exists, and its parser accepts its flags."""
    words = last_program(words)
    name = program(words)
    if words[0] in ("deepspeed", "python") and name.startswith("training/"):
        assert (ROOT / name).exists()
        parse(STEP[name.split("/")[1]], words[words.index(name) + 1 :])
    elif name == "dschat_ppo.tools.data":  # parses in two parts
        read_words(words[words.index(name) + 1 :])
    elif words[0] == "python":
        parse_alone(name, words[words.index(name) + 1 :], is_module=words[1] == "-m")
    elif words[0] == "bash":
        assert (ROOT / name).exists(), f"{name} does not exist"
        assert not [word for word in words[2:] if word.startswith("--")], (
            "flags of a script: name the test that runs it"
        )
    elif words[:2] == ["pip", "install"]:
        (extra,) = re.findall(r"\.\[(\w+)\]", " ".join(words))
        assert extra in extras(), f"setup.py has no extra {extra}"
    else:
        assert words in (["source", ".venv/bin/activate"],), f"unknown command: mark the block, or check {words} here"


UNMARKED = [block for block in BLOCKS if not block.mark]
MARKED = [block for block in BLOCKS if block.mark]


def place(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("block", UNMARKED, ids=place)
def test_an_unmarked_block_parses(block):
    is_flags = block.text.startswith(FLAGS_OF_STEP_3)
    for command in block.commands:
        check_parses(shlex.split(f"python training/step3_ppo/main.py {_NEEDED} {command}" if is_flags else command))


@pytest.mark.parametrize("block", MARKED, ids=place)
def test_a_mark_names_a_test_that_runs_the_block(block):
    if block.mark == GPU:
        return
    test = re.fullmatch(r"run by (tests/[\w/]+\.py)", block.mark)
    assert test, f"unknown mark: {block.mark}"
    text = (ROOT / test[1]).read_text(encoding="utf-8")
    if block.page.removeprefix("docs/") in text:  # the test reads the commands from the page
        return
    for command in block.commands:
        name = program(last_program(shlex.split(command))).split("/")[-1]
        assert name in text, f"{test[1]} does not run {name}"


def test_every_page_with_commands_is_read():
    fenced = [str(page.relative_to(ROOT)) for page in PAGES if "```bash" in page.read_text(encoding="utf-8")]
    assert {block.page for block in BLOCKS} == set(fenced)
    assert sum(page.read_text(encoding="utf-8").count("```bash") for page in PAGES) == len(BLOCKS)
