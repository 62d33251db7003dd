"""The forms in which people write environments and tools, behind one: `Environment`.

- tools of TRL: plain functions, each with type hints and a docstring that describes its arguments;
- environment of TRL: a class with `reset` and without `step`; its other public methods are tools,
  and `get_reward()` scores the episode;
- SkyRL-Gym: a class with `init` and `step`;
- Gymnasium: a class with `reset` and `step`;
- agent of OpenRLHF: a class whose `reset` and `step` take `states`;
- tools of verl: classes with `create`, `execute`, `calc_reward` and `release`, which a YAML file
  lists.

The processes of episodes import this module, so it imports no large library at its top.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dschat_ppo.common.own_functions import load_callable
from dschat_ppo.features.environments.environments import (
    EnvironmentForm,
    Message,
    Row,
    Turn,
    awaited,
    finite_metrics,
    message_content,
    reward_number,
)
from dschat_ppo.features.environments.tool_environments import (
    ToolEnvironment,
    stand_ins,
    tool_methods,
    tool_schema,
    verl_form,
)


def environment_form(
    environment: str | None = None,
    tools: Sequence[str] = (),
    tool_config: str | None = None,
    agent: str | None = None,
) -> EnvironmentForm:
    """The form of what the flags name: `FILE.py:NAME` or `MODULE:NAME` of a class or of functions,
    a YAML file of verl, or a file of OpenRLHF. Importing them may raise anything."""
    if tool_config is not None:
        return verl_form(tool_config)
    if agent is not None:
        return _agent_form(agent)
    functions = [_imported(name) for name in tools]
    if environment is None:
        return EnvironmentForm(
            lambda: ToolEnvironment(_by_name(functions)), lambda: list(map(tool_schema, functions))
        )
    make = _imported(environment)
    methods = {name for name in ("init", "reset", "step") if callable(getattr(make, name, None))}
    if methods >= {"init", "step"}:
        return EnvironmentForm(lambda: _Gym(make))
    if methods >= {"reset", "step"}:
        if "states" in inspect.signature(make.step).parameters:  # type: ignore[attr-defined]
            return EnvironmentForm(lambda: _Agent(make()))
        return EnvironmentForm(lambda: _Gym(make))
    if "reset" not in methods:
        raise TypeError("it has no method 'reset', so it is no environment")

    def make_tools() -> ToolEnvironment:
        instance = make()
        return ToolEnvironment(_by_name([*tool_methods(instance), *functions]), instance)

    return EnvironmentForm(
        make_tools, lambda: list(map(tool_schema, [*tool_methods(make()), *functions]))
    )


def _by_name(functions: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {function.__name__: function for function in functions}


def _agent_form(path: str) -> EnvironmentForm:
    """The `AgentInstance` of a file of OpenRLHF, which need not be installed."""
    names = {"AgentInstanceBase": object, "MultiTurnAgentExecutor": object}
    with stand_ins({"openrlhf.utils.agent": names}):
        make = load_callable(path, "AgentInstance")
    return EnvironmentForm(lambda: _Agent(make()))


def _imported(spec: str) -> Callable[..., Any]:
    """The function or class that `FILE.py:NAME` or `MODULE:NAME` names."""
    module, _, name = spec.rpartition(":")
    if not module:
        raise ValueError(f"expected FILE.py:NAME or MODULE:NAME, not '{spec}'")
    return load_callable(module, name)


class _Gym:
    """An environment of Gymnasium or SkyRL-Gym; the action is the text of the message."""

    def __init__(self, make: Callable[..., Any]):
        self.make = make
        self.instance: Any = None

    def reset(
        self, row: Row, seed: int, prompt: str = "", messages: list[Message] | None = None
    ) -> Turn:
        settings = {"env_config": {}, "extras": row}
        self.instance = self.make(**_taken(self.make, settings))
        if hasattr(self.instance, "init"):
            # what it returns is not used: the prompt is the data's
            awaited(self.instance.init(prompt if messages is None else messages))
            return Turn()
        options = {"seed": seed, "options": row}
        observation = awaited(self.instance.reset(**_taken(self.instance.reset, options)))
        if isinstance(observation, tuple):  # with Gymnasium's info
            observation = observation[0]
        return Turn(_observation_messages(observation))

    def step(self, action: Message) -> Turn:
        text = action.get("content") or ""
        if hasattr(self.instance, "init"):  # SkyRL-Gym, whose environments read the thoughts too
            text = action.get("text", text)
        output = awaited(self.instance.step(text))
        if isinstance(output, tuple) and len(output) > 2:
            observation, reward, *ends = output  # of Gymnasium: terminated, truncated, info
            info = {}
            if len(ends) > 1:
                info = ends.pop()
            return Turn(
                messages=_observation_messages(observation),
                reward=reward_number(reward),
                done=any(ends),
                metrics=finite_metrics(info),
            )
        if not isinstance(output, Mapping):
            if not hasattr(output, "__dict__"):
                raise TypeError(
                    f"step returned {type(output).__name__}, not observation, reward and whether it"
                    " is done"
                )
            output = vars(output)
        return Turn(
            messages=_observation_messages(output.get("observations", output.get("observation"))),
            reward=reward_number(output.get("reward")),
            done=bool(output.get("done")),
            metrics=finite_metrics(output.get("metadata", output.get("info"))),
        )

    def finish(self) -> Turn:
        if hasattr(self.instance, "close"):
            awaited(self.instance.close())
        return Turn()


def _taken(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function has a parameter for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _with_text(message: Mapping[str, Any]) -> Message:
    """A message whose content is text; no content is an empty one."""
    content = ""
    if message.get("content") is not None:
        content = message_content(message["content"])
    return {**message, "content": content}


def _observation_messages(observation: Any) -> list[Message]:
    """Messages, or another observation as a message of the user."""
    if observation is None or (isinstance(observation, str) and not observation):
        return []
    if isinstance(observation, list) and all(
        isinstance(message, Mapping) and "role" in message for message in observation
    ):
        return [_with_text(message) for message in observation]
    return [{"role": "user", "content": message_content(observation)}]


class _Agent:
    """An `AgentInstance` of OpenRLHF, which answers with text as it is."""

    def __init__(self, instance: Any):
        self.instance = instance
        self.text_so_far = ""  # prompt, actions and observations
        self.label: Any = None

    def reset(
        self, row: Row, seed: int, prompt: str = "", messages: list[Message] | None = None
    ) -> Turn:
        self.label = row.get("label", row.get("ground_truth"))
        observation = awaited(self.instance.reset({"observation": prompt, "label": self.label}))
        if observation is None:
            observation = prompt
        elif isinstance(observation, Mapping):
            observation = observation.get("observation", prompt)
        text = str(observation)
        if not text.startswith(prompt):
            raise ValueError("reset returned an observation that does not begin with the prompt")
        self.text_so_far = text
        return Turn(text=text[len(prompt) :] or None)

    def step(self, action: Message) -> Turn:
        text = str(action.get("text", action.get("content") or ""))
        states = {"observation_text": self.text_so_far, "action_text": text, "label": self.label}
        output = awaited(self.instance.step(states))
        if not isinstance(output, Mapping):
            raise TypeError(
                f"step returned {type(output).__name__}, not a dict with 'rewards',"
                " 'environment_feedback' and 'done'"
            )
        feedback = str(output.get("environment_feedback") or "")
        self.text_so_far += text + feedback
        reward: Any = output.get("rewards")
        if hasattr(reward, "item"):  # a tensor of one number
            reward = reward.item()
        return Turn(
            text=feedback,
            reward=reward_number(reward),
            done=bool(output.get("done")),
            metrics=finite_metrics(output.get("extra_logs")),
        )

    def finish(self) -> Turn:
        return Turn()
