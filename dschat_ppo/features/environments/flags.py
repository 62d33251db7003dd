"""Flags of episodes: tools and environments of step 3, and of the tools that let models act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dschat_ppo.config.feature_flags import FlagNotes, HasFeatures, features_observe
from dschat_ppo.config.schema import finite, flag, positive, require_used
from dschat_ppo.errors import UserError

_PURPOSE = "--environment, --tools, --tool_config or --agent_func_path"


@dataclass(frozen=True)
class EnvironmentFlags:
    """Tools and environments: an answer becomes an episode of several turns
    (docs/environments.md)."""

    environment: str | None = flag(
        None,
        "environment, FILE.py:CLASS or MODULE:CLASS: a class of TRL, Gymnasium, SkyRL-Gym or"
        " OpenRLHF",
    )
    tools: list[str] = flag(
        [],
        "tools, FILE.py:FUNCTION or MODULE:FUNCTION each: functions with type hints and a docstring"
        " that describes their arguments; beside an environment of TRL, whose methods are"
        " tools, too",
    )
    tool_config: str | None = flag(
        None, "tools of verl: a YAML file with class_name, config and tool_schema of each"
    )
    agent_func_path: str | None = flag(
        None, "environment of OpenRLHF: a file with a class AgentInstance"
    )
    max_turns: int = positive(
        8, "most answers of the model in an episode; --max_answer_seq_len counts all its tokens"
    )
    max_observation_tokens: int = positive(
        512, "most tokens of the content of one message of an environment or tool"
    )
    observation_truncation: Literal["left", "middle", "right"] = flag(
        "middle", "where a longer one is cut"
    )
    environment_workers: int = positive(
        32, "most calls of environments that run at a time on each rank"
    )
    environment_reward_weight: float = finite(
        1.0, "weight of the reward of the environment; 0 = only log it"
    )
    turn_reward: Literal["sum", "to_go"] = flag(
        "sum",
        "what the tokens of a turn are credited with: all rewards of the episode, or the rewards"
        " from the turn on",
    )
    environment_timeout: float = positive(
        60.0, "timeout of a call, in seconds; it ends the episode"
    )

    def __post_init__(self) -> None:
        """Refuse a second environment, tools beside one that has none, and flags without effect."""
        environment_flags = [
            f"--{name}"
            for name in ("environment", "tool_config", "agent_func_path")
            if vars(self)[name] is not None
        ]
        if len(environment_flags) > 1:
            raise UserError(f"{' and '.join(environment_flags)}: name one of them")
        if self.tools and environment_flags not in ([], ["--environment"]):
            raise UserError(
                f"--tools beside {environment_flags[0]}: its environment has no other tools; omit"
                " one of the two"
            )
        require_used(
            self,
            "max_observation_tokens observation_truncation",
            when=self.is_used,
            purpose=_PURPOSE,
        )

    @property
    def is_used(self) -> bool:
        """Whether answers are episodes."""
        return bool(self.tools or self.environment or self.tool_config or self.agent_func_path)

    @property
    def gives_reward(self) -> bool:
        """Whether there is an environment; tools alone score nothing."""
        return self.is_used and bool(self.environment or self.tool_config or self.agent_func_path)

    @property
    def given(self) -> dict[str, Any]:
        """The flags that name environments and tools -> their values."""
        names = ("environment", "tools", "tool_config", "agent_func_path")
        return {name: vars(self)[name] for name in names if vars(self)[name]}

    @property
    def files(self) -> list[tuple[str, str]]:
        """(flag with its value, file) of each file among them."""
        files = []
        for name, value_or_values in self.given.items():
            values = value_or_values
            if isinstance(value_or_values, str):
                values = [value_or_values]
            for value in values:
                path = value.rpartition(":")[0] or value
                if path.endswith((".py", ".yaml", ".yml")):
                    files.append((f"--{name} {value}", path))
        return files

    @property
    def names(self) -> dict[str, Any]:
        """The arguments of `environment_forms.environment_form`."""
        return {
            "environment": self.environment,
            "tools": self.tools,
            "tool_config": self.tool_config,
            "agent": self.agent_func_path,
        }


def refuse_unused(flags: HasFeatures) -> None:
    """Refuse flags without effect of those that other features with episodes have too."""
    environment_flags = flags.of(EnvironmentFlags)
    is_used = features_observe(flags)
    gives_reward = environment_flags.gives_reward or (is_used and not environment_flags.is_used)
    require_used(
        environment_flags,
        "max_turns environment_workers environment_timeout",
        when=is_used,
        purpose=f"{_PURPOSE}, and for --agent",
    )
    require_used(
        environment_flags,
        "environment_reward_weight turn_reward",
        when=gives_reward,
        purpose="--environment, --tool_config or --agent_func_path, and for --agent",
    )


FLAGS = {"ppo": EnvironmentFlags, "evaluate": EnvironmentFlags, "chat": EnvironmentFlags}
NOTES = FlagNotes(
    their_names={"max_turns": "max_tool_calling_iterations"},
    descriptions={
        "evaluate": (
            "With tools or an environment an answer is an episode, as in step 3; --max_tokens"
            " counts all\ntokens after its prompt.\n"
        ),
        "chat": (
            "The model can call --tools and those of an --environment. An environment without tools"
            " takes the\npart of the user: each message begins an episode.\n"
        ),
    },
    without_effect={
        "evaluate": {"turn_reward": "has no effect here, where nothing trains; omit it"},
        "chat": dict.fromkeys(
            ("environment_workers", "environment_reward_weight", "turn_reward"),
            "has no effect here, where one episode runs at a time and nothing trains; omit it",
        ),
    },
    rewarding=("environment", "tool_config", "agent_func_path"),
    observing=("environment", "tools", "tool_config", "agent_func_path"),
)


def files(flags: HasFeatures) -> list[tuple[str, str]]:
    """(flag with its value, file) of the user's files that a run reads."""
    return flags.of(EnvironmentFlags).files
