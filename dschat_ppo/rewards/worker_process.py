"""The process that runs a reward function. Started by `pool.Worker`; imports nothing but the standard library.

Requests come on standard input, each a length and a pickle of keyword arguments; answers leave on what was standard
output, each a length and JSON (the trainer unpickles nothing that a function's process wrote). The function itself
finds an empty standard input, and its prints go to standard error.

The process divides in two. One half runs the function; the other only watches whether the trainer is alive, because a
function that never lets go of the interpreter's lock (a regular expression that backtracks for ever) could not watch
for itself. When the trainer is gone, however it went, the watcher kills the whole process group.

SIGTERM and SIGINT end neither half: DeepSpeed's launcher sends SIGTERM to all processes below it when the run is asked
to stop, and the trainer still wants the rewards of its last step.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, BinaryIO, NoReturn, SupportsFloat

LENGTH = struct.Struct(">Q")
GIVEN = ("prompts", "responses", "prompt", "response")
_LOOK_MILLISECONDS = 1000
_LONGEST_TEXT = 500  # characters of an exception's own text


def main(words: list[str]) -> None:
    """Serve the function described by `words`: where it is, its name, its settings as JSON."""
    parent = os.getppid()
    outlive_signals()
    child = os.fork()
    if child:
        _watch(parent, child)
    os.register_at_fork(after_in_child=_take_signals)
    requests, answers = _take_pipes()
    where, name, settings = words
    try:
        function = load(where, name)
        loaded, file = describe(function, json.loads(settings)), file_of(function)
    except BaseException as problem:  # noqa: BLE001  whatever the user's module raises is told to the trainer
        _send(answers, {"error": cause_of(problem, os.path.abspath(where))})
        return
    _send(answers, {"ready": loaded})
    loop = asyncio.new_event_loop()
    while (arguments := _receive(requests)) is not None:
        try:
            reply: dict[str, Any] = {"values": _values(_call(function, arguments, loop), loaded["per_row"])}
        except BaseException as problem:  # noqa: BLE001  one bad call costs its rows, not the run
            reply = {"error": cause_of(problem, file)}
        _send(answers, reply)


def outlive_signals() -> None:
    """SIGTERM and SIGINT do nothing here. Not by ignoring them, which programs started from here would inherit."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def _take_signals() -> None:
    """As usual, in processes that the function forks: a pool of them is ended by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _watch(parent: int, child: int) -> NoReturn:
    """End with the other half, or end the whole group when the trainer has closed the pipe or is gone."""
    os.close(1)
    hang_up = select.poll()
    hang_up.register(0, 0)  # no event but the other end's closing
    while not hang_up.poll(_LOOK_MILLISECONDS) and os.getppid() == parent:
        if os.waitpid(child, os.WNOHANG)[0]:
            os._exit(0)
    os.killpg(os.getpid(), signal.SIGKILL)  # the group is this process's own
    os._exit(1)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes on new descriptors that are not inherited; the usual ones become harmless."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    return requests, answers


def _send(answers: BinaryIO, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    answers.write(LENGTH.pack(len(body)) + body)
    answers.flush()


def _receive(requests: BinaryIO) -> dict[str, Any] | None:
    head = requests.read(LENGTH.size)
    return pickle.loads(requests.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def cause_of(problem: BaseException, file: str | None) -> str:
    """Type and text of an exception and the deepest line of `file` that it passed, in one line.

    An exception is the user's code too: asked for its text, it may raise whatever it likes.
    """
    kind, text, place = "an exception", "its text cannot be printed", ""
    try:
        kind = _one_line(type(problem).__name__)
        lines = [n for frame, n in traceback.walk_tb(problem.__traceback__) if frame.f_code.co_filename == file]
        place = f" ({_one_line(str(file))}:{lines[-1]})" if lines else ""
        text = _one_line(str(problem)[:_LONGEST_TEXT])
    except BaseException:  # noqa: BLE001, S110  then the words above stand for it
        pass
    return (f"{kind}: {text}" if text else kind) + place


def _one_line(text: str) -> str:
    return " ".join(str.split(text)).encode(errors="backslashreplace").decode()


def file_of(function: Callable[..., Any]) -> str | None:
    """Where the user wrote the function; None for a shipped rule and for what is not written in Python."""
    plain = inspect.unwrap(function)
    for written in (plain, type(plain).__call__):
        code = getattr(written, "__code__", None)
        if isinstance(code, CodeType) and Path(code.co_filename).parent != Path(__file__).parent:
            return code.co_filename
    return None


def load(where: str, name: str) -> Callable[..., Any]:
    """The callable `name` of a file `*.py` or of a module that can be imported.

    Raises:
        TypeError, AttributeError: there is no such callable. Whatever the module raises.
    """
    function = getattr(_module_of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where), name)
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}, not a function")
    return function


def _module_of_file(path: Path) -> ModuleType:
    """The file as a module, with its folder first in the search path, as if it were run."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"reward_function_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def describe(function: Callable[..., Any], settings: dict[str, str]) -> dict[str, Any]:
    """How a function wants to be called.

    Returns:
        `per_row`: it takes single values (`response`), not lists (`responses`); `takes`: names of its arguments;
        `needs`: those without a default; `any`: whether it takes all others too; `settings`: with the types of the
        defaults that they replace.

    Raises:
        TypeError, ValueError: it cannot be called by keywords, or has no argument for a setting or another type.
    """
    parameters = inspect.signature(function).parameters
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    by_position = [n for n, kind in kinds.items() if kind in (kind.POSITIONAL_ONLY, kind.VAR_POSITIONAL)]
    if by_position:
        raise TypeError(f"its argument {by_position[0]} can be given by position only; it is called by keywords")
    names = [name for name, kind in kinds.items() if kind != kind.VAR_KEYWORD]
    takes_any = len(names) < len(kinds)
    for name in settings:
        if name in GIVEN or (name not in names and not takes_any):
            raise TypeError(f"it has no setting '{name}'; its arguments are {', '.join(names)}")
    return {
        "per_row": "response" in names and "responses" not in names,
        "takes": names,
        "needs": [name for name in names if parameters[name].default is inspect.Parameter.empty],
        "any": takes_any,
        "settings": {n: _typed(n, text, parameters[n].default if n in names else None) for n, text in settings.items()},
    }


def _typed(name: str, text: str, default: Any) -> Any:
    """The text of a setting as the type of the default that it replaces."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"its setting {name} must be true or false, not '{text}'")
        return text.lower() == "true"
    if isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError:
            raise ValueError(f"its setting {name} must be a number ({type(default).__name__}), not '{text}'") from None
    return text


def _call(function: Callable[..., Any], arguments: dict[str, Any], loop: asyncio.AbstractEventLoop) -> Any:
    result = function(**arguments)
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return loop.run_until_complete(wait())


def _values(result: Any, per_row: bool) -> list[float | None]:
    """What was returned, as numbers; None for what is none."""
    if per_row:
        return [_number(result)]
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        raise TypeError(f"returned {type(result).__name__}, not a list of numbers")
    return [_number(value) for value in result]


def _number(value: Any) -> float | None:
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
