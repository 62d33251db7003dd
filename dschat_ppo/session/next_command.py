"""Commands that a run prints at its end: they run as printed, on this machine and from this folder."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path

import dschat_ppo
from dschat_ppo.common import dist
from dschat_ppo.common.paths import shown_path
from dschat_ppo.config.data_flags import DataFlags, parse_data_split
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.config.steps import PreferenceConfig

NO_NEXT = "DSCHAT_PPO_NO_NEXT"  # "1" in the scripts that run several steps: they print what comes after all of them


def tool_command(tool: str, words: Sequence[str]) -> str:
    """The command of `python -m dschat_ppo.tools.TOOL WORDS`, for a shell."""
    return shlex.join([_program("python"), "-m", f"dschat_ppo.tools.{tool}", *map(shown_path, words)])


def step_command(folder: str, words: Sequence[str]) -> str:
    """The command that runs `training/FOLDER/main.py WORDS` on as many ranks of each machine as this run, for a shell.

    It is the installed command, such as `dschat-ppo`, if one has started this run or there is no source tree. On a CPU
    it sets `OMP_NUM_THREADS` as this run has it, since DeepSpeed's launcher does not know the cores per rank. On the
    GPUs of one machine it names them: the launcher ignores `CUDA_VISIBLE_DEVICES` beside a number of ranks.
    """
    main = Path(dschat_ppo.__file__).parents[1] / "training" / folder / "main.py"
    ranks, on_gpus = dist.local_world_size(), dist.on_gpu()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if on_gpus and dist.machines() == 1 else None
    threads = os.environ.get("OMP_NUM_THREADS") if ranks > 1 and not on_gpus else None
    count = ["--num_accelerators", str(ranks)]
    variables = {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": gpus}
    if _is_installed_command() or not main.is_file():
        program = [_program(f"dschat-{folder.partition('_')[2]}"), *(count if ranks > 1 or on_gpus else [])]
    elif ranks == 1 and dist.machines() == 1:
        program = [_program("python"), shown_path(main)]
    elif gpus:
        program = [_program("deepspeed"), "--include", f"localhost:{gpus}", shown_path(main)]
        del variables["CUDA_VISIBLE_DEVICES"]
    else:
        program = [_program("deepspeed"), *count, shown_path(main)]
    prefix = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items() if value)
    return prefix + shlex.join([*program, *map(shown_path, words)])


def ppo_words(config: PreferenceConfig, model: str, reward: str) -> list[str]:
    """The flags of step 3 after the run of `config`, which trained the reward model in the folder `reward` from the
    folder `model`, the actor's: over the same data, as long as its rows, with its memory settings."""
    data, fit = config.data, config.fit
    if parse_data_split(data.data_split)[2] == 0:  # all rows were for other steps
        data = replace(data, data_split="0,0,1")
    words = ["--actor_model_name_or_path", model, "--critic_model_name_or_path", reward, *data_words(data)]
    words += ["--output_dir", new_folder_beside(Path(reward), "ppo")]
    half = fit.max_seq_len // 2
    own = PPOFlags("")
    values = {"max_prompt_seq_len": half, "max_answer_seq_len": fit.max_seq_len - half, "offload": fit.offload}
    for role in ("actor", "critic"):
        values |= {f"{role}_zero_stage": fit.zero_stage, f"{role}_gradient_checkpointing": fit.gradient_checkpointing}
    for name, value in values.items():
        words += [] if value == vars(own)[name] else [f"--{name}", str(value)]
    return words if config.run.dtype == "bf16" else [*words, "--dtype", config.run.dtype]


def data_words(flags: DataFlags) -> list[str]:
    """The flags of the data that differ from their defaults, as words of a command line; all steps have them."""
    words: list[str] = []
    for field in fields(flags):
        value = getattr(flags, field.name)
        if value == field.default or value == []:
            continue
        if field.default_factory is not MISSING:
            words += [f"--{field.name}", *value]
        elif str(value).startswith("-"):  # argparse would take it for a flag
            words.append(f"--{field.name}={value}")
        else:
            words += [f"--{field.name}", str(value)]
    return words


def new_folder_beside(folder: Path, name: str) -> str:
    """`name` in the folder that holds `folder`, with a number behind it if that exists."""
    found, number = folder.resolve().parent / name, 1
    while found.exists():
        number += 1
        found = found.with_name(f"{name}_{number}")
    return str(found)


def _is_installed_command() -> bool:
    """Whether `dschat-STEP` or `python -m dschat_ppo` has started this run."""
    started = Path(sys.argv[0])
    return started.name.startswith("dschat-") or (started.parent.name, started.name) == ("dschat_ppo", "__main__.py")


def _program(name: str) -> str:
    """The program of this environment: its name if the shell finds that one, otherwise its path."""
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    is_found = found is not None and Path(found).parent.resolve() == own.parent.resolve()
    return name if is_found or not own.exists() else shown_path(own)
