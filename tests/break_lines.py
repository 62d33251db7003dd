"""Breaks lines of the package, one at a time, and checks that a test notices each.

    python tests/break_lines.py [--only WORD] [--list] [--seconds N]

`broken_lines.json` has the lines: the file, the text before and after, and the test that must fail.
`--only` takes the lines whose file or test contains a word, `--list` says only which no longer
apply. The exit code is 0 if every line applies and is noticed. A test that takes longer than
`--seconds` is ended, and has not noticed its line.

Each line is broken in a copy of the repository, in a process that is forked from one that has
imported the libraries.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import datasets  # noqa: F401  (the forked processes need not import the libraries again)
import deepspeed  # noqa: F401
import peft  # noqa: F401
import pytest
from transformers import LlamaForCausalLM, LlamaForSequenceClassification  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("broken_lines.json")
LEFT_OUT = (".git", ".venv", "output", "__pycache__", ".mypy_cache", ".ruff_cache")
SECONDS = 600  # of one test: those of whole runs take two minutes on a machine that has other work


@dataclass(frozen=True)
class BrokenLine:
    file: str  # in dschat_ppo/
    before: str  # stands in the file once
    after: str
    test: str  # a file, or one test of it, as pytest names it

    def __str__(self) -> str:
        return f"{self.file}: {self.before!r} -> {self.after!r}"

    def applies(self) -> bool:
        path = ROOT / "dschat_ppo" / self.file
        return path.exists() and path.read_text(encoding="utf-8").count(self.before) == 1


def read_lines() -> list[BrokenLine]:
    entries = json.loads(LIST.read_text(encoding="utf-8"))
    return [BrokenLine(**entry) for entry in entries]


def outcome(line: BrokenLine, copy: Path, seconds: float) -> str:
    """`noticed`, `missed`, or what else the test did in so many seconds. `copy`: of the
    repository."""
    path = copy / "dschat_ppo" / line.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(line.before, line.after), encoding="utf-8")
    try:
        code = run_test(line.test, copy, seconds)
    finally:
        path.write_text(text, encoding="utf-8")
    if code is None:
        return f"the test did not end in {seconds:g} s"
    names = {
        pytest.ExitCode.OK: "missed",
        pytest.ExitCode.TESTS_FAILED: "noticed",
    }
    return names.get(code, f"the test did not run: pytest ended with {code}")


def run_test(test: str, copy: Path, seconds: float) -> int | None:
    """The exit code of pytest in a process of its own, or None if it was ended after so many
    seconds."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copy)
        sys.path[0] = str(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.dont_write_bytecode = True  # files change within the second that .pyc files resolve
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        code = 1
        try:
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", test])
        finally:
            os._exit(int(code))
    try:
        code = exit_code_within(child, seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # processes that a failed test leaves
    if code is None:
        os.waitpid(child, 0)
    return code


def exit_code_within(child: int, seconds: float) -> int | None:
    """The exit code of a child process, or None if it still runs after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help="of the file or the test")
    parser.add_argument("--list", action="store_true", help="say only which lines apply no longer")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="N", help="that one test may take"
    )
    arguments = parser.parse_args()
    lines = [
        line for line in read_lines() if arguments.only in line.file or arguments.only in line.test
    ]
    stale = [line for line in lines if not line.applies()]
    for line in stale:
        print(f"applies no longer: {line}")
    if arguments.list:
        return 1 if stale else 0

    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        for line in lines:
            if line in stale:
                continue
            result = outcome(line, copy, arguments.seconds)
            print(f"{result}: {line}", flush=True)
            if result != "noticed":
                unnoticed += 1
    print(f"{len(lines)} lines: {len(stale)} apply no longer, {unnoticed} are not noticed")
    return 1 if stale or unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
