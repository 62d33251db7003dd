"""The scripts for real models: each command passes a dry run, and the largest models fit by the
planner as the script says."""

import json
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from launch import ROOT, environment
from transformers import LlamaConfig, Qwen2Config

from dschat_ppo.commands import run_training
from dschat_ppo.config.cli import parse
from dschat_ppo.planner.model_parts import read_model_configs
from dschat_ppo.planner.plan_step import plan_step
from dschat_ppo.tools import toy

# the largest model of each size of the scripts
MODELS = {
    "Qwen2.5-1.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        architectures=["Qwen2ForCausalLM"],
    ),
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
    ),
}


SCRIPTS = ROOT / "training_scripts"
STEPS = ("sft", "reward", "dpo", "ppo", "grpo")
MAINS = {"step1_sft": "sft", "step2_reward": "reward", "step2_dpo": "dpo", "step3_ppo": "ppo"}
# ranks, ..., GiB
HARDWARE_OF = {"single_gpu": (1, 1, 128), "single_node": (8, 8, 1024), "multi_node": (16, 8, 1024)}
LARGEST = {"small": "Qwen2.5-1.5B", "large": "Llama-3.1-8B"}
PRINTS = '() { printf "%s\\0" "$@"; }'  # in place of a program
GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models without weights (in `shallow` of two layers), pairs, and problems in the form of
    GSM8K."""
    folder = tmp_path_factory.mktemp("recipes")
    tokenizer = toy.make_tokenizer(["a few words to merge"])
    for name, config in MODELS.items():
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        shallow = shutil.copytree(folder / name, folder / "shallow" / name) / "config.json"
        shallow.write_text(
            json.dumps(
                json.loads(shallow.read_text()) | {"num_hidden_layers": 2, "layer_types": None}
            )
        )
    pairs = [
        {"prompt": f"Is {n} even?", "chosen": " I think so.", "rejected": " No."}
        for n in range(1900)
    ]
    problems = [
        {"question": f"What is {n} + 1?", "answer": f"{n}+1\n#### {n + 1}"} for n in range(1900)
    ]
    for name, rows in (("pairs", pairs), ("problems", problems)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def bash(
    script: str, *words: object, program: str = "python", **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run a script with `program`, unless it is "", replaced by a function that prints its
    arguments, each followed by NUL."""
    own = {
        name: value
        for name, value in environment().items()
        if not name.startswith(("SLURM", "RANK", "MACHINES"))
    }
    own |= {"DS_ACCELERATOR": "cpu", "MASTER_PORT": "29777"}
    if program:
        own[f"BASH_FUNC_{program}%%"] = PRINTS
    command = ["bash", str(SCRIPTS / script), *map(str, words)]
    env = own | {name: str(value) for name, value in variables.items()}
    return subprocess.run(
        command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=180, check=False
    )


