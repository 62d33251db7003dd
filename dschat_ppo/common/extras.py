"""Packages that only some flags need: the extras of setup.py."""

from __future__ import annotations

from importlib.util import find_spec

from dschat_ppo.errors import UserError

EXTRAS = {  # module -> (package, the arguments of pip that install it)
    "bitsandbytes": ("bitsandbytes", '-e ".[qlora]"'),
    "flash_attn": ("flash-attn", '--no-build-isolation -e ".[flash]"'),
    "math_verify": ("math-verify", '-e ".[math]"'),
    "mlflow": ("mlflow-skinny", '-e ".[mlflow]"'),
    "peft": ("peft", '-e ".[lora]"'),
    "sentencepiece": ("sentencepiece", '-e ".[sentencepiece]"'),
    "tensorboard": ("tensorboard", "-e ."),  # required by setup.py, and checked as the other trackers are
    "trackio": ("trackio", '-e ".[trackio]"'),
    "wandb": ("wandb", '-e ".[wandb]"'),
}


def is_installed(module: str) -> bool:
    """Whether a module of an extra can be imported, and is not merely a folder of that name, such as the local files
    of W&B in the working folder."""
    spec = find_spec(module)
    return spec is not None and (spec.origin is not None or spec.submodule_search_locations is None)


def how_to_install(module: str) -> str:
    """The pip command that installs a module of `EXTRAS`."""
    return f"pip install {EXTRAS[module][1]}"


def require_extra(module: str, what: str) -> None:
    """Check that a module of `EXTRAS` is installed, before it is imported.

    Args:
        module: its import name.
        what: the flag, value or file that needs it.

    Raises:
        UserError: it is not installed; the message holds the pip command.
    """
    if not is_installed(module):
        raise UserError(f"{what} needs the package {EXTRAS[module][0]}: {how_to_install(module)}")
