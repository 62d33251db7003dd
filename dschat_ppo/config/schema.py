"""The flag groups that the steps share. Every field is a command-line flag, documented by its help text.

Names, types and meanings follow DeepSpeed-Chat, so that its scripts keep working. A group validates itself when it is
created, and is frozen.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field
from pathlib import Path
from typing import Any, Literal

from dschat_ppo.errors import UserError, nearest_path

SCHEDULERS = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]
ZERO_STAGES = Literal[0, 1, 2, 3]
EPOCHS_HELP = "epochs over the {}; a fraction such as 0.5 or 1.5 ends inside an epoch (see --max_steps)"
VALIDATE_ONLY = "evaluate once, write the results to validation/ in --output_dir, and train nothing"
MOST_EPOCHS = 2**31 - 1
MOST_PROCESSES = 1024  # worker processes on one machine
MOST_SETTINGS = 2**20  # characters of a settings file; a device such as /dev/zero has no end

SMALLEST_EPSILON = 2.0**-63  # of AdamW: the squares of smaller gradients are subnormal in fp32
LARGEST_BETA = 1 - 1e-6  # of AdamW: 1 - beta of a larger one has hardly a significant digit in fp32
SMALLEST_NORM = 1e-6  # of clipped gradients: smaller ones vanish against the usual epsilon

REQUIRED: Any = MISSING  # in place of the default of a flag that must be given

# Flags that scripts of DeepSpeed-Chat give and that change nothing here -> why, for the help and for a note.
WITHOUT_EFFECT = {
    "deepspeed": "training always runs on DeepSpeed",
    "compute_fp32_loss": "losses are always computed in fp32",
    "add_eot_token": "answers end with the chat template's end-of-turn token, or with EOS after a text prompt",
    "eot_token": "answers end with the chat template's end-of-turn token, or with EOS after a text prompt",
    "print_loss": "the loss is printed every --logging_steps steps in any case",
    "num_padding_at_beginning": "the attention mask gives the score position",
    "enable_hybrid_engine": "the hybrid engine is always used",
    "release_inference_cache": "the KV cache is always released after a rollout",
}


def flag(default: Any, help: str, *aliases: str, commas: bool = False) -> Any:
    """A dataclass field that becomes the command-line flag of the same name. `aliases` are names of other libraries. A
    list takes any number of values; with `commas` it takes them between commas too, and a text has such parts, which
    may also be words of their own."""
    metadata: dict[str, Any] = {"help": help, "aliases": [f"--{name}" for name in aliases]} | (
        {"commas": True} if commas else {}
    )
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def old_flag(name: str, default: Any, more: str = "") -> Any:
    """The flag `name` of `WITHOUT_EFFECT`; `more` follows in its help."""
    return flag(default, f"no effect (kept for old scripts): {WITHOUT_EFFECT[name]}{more}")


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def refuse(problems: Mapping[str, bool]) -> None:
    """Raise `UserError` with the first message of a table whose condition holds."""
    for message, holds in problems.items():
        require(not holds, message)


def require_ranges(
    flags: object, *, positive: str = "", not_negative: str = "", fraction: str = "", share: str = ""
) -> None:
    """Require flags, whose names are separated by spaces, to be in a range; None (not given) passes. Of flags that are
    0 or above the message says what 0 means, for which others have -1."""
    ranges: list[tuple[str, str, Callable[[float], bool]]] = [
        (positive, "finite and above 0", lambda value: 0 < value < math.inf),
        (not_negative, "finite, 0 or above", lambda value: 0 <= value < math.inf),
        (fraction, "at least 0 and below 1", lambda value: 0 <= value < 1),
        (share, "above 0 and at most 1", lambda value: 0 < value <= 1),
    ]
    for names, wanted, fits in ranges:
        for name, value in _named(flags, names):
            help = type(flags).__dataclass_fields__[name].metadata["help"]  # type: ignore[attr-defined]
            zero = re.search(r"\b0 = [^;,)]+", help) if wanted.endswith("0 or above") else None
            message = f"--{name} must be {wanted}, got {value}" + (f"; {zero[0]}" if zero else "")
            require(value is None or fits(value), message)


def require_bounded_updates(flags: object, learning_rate: str, weight_decay: str) -> None:
    """Require these two flags and `--max_grad_norm` to bound the update of AdamW. With the betas that `RunFlags`
    allows, an update moves each weight by at most the learning rate times a small number, and weight decay multiplies
    it by `1 - learning_rate * weight_decay`."""
    rate, decay = vars(flags)[learning_rate], vars(flags)[weight_decay]
    refuse({
        f"--{learning_rate} must be at most 1, got {rate}: an update of AdamW moves each weight by about this rate":
            rate > 1,
        f"--{learning_rate} x --{weight_decay} must be below 1, got {rate * decay:g}: otherwise the decay changes the "
        "sign of the weights or makes them grow": rate * decay >= 1,
    })  # fmt: skip
    require_clip_norm(flags, "max_grad_norm")


def require_clip_norm(flags: object, name: str) -> None:
    """Require the norm to which gradients are clipped to be 0 (off) or large enough for AdamW; None passes."""
    [(_, norm)] = _named(flags, name)
    require(
        norm is None or norm == 0 or norm >= SMALLEST_NORM,
        f"--{name} must be 0 (off) or at least {SMALLEST_NORM:g}, got {norm}: smaller gradients vanish against "
        "AdamW's epsilon",
    )


def require_at_most(flags: object, names: str, most: float, reason: str) -> None:
    """Require these flags to be at most `most`, because of `reason`; None passes."""
    for name, value in _named(flags, names):
        require(value is None or value <= most, f"--{name} {value}: must be at most {most}: {reason}")


def _named(flags: object, names: str) -> list[tuple[str, float | None]]:
    """(name, value) of these flags."""
    return [(name, vars(flags)[name]) for name in names.split()]


def read_settings(flag: str, path: str) -> str:
    """The text of the settings file that `flag` names; it must be UTF-8 of at most `MOST_SETTINGS` characters."""
    special = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    require(not special, f"{flag} {path}: is not a regular file")  # a pipe would be waited for, on each rank
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MOST_SETTINGS + 1)
    except OSError as problem:
        nearest = nearest_path(path) if isinstance(problem, FileNotFoundError) else ""
        raise UserError(f"{flag} {path}: cannot be read ({problem.strerror}){nearest}") from None
    except UnicodeDecodeError as problem:
        raise UserError(f"{flag} {path}: is not UTF-8 text ({problem})") from None
    require(
        len(text) <= MOST_SETTINGS,
        f"{flag} {path}: is longer than {MOST_SETTINGS} characters, so it is not a settings file",
    )
    return text
