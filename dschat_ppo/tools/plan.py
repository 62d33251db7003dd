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
from typing import TYPE_CHECKING, Any, NamedTuple

from dschat_ppo.common.host_memory import host_memory
from dschat_ppo.config.cli import parse
from dschat_ppo.config.feature_flags import smaller_rollouts
from dschat_ppo.config.flag_parser import flag_parser
from dschat_ppo.config.run_flags import AUTO
from dschat_ppo.config.step_config import StepConfig, flatten
from dschat_ppo.errors import UserError, counted
from dschat_ppo.features import hooks
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
LEAST_SHOWN = 0.005 * GIB  # smaller sizes are blank in the table
FlagValues = dict[str, Any]  # name of a flag -> value


class Proposal(NamedTuple):
    """Words to add to the command, and the plan of the run with them."""

    words: list[str]
    plan: Plan


def size_of(text: str) -> int:
    """Bytes of a size such as 80GiB, 1TiB, 24G or 500000000. Units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtb]?)(?:i?b)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 80GiB or 1TiB")
    return int(float(match[1]) * _UNITS[match[2]])


def read_planner_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of the planner, and the other words, which are flags of the step. Sizes are bytes;
    `device_memory` 0: the run is on a CPU. `UserError` if the ranks do not fill machines."""
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
    args, step_words = parser.parse_known_args(argv)
    for name, flag in _MODELS.items():
        model = getattr(args, name)
        if model is not None:
            step_words += [f"--{flag}", model]
    if args.devices_per_node is None:
        args.devices_per_node = args.devices
    if args.host_memory is None:
        args.host_memory = host_memory()
    if args.devices < 1 or args.devices_per_node < 1 or args.devices % args.devices_per_node:
        raise UserError(
            f"--devices {args.devices} --devices_per_node {args.devices_per_node}: both must be"
            " above 0, and the second must divide the first"
        )
    return args, step_words


def step_config(step: str, step_words: Sequence[str]) -> Any:
    """The configuration of the step, as its main.py reads it from these words."""
    return parse(STEPS[step], step_words, given={"data_path": ["DATA"], "output_dir": "output"})


def main(argv: Sequence[str]) -> int:
    return exit_code_of(lambda: _plan_command(*read_planner_flags(argv)))


def _plan_command(args: argparse.Namespace, step_words: list[str]) -> None:
    """Plan the step, look for flags with which it fits if it does not, and print both."""
    config = step_config(args.step, step_words)
    # else DeepSpeed searches for a device, and prints a warning
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # after the flags are checked: these imports take seconds
    from dschat_ppo.common.logging import quiet_hugging_face
    from dschat_ppo.models.model_folders import settings_only
    from dschat_ppo.planner.model_parts import read_model_configs
    from dschat_ppo.planner.plan_step import larger_micro_batch, larger_text, plan_step

    quiet_hugging_face()
    with settings_only():
        models = read_model_configs(config)

    def plan_of(config: StepConfig) -> Plan:
        return plan_step(
            config,
            models,
            args.devices,
            args.device_memory,
            args.host_memory,
            args.devices_per_node,
        )

    if config.run.dtype == AUTO:
        words_of_dtype = _chosen_dtype(args, config, next(iter(models.values())), plan_of)
        step_words = [*step_words, *words_of_dtype]
        config = step_config(args.step, step_words)

    def plan_with(words: list[str]) -> Plan:
        return plan_of(step_config(args.step, [*step_words, *words]))

    plan = plan_with([])
    proposal = None
    larger = None
    if plan.missing:
        proposal = flags_that_fit(config, plan_with)
    elif args.device_memory:
        larger = larger_micro_batch(config, args.devices, plan_of)
    if args.json:
        print(json.dumps(json_of(plan, proposal), indent=2))
        return
    _print_plan(args.step, config, plan, proposal)
    if larger is not None:
        text = larger_text(larger)
        print(f"{text[0].upper()}{text[1:]}")


def _chosen_dtype(
    args: argparse.Namespace,
    config: StepConfig,
    model_config: Any,
    plan_of: Callable[[StepConfig], Plan],
) -> list[str]:
    """Choose the format of numbers as a run with `--dtype auto` would, and print the line of its
    log. Returns the flag that names it."""
    from dschat_ppo.planner.number_format import dtype_for_plan

    number_format = dtype_for_plan(
        config,
        model_config,
        on_gpu=args.device_memory > 0,
        fits=lambda in_fp32: not plan_of(in_fp32).missing,
    )
    print(f"{number_format}\n", file=sys.stderr if args.json else sys.stdout)
    return ["--dtype", number_format.dtype]


def _print_plan(step: str, config: StepConfig, plan: Plan, proposal: Proposal | None) -> None:
    """Print what is planned, the table of memory, whether it fits, and flags with which it does."""
    from dschat_ppo.planner.role_memory import PARTS

    device = "CPU"
    if plan.device_memory:
        device = f"GPU of {plan.device_memory / GIB:.0f} GiB"
    print(
        f"Step {step} on {plan.ranks} x {device}, {plan.host_memory / GIB:.0f} GiB of host memory"
        f" for {plan.ranks_per_node}\n"
    )
    print(
        "GiB of one rank at the peak of each phase; 'all': what a device and a host need, libraries"
        " included;"
    )
    print("a model that holds less than 0.005 GiB in a phase has no line there")
    print(memory_table(plan, PARTS))
    shortages = [f"It does not fit: {shortage}." for shortage in plan.shortages()]
    print("\n" + "\n".join(shortages or ["It fits."]))
    if plan.rows:
        print(f"A rank decodes {counted(plan.rows, 'sequence')} at a time.")
    if proposal is not None:
        print(
            f"\nIt fits ({proposal.plan.peak_text()}) with these flags added:\n "
            f" {shlex.join(proposal.words)}"
        )
    elif plan.missing:
        other_optimizer = ""
        if config.run.optimizer != "adamw":
            other_optimizer = "--optimizer adamw with ZeRO, "
        print(
            f"\nNo flags of the planner make it fit: use {other_optimizer}more devices, a smaller"
            " model, or shorter rows."
        )


