"""The forms in which people write environments and tools, behind one: `Environment`.

| form | recognised by | |---|---| | tools of TRL | plain functions, each with type hints and a
docstring that describes its arguments | | environment of TRL | a class with `reset` and without
`step`; its other public methods are tools; `get_reward()` | | SkyRL-Gym | a class with `init` and
`step` | | Gymnasium | a class with `reset` and `step` | | agent of OpenRLHF | a class whose `reset`
and `step` take `states` | | tools of verl | classes with `create`, `execute`, `calc_reward` and
`release`, which a YAML file lists |

The processes of episodes import this module, so it imports no large library at its top.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from dschat_ppo.common.own_functions import cause_of, load
from dschat_ppo.errors import attempt
from dschat_ppo.rewards.call_forms import LARGEST, clean_name

Message = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What an environment answers to an action; all of it is JSON."""

    messages: list[Message] = field(default_factory=list)  # what the model reads next
    text: str | None = None  # in place of messages: text without the chat template (OpenRLHF)
    reward: float = 0.0  # of the action
    done: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)  # to be logged
    failed_calls: int = 0  # tool calls that raised, or named no tool

    def __post_init__(self) -> None:
        for message in self.messages:
            texts = [message.get(name, "") for name in ("role", "content", "name", "tool_call_id")]
            if not message.get("role") or not all(isinstance(text, str) for text in texts):
                raise TypeError(
                    f"it answered with the message {str(message)[:80]}, not with one whose 'role'"
                    " and 'content' are texts"
                )
        if not isinstance(self.text, str | None) or not isinstance(self.done, bool):
            raise TypeError("its text must be a text, and whether it is done true or false")
        if not abs(self.reward) <= LARGEST:
            raise ValueError(f"its reward is {self.reward}, which is not a finite fp32 number")


class Environment(Protocol):
    """One episode. A method may raise anything; the episode then ends."""

    def reset(self, row: Row, seed: int, prompt: str, messages: list[Message] | None) -> Turn:
        """Begin the episode of a data row with this prompt, which the chat template makes of
        `messages` if there are any. Messages and text of the turn come after it."""

    def step(self, action: Message) -> Turn:
        """Answer the model's message; its tool calls are under `tool_calls`, as in transformers'
        chats. If it has thoughts, `content` is what follows them, and `text` all of it."""

    def finish(self) -> Turn:
        """End the episode, whose last turn came or which a limit ended: a reward of the end, and
        numbers."""


@dataclass(frozen=True)
class Form:
    """How to make an environment for each episode."""

    make: Callable[[], Environment]
    describe: Callable[[], list[dict[str, Any]]] = list

    @property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas for the chat template. Those of functions import transformers, which slows
        later forks."""
        return self.describe()


def form_of(
    environment: str | None = None,
    tools: Sequence[str] = (),
    tool_config: str | None = None,
    agent: str | None = None,
) -> Form:
    """The form of what the flags name: `FILE.py:NAME` or `MODULE:NAME` of a class or of functions,
    a YAML file of verl, or a file of OpenRLHF. Importing them may raise anything."""
    if tool_config is not None:
        return _verl_form(tool_config)
    if agent is not None:
        with _stand_ins(
            {
                "openrlhf.utils.agent": {
                    "AgentInstanceBase": object,
                    "MultiTurnAgentExecutor": object,
                }
            }
        ):
            found = load(agent, "AgentInstance")
        return Form(lambda: _Agent(found()))
    functions = [_named(name) for name in tools]
    if environment is None:
        return Form(
            lambda: _Tools({each.__name__: each for each in functions}),
            lambda: list(map(_schema, functions)),
        )
    made = _named(environment)
    has = {name for name in ("init", "reset", "step") if callable(getattr(made, name, None))}
    if has >= {"init", "step"}:
        return Form(lambda: _Gym(made))
    if has >= {"reset", "step"}:
        takes_states = "states" in inspect.signature(made.step).parameters  # type: ignore[attr-defined]
        return Form(lambda: _Agent(made()) if takes_states else _Gym(made))
    if "reset" not in has:
        raise TypeError("it has no method 'reset', so it is no environment")

    def with_methods() -> _Tools:
        instance = made()
        return _Tools({each.__name__: each for each in (*_methods(instance), *functions)}, instance)

    return Form(with_methods, lambda: list(map(_schema, (*_methods(made()), *functions))))


@contextmanager
def _stand_ins(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Offer these modules, name -> contents, to the imports of the block where their package is not
    installed."""
    missing = {
        name: members for name, members in modules.items() if not find_spec(name.partition(".")[0])
    }
    for name, members in missing.items():
        for parent in (name.rsplit(".", depth)[0] for depth in range(name.count("."), -1, -1)):
            sys.modules.setdefault(parent, module_from_spec(ModuleSpec(parent, None)))
        vars(sys.modules[name]).update(members)
    yield


