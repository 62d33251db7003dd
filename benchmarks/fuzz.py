"""Fuzzing: a thousand mutated files and flags; each must end with a result or one line that says
what to do.

    python benchmarks/fuzz.py [--seed S] [--cases N] [--case N] [--only WORD] [--json F] [--docs F]

Each case (`fuzz_cases.py`, `fuzz_judges.py`, `fuzz_images.py`) mutates something valid and gives it
to a step until it would load its models. `--seed` and its number determine a case; `--case N`
repeats one and prints what it prints. This process imports the libraries once and forks for each
case.

A case passes if it ends with exit code 0, or with a documented code other than 1 and 5 and one line
`error: ...` (and a line for each further wrong flag). It fails if it ends by a signal or with a
traceback, if it exceeds the limits of time (60 s of processor time, 180 s) or memory, or if it ends
without saying why. The exit code of this command is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from fuzz_cases import KINDS as STEP_KINDS
from fuzz_cases import ROOT, make_material, train_run
from fuzz_images import IMAGE_KINDS, make_pictures
from fuzz_judges import JUDGE_KINDS

sys.path.insert(0, str(ROOT))
from dschat_ppo.common.processes import (
    signal_when_parent_ends,
)  # noqa: E402  benchmarks run from any folder

KINDS = STEP_KINDS | JUDGE_KINDS | IMAGE_KINDS
MARKS = ("<!-- fuzz -->", "<!-- /fuzz -->")
OUTCOMES = ("result", "error line", "failed")
CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES = 60, 180.0, 6 * 2**30
# of docs/reliability.md; 1 is a failure with a traceback, 5 the loss of a rank
REPORTED_CODES = 2, 3, 4, 6
_IMPORTED = (
    "datasets",
    "deepspeed",
    "peft",
    "pyarrow.parquet",
    "transformers.models.llama.modeling_llama",
    "dschat_ppo.ppo.train_ppo",
    "dschat_ppo.supervised.sft",
    "dschat_ppo.supervised.train_preference",
)


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, negative for a signal, None for the limit of time; and
    what it printed."""

    code: int | None
    out: str
    err: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case, and why it failed; "" if it did not."""

    case: int
    kind: str
    outcome: str
    why: str
    what: str
    code: int | None
    err: str


def judge(ended: Ended) -> tuple[str, str]:
    """(the outcome, why it failed)."""
    if ended.code is None:
        return "failed", "hang"
    if ended.code == -signal.SIGXCPU or ended.code == -signal.SIGKILL:
        return "failed", "processor time or memory"
    if ended.code < 0:
        return "failed", f"signal {signal.Signals(-ended.code).name}"
    if "Traceback (most recent call last)" in ended.out + ended.err:
        return "failed", "traceback"
    if ended.code == 0:
        return "result", ""
    if ended.code not in REPORTED_CODES:
        return "failed", f"exit code {ended.code}"
    lines = ended.err.split("\n")
    errors = [number for number, line in enumerate(lines) if line.startswith("error")]
    if len(errors) != 1:
        return "failed", f"{len(errors)} error lines"
    # a table of settings is indented; each further wrong flag has a line
    if any(
        line and not line.startswith(("  ", "--", "unknown flag"))
        for line in lines[errors[0] + 1 :]
    ):
        return "failed", "more than one line"
    return "error line", ""


def run_forked(folder: Path, body: Callable[[], int | None]) -> Ended:
    """Run `body` in a child process, to its end, with its output in files of `folder`."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return _ended(child, folder)
    code = 1
    try:
        os.setsid()
        signal_when_parent_ends(signal.SIGKILL)
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  pytest has replaced them
        sys.stderr = open(  # noqa: SIM115
            2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
        )  # noqa: SIM115
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
        os.chdir(folder)
        code = body() or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  the top level of a process
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ended(child: int, folder: Path) -> Ended:
    """How a process ends, with what it printed. What is left of its session ends with it."""
    deadline, done = time.monotonic() + WALL_SECONDS, 0
    while not done and time.monotonic() < deadline:
        time.sleep(0.02)
        done, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
    files = [folder / name for name in ("stdout", "stderr")]
    texts = [
        file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        for file in files
    ]
    return Ended(os.waitstatus_to_exitcode(status) if done else None, *texts)


