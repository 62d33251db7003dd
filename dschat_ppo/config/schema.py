"""The flag groups that the steps share. Every field is a command-line flag, documented by its help
text.

Names, types and meanings follow DeepSpeed-Chat, so that its scripts keep working. A group validates
itself when it is created, and is frozen.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

from dschat_ppo.errors import UserError, nearest_path

SCHEDULERS = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
]
ZERO_STAGES = Literal[0, 1, 2, 3]
EPOCHS_HELP = (
    "epochs over the {}; a fraction such as 0.5 or 1.5 ends inside an epoch (see --max_steps)"
)
VALIDATE_ONLY = "evaluate once, write the results to validation/ in --output_dir, and train nothing"

REQUIRED: Any = MISSING  # in place of the default of a flag that must be given

types_of = cache(get_type_hints)  # of the fields of a class of flags, by name

RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "positive": ("finite and above 0", lambda value: 0 < value < math.inf),
    "not_negative": ("finite, 0 or above", lambda value: 0 <= value < math.inf),
    "fraction": ("at least 0 and below 1", lambda value: 0 <= value < 1),
    "finite": ("finite", math.isfinite),
    "unit": ("between 0 and 1", lambda value: 0 <= value <= 1),
    "share": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "open_unit": ("above 0 and below 1", lambda value: 0 < value < 1),
    "above_one": ("above 1", lambda value: value > 1),
    "zero_or_above_one": ("0 (off) or above 1", lambda value: value == 0 or value > 1),
    "tokens_of_a_row": ("at least 2 (a prompt and an answer token)", lambda value: value >= 2),
    "temperature": (
        "finite and above 0; --top_k 1 takes the most likely token (greedy)",
        lambda value: 0 < value < math.inf,
    ),
    # its progress is checked every half second
    "seconds_to_years": (
        "at least 1 second, and at most 10^8, three years",
        lambda value: 1 <= value <= 10**8,
    ),
    "seconds_to_days": (
        "above 0, and at most 10^6 seconds, eleven days",
        lambda value: 0 < value <= 10**6,
    ),
}


def flag(
    default: Any,
    help: str,
    *aliases: str,
    commas: bool = False,
    range: str = "",
    check: Callable[[Any], Any] | None = None,
) -> Any:
    """A dataclass field that becomes the command-line flag of the same name. `aliases` are names of
    other libraries. A list takes any number of values; with `commas` it takes them between commas
    too, and a text has such parts, which may also be words of their own. `range`: of `RANGES`,
    which the parser checks. `check`: what else the value alone must be, without the other flags and
    without a file; it raises `UserError` with the name of the flag, for the message in which the
    parser names all wrong values."""
    metadata: dict[str, Any] = {"help": help, "aliases": [f"--{name}" for name in aliases]}
    if commas:
        metadata["commas"] = True
    if range:
        metadata["range"] = range
    if check is not None:
        metadata["check"] = check
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


positive = partial(flag, range="positive")
not_negative = partial(flag, range="not_negative")
fraction = partial(flag, range="fraction")
finite = partial(flag, range="finite")
unit = partial(flag, range="unit")
share = partial(flag, range="share")


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def check_values(flags: Any) -> None:
    """Run the checks of the single flags of a group that was not parsed."""
    for flag_field in fields(flags):
        check = flag_field.metadata.get("check")
        value = vars(flags)[flag_field.name]
        if check is not None and value is not None:
            check(value)


def check_not_empty(name: str, value: str | list[str]) -> None:
    """Refuse an empty text, or a list with one."""
    texts = [value] if isinstance(value, str) else value
    require(all(texts), f"--{name} must not be an empty string")


def default_of(flag_field: Field[Any]) -> Any:
    """The default of a field; `MISSING` for a flag that must be given."""
    if flag_field.default_factory is MISSING:
        return flag_field.default
    return flag_field.default_factory()


def require_used(flags: Any, names: str, when: bool, purpose: str) -> None:
    """Refuse flags that are given but have no effect.

    Args:
        flags: The group of flags.
        names: Names of fields of the group, with spaces between them.
        when: Whether other flags let these flags have an effect.
        purpose: What these flags are for, in the words of the error.
    """
    if when:
        return
    defaults = {flag_field.name: default_of(flag_field) for flag_field in fields(flags)}
    for name in names.split():
        value = vars(flags)[name]
        if value != defaults[name]:
            raise UserError(f"--{name} {value} has no effect: it is for {purpose}; omit it")


def is_own_function(name: str) -> bool:
    """Whether this is `FILE.py:FUNCTION`; the file need not exist."""
    return re.fullmatch(r".+\.py:[^\W\d]\w*", name, re.DOTALL) is not None


def read_settings(flag: str, path: str) -> str:
    """The text of the settings file that `flag` names."""
    is_special = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    if is_special:  # a pipe would be waited for, on each rank
        raise UserError(f"{flag} {path}: is not a regular file")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as problem:
        nearest = ""
        if isinstance(problem, FileNotFoundError):
            nearest = nearest_path(path)
        raise UserError(f"{flag} {path}: cannot be read ({problem.strerror}){nearest}") from None
    except UnicodeDecodeError as problem:
        raise UserError(f"{flag} {path}: is not UTF-8 text ({problem})") from None


def changed_words(flags: Any, omitted: Sequence[str] = ()) -> list[str]:
    """The flags of a group that differ from their defaults, without the `omitted` ones, as words of
    a command line."""
    words: list[str] = []
    for flag_field in fields(flags):
        value = getattr(flags, flag_field.name)
        if flag_field.name in omitted:
            continue
        if isinstance(value, list):
            if value:
                words += [f"--{flag_field.name}", *value]
        elif value != flag_field.default:
            # one word: its value may begin with a dash
            words.append(f"--{flag_field.name}={value}")
    return words
