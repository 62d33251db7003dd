"""Plan a run from its flags and model configurations: memory by phase, whether it fits, and flags
with which it fits.

    python -m dschat_ppo.tools.plan --actor M --critic R --devices 8 --device_memory 80GiB
        --host_memory 1TiB
        [--devices_per_node 8] [--json] [flags of step 3]
    python -m dschat_ppo.tools.plan --step 1 --model M --devices 8 [flags of step 1]

--step is 1 (SFT), 2 (reward model), dpo or 3 (PPO, the default). A model is a folder that holds at
least config.json, or a name on the hub, of which no weights are downloaded. All flags of the step's
main.py are accepted; --data_path and --output_dir may be left out. docs/memory.md explains the
table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dschat_ppo.common.host_memory import host_memory
from dschat_ppo.config.cli import parse
from dschat_ppo.config.flag_parser import flag_parser
from dschat_ppo.config.run_flags import AUTO
from dschat_ppo.config.step_config import StepConfig, flatten
from dschat_ppo.errors import UserError, counted
from dschat_ppo.tools import exit_code_of

if TYPE_CHECKING:  # it needs torch
    from dschat_ppo.planner.plan_step import Plan

STEPS = {"1": "sft", "2": "reward", "dpo": "dpo", "3": "ppo"}
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MODELS = {  # short name -> flag of the step
    "actor": "actor_model_name_or_path",
    "critic": "critic_model_name_or_path",
    "reward": "reward_model_name_or_path",
    "reference": "ref_model_name_or_path",
    "model": "model_name_or_path",
}
GIB = 2**30
LORA_DIM = 16  # of the LoRA that is tried where nothing else fits
Change = dict[str, Any]  # flag -> value


def size_of(text: str) -> int:
    """Bytes of a size such as 80GiB, 1TiB, 24G or 500000000. Units are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtb]?)(?:i?b)?", text.strip().lower())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 80GiB or 1TiB")
    return int(float(found[1]) * _UNITS[found[2]])