def _named(name: str) -> Callable[..., Any]:
    where, _, what = name.rpartition(":")
    if not where:
        raise ValueError(f"expected FILE.py:NAME or MODULE:NAME, not '{name}'")
    return load(where, what)


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # takes seconds, and only tools need it

    return dict(get_json_schema(function))


def _methods(instance: Any) -> list[Callable[..., Any]]:
    """The tools of an environment of TRL: its public methods."""
    names = [name for name in dir(type(instance)) if not name.startswith("_")]
    return [
        getattr(instance, n)
        for n in names
        if n not in ("reset", "get_reward", "close")
        and inspect.isroutine(getattr(type(instance), n))
    ]


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process; forks of one loop would take each other's wake-ups."""
    return asyncio.new_event_loop()


def _result(value: Any) -> Any:
    """A value, or what a coroutine returns."""
    return _loop().run_until_complete(value) if inspect.isawaitable(value) else value


def _content(value: Any) -> str:
    """What a tool returned, as the content of a message."""
    text = value if isinstance(value, str) else str(value)
    if not isinstance(value, str):
        with suppress(TypeError, ValueError):
            text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # without halves of surrogates


def _number(value: Any) -> float:
    """A number, also of NumPy or PyTorch; `TypeError` for anything else."""
    if value is None:
        return 0.0
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"its reward is {type(value).__name__}, not a number")
    return float(value)


def _numbers(values: Any) -> dict[str, float]:
    """The numbers of a record that are finite in fp32."""
    numbers = dict[str, float]()
    for key, value in values.items() if isinstance(values, Mapping) else ():
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # of arrays
            if isinstance(value, SupportsFloat) and abs(float(value)) <= LARGEST:
                numbers[clean_name(key)] = float(value)
    return numbers


class _Tools:
    """Functions as tools, and the environment of TRL whose methods they are. A message without a
    call ends it."""

    def __init__(self, tools: dict[str, Callable[..., Any]], instance: Any = None):
        self.tools = tools
        self.instance = instance

    def reset(
        self, row: Row, seed: int, prompt: str = "", messages: list[Message] | None = None
    ) -> Turn:
        opening = None if self.instance is None else _result(self.instance.reset(**row))
        return Turn([{"role": "user", "content": _content(opening)}]) if opening else Turn()

    def step(self, action: Message) -> Turn:
        messages, failed = list[Message](), 0
        calls = action.get("tool_calls") or ()
        for made in calls:
            call, known = made["function"], {"tool_call_id": made["id"]} if made.get("id") else {}
            content, is_right = self.call(call["name"], call["arguments"])
            failed += not is_right
            messages.append(
                {"role": "tool", "name": _content(call["name"]), "content": content, **known}
            )
        return Turn(messages, done=not calls, failed_calls=failed)

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """What a call returns or raises, for the model, and whether it returned."""
        if name not in self.tools:
            return (
                _content(f"error: there is no tool '{name}'; there are: {', '.join(self.tools)}"),
                False,
            )
        with attempt(also_exits=True) as tried:
            return _content(_result(self.tools[name](**arguments))), True
        assert tried.problem is not None
        return _content(f"error: {cause_of(tried.problem, None)}"), False

    def finish(self) -> Turn:
        reward, close = (getattr(self.instance, name, None) for name in ("get_reward", "close"))
        found = Turn(reward=_number(None if reward is None else _result(reward())))
        if close is not None:
            _result(close())
        return found


