"""Each command in a bash block of the documents runs, as printed, on a tiny model and data: see `command_rules.py`.

The README's commands run first, in one folder. Each other page runs in a folder that starts with their outputs.
A command that the README also prints runs once. A block of flags of step 3 runs a line at a time.
"""

import argparse
import ast
import json
import re
import runpy
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bash_blocks import BLOCKS, FLAGS_OF_STEP_3, PAGES, ROOT, Block, files_of
from command_rules import RULES, Elsewhere, NotRun, Run, Serve, rule_of
from documents_folder import free_output, make_folder
from launch import _free_port, environment, forked, metrics_of, succeed

from dschat_ppo.config.cli import parse
from dschat_ppo.tools.plan import read_words as read_plan_words
from dschat_ppo.tools.plan import step_config

README = "README.md"
SERVICE = "http://host:5000"  # in a command: the server of `tools.serve_reward`
PLACEHOLDERS = {"HELD_OUT": "test_prompts.jsonl", "step_000012": "step_000001"}
INPUT = "Where is the lamp?\n"  # typed into the chats
FLAGS_COMMAND = (
    "deepspeed training/step3_ppo/main.py --actor_model_name_or_path out/sft --critic_model_name_or_path out/reward "
    "--data_path sums.jsonl --output_dir out/line_{} {}"
)


def commands_of(block: Block) -> list[str]:
    """The commands of a block; lines of flags are completed to commands."""
    if not block.text.startswith(FLAGS_OF_STEP_3):
        return block.commands
    return [FLAGS_COMMAND.format(f"{block.line}_{number}", flags) for number, flags in enumerate(block.commands)]


COMMANDS = {page: [c for b in BLOCKS if b.page == page for c in commands_of(b)] for page in {b.page for b in BLOCKS}}
MIGRATION = {f"docs/from-{name}.md" for name in ("deepspeed-chat", "trl", "openrlhf")}  # test_migration.py runs them
OTHER_PAGES = sorted(COMMANDS.keys() - {README} - MIGRATION)
NOT_HERE = sorted({c for part in COMMANDS.values() for c in part if isinstance(rule_of(c), Elsewhere | NotRun)})