def read_words(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own flags, and those of the step."""
    parser = flag_parser([], prog="python -m dschat_ppo.tools.plan", description=__doc__)
    parser.usage = (
        f"{parser.prog} --actor M --critic R [--devices N] [--device_memory SIZE] [flags of step 3]"
    )
    add = parser.add_argument_group("planner").add_argument
    add(
        "--step",
        choices=list(STEPS),
        default="3",
        help="1: SFT, 2: reward model, dpo, 3: PPO (default)",
    )
    for name, flag in _MODELS.items():
        add(f"--{name}", metavar="M", help=f"the same as --{flag}")
    add("--devices", type=int, default=1, metavar="N", help="ranks of the run (default: 1)")
    add("--devices_per_node", type=int, metavar="N", help="ranks on each machine (default: all)")
    add(
        "--device_memory",
        type=size_of,
        default=0,
        metavar="SIZE",
        help="memory of a GPU, such as 80GiB (default: the run is on a CPU)",
    )
    add(
        "--host_memory",
        type=size_of,
        metavar="SIZE",
        help="memory of a machine, such as 1TiB (default: this one)",
    )
    add("--json", action="store_true", help="print the plan as JSON, for scripts; sizes are bytes")
    words, rest = parser.parse_known_args(argv)
    for name, flag in _MODELS.items():
        if getattr(words, name) is not None:
            rest += [f"--{flag}", getattr(words, name)]
    words.devices_per_node = words.devices_per_node or words.devices
    words.host_memory = words.host_memory or host_memory()
    if words.devices < 1 or words.devices_per_node < 1 or words.devices % words.devices_per_node:
        given = f"--devices {words.devices} --devices_per_node {words.devices_per_node}"
        raise UserError(f"{given}: both must be above 0, and the second must divide the first")
    return words, rest


def step_config(step: str, rest: Sequence[str]) -> Any:
    return parse(STEPS[step], rest, given={"data_path": ["DATA"], "output_dir": "output"})


def main(argv: Sequence[str]) -> int:
    return exit_code_of(lambda: _print_plan(*read_words(argv)))


def _print_plan(words: argparse.Namespace, rest: list[str]) -> None:
    config = step_config(words.step, rest)
    # else DeepSpeed searches for a device, and prints a warning
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # after the flags are checked: these imports take seconds
    from dschat_ppo.common.logging import quiet_hugging_face
    from dschat_ppo.models.model_folders import settings_only
    from dschat_ppo.planner.model_parts import read_model_configs
    from dschat_ppo.planner.number_format import dtype_for_plan
    from dschat_ppo.planner.plan_step import plan_step
    from dschat_ppo.planner.role_memory import PARTS

    quiet_hugging_face()
    with settings_only():
        models = read_model_configs(config)

    def plan_of(config: StepConfig) -> Plan:
        return plan_step(
            config,
            models,
            words.devices,
            words.device_memory,
            words.host_memory,
            words.devices_per_node,
        )

    if config.run.dtype == AUTO:
        model = next(iter(models.values()))
        on_gpu = words.device_memory > 0
        chosen = dtype_for_plan(config, model, on_gpu, lambda each: not plan_of(each).missing)
        print(f"{chosen}\n")
        rest = [*rest, "--dtype", chosen.dtype]
        config = step_config(words.step, rest)

    def plan_with(more: list[str]) -> Plan:
        return plan_of(step_config(words.step, [*rest, *more]))

    plan = plan_with([])
    if plan.missing:
        proposal = flags_that_fit(config, plan_with)
    else:
        proposal = None
    if words.json:
        print(json.dumps(json_of(plan, proposal), indent=2))
        return
    where = f"{plan.ranks} x " + (
        f"GPU of {plan.device_memory / GIB:.0f} GiB" if plan.device_memory else "CPU"
    )
    print(
        f"Step {words.step} on {where}, {plan.host_memory / GIB:.0f} GiB of host memory for"
        f" {plan.ranks_per_node}\n"
    )
    print(
        "GiB of one rank at the peak of each phase; 'all': what a device and a host need, libraries"
        " included;"
    )
    print("a model that holds less than 0.005 GiB in a phase has no line there")
    print(table(plan, PARTS))
    print(
        "\n" + ("\n".join(f"It does not fit: {each}." for each in plan.shortages()) or "It fits.")
    )
    if plan.rows:
        print(f"A rank decodes {counted(plan.rows, 'sequence')} at a time.")
    if proposal is not None:
        print(
            f"\nIt fits ({proposal[1].peak_text()}) with these flags added:\n "
            f" {shlex.join(proposal[0])}"
        )
    elif plan.missing:
        if config.run.optimizer == "muon":
            others = "--optimizer adamw with ZeRO, "
        else:
            others = ""
        print(
            f"\nNo flags of the planner make it fit: use {others}more devices, a smaller model, or"
            " shorter rows."
        )


def json_of(plan: Plan, proposal: tuple[list[str], Plan] | None) -> dict[str, Any]:
    """A plan for scripts. Sizes are bytes: of one rank in `held`, of one device and of one host in
    `needs`. `proposal`: the flags with which it fits, and their plan; None if it fits as it is, or
    with no flags of the planner."""
    phases = []
    for phase in plan.phases:
        device, host = plan.needs(phase)
        held = [
            {"role": role, "part": part, "on_host": on_host, "bytes": size}
            for (role, part, on_host), size in phase.held.items()
        ]
        phases.append(
            {"phase": phase.name, "needs": {"device": device, "host": host}, "held": held}
        )
    proposed = None
    if proposal is not None:
        flags, proposed_plan = proposal
        proposed = {"flags": flags, **json_of(proposed_plan, None)}
    return {
        "fits": not plan.missing,
        "shortages": [str(shortage) for shortage in plan.shortages()],
        "phases": phases,
        "rows": plan.rows,
        "ranks": plan.ranks,
        "ranks_per_node": plan.ranks_per_node,
        "device_memory": plan.device_memory,
        "host_memory": plan.host_memory,
        "proposal": proposed,
    }


def table(plan: Plan, parts: Sequence[str]) -> str:
    """GiB of a rank by phase, role and part; a line "all" for each phase, with what a device and a
    host need."""
    form = "{:18} {:10}" + " {:>11}" * len(parts) + " {:>9}" * 2
    lines = [form.format("phase", "role", *parts, "device", "host")]
    for phase in plan.phases:
        for role in [*dict.fromkeys(role for role, _, _ in phase.held), None]:
            if role is None:
                places = plan.needs(phase)
            else:
                places = (phase.total(role, on_host=False), phase.total(role, on_host=True))
            sizes = [*(phase.total(role, part) for part in parts), *places]
            shown = [f"{size / GIB:.2f}" if size >= 0.005 * GIB else "" for size in sizes]
            if role is None or any(shown):
                lines.append(form.format(phase.name, role or "all", *shown).rstrip())
    return "\n".join(lines)


def flags_that_fit(
    config: StepConfig, plan_with: Callable[[list[str]], Plan]
) -> tuple[list[str], Plan] | None:
    """The flags to add so that the run fits, and its plan; None if all of the ladder is not enough.
    Rungs that lower what is missing are taken until the run fits. Then those that it fits without
    are removed, the last one first. The rows of an optimizer step stay. LoRA changes what is
    trained, so it is the last rung."""
    given = flatten(config)

    def tried(rungs: Sequence[Change]) -> tuple[list[str], Plan] | None:
        wanted = {
            name: value for rung in rungs for name, value in rung.items() if given[name] != value
        }
        words = [word for name, value in wanted.items() for word in (f"--{name}", str(value))]
        with suppress(UserError):  # flags that contradict each other, such as --offload at stage 0
            return words, plan_with(words)
        return None

    taken: list[Change] = []
    best = tried(taken)
    for rung in _ladder(config, given):
        if (
            best
            and best[1].missing
            and (found := tried([*taken, rung]))
            and found[1].missing < best[1].missing
        ):
            taken = [*taken, rung]
            best = found
    if best is None or best[1].missing:
        return None
    for rung in reversed(taken[:-1]):
        fewer = [each for each in taken if each is not rung]
        if (found := tried(fewer)) and not found[1].missing:
            taken, best = fewer, found
    return best


def _ladder(config: StepConfig, given: Change) -> list[Change]:
    """What makes a run smaller, in the order of what it costs."""
    prefixes = list(config.stages)
    batch = config.micro_batch
    frozen = [f"offload_{role}_model" for role in ("reference", "reward") if role in config.models]
    zero = {
        f"{prefix}zero_stage" for prefix in [*prefixes, *["critic_"] * ("reward" in config.models)]
    }
    stage_2, stage_3 = (
        {name: max(stage, given[name]) for name in sorted(zero)} for stage in (2, 3)
    )
    size = given[batch]
    accumulation = given["gradient_accumulation_steps"]
    halves: list[Change] = []
    while size % 2 == 0:
        size = size // 2
        accumulation = 2 * accumulation
        halves.append({batch: size, "gradient_accumulation_steps": accumulation})
    return [
        stage_2,
        stage_3,
        *([{"sleep_in_rollout": True}] if "actor" in config.models else []),
        *halves,
        {f"{prefix}gradient_checkpointing": True for prefix in prefixes},
        *(stage_3 | {name: True} for name in frozen),
        stage_2 | {"offload_optimizer": True},
        stage_3 | {"offload_optimizer": True},
        stage_3 | {"offload_optimizer": False, "offload": True},
        {"only_optimize_lora": True}
        | {f"{prefix}lora_dim": given[f"{prefix}lora_dim"] or LORA_DIM for prefix in prefixes},
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
