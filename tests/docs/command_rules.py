"""How tests/docs/test_commands.py runs each command of the documents. For a command, the first matching rule counts.

`MODEL`, `DATA` and other names in the commands are a tiny model and small files (`documents_folder.py`). A command that
no rule matches fails the test: add a rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Run:
    """Run the command as printed.

    Attributes:
        by: `bash` runs the line in a shell; `launcher` also, with `ranks`; `fork` runs its program in
            processes forked from one that has imported the libraries, which saves seconds for each command.
        more: words appended to the command, so that it takes seconds.
        data: the file that `DATA` stands for.
        ranks: number of ranks of a `deepspeed` command.
    """

    by: Literal["bash", "launcher", "fork"]
    more: str = ""
    data: str = "pairs.jsonl"
    ranks: int = 1


@dataclass(frozen=True)
class Serve:
    """Start the command on a free port until it answers a request for `path`."""

    path: str


@dataclass(frozen=True)
class Elsewhere:
    """Do not run the command here, because of `why`; `test` runs the same program, shortened."""

    why: str
    test: str


@dataclass(frozen=True)
class NotRun:
    """No test runs the command, because of `why`."""

    why: Literal["needs a GPU", "needs a network", "runs the tests themselves"]


Rule = Run | Serve | Elsewhere | NotRun
STEP_3 = r"deepspeed training/step3_ppo/main\.py "
TOOL = r"python -m dschat_ppo\.tools\."
PARTS = "minutes; the test runs what the program measures, shortened, without its command line"
SHORT = "--max_answer_seq_len 16"
KEPT = "--keep_final_checkpoint"  # for the commands that export a checkpoint

RULES: dict[str, Rule] = {
    # scripts
    r"bash training_scripts/quickstart\.sh$": Elsewhere("minutes", "tests/tools/test_quickstart_report.py"),
    r"bash training_scripts/toy/run_step2_dpo\.sh ": Run("bash", more="--max_steps 1"),
    r"bash training_scripts/toy/run_grpo_addition\.sh ": Elsewhere(
        "minutes", "tests/training_scripts/test_run_grpo_addition.py"
    ),
    r"(.*bash training_scripts/examples/gsm8k/|.*--data_path \"\$DATA\")": Elsewhere(
        "downloads a model and a data set", "tests/training_scripts/test_gsm8k_example.py"
    ),
    r"bash training_scripts/setup_venv\.sh$": Run("bash"),
    r"source \.venv/bin/activate$": Run("bash"),
    r"export ": Run("bash"),
    r"bash training_scripts/setup_venv\.sh lora$": NotRun("needs a network"),
    r"pip install ": NotRun("needs a network"),
    r"bash tests/run\.sh": NotRun("runs the tests themselves"),
    r"mkdocs build --strict$": Elsewhere("it is the test of the site", "tests/docs/test_site.py"),
    r".*bash training_scripts/(single_gpu|single_node|multi_node)/train\.sh ": Elsewhere(
        "trains a published model on GPUs", "tests/training_scripts/test_recipes.py"
    ),
    r"(.*sbatch .*|.*training_scripts/)(slurm/train\.sbatch|e2e\.sh)": Elsewhere(
        "trains published models on GPUs", "tests/training_scripts/test_recipes.py"
    ),
    # installed commands, and several machines
    r"(dschat-sft|python -m dschat_ppo) ": Elsewhere("needs an installed wheel", "tests/commands/test_wheel.py"),
    r"deepspeed --num_accelerators 2 --module dschat_ppo ": Elsewhere(
        "the same command as the one before, by another launcher", "tests/commands/test_start_ranks.py"
    ),
    r"(deepspeed --hostfile|.*torchrun|.*srun) ": Elsewhere(
        "needs several machines", "tests/ranks/test_ranks_launchers.py"
    ),
    r"python training/step1_sft/main\.py .*--dry_run": Run("bash"),
    # the three steps
    r"deepspeed training/step2_reward/main\.py .*--data_format tickets\.py:read ": Elsewhere(
        "its function is on the page", "tests/docs/test_extending.py"
    ),
    r"deepspeed training/step1_sft/main\.py --model_name_or_path MODEL --data_path DATA --output_dir out/sft$": Run(
        "launcher", more=KEPT, ranks=2
    ),
    r"deepspeed training/step2_reward/main\.py --model_name_or_path out/sft --data_path DATA "
    r"--output_dir out/reward$": Run("launcher", ranks=2),
    STEP_3 + r"--actor_model_name_or_path out/sft --critic_model_name_or_path out/reward --data_path DATA "
    r"--output_dir out/ppo$": Run("launcher", more=f"{SHORT} {KEPT}", ranks=2),
    STEP_3 + r".*--report_to tensorboard wandb$": Run("launcher", more=SHORT),  # its environment: W&B offline
    STEP_3 + r".*--output_dir out/grpo ": Run("fork", more=SHORT, ranks=2),
    STEP_3: Run("fork", more=SHORT),
    r"deepspeed training/step2_dpo/main\.py --model_name_or_path out/sft ": Run("fork", ranks=2),
    r"deepspeed training/step2_reward/main\.py --objective process ": Run("fork", data="labelled_steps.jsonl"),
    r"deepspeed training/step[12]_\w+/main\.py ": Run("fork"),
    # tools
    TOOL + r"chat .*--web": Serve("/"),
    TOOL + r"serve_reward ": Elsewhere(
        "serves until it is stopped; it is started for the command with --remote_reward_url",
        "tests/docs/test_commands.py",
    ),
    TOOL + r"replay ": Elsewhere("needs a run with a NaN", "tests/ranks/test_ranks_nonfinite.py"),
    TOOL + r"(chat|evaluate --model) ": Run("fork", more="--max_tokens 8"),
    TOOL + r"(data|evaluate|export|report) ": Run("fork"),
    r"printf .* \| " + TOOL + r"chat ": Run("bash", more="--max_tokens 8"),
    TOOL + r"plan ": Elsewhere("reads configurations of models on the hub", "tests/tools/test_plan.py"),
    # benchmarks
    r"bash benchmarks/gpu\.sh --json": NotRun("needs a GPU"),
    r"bash benchmarks/gpu\.sh --help$": Run("bash"),
    r"bash benchmarks/gpu\.sh --tiny$": Elsewhere("a minute", "tests/benchmarks/test_gpu_benchmark.py"),
    r"python benchmarks/ppo_step\.py": Elsewhere("minutes", "tests/benchmarks/test_ppo_step_benchmark.py"),
    r"python benchmarks/faults\.py": Elsewhere(PARTS, "tests/benchmarks/test_faults_benchmark.py"),
    r"python benchmarks/step_costs\.py": Elsewhere(PARTS, "tests/benchmarks/test_step_costs_benchmark.py"),
    r"python benchmarks/learning\.py": Elsewhere("minutes", "tests/training_scripts/test_run_grpo_addition.py"),
    r"python benchmarks/rollout\.py": Elsewhere(PARTS, "tests/benchmarks/test_gpu_benchmark.py"),
    r"python benchmarks/fuzz\.py": Elsewhere("minutes", "tests/benchmarks/test_fuzz_benchmark.py"),
    r"python benchmarks/trajectories\.py": Elsewhere("minutes", "tests/benchmarks/test_trajectories_benchmark.py"),
}


def rule_of(command: str) -> Rule:
    """The rule of a command whose words are separated by single spaces.

    Raises:
        LookupError: no rule matches.
    """
    for start, rule in RULES.items():
        if re.match(start, command):
            return rule
    raise LookupError(f"no rule in tests/docs/command_rules.py says how this command is run: {command}")
