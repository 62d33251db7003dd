"""Functions of one's own, which a flag names as `FILE.py:FUNCTION`. The loader needs only the
standard library."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dschat_ppo.config.schema import is_own_function
from dschat_ppo.errors import UserError, attempt, printable_line, safe_text

Function = TypeVar("Function", bound=Callable[..., Any])

_LONGEST_TEXT = 500  # characters of an exception's text
# Credentials are hidden in these characters before the text is cut, so that no half of one stays.
# In a text of megabytes that would take longer than a call may.
_READ_TEXT = 2**16


def function_named(flag: str, name: str, built_in: Mapping[str, Function]) -> Function:
    """The built-in function of this name, or the one of one's own that `FILE.py:FUNCTION` names;
    errors name `flag`."""
    if name in built_in:
        return built_in[name]
    return own_function(flag, name)


@cache
def own_function(flag: str, name: str) -> Any:
    path, _, function = name.rpartition(":")
    if not os.path.isfile(path):
        raise UserError(f"{flag} {name}: there is no file {path}")
    with running_own(f"{flag} {name}: cannot be loaded:", name):
        return load_callable(file_named(name), function)


@contextmanager
def running_own(what: str, name: str) -> Iterator[None]:
    """The block runs code of `FILE.py:FUNCTION`, which may raise anything: a `UserError` of `what`
    and the cause."""
    with attempt() as tried:
        yield
    if tried.problem is not None:
        raise UserError(f"{what} {cause_of(tried.problem, file_named(name))}") from None


def file_named(name: str) -> str:
    """The file of `FILE.py:FUNCTION`, from the root."""
    return os.path.abspath(name.rpartition(":")[0])


def own_files(*flags: tuple[str, str]) -> list[tuple[str, str]]:
    """(flag, file) of those of these (flag, value) that name functions of one's own."""
    return [(flag, file_named(name)) for flag, name in flags if is_own_function(name)]


def load_callable(module_name: str, name: str) -> Callable[..., Any]:
    """The callable `name` of a file `*.py`, whose folder comes first in the search path, as if it
    were run, or of an importable module. Importing it may raise anything."""
    if module_name.endswith(".py"):
        module = _module_of(os.path.abspath(module_name))
    else:
        module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        defined_there = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        ]
        names = ", ".join(defined_there) or "none"
        raise TypeError(f"{Path(module_name).name} has no function '{name}'; it has: {names}")
    return function


@cache  # functions of one file share its globals
def _module_of(file: str) -> ModuleType:
    path = Path(file)
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cause_of(problem: BaseException, file: str | None) -> str:
    """Type and text of an exception and the innermost line of `file` in its traceback, as one
    line."""
    cause = type(problem).__name__
    text = printable_line(safe_text(str(problem)[:_READ_TEXT])[:_LONGEST_TEXT])
    if text:
        cause += f": {text}"
    lines = [
        line
        for frame, line in traceback.walk_tb(problem.__traceback__)
        if frame.f_code.co_filename == file
    ]
    if lines:
        cause += f" ({printable_line(str(file))}:{lines[-1]})"
    return cause
