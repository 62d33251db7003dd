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
    """Refuse flags of other responses beside those of agents. Flags that do not fit any episode are
    refused by `environments`."""
    if not isinstance(config, PPOConfig):
        return
    flags = config.of(AgentFlags)
    if not flags.is_used:
        return
    _check_agent(flags, config.of(EnvironmentFlags))
    name = "--agent"
    if flags.agent is None:
        name = "--agent_command"
    if config.ppo.repetition_penalty != 1:
        raise UserError(
            f"--repetition_penalty {config.ppo.repetition_penalty} is not for {name}; omit it"
        )
    if config.value("teacher_prompt_column"):
        raise UserError(
            f"--teacher_prompt_column is not for {name}, whose rows are conversations; omit it"
        )


def refuse_evaluation(args: argparse.Namespace, flags: HasFeatures) -> None:
    """Refuse flags of `tools.evaluate` beside those of agents."""
    agent_flags = flags.of(AgentFlags)
    if not agent_flags.is_used:
        return
    _check_agent(agent_flags, flags.of(EnvironmentFlags))


def _check_agent(flags: AgentFlags, environment_flags: EnvironmentFlags) -> None:
    """Refuse environments beside agents, and a program that is not there."""
    for name in environment_flags.given:
        agent = flags.as_written.partition(" ")[0]
        raise UserError(f"{agent} and --{name}: name one of them")
    if flags.agent_command is not None:
        program = shlex.split(flags.agent_command)[0]
        if shutil.which(program) is None:
            raise UserError(f"--agent_command {program}: there is no such program")
