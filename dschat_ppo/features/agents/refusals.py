"""Flags that do not fit episodes of agents."""

from __future__ import annotations

import argparse
import shlex
import shutil

from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.agents.flags import AgentFlags
from dschat_ppo.features.environments.flags import EnvironmentFlags


def refuse(config: StepConfig) -> None:
    """Refuse flags of other responses beside those of agents."""
    if not isinstance(config, PPOConfig):
        return
    flags = config.of(AgentFlags)
    if not flags.is_used:
        return
    _check_agent(flags, config.of(EnvironmentFlags))
    name = "--agent"
    if flags.agent is None:
        name = "--agent_command"
    if config.ppo.min_answer_seq_len > 0:
        raise UserError(f"--min_answer_seq_len is not for {name}: a call may be short; omit it")
    if config.ppo.repetition_penalty != 1:
        raise UserError(
            f"--repetition_penalty {config.ppo.repetition_penalty} is not for {name}; omit it"
        )
    estimator = config.algorithm.advantage_estimator
    if config.of(EnvironmentFlags).turn_reward == "to_go" and estimator in ("remax", "gdpo"):
        raise UserError(
            f"--advantage_estimator {estimator} compares scores of whole episodes; use"
            " --turn_reward sum"
        )
    ranks_of_group = config.value("inference_tp_size") or 1
    if ranks_of_group > 1:
        raise UserError(
            f"--inference_tp_size {ranks_of_group}: the ranks of a group would each run the agents"
            " of all; set it to 1"
        )
    for refused in ("teacher_prompt_column", "process_reward"):
        if config.value(refused):
            raise UserError(f"--{refused} is not for {name}, whose rows are conversations; omit it")
    learned_on = config.value("distill_on") or "policy"
    if learned_on != "policy":
        raise UserError(f"--distill_on {learned_on} is not for {name}; set it to policy")


def refuse_evaluation(args: argparse.Namespace, flags: HasFeatures) -> None:
    """Refuse flags of `tools.evaluate` for single responses beside those of agents."""
    agent_flags = flags.of(AgentFlags)
    if not agent_flags.is_used:
        return
    _check_agent(agent_flags, flags.of(EnvironmentFlags))
    if args.write_best or args.write_pairs:
        raise UserError(
            "--write_best and --write_pairs are for single answers, not for episodes; omit them"
        )


def _check_agent(flags: AgentFlags, environment_flags: EnvironmentFlags) -> None:
    """Refuse environments beside agents, and a program that is not there."""
    for name in environment_flags.given:
        agent = flags.as_written.partition(" ")[0]
        raise UserError(f"{agent} and --{name}: name one of them")
    if flags.agent_command is not None:
        program = shlex.split(flags.agent_command)[0]
        if shutil.which(program) is None:
            raise UserError(f"--agent_command {program}: there is no such program")
