"""Describe this machine, its libraries and a run in one block for a bug report.

    dschat-env [RUN] [--imports]

RUN is the output folder of a run: its flags that differ from their defaults are shown too. The
block is printed as Markdown. Credentials are left out. Neither torch nor DeepSpeed is imported, so
the command works where they are broken; --imports imports them in processes of their own, and says
what fails.

Exit code 0: the block is printed; 2: RUN is not the output folder of a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.common.paths import CONFIG, RESULT
from dschat_ppo.errors import HIDDEN, UserError, is_secret_name, safe_text
from dschat_ppo.tools import exit_code_of
from dschat_ppo.tools.machine_facts import (
    Facts,
    environment_variables,
    folders,
    imports,
    libraries,
    machine,
)

LONGEST = 300  # characters of a fact
FENCE = "```"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dschat_ppo.tools.env",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", nargs="?", type=Path, metavar="RUN", help="output folder of a run of any step"
    )
    parser.add_argument(
        "--imports",
        action="store_true",
        help="import torch, DeepSpeed, transformers and peft too, which takes seconds, and ask"
        " torch for its devices",
    )
    args = parser.parse_args(argv)
    return exit_code_of(lambda: print(report(args.run, args.imports)))


def report(run: Path | None, with_imports: bool) -> str:
    """The whole block. Raises `UserError` if `run` is not the output folder of a run."""
    sections = {
        "versions": libraries(),
        "machine": machine(),
        "folders": folders(run),
        "environment variables": environment_variables(),
    }
    if with_imports:
        sections["imports"] = imports()
    if run is not None:
        sections |= facts_of_run(run)
    lines = [f"{FENCE}text"]
    for heading, facts in sections.items():
        lines += [f"{heading}:", *(f"  {shown(name, value)}" for name, value in facts)]
    return "\n".join([*lines, FENCE])


def shown(name: str, value: str) -> str:
    """A fact as the block has it: one line without credentials, that cannot end the block."""
    line = " ".join(f"{name}: {value}".split()).replace(FENCE, "'''")
    home = str(Path.home())
    if len(home) > 1:
        line = line.replace(home, "~")
    line = safe_text(line)
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]} ..."
    return line


def facts_of_run(folder: Path) -> dict[str, Facts]:
    """Heading -> what the files of a run say: how it last started, how it ended, and its flags that
    differ from their defaults."""
    # not at the top: the machine is described without them
    from dschat_ppo.html_report.run_folder import flags_of_run, starts_of_run
    from dschat_ppo.html_report.tables import cell_text, defaults

    flags = flags_of_run(folder)
    if not flags:
        raise UserError(
            f"{folder}: has no {CONFIG}, so it is not the output folder of a run; name that, or"
            " leave it out"
        )
    state = [("finished", str((folder / RESULT).is_file()))]
    starts = starts_of_run(folder)
    state.append(("starts", str(len(starts))))
    if starts:
        for name in ("world_size", "versions"):
            state.append((f"{name} of the last", cell_text(starts[-1].get(name))))
    step_defaults = defaults(flags)
    changed = []
    for flag, value in flags.items():
        if flag in step_defaults and step_defaults[flag] == value:
            continue
        text = cell_text(value)
        if is_secret_name(flag):
            text = HIDDEN
        changed.append((f"--{flag}", text))
    return {"run": state, "flags that differ from their defaults": changed}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