def words_of(script: str, *words: object, **variables: object) -> list[str]:
    result = bash(script, *words, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\0")[:-1]


@cache
def flags_of(
    folder: Path, place: str, size: str, step: str, models: str = ""
) -> tuple[str, tuple[str, ...]]:
    """(name of the step's command, flags) of a script with the largest model of a size, in a dry
    run."""
    model = folder / models / LARGEST[size]
    data = folder / ("problems.jsonl" if step == "grpo" else "pairs.jsonl")
    unbuffered, main, *flags = words_of(
        f"{place}/train.sh",
        step,
        folder / "out",
        "--dry_run",
        MODEL=model,
        REWARD_MODEL=model,
        DATA=data,
    )
    assert unbuffered == "-u"
    return MAINS[Path(main).parent.name], tuple(flags)


@pytest.mark.parametrize(
    ("place", "size"),
    [
        ("single_gpu", "large"),
        pytest.param("single_gpu", "small", marks=pytest.mark.release),
        *(
            pytest.param(place, "large", marks=pytest.mark.release)
            for place in HARDWARE_OF
            if place != "single_gpu"
        ),
    ],
)
def test_every_step_passes_a_dry_run(folder, capsys, monkeypatch, place, size):
    monkeypatch.chdir(folder)
    for step in STEPS:
        command, flags = flags_of(folder, place, size, step, "shallow")
        code = run_training(command, flags)
        printed = capsys.readouterr()
        assert code == 0, f"{step}: {printed.err}"
        ranks = HARDWARE_OF[place][0]
        assert f"dry run for {ranks} rank" in printed.out
        assert "has no effect" not in printed.out, f"{step}: {printed.out}"
        batch = {"ppo": 64, "grpo": 256}.get(step, 64)
        assert re.search(rf"global batch .* = {batch}\n", printed.out), f"{step}: {printed.out}"


def test_a_dry_run_of_e2e_checks_every_step(folder, tmp_path, capsys):
    """Step 3 reads copies of the settings, which the script removes at its end."""
    model, copies, kept = (
        folder / "shallow" / LARGEST["small"],
        tmp_path / "copies",
        tmp_path / "kept",
    )
    copies.mkdir()
    prints_and_keeps = PRINTS.replace("; }", '; cp -rT "$TMPDIR" "$KEPT"; }')
    variables = {"BASH_FUNC_python%%": prints_and_keeps, "TMPDIR": copies, "KEPT": kept}
    result = bash(
        "e2e.sh",
        "--actor-model",
        model,
        "--reward-model",
        model,
        "--data-path",
        folder / "pairs.jsonl",
        "--output-dir",
        tmp_path / "out",
        "--dry-run",
        program="",
        **variables,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert not list(copies.iterdir())
    for part in result.stdout.replace(str(copies), str(kept)).split("e2e: ")[1:]:
        _, main, *flags = part.split("\0")[:-1]
        code = run_training(MAINS[Path(main).parent.name], flags)
        printed = capsys.readouterr()
        assert code == 0 and "dry run for 1 rank" in printed.out, printed.err
    assert result.stdout.count("e2e: ") == 3


@pytest.mark.release
@pytest.mark.parametrize("place", HARDWARE_OF)
def test_the_largest_models_fit_with_the_peak_that_the_script_states(folder, place):
    ranks, per_machine, host = HARDWARE_OF[place]
    for size, name in LARGEST.items():
        [line] = re.findall(
            rf"^#   {re.escape(name)} +(.*)$",
            (SCRIPTS / place / "train.sh").read_text(),
            re.MULTILINE,
        )
        for step, stated in zip(STEPS, line.split(), strict=True):
            command, flags = flags_of(folder, place, size, step)
            config = parse(command, flags)
            plan = plan_step(
                config, read_model_configs(config), ranks, 80 * GIB, host * GIB, per_machine
            )
            assert not plan.missing, f"{name}, {step}: {plan.shortages()}"
            peak = plan.peaks[0].needs / GIB
            assert peak == pytest.approx(float(stated), rel=0.1, abs=1), (
                f"{name}, {step}: state {peak:.0f}"
            )


def test_several_machines_are_those_of_the_hostfile(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# node0 slots=8\nnode1 slots=4\n  # node2 slots=4\nnode3 slots=4 # 8 slots=8")
    words = words_of(
        "multi_node/train.sh", "sft", "out", program="deepspeed", HOSTFILE=hosts, MODEL="m-1b"
    )
    assert words[words.index("--hostfile") + 1] == str(hosts)
    assert words[words.index("--num_accelerators") + 1] == "4", "comments name no machines"
    assert words[words.index("--gradient_accumulation_steps") + 1] == "1"
    assert words[words.index("--per_device_train_batch_size") + 1] == "8"  # of 64 rows, for 8 ranks
    hosts.write_text("node1 slots=4\nnode2 slots=8\n")
    assert (
        "with the same N"
        in bash("multi_node/train.sh", "sft", "out", HOSTFILE=hosts, MODEL="m-1b").stderr
    )
    words = words_of("single_gpu/train.sh", "sft", "out", HOSTFILE=hosts, MODEL="m-1b", RANKS=2)
    assert words[:3] == ["-u", "-m", "deepspeed.launcher.launch"], "one machine has no hostfile"


def test_srun_starts_the_ranks_under_slurm():
    job = {
        "SLURM_JOB_ID": 7,
        "SLURM_NNODES": 4,
        "SLURM_NTASKS_PER_NODE": 2,
        "SLURM_SUBMIT_DIR": ROOT,
    }
    job |= {"SLURM_CPUS_PER_TASK": 3, "MODEL": "m-1b"}
    words = words_of("slurm/train.sbatch", "grpo", "out", program="srun", **job)
    assert words[:6] == ["--distribution", "block", "--cpus-per-task", "3", "python", "-u"]
    assert words[6].endswith("training/step3_ppo/main.py")
    # 256 rows of 8 ranks, 16 at a time
    assert words[words.index("--gradient_accumulation_steps") + 1] == "2"
    assert (
        "submit this script with sbatch"
        in bash("slurm/train.sbatch", "sft", "out", MODEL="m-1b").stderr
    )
    assert words_of("slurm/train.sbatch", "sft", "out", "--dry_run", MODEL="m-1b")[-1] == "16"


def test_the_commands_of_the_page_start_steps():
    """Those of the scripts in docs/models.md, with a program that prints in place of python."""
    page = (ROOT / "docs/models.md").read_text().split("## Scripts for published models")[1]
    lines = (
        "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ").splitlines()
    )
    assert len(lines) == 6
    started = []
    for line in lines:
        words = shlex.split(line)
        variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        script, *flags = words[len(variables) + 1 :]
        result = bash(script.removeprefix("training_scripts/"), *flags, **variables, RANKS=1)
        # e2e stops after a step without result
        assert result.returncode == (1 if "e2e" in script else 0)
        _, main, *flags = (
            result.stdout.removeprefix("e2e: sft\n").split("e2e: ")[0].split("\0")[:-1]
        )
        parse(MAINS[Path(main).parent.name], flags)
        started.append(MAINS[Path(main).parent.name])
    assert started == ["sft", "reward", "ppo", "dpo", "ppo", "sft"]