def json_of(plan: Plan, proposal: Proposal | None) -> dict[str, Any]:
    """A plan for scripts. Sizes are bytes: of one rank in `held`, of one device and of one host in
    `needs`. `proposal`: the flags with which it fits, and their plan; None if it fits as it is, or
    with no flags of the planner."""
    phases = []
    for phase in plan.phases:
        device, host = plan.needs(phase)
        holdings = [
            {"role": role, "part": kind, "on_host": on_host, "bytes": size}
            for (role, kind, on_host), size in phase.held.items()
        ]
        phases.append(
            {"phase": phase.name, "needs": {"device": device, "host": host}, "held": holdings}
        )
    proposed = None
    if proposal is not None:
        proposed = {"flags": proposal.words, **json_of(proposal.plan, None)}
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


def memory_table(plan: Plan, kinds: Sequence[str]) -> str:
    """GiB of a rank by phase, role and kind of memory, one of `PARTS`; a line "all" for each phase,
    with what a device and a host need."""
    row_format = "{:18} {:10}" + " {:>11}" * len(kinds) + " {:>9}" * 2
    lines = [row_format.format("phase", "role", *kinds, "device", "host")]
    for phase in plan.phases:
        roles = dict.fromkeys(role for role, _, _ in phase.held)
        for role in [*roles, None]:  # None: all of them
            if role is None:
                device, host = plan.needs(phase)
            else:
                device = phase.total(role, on_host=False)
                host = phase.total(role, on_host=True)
            sizes = [phase.total(role, kind) for kind in kinds]
            cells = [_gib_text(size) for size in (*sizes, device, host)]
            if role is None or any(cells):
                lines.append(row_format.format(phase.name, role or "all", *cells).rstrip())
    return "\n".join(lines)


def _gib_text(size: int) -> str:
    if size < LEAST_SHOWN:
        return ""
    return f"{size / GIB:.2f}"


def flags_that_fit(config: StepConfig, plan_with: Callable[[list[str]], Plan]) -> Proposal | None:
    """The flags to add so that the run fits, and its plan; None if all of the ladder is not enough.
    Rungs that lower what is missing are taken until the run fits. Then those that it fits without
    are removed, the last one first. The rows of an optimizer step stay. LoRA changes what is
    trained, so it is the last rung."""
    run_flags = flatten(config)

    def plan_rungs(rungs: Sequence[FlagValues]) -> Proposal | None:
        """The plan with the values of these rungs that differ from the run's; None if they
        contradict each other, such as --offload at stage 0."""
        changes: FlagValues = {}
        for rung in rungs:
            for name, value in rung.items():
                if value != run_flags[name]:
                    changes[name] = value
        words = []
        for name, value in changes.items():
            words += [f"--{name}", str(value)]
        try:
            return Proposal(words, plan_with(words))
        except UserError:
            return None

    taken: list[FlagValues] = []
    best = plan_rungs(taken)
    if best is None:
        return None
    for rung in _ladder(config, run_flags):
        if not best.plan.missing:
            break
        candidate = plan_rungs([*taken, rung])
        if candidate is not None and candidate.plan.missing < best.plan.missing:
            taken.append(rung)
            best = candidate
    if best.plan.missing:
        return None
    for rung in reversed(taken[:-1]):
        fewer = [each for each in taken if each is not rung]
        candidate = plan_rungs(fewer)
        if candidate is not None and not candidate.plan.missing:
            taken = fewer
            best = candidate
    return best


def _ladder(config: StepConfig, run_flags: FlagValues) -> list[FlagValues]:
    """What makes a run smaller, in the order of what it costs."""
    prefixes = list(config.stages)
    stage_flags = {f"{prefix}zero_stage" for prefix in prefixes}
    if "reward" in config.models:  # its engine has the stage of the critic's
        stage_flags.add("critic_zero_stage")
    stage_2 = {name: max(2, run_flags[name]) for name in sorted(stage_flags)}
    stage_3 = {name: max(3, run_flags[name]) for name in sorted(stage_flags)}
    rungs: list[FlagValues] = [stage_2, stage_3]
    if "actor" in config.models:
        rungs += [dict(smaller.values) for smaller in smaller_rollouts() if smaller.values]
    batch_size = run_flags[config.micro_batch]
    accumulation = run_flags["gradient_accumulation_steps"]
    while batch_size % 2 == 0:
        batch_size = batch_size // 2
        accumulation = 2 * accumulation
        rungs.append({config.micro_batch: batch_size, "gradient_accumulation_steps": accumulation})
    rungs.append({f"{prefix}gradient_checkpointing": True for prefix in prefixes})
    for role in ("reference", "reward"):
        if role in config.models:
            rungs.append(stage_3 | {f"offload_{role}_model": True})
    rungs += [
        stage_2 | {"offload_optimizer": True},
        stage_3 | {"offload_optimizer": True},
        stage_3 | {"offload_optimizer": False, "offload": True},
    ]
    # flags of features with which fewer weights train: `flags.fewer_trained(prefixes of the flags
    # of models that train, values of all flags)`
    rungs += [fewer_trained(prefixes, run_flags) for fewer_trained in hooks("flags.fewer_trained")]
    return rungs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