class _Gym:
    """An environment of Gymnasium or SkyRL-Gym; the action is the text of the message."""

    def __init__(self, made: Callable[..., Any]):
        self.made = made
        self.instance: Any = None

    def reset(
        self, row: Row, seed: int, prompt: str = "", messages: list[Message] | None = None
    ) -> Turn:
        takes = inspect.signature(self.made).parameters
        settings = {"env_config": {}, "extras": row}
        self.instance = self.made(
            **{name: value for name, value in settings.items() if name in takes}
        )
        if hasattr(self.instance, "init"):
            # what it returns is not used: the prompt is the data's
            given = prompt if messages is None else messages
            _result(self.instance.init(given))
            return Turn()
        takes = inspect.signature(self.instance.reset).parameters
        options = {
            name: value for name, value in {"seed": seed, "options": row}.items() if name in takes
        }
        found = _result(self.instance.reset(**options))
        return Turn(_read(found[0] if isinstance(found, tuple) else found))

    def step(self, action: Message) -> Turn:
        text = action.get("content") or ""
        if hasattr(self.instance, "init"):  # SkyRL-Gym, whose environments read the thoughts too
            text = action.get("text", text)
        found = _result(self.instance.step(text))
        if isinstance(found, tuple) and len(found) > 2:
            observation, reward, *ends = found
            info = ends.pop() if len(ends) > 1 else {}
            return Turn(_read(observation), None, _number(reward), any(ends), _numbers(info))
        if not isinstance(found, Mapping) and not hasattr(found, "__dict__"):
            raise TypeError(
                f"step returned {type(found).__name__}, not observation, reward and whether it is"
                " done"
            )
        found = found if isinstance(found, Mapping) else vars(found)
        observation = found.get("observations", found.get("observation"))
        numbers = _numbers(found.get("metadata", found.get("info")))
        return Turn(
            _read(observation), None, _number(found.get("reward")), bool(found.get("done")), numbers
        )

    def finish(self) -> Turn:
        if hasattr(self.instance, "close"):
            _result(self.instance.close())
        return Turn()


def _with_text(message: Mapping[str, Any]) -> Message:
    """A message whose content is text; no content is an empty one."""
    content = message.get("content")
    return {**message, "content": "" if content is None else _content(content)}


def _read(observation: Any) -> list[Message]:
    """Messages, or another observation as a message of the user."""
    if observation is None or (isinstance(observation, str) and not observation):
        return []
    if isinstance(observation, list) and all(
        isinstance(part, Mapping) and "role" in part for part in observation
    ):
        return [_with_text(part) for part in observation]
    return [{"role": "user", "content": _content(observation)}]


class _Agent:
    """An `AgentInstance` of OpenRLHF, which answers with text as it is."""

    def __init__(self, instance: Any):
        self.instance = instance
        self.read, self.label = "", None

    def reset(
        self, row: Row, seed: int, prompt: str = "", messages: list[Message] | None = None
    ) -> Turn:
        self.label = row.get("label", row.get("ground_truth"))
        found = _result(self.instance.reset({"observation": prompt, "label": self.label}))
        text = (
            str((found or {}).get("observation", prompt))
            if isinstance(found, Mapping | None)
            else str(found)
        )
        if not text.startswith(prompt):
            raise ValueError("reset returned an observation that does not begin with the prompt")
        self.read = text
        return Turn(text=text[len(prompt) :] or None)

    def step(self, action: Message) -> Turn:
        text = str(action.get("text", action.get("content") or ""))
        states = {"observation_text": self.read, "action_text": text, "label": self.label}
        found = _result(self.instance.step(states))
        if not isinstance(found, Mapping):
            raise TypeError(
                f"step returned {type(found).__name__}, not a dict with 'rewards',"
                " 'environment_feedback' and 'done'"
            )
        feedback = str(found.get("environment_feedback") or "")
        self.read += text + feedback
        numbers = _numbers(found.get("extra_logs"))
        return Turn(
            [], feedback, _number(_mean(found.get("rewards"))), bool(found.get("done")), numbers
        )

    def finish(self) -> Turn:
        return Turn()


def _mean(value: Any) -> Any:
    """OpenRLHF's rewards are tensors of one number."""
    return value.item() if hasattr(value, "item") else value


