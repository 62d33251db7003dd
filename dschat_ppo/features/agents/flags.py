"""Flags of agents: programs that play episodes by calling the model."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from dschat_ppo.config.feature_flags import FlagNotes, HasFeatures
from dschat_ppo.config.schema import flag, is_own_function, positive, require_used
from dschat_ppo.errors import UserError


@dataclass(frozen=True)
class AgentFlags:
    """Agents: a function or a program plays an episode, and calls the model through an
    OpenAI-compatible endpoint (docs/agents.md)."""

    agent: str | None = flag(
        None,
        "agent, FILE.py:FUNCTION: plays an episode with the model at an OpenAI-compatible endpoint,"
        " and returns its reward",
    )
    agent_command: str | None = flag(
        None,
        "agent, the words of a program, which finds the endpoint in OPENAI_BASE_URL and"
        " OPENAI_API_KEY, and gets the row as JSON on its standard input",
    )
    max_contexts: int = positive(
        4, "most separate conversations of an episode of an agent; all of them are one row"
    )
    max_context_len: int | None = flag(
        None,
        "most tokens of a conversation of an agent (default: --max_prompt_seq_len +"
        " --max_answer_seq_len)",
    )

    def __post_init__(self) -> None:
        """Refuse a second agent, and flags without effect."""
        if self.agent is not None and self.agent_command is not None:
            raise UserError("--agent and --agent_command: name one of them")
        if self.agent_command is not None:
            try:
                words = shlex.split(self.agent_command)
            except ValueError as problem:
                raise UserError(f"--agent_command {self.agent_command}: {problem}") from None
            if not words:
                raise UserError("--agent_command: names no program")
        require_used(
            self,
            "max_contexts max_context_len",
            when=self.is_used,
            purpose="--agent or --agent_command",
        )
        if self.max_context_len is not None and self.max_context_len < 2:
            raise UserError(
                f"--max_context_len {self.max_context_len}: a conversation has at least 2 tokens"
            )

    @property
    def is_used(self) -> bool:
        """Whether agents play episodes."""
        return bool(self.agent or self.agent_command)

    @property
    def as_written(self) -> str:
        """The flag as in a command line, for messages."""
        if self.agent is not None:
            return f"--agent {self.agent}"
        return f"--agent_command {self.agent_command}"

    @property
    def names(self) -> dict[str, Any]:
        """The arguments of `forms.form_of_agent`."""
        return {"function": self.agent, "command": self.agent_command}


FLAGS = {"ppo": AgentFlags, "evaluate": AgentFlags}
NOTES = FlagNotes(
    descriptions={
        "evaluate": (
            "With --agent or --agent_command an answer is an episode that the program plays, as in"
            " step 3;\n--max_tokens counts all tokens after its first prompt.\n"
        ),
    },
    rewarding=("agent", "agent_command"),
    observing=("agent", "agent_command"),
)


def agent_files(flags: AgentFlags) -> list[tuple[str, str]]:
    """(flag with its value, file) of the agent's file."""
    if flags.agent is None or not is_own_function(flags.agent):
        return []
    return [(flags.as_written, flags.agent.rpartition(":")[0])]


def files(flags: HasFeatures) -> list[tuple[str, str]]:
    """(flag with its value, file) of the user's files that a run reads."""
    return agent_files(flags.of(AgentFlags))
