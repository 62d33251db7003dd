"""The forms in which people write agents: a function that plays an episode, or a program.

The processes of episodes import this module, so it imports no large library at its top.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, SupportsFloat

from dschat_ppo.common.extras import how_to_install
from dschat_ppo.common.own_functions import load_callable
from dschat_ppo.errors import printable_line
from dschat_ppo.features.agents.call_replies import CallReply, completion_of
from dschat_ppo.features.agents.call_requests import TRAINED_MODEL, CallRequest
from dschat_ppo.features.agents.record import ChatPrompt
from dschat_ppo.features.environments.environments import (
    EnvironmentForm,
    Row,
    awaited,
    finite_metrics,
)
from dschat_ppo.rewards.call_forms import LARGEST

# parameters of a function that are no columns
OURS = ("client", "base_url", "api_key", "model", "seed", "row")
_TAIL = 400  # characters of a program's output that are the cause of its failure
_WARM_UP_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "To look.", "parameters": {"type": "object"}},
}
_WARM_UP_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Where?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "call0", "content": "A hall."},
]


@dataclass(frozen=True)
class AgentResult:
    """What an agent returned. `reward`: None if it does not score its episode; `call_rewards`: one
    of each trained call, or None."""

    reward: float | None = None
    call_rewards: list[float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def set_variables(base_url: str, api_key: str, model: str) -> None:
    """Let clients in this process, and in those that it starts, find this model, in place of an
    account, and without a proxy."""
    os.environ["OPENAI_BASE_URL"] = base_url
    os.environ["OPENAI_API_KEY"] = api_key
    os.environ["OPENAI_MODEL"] = model
    for name in ("no_proxy", "NO_PROXY"):
        hosts = os.environ.get(name, "")
        os.environ[name] = ",".join(filter(None, [hosts, "127.0.0.1"]))


def form_of_agent(function: str | None = None, command: str | None = None) -> EnvironmentForm:
    """The form of `FILE.py:FUNCTION`, or of the words of a program. Its `tools` are the parameters
    that a function must be given. Importing it may raise anything."""
    if function is None:
        words = shlex.split(command or "")
        return EnvironmentForm(lambda: _ProgramAgent(words))  # type: ignore[return-value,arg-type]
    module, _, name = function.rpartition(":")
    if not module:
        raise ValueError(f"expected FILE.py:FUNCTION, not '{function}'")
    play = load_callable(module, name)
    parameters = inspect.signature(play).parameters
    client = None
    if "client" in parameters:
        if find_spec("openai") is None:
            raise ImportError(f"needs the package openai: {how_to_install('openai')}")
        is_async = inspect.iscoroutinefunction(play)
        _warm_up(is_async)
        client = _client_of(is_async, "http://127.0.0.1:9/v1", "none")  # nobody listens there
    needed = list[Any]()
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            needed.append(parameter.name)
    return EnvironmentForm(lambda: _FunctionAgent(play, client), lambda: needed)  # type: ignore[arg-type,return-value]


class _FunctionAgent:
    """A function, called with what its parameters name: things of ours, or columns of the row. Its
    client is a copy of `client`, because making one anew takes as long as a call."""

    def __init__(self, function: Callable[..., Any], client: Any):
        self.function = function
        self.client = client

    def play(self, row: Row, seed: int, base_url: str, api_key: str, model: str) -> AgentResult:
        """Play one episode."""
        set_variables(base_url, api_key, model)
        known = {
            **row,
            "base_url": base_url,
            "api_key": api_key,
            "model": model,
            "seed": seed,
            "row": row,
        }
        if self.client is not None:
            known["client"] = self.client.copy(base_url=base_url, api_key=api_key)
        names = inspect.signature(self.function).parameters
        arguments = {name: known[name] for name in names if name in known}
        return agent_result(awaited(self.function(**arguments)))


def _client_of(is_async: bool, base_url: str, api_key: str) -> Any:
    """A client of the openai package that neither tries again nor gives up. It uses no proxy and
    reads no certificates, which takes as long as ten calls and which no endpoint here has."""
    openai: Any = import_module("openai")
    make = openai.OpenAI
    http = openai.DefaultHttpxClient
    if is_async:
        make = openai.AsyncOpenAI
        http = openai.DefaultAsyncHttpxClient
    return make(
        base_url=base_url,
        api_key=api_key,
        max_retries=0,
        timeout=None,
        http_client=http(verify=False, trust_env=False),
    )


def _warm_up(is_async: bool) -> None:
    """Make a call, whose reply is a call of a tool, in a conversation that has one. What the first
    call imports and builds takes a second; episodes are forks of this process and have it."""
    with HTTPServer(("127.0.0.1", 0), _WarmUpHandler) as server:
        thread = Thread(target=server.handle_request, daemon=True)
        thread.start()
        client = _client_of(is_async, f"http://127.0.0.1:{server.server_port}/v1", "none")
        request = {"model": TRAINED_MODEL, "messages": _WARM_UP_MESSAGES, "tools": [_WARM_UP_TOOL]}

        async def call_async() -> None:
            await client.chat.completions.create(**request)
            await client.close()

        if is_async:
            asyncio.run(call_async())  # forks must not share an event loop, so it is closed
        else:
            client.chat.completions.create(**request)
            client.close()
        thread.join()


class _WarmUpHandler(BaseHTTPRequestHandler):
    """Replies to a call."""

    def do_POST(self) -> None:  # noqa: N802 (the name that it needs)
        """Reply as the front does."""
        self.rfile.read(int(self.headers["content-length"]))
        reply = CallReply(_WARM_UP_MESSAGES[1], "tool_calls", [0], [0])
        request = CallRequest(True, ChatPrompt(()))
        body = json.dumps(completion_of(reply, request, number=0, created=0)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


class _ProgramAgent:
    """A program, which reads the row as JSON and writes its result into a file."""

    def __init__(self, words: Sequence[str]):
        self.words = list(words)

    def play(self, row: Row, seed: int, base_url: str, api_key: str, model: str) -> AgentResult:
        """Play one episode."""
        set_variables(base_url, api_key, model)
        with tempfile.TemporaryDirectory(prefix="dschat_agent_") as folder:
            result = Path(folder, "result.json")
            output = Path(folder, "output")
            with output.open("wb") as written:
                ended = subprocess.run(
                    self.words,
                    input=json.dumps(row).encode(),
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "DSCHAT_SEED": str(seed), "DSCHAT_RESULT": str(result)},
                    check=False,
                )
            if ended.returncode != 0:
                raise RuntimeError(f"exit code {ended.returncode}: {_end_of(output)}")
            if not result.is_file():
                return AgentResult()
            try:
                value = json.loads(result.read_bytes())
            except ValueError as problem:
                raise ValueError(f"the file DSCHAT_RESULT is no JSON ({problem})") from None
            return agent_result(value)


def _end_of(file: Path) -> str:
    """The end of a program's output, in one line which a message quotes whole."""
    with file.open("rb") as written:
        written.seek(max(0, file.stat().st_size - 4 * _TAIL))
        text = printable_line(written.read().decode("utf-8", "replace"))
    if len(text) > _TAIL:
        text = f"...{text[-_TAIL:]}"
    return text or "it wrote nothing"


def agent_result(value: Any) -> AgentResult:
    """What an agent returned: a number, None, or a dict with `reward`, `call_rewards` and numbers
    for the log. `TypeError` or `ValueError` for anything else."""
    if value is None:
        return AgentResult()
    if isinstance(value, Mapping):
        rest = {
            name: each for name, each in value.items() if name not in ("reward", "call_rewards")
        }
        reward = value.get("reward")
        call_rewards = value.get("call_rewards")
        if call_rewards is not None:
            call_rewards = [_fp32_number(each) for each in call_rewards]
        if reward is not None:
            reward = _fp32_number(reward)
        return AgentResult(reward, call_rewards, finite_metrics(rest))
    return AgentResult(_fp32_number(value))


def _fp32_number(value: Any) -> float:
    """A number, also of NumPy or PyTorch, that fp32 holds."""
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        raise TypeError(
            f"it returned {type(value).__name__}; expected a number, None, or a dict with 'reward'"
        )
    reward = float(value)
    if not abs(reward) <= LARGEST:
        raise ValueError(f"its reward is {reward}, which is not a finite fp32 number")
    return reward