class Fuzz:
    """Runs cases in a work folder, which must be empty. Imports the libraries and makes the valid
    files."""

    def __init__(self, work: Path, seed: int):
        self.work, self.seed, self.material = work, seed, work / "material"
        self.material.mkdir(parents=True)
        for name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            os.environ.pop(name, None)  # each case is a launch by itself
        os.environ.update(
            HF_HUB_OFFLINE="1",
            HF_HOME=str(work / "hf"),
            TMPDIR=str(work),
            OMP_NUM_THREADS="1",
            DS_ACCELERATOR="cpu",
            TOKENIZERS_PARALLELISM="false",
        )
        tempfile.tempdir = None
        for name in _IMPORTED:
            importlib.import_module(name)
        for make in (make_material, train_run, make_pictures):
            name = make.__name__
            (work / name).mkdir()
            ended = run_forked(work / name, partial(make, self.material))
            if ended.code != 0:
                raise RuntimeError(
                    f"the valid files cannot be made ({name},"
                    f" {ended.code}):\n{ended.out}{ended.err}"
                )
        gc.collect()
        gc.freeze()  # the cases share these pages

    def run(self, number: int) -> Verdict:
        """Run and judge a case; its folder stays only if it failed."""
        folder, kind = self.work / f"case_{number}", list(KINDS)[number % len(KINDS)]
        folder.mkdir()
        rng = random.Random(f"{self.seed} {number}")
        ended = run_forked(folder, lambda: KINDS[kind](rng, self.material, folder))
        outcome, why = judge(ended)
        noted = folder / "case.txt"
        what = noted.read_text(encoding="utf-8") if noted.exists() else ""
        if outcome != "failed":
            shutil.rmtree(folder, ignore_errors=True)
        return Verdict(number, kind, outcome, why, what, ended.code, ended.err)


def table(verdicts: list[Verdict]) -> str:
    """Markdown: a row for each kind."""
    from measure import markdown

    counts = Counter((verdict.kind, verdict.outcome) for verdict in verdicts)
    rows = [[kind, *(str(counts[kind, outcome]) for outcome in OUTCOMES)] for kind in KINDS]
    total = Counter(verdict.outcome for verdict in verdicts)
    return markdown(
        ["cases", *OUTCOMES], [*rows, ["all", *(str(total[outcome]) for outcome in OUTCOMES)]]
    )


def main() -> int:
    """Run the cases; 1 if one fails."""
    from measure import publish

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--cases", type=int, default=1000, help="number of cases (default: 1000)")
    parser.add_argument(
        "--case", type=int, help="run only the case with this number, and print what it prints"
    )
    parser.add_argument("--only", default="", help="run only the kinds whose name has this word")
    parser.add_argument(
        "--work", type=Path, help="an empty folder, kept at the end with the files of failed cases"
    )
    parser.add_argument(
        "--json", type=Path, help="write {seed, cases, seconds, outcomes, failures} there"
    )
    parser.add_argument("--docs", type=Path, help="write the table into this file")
    chosen = parser.parse_args()
    work = (chosen.work or Path(tempfile.mkdtemp(prefix="fuzz_"))).resolve()
    fuzz, started, verdicts = Fuzz(work, chosen.seed), time.monotonic(), []
    numbers = [chosen.case]
    if chosen.case is None:
        kinds = list(KINDS)
        numbers = [
            number for number in range(chosen.cases) if chosen.only in kinds[number % len(kinds)]
        ]
    for number in numbers:
        verdicts.append(verdict := fuzz.run(number))
        if verdict.outcome == "failed" or chosen.case is not None:
            ended = f"{verdict.outcome} {verdict.why} (exit code {verdict.code})"
            print(
                f"case {verdict.case} ({verdict.kind}):"
                f" {ended}\n{verdict.what}{verdict.err[-3000:]}",
                flush=True,
            )
    seconds = time.monotonic() - started
    counts = Counter(verdict.outcome for verdict in verdicts)
    found = {
        "seed": chosen.seed,
        "cases": len(verdicts),
        "seconds": round(seconds),
        "outcomes": counts,
    }
    failures = [asdict(verdict) for verdict in verdicts if verdict.outcome == "failed"]
    publish({**found, "failures": failures}, table(verdicts), MARKS, chosen.json, chosen.docs)
    if chosen.work is None and not counts["failed"]:
        shutil.rmtree(work)
    return int(counts["failed"] > 0 or not verdicts)


if __name__ == "__main__":
    sys.exit(main())
