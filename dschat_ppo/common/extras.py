"""Packages that only some flags need: the extras of setup.py."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dschat_ppo.errors import UserError

EXTRAS = {  # module -> (package, the extra that installs it)
    "bitsandbytes": ("bitsandbytes", "qlora"),
    "fastapi": ("fastapi", "serve"),
    "math_verify": ("math-verify", "math"),
    "num2words": ("num2words", "images"),
    "openai": ("openai", "agents"),
    "peft": ("peft", "lora"),
    "PIL": ("pillow", "images"),
    "sentencepiece": ("sentencepiece", "sentencepiece"),
    # required by setup.py, and checked as the other trackers are
    "tensorboard": ("tensorboard", ""),
    "trackio": ("trackio", "trackio"),
    "uvicorn": ("uvicorn", "serve"),
    "wandb": ("wandb", "wandb"),
}
CHECKOUT = Path(__file__).parents[2]  # of the sources, unless the package is installed from a wheel


def is_installed(module: str) -> bool:
    """Whether a module of an extra can be imported, and is not merely a folder of that name, such
    as the local files of W&B in the working folder."""
    spec = find_spec(module)
    return spec is not None and (spec.origin is not None or spec.submodule_search_locations is None)


def how_to_install(module: str) -> str:
    """The pip command that installs a module of `EXTRAS`: from the sources, or beside the installed
    package."""
    _, extra = EXTRAS[module]
    option = ""
    package = "dschat_ppo"
    if (CHECKOUT / "setup.py").is_file():
        option = "-e "
        package = "."
    if extra:
        package = f'"{package}[{extra}]"'
    return f"pip install {option}{package}"


def require_extra(module: str, what: str) -> None:
    """Check that a module of `EXTRAS` is installed, before it is imported; `what`: the flag or file
    that needs it."""
    if not is_installed(module):
        raise UserError(f"{what} needs the package {EXTRAS[module][0]}: {how_to_install(module)}")
