"""Random flags for `fuzz.py`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Any, get_type_hints

from fuzz_mutations import STRANGE_WORDS

# Flags whose legal values compile operators for minutes or write outside of the case's folder.
_LEFT_OUT = {"offload", "offload_optimizer", "offload_reference_model", "output_dir", "data_output_path", "config"}
Flag = tuple[str, dict[str, Any]]  # the name, and what `values_of` says of its values


def flags_of(kinds: Iterable[type]) -> list[Flag]:
    """The flags of some groups."""
    from dschat_ppo.config.flag_parser import values_of

    return [
        (field.name, values_of(get_type_hints(kind)[field.name]))
        for kind in kinds for field in dataclasses.fields(kind) if field.name not in _LEFT_OUT
    ]  # fmt: skip


def random_flag(rng: random.Random, known: Sequence[Flag]) -> list[str]:
    """One of the flags, most often with a value that it takes."""
    name, how = rng.choice(known)
    if rng.random() < 0.08:
        place = rng.randrange(len(name))
        misspelt = (name[:place] + name[place + 1 :], name.upper(), f"no_{name}", f"{name}s", name.replace("_", "-"))
        name = rng.choice(misspelt)
    values = [_random_word(rng, how) for _ in range(rng.choice((0, 1, 2, 5)) if how.get("nargs") == "*" else 1)]
    if how.get("nargs") == "?" and rng.random() < 0.3:
        values = []
    if len(values) == 1 and rng.random() < 0.3:
        return [f"--{name}={values[0]}"]
    return [f"--{name}", *values]


def _random_word(rng: random.Random, how: dict[str, Any]) -> str:
    if rng.random() < 0.15:
        return rng.choice(STRANGE_WORDS)
    if "choices" in how:
        return str(rng.choice(how["choices"]))
    if how.get("nargs") == "?":
        return rng.choice(("true", "false", "True", "0", "y"))
    if how["type"] is int:
        return str(rng.choice((0, 1, 2, 3, 7, 8, 64, 1000, -1, 2**31 - 1)))
    if how["type"] is float:
        return rng.choice(("0", "0.1", "0.5", "1", "1.0", "2", "-1", "1e-6", "1e30", "100"))
    return rng.choice(STRANGE_WORDS)