class _VerlTools(_Tools):
    """Tools of verl: an instance of each for an episode, with what `extra_info.tools_kwargs` of the
    row says."""

    def __init__(self, classes: Mapping[str, Any]):
        super().__init__({})
        self.classes, self.numbers = classes, dict[str, float]()
        self.reward, self.row = 0.0, dict[str, Any]()  # of the turn
        self.instances = dict[str, str]()

    def _given(self, name: str, what: str) -> dict[str, Any]:
        kinds = (self.row.get("extra_info") or {}).get("tools_kwargs") or {}
        return dict((kinds.get(name) or {}).get(what) or {})

    def reset(
        self, row: Row, seed: int, prompt: str = "", messages: list[Message] | None = None
    ) -> Turn:
        self.row = row
        for name, tool in self.classes.items():
            made = _result(tool.create(None, **self._given(name, "create_kwargs")))
            self.instances[name] = made[0] if isinstance(made, tuple) else made
            self.tools[name] = partial(self._execute, name)
        return Turn()

    def _execute(self, name: str, /, **arguments: Any) -> str:
        given = self._given(name, "execute_kwargs")
        response, reward, metrics = _result(
            self.classes[name].execute(self.instances[name], arguments, **given)
        )
        self.reward += _number(reward)
        self.numbers |= _numbers(metrics)
        return _content(
            response if isinstance(response, str) else getattr(response, "text", None) or ""
        )

    def step(self, action: Message) -> Turn:
        self.reward, self.numbers = 0.0, {}
        return replace(super().step(action), reward=self.reward, numbers=dict(self.numbers))

    def finish(self) -> Turn:
        reward = 0.0
        for name, tool in self.classes.items():
            of_tool = self._given(name, "calc_reward_kwargs"), self._given(name, "release_kwargs")
            reward += _number(_result(tool.calc_reward(self.instances[name], **of_tool[0])))
            _result(tool.release(self.instances[name], **of_tool[1]))
        return Turn(reward=reward)


def _verl_form(path: str) -> Form:
    """The tools of a YAML file of verl. Their modules lie in its folder, in the working folder, or
    are installed."""
    import yaml  # comes with transformers

    with open(path, encoding="utf-8") as file:
        found = yaml.safe_load(file)
    listed = found.get("tools") if isinstance(found, dict) else None
    if not isinstance(listed, list) or not all(
        isinstance(entry, dict) and "class_name" in entry for entry in listed
    ):
        raise ValueError("expected an entry `tools`, a list whose entries have a `class_name`")
    names: dict[str, dict[str, Any]] = {
        "verl.tools.base_tool": {"BaseTool": _BaseTool},
        "verl.tools.schemas": {"OpenAIFunctionToolSchema": _Record, "ToolResponse": _Record},
        "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
    }
    classes, schemas = dict[str, Any](), list[dict[str, Any]]()
    sys.path.insert(0, str(Path(path).resolve().parent))
    with _stand_ins(names):
        for entry in listed:
            module, _, name = entry["class_name"].rpartition(".")
            schema = entry.get("tool_schema")
            made = getattr(importlib.import_module(module), name)(
                entry.get("config") or {}, _record(schema)
            )
            found = schema or made.get_openai_tool_schema()
            schemas.append(
                found if isinstance(found, dict) else json.loads(json.dumps(found, default=vars))
            )
            classes[schemas[-1]["function"]["name"]] = made
    return Form(lambda: _VerlTools(classes), lambda: schemas)


class _Record(types.SimpleNamespace):
    """Stands for verl's pydantic models."""

    model_validate = classmethod(lambda cls, value: _record(value))

    def model_dump(self, **_: Any) -> Any:
        return json.loads(json.dumps(self, default=vars))


def _record(value: Any) -> Any:
    if isinstance(value, dict):
        return _Record(**{key: _record(part) for key, part in value.items()})
    return [_record(part) for part in value] if isinstance(value, list) else value


class _BaseTool:
    """Stands for verl's class of this name where verl is not installed."""

    def __init__(self, config: dict[str, Any], tool_schema: Any):
        self.config, self.tool_schema = config, tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_: Any) -> Any:
        return instance_id or f"{id(self):x}", _Record(text=None)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        return _Record(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **_: Any) -> None:
        return None
