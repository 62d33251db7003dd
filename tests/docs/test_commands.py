"""The commands in the bash blocks of the documents.

Those of README.md and of docs/your-data.md run as printed, on a tiny model and data, each page in a
folder of its own; the second page, and the variants of README.md, before a release. Of the others
the program and its flags are checked. A block of flags of step 3 is checked a line at a time.
"""

import argparse
import ast
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from bash_blocks import BLOCKS, FLAGS_OF_STEP_3, PAGES, ROOT, Block, templates_of
from launch import _free_port, environment, forked, metrics_of, succeed

from dschat_ppo.config.cli import parse
from dschat_ppo.tools.plan import read_planner_flags, step_config

RUN = ("README.md", "docs/your-data.md")
VARIANTS = r".*--output_dir out/(grpo|dpo)\b"  # of README.md
# scripts, benchmarks, installed commands, dry runs and servers have tests of their own
NOT_RUN = (
    r"bash |source |python benchmarks/|dschat-|.*-m(odule)? dschat_ppo sft|.*--(dry_run|serve)"
)
SHORT = {"README.md": "--dtype fp32", "docs/your-data.md": ""}
FIRST = r".*step1_sft.*out/sft$"  # of README.md: a release runs it under the launcher
MORE = {
    r"deepspeed training/step3_ppo": "--max_answer_seq_len 8",
    r".*tools\.(chat|evaluate)": "--max_tokens 8",
}
STEPS = {"step1_sft": "sft", "step2_reward": "reward", "step2_dpo": "dpo", "step3_ppo": "ppo"}
STEP_3 = (
    "deepspeed training/step3_ppo/main.py --actor_model_name_or_path a --critic_model_name_or_path"
    " c --data_path d --output_dir o"
)


def commands_of(block: Block) -> list[str]:
    """The commands of a block; lines of flags are completed to commands."""
    flags = block.text.startswith(FLAGS_OF_STEP_3)
    return [f"{STEP_3} {line}" for line in block.commands] if flags else block.commands


COMMANDS = {
    page: [c for b in BLOCKS if b.page == page for c in commands_of(b)]
    for page in {b.page for b in BLOCKS}
}
CHECKED = sorted(
    {
        c
        for page, part in COMMANDS.items()
        for c in part
        if page not in RUN or re.match(f"{NOT_RUN}|{VARIANTS}", c)
    }
)