@contextmanager
def served(command: str, path: str, folder: Path) -> Iterator[str]:
    """The address of a server that answers `path`, started by a command with `--port NUMBER`."""
    port = _free_port()
    words = shlex.split(re.sub(r"--port \d+", f"--port {port}", command))
    with subprocess.Popen(words, cwd=folder, env=environment()) as process:
        try:
            for _ in range(600):
                assert process.poll() is None, f"{command} ended with exit code {process.returncode}"
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60).close()
                    break
                except OSError:
                    time.sleep(0.1)
            else:
                pytest.fail(f"{command} does not answer")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def fork(words: list[str], ranks: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `deepspeed SCRIPT ...` or `python -m MODULE ...` in forked ranks."""
    if words[0] == "deepspeed":
        return forked(ranks, words[1], *words[2:], folder=folder)
    assert words[:2] == ["python", "-m"]
    return forked(1, "tests/workers/run_module.py", *words[2:], folder=folder, stdin=folder / "input")


def run_as(rule: Run, command: str, folder: Path) -> None:
    """Run a command in `folder`; fails with the end of its output."""
    line = f"{command} {rule.more}"
    for name, instead in {**PLACEHOLDERS, "DATA": rule.data}.items():
        line = re.sub(rf"\b{name}\b(?!=)", instead, line)  # not the name of a variable
    if "--output_dir" in shlex.split(line):
        free_output(folder, shlex.split(line))
    if rule.by == "fork":
        succeed(fork(shlex.split(line), rule.ranks, folder))
        return
    if rule.by == "launcher":
        line = line.replace("deepspeed ", f"deepspeed --num_accelerators {rule.ranks} --master_port {_free_port()} ", 1)
    shell = ["bash", "-euo", "pipefail", "-c", line]
    env = environment() | {"WANDB_MODE": "offline"}
    done = subprocess.run(
        shell, cwd=folder, env=env, input=INPUT, text=True, capture_output=True, timeout=600, check=False
    )
    succeed(done)


def run_commands(commands: list[str], folder: Path) -> None:
    (folder / "input").write_text(INPUT)
    for command in commands:
        rule = rule_of(command)
        if isinstance(rule, Serve):
            with served(command, rule.path, folder):
                pass
        elif isinstance(rule, Run) and SERVICE in command:
            [server] = [c for c in COMMANDS["docs/rewards.md"] if "tools.serve_reward" in c]
            with served(server, "/health", folder) as address:
                run_as(rule, command.replace(SERVICE, address), folder)
        elif isinstance(rule, Run):
            run_as(rule, command, folder)


@pytest.fixture(scope="module")
def readme(assets, tmp_path_factory) -> Path:
    """The folder in which the commands of README.md have run."""
    folder = make_folder(tmp_path_factory.mktemp("documents") / "readme", assets)
    run_commands(COMMANDS[README], folder)
    return folder


@pytest.mark.ranks
@pytest.mark.slow
def test_commands_of_the_readme(readme):
    for step in ("sft", "reward", "ppo"):
        assert json.loads((readme / f"out/{step}/result.json").read_text())["world_size"] == 2
        assert (readme / f"out/{step}/report.html").stat().st_size > 10_000
    assert not (readme / "out/grpo/critic").exists()
    means = [line["reward/score_mean"] for line in metrics_of(readme / "out/grpo") if "reward/score_mean" in line]
    assert means and means[0] >= 0, "my_rewards.py scores the responses"
    assert all((readme / path / "model.safetensors").exists() for path in ("out/dpo", "out/ppo/actor", "output/dpo"))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("page", OTHER_PAGES)
def test_commands_of_a_page(page, readme, assets, tmp_path):
    folder = make_folder(tmp_path / "page", assets, readme)
    for name, text in files_of(ROOT / page).items():
        (folder / name).write_text(text, encoding="utf-8")
    run_commands([command for command in COMMANDS[page] if command not in COMMANDS[README]], folder)
    if page == "docs/extending.md":
        own = [line for path in folder.glob("out/line_*") for line in metrics_of(path) if "own/long_answers" in line]
        assert own and all(0 <= line["own/long_answers"] <= 1 for line in own)
    if page == "docs/your-data.md":
        assert any("eval_loss" in line for line in metrics_of(folder / "out/sft"))
        assert any("eval_accuracy" in line for line in metrics_of(folder / "out/reward"))
        assert {"kl/ref_k1", "reward/score_std", "rollout/ended_share"} <= set(metrics_of(folder / "out/ppo")[-1])
        assert (folder / "out/ppo/report.html").stat().st_size > 10_000


class ParsedError(Exception):
    """Ends a program after it has parsed its command line."""


def check_flags(words: list[str]) -> None:
    """Run a Python program of a command that is not run here until it has parsed its command line."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *given, **settings):
        real(self, *given, **settings)
        raise ParsedError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ParsedError):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setattr(sys, "argv", words[2:] if words[1] == "-m" else words[1:])
        if words[1] == "-m":
            runpy.run_module(words[2], run_name="__main__")
        else:
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", NOT_HERE)
def test_a_command_that_is_not_run_here_could_run(command):
    rule = rule_of(command)
    words = shlex.split(command)
    program = next((word for word in words if re.search(r"\.(py|sh)$|^dschat_ppo\.", word)), words[0])
    if isinstance(rule, Elsewhere):
        name = re.sub(r".*\.(?=\w+$)", "", program.removesuffix(".py").removesuffix(".sh").split("/")[-1])
        assert name in (ROOT / rule.test).read_text(encoding="utf-8"), f"{rule.test} does not run {name}"
    if program.endswith((".py", ".sh")):
        assert (ROOT / program).exists()
    if words[:2] == ["pip", "install"] or words[1:2] == ["training_scripts/setup_venv.sh"]:
        tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
        [extras] = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "extras_require"
        ]
        assert re.sub(r".*\.\[(\w+)\]", r"\1", words[-1]) in ast.literal_eval(extras)
    if "dschat_ppo" in words:
        step, *flags = words[words.index("dschat_ppo") + 1 :]
        parse(step, flags)
    elif "dschat_ppo.tools.plan" in words:  # parses in two parts
        own, of_step = read_plan_words(words[words.index("dschat_ppo.tools.plan") + 1 :])
        step_config(own.step, of_step)
    elif words[0] == "python" and "$DATA" not in words:  # the example's variables are for a shell
        check_flags(words)


def test_every_rule_is_used_and_every_block_is_read():
    used = {start for part in COMMANDS.values() for c in part for start in RULES if RULES[start] is rule_of(c)}
    assert used == set(RULES)
    assert sum(page.read_text(encoding="utf-8").count("```bash") for page in PAGES) == len(BLOCKS)
