"""Environments of tools: functions and TRL's methods, and the tool classes of verl.

The processes of episodes import this module, so it imports no large library at its top.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

from dschat_ppo.common.own_functions import cause_of
from dschat_ppo.errors import attempt
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


class ToolEnvironment:
    """Functions as tools, and the environment of TRL whose methods they are. A message without a
    call ends it."""

    def __init__(self, tools: dict[str, Callable[..., Any]], instance: Any = None):
        self.tools = tools
        self.instance = instance

    def reset(
        self, row: Row, seed: int, prompt: str = "", messages: list[Message] | None = None
    ) -> Turn:
        if self.instance is None:
            return Turn()
        opening = awaited(self.instance.reset(**row))
        if not opening:
            return Turn()
        return Turn([{"role": "user", "content": message_content(opening)}])

    def step(self, action: Message) -> Turn:
        messages = list[Message]()
        failed = 0
        calls = action.get("tool_calls") or ()
        for call in calls:
            name = call["function"]["name"]
            content, has_returned = self.call(name, call["function"]["arguments"])
            if not has_returned:
                failed += 1
            message = {"role": "tool", "name": message_content(name), "content": content}
            if call.get("id"):
                message["tool_call_id"] = call["id"]
            messages.append(message)
        return Turn(messages, done=not calls, failed_calls=failed)

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """What a call returns or raises, for the model, and whether it returned."""
        if name not in self.tools:
            names = ", ".join(self.tools)
            return message_content(f"error: there is no tool '{name}'; there are: {names}"), False
        with attempt(also_exits=True) as tried:
            return message_content(awaited(self.tools[name](**arguments))), True
        assert tried.problem is not None
        return message_content(f"error: {cause_of(tried.problem, None)}"), False

    def finish(self) -> Turn:
        get_reward = getattr(self.instance, "get_reward", None)
        turn = Turn()
        if get_reward is not None:
            turn = Turn(reward=reward_number(awaited(get_reward())))
        close = getattr(self.instance, "close", None)
        if close is not None:
            awaited(close())
        return turn


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # takes seconds, and only tools need it

    return dict(get_json_schema(function))


def tool_methods(instance: Any) -> list[Callable[..., Any]]:
    """The tools of an environment of TRL: its public methods."""
    names = [name for name in dir(type(instance)) if not name.startswith("_")]
    return [
        getattr(instance, name)
        for name in names
        if name not in ("reset", "get_reward", "close")
        and inspect.isroutine(getattr(type(instance), name))
    ]


class VerlEnvironment(ToolEnvironment):
    """Tools of verl: an instance of each for an episode, with what `extra_info.tools_kwargs` of the
    row says."""

    def __init__(self, verl_tools: Mapping[str, Any]):
        super().__init__({})
        self.verl_tools = verl_tools
        self.row = dict[str, Any]()
        self.instances = dict[str, str]()  # name of a tool -> the id of its instance
        self.reward = 0.0  # of the turn
        self.metrics = dict[str, float]()  # of the turn

    def _row_arguments(self, name: str, method: str) -> dict[str, Any]:
        """What the row has for a method of a tool: under "create_kwargs", for example."""
        of_tools = (self.row.get("extra_info") or {}).get("tools_kwargs") or {}
        return dict((of_tools.get(name) or {}).get(f"{method}_kwargs") or {})

    def reset(
        self, row: Row, seed: int, prompt: str = "", messages: list[Message] | None = None
    ) -> Turn:
        self.row = row
        for name, tool in self.verl_tools.items():
            instance_id = awaited(tool.create(None, **self._row_arguments(name, "create")))
            if isinstance(instance_id, tuple):  # with a response
                instance_id = instance_id[0]
            self.instances[name] = instance_id
            self.tools[name] = partial(self._execute, name)
        return Turn()

    def _execute(self, name: str, /, **arguments: Any) -> str:
        response, reward, metrics = awaited(
            self.verl_tools[name].execute(
                self.instances[name], arguments, **self._row_arguments(name, "execute")
            )
        )
        self.reward += reward_number(reward)
        self.metrics |= finite_metrics(metrics)
        if isinstance(response, str):
            return message_content(response)
        content = message_content(getattr(response, "text", None) or "")
        message_content(getattr(response, "image", None) or "")  # an image is refused
        return content

    def step(self, action: Message) -> Turn:
        self.reward = 0.0
        self.metrics = {}
        turn = super().step(action)
        return replace(turn, reward=self.reward, metrics=dict(self.metrics))

    def finish(self) -> Turn:
        reward = 0.0
        for name, tool in self.verl_tools.items():
            instance_id = self.instances[name]
            for_reward = self._row_arguments(name, "calc_reward")
            reward += reward_number(awaited(tool.calc_reward(instance_id, **for_reward)))
            awaited(tool.release(instance_id, **self._row_arguments(name, "release")))
        return Turn(reward=reward)


def verl_form(path: str) -> EnvironmentForm:
    """The tools of a YAML file of verl. Their modules lie in its folder, in the working folder, or
    are installed."""
    import yaml  # comes with transformers

    with open(path, encoding="utf-8") as file:
        contents = yaml.safe_load(file)
    entries = None
    if isinstance(contents, dict):
        entries = contents.get("tools")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "class_name" in entry for entry in entries
    ):
        raise ValueError("expected an entry `tools`, a list whose entries have a `class_name`")
    names: dict[str, dict[str, Any]] = {
        "verl.tools.base_tool": {"BaseTool": _BaseTool},
        "verl.tools.schemas": {"OpenAIFunctionToolSchema": _VerlModel, "ToolResponse": _VerlModel},
        "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
    }
    tools = dict[str, Any]()
    schemas = list[dict[str, Any]]()
    sys.path.insert(0, str(Path(path).resolve().parent))
    with stand_ins(names):
        for entry in entries:
            module, _, name = entry["class_name"].rpartition(".")
            make = getattr(importlib.import_module(module), name)
            schema = entry.get("tool_schema")
            tool = make(entry.get("config") or {}, _verl_model(schema))
            schema = schema or tool.get_openai_tool_schema()
            if not isinstance(schema, dict):
                schema = json.loads(json.dumps(schema, default=vars))
            schemas.append(schema)
            tools[schema["function"]["name"]] = tool
    return EnvironmentForm(lambda: VerlEnvironment(tools), lambda: schemas)


class _VerlModel(types.SimpleNamespace):
    """Stands for verl's pydantic models."""

    model_validate = classmethod(lambda cls, value: _verl_model(value))

    def model_dump(self, **_: Any) -> Any:
        return json.loads(json.dumps(self, default=vars))


def _verl_model(value: Any) -> Any:
    """A value of JSON whose objects become records with attributes, as pydantic makes them."""
    if isinstance(value, dict):
        return _VerlModel(**{key: _verl_model(entry) for key, entry in value.items()})
    if isinstance(value, list):
        return [_verl_model(entry) for entry in value]
    return value


class _BaseTool:
    """Stands for verl's class of this name where verl is not installed."""

    def __init__(self, config: dict[str, Any], tool_schema: Any):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_: Any) -> Any:
        return instance_id or f"{id(self):x}", _VerlModel(text=None)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        return _VerlModel(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **_: Any) -> None:
        return None


@contextmanager
def stand_ins(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Offer these modules, name -> contents, to the imports of the block where their package is not
    installed."""
    # what is missing first: a stand-in would count as installed
    missing = [name for name in modules if not find_spec(name.partition(".")[0])]
    for name in missing:
        packages = name.split(".")
        for depth in range(1, len(packages) + 1):
            package = ".".join(packages[:depth])
            sys.modules.setdefault(package, module_from_spec(ModuleSpec(package, None)))
        vars(sys.modules[name]).update(modules[name])
    yield