def run_command(command: str, folder, page: str, in_release: bool) -> None:
    """Run a command in `folder`; fails with the end of its output."""
    more = [words for start, words in MORE.items() if re.match(start, command)]
    launched = in_release and page == "README.md" and re.match(FIRST, command)
    if command.startswith("deepspeed "):
        more += [SHORT[page], "--max_steps 2"]
    line = re.sub(r"\bDATA\b", "pairs.jsonl", " ".join([command, *more]))
    words = shlex.split(line)
    if "|" in words or launched:
        line = line.replace(
            "deepspeed ", f"deepspeed --num_accelerators 2 --master_port {_free_port()} ", 1
        )
        settings = {
            "cwd": folder,
            "env": environment(),
            "text": True,
            "capture_output": True,
            "timeout": 600,
        }
        result = subprocess.run(["bash", "-euo", "pipefail", "-c", line], check=False, **settings)
    elif words[0] == "deepspeed":
        result = forked(2 if page == "README.md" else 1, *words[1:], folder=folder)
    else:
        assert words[:2] == ["python", "-m"]
        result = forked(
            1, "tests/workers/run_module.py", *words[2:], folder=folder, stdin=folder / "input"
        )
    succeed(result)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "left_out"),
    [
        ("README.md", f"{NOT_RUN}|{VARIANTS}"),
        *(pytest.param(page, NOT_RUN, marks=pytest.mark.release) for page in RUN),
    ],
)
def test_commands_of_a_page(page, left_out, assets, tmp_path):
    (tmp_path / "training").symlink_to(ROOT / "training")
    model = shutil.copytree(assets / "lm", tmp_path / "MODEL")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    shutil.copy(assets / "pairs.jsonl", tmp_path)
    (tmp_path / "input").write_text("Where is the lamp?\n")  # typed into the chats
    (tmp_path / "my_rewards.py").write_text(
        "def score(response, **columns):\n    return float(response.count('e'))\n\n"
        "def accuracy_reward(completions, **kwargs):  # as TRL calls it\n"
        "    return [score(text) for text in completions]\n"
    )
    for command in COMMANDS[page]:
        if not re.match(left_out, command):
            run_command(command, tmp_path, page, in_release=left_out == NOT_RUN)
    out = tmp_path / "out"
    for step in ("sft", "reward", "ppo"):
        assert json.loads((out / step / "result.json").read_text())["world_size"] == (
            2 if page == "README.md" else 1
        )
        assert (out / step / "report.html").stat().st_size > 10_000
    assert (out / "ppo/actor/model.safetensors").exists()
    if page == "README.md" and left_out == NOT_RUN:
        assert (out / "dpo/model.safetensors").exists() and not (out / "grpo/critic").exists()
        means = [
            line["reward/score_mean"]
            for line in metrics_of(out / "grpo")
            if "reward/score_mean" in line
        ]
        assert means and means[0] >= 0, "my_rewards.py scores the responses"
    if page != "README.md":
        assert any("eval_loss" in line for line in metrics_of(out / "sft"))
        assert any("eval_accuracy" in line for line in metrics_of(out / "reward"))
        assert {"kl/ref_k1", "reward/score_std", "rollout/ended_share"} <= set(
            metrics_of(out / "ppo")[-1]
        )


class ParsedError(Exception):
    """Ends a program after it has parsed its command line."""


def check_flags(words: list[str]) -> None:
    """Run `python FILE ...` or `python -m MODULE ...` until it has parsed its command line."""

    def ends(real):
        def parsed(*given, **settings):
            real(*given, **settings)
            raise ParsedError

        return parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ParsedError):
        for name in ("parse_args", "parse_known_args"):
            patch.setattr(
                argparse.ArgumentParser, name, ends(getattr(argparse.ArgumentParser, name))
            )
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setattr(sys, "argv", words[2:] if words[1] == "-m" else words[1:])
        if words[1] == "-m":
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", CHECKED)
def test_a_command_names_a_program_and_its_flags(command, tmp_path, monkeypatch):
    for name, template in templates_of(ROOT / "docs/rewards.md").items():
        if name in command:
            (tmp_path / name).write_text(template)
            monkeypatch.chdir(tmp_path)
    words = shlex.split(command.rpartition(" | ")[2])
    program = next(
        (word for word in words if re.search(r"\.(py|sh)$|^dschat_ppo\.", word)), words[0]
    )
    step = STEPS.get(program.split("/")[-2]) if program.endswith("main.py") else None
    if program.endswith((".py", ".sh")):
        assert (ROOT / program).exists()
    if words[:2] == ["pip", "install"] or words[1:2] == ["training_scripts/setup_venv.sh"]:
        tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
        [extras] = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.keyword) and node.arg == "extras_require"
        ]
        extra = re.sub(r".*\.\[(\w+)\]", r"\1", words[-1])
        assert extra in ast.literal_eval(extras) or extra == words[1]
    if "dschat_ppo" in words:
        step, *flags = words[words.index("dschat_ppo") + 1 :]
        parse(step, flags)
    elif step:
        parse(step, words[words.index(program) + 1 :])
    elif "dschat_ppo.tools.plan" in words:  # parses in two parts
        args, step_words = read_planner_flags(words[words.index("dschat_ppo.tools.plan") + 1 :])
        step_config(args.step, step_words)
    elif words[0] == "python" and "$DATA" not in words:  # the example's variables are for a shell
        check_flags(words)


def test_every_block_is_read():
    assert sum(page.read_text(encoding="utf-8").count("```bash") for page in PAGES) == len(BLOCKS)
