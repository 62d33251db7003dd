"""Runs the parts one after another, each in a process with a time limit, and prints all findings as
one line of JSON.

The exit code is 1 if a part failed or something is wrong, and 0 if all is right, although it may be
slower than wanted; "missed" names both. A part that fails or ends late keeps what it has found by
then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_checks.parts import LIMIT, PARTS, Findings, missed

LEAST = 15  # a part that has less time left does not start


def start(names: list[str], folder: Path, tiny: bool) -> subprocess.Popen[bytes]:
    """Start a process for these parts, in a session, so that processes it starts end with it."""
    command = [sys.executable, "-m", "gpu_checks", "--here", "--only", *names]
    with (folder / f"{names[0]}.log").open("wb") as log:
        return subprocess.Popen(
            command + ["--tiny"] * tiny,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )


def run_here(names: list[str], tiny: bool) -> None:
    """Run the parts in this process, which ends; PART.json has what each has found so far."""
    for name in names:
        part, started = PARTS[name], time.monotonic()
        function = getattr(importlib.import_module(f"gpu_checks.{part.module}"), part.function)
        findings = Findings(Path(f"{name}.json"))
        function(findings, tiny, *part.arguments)
        findings.add("seconds", round(time.monotonic() - started, 1))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no teardown of DeepSpeed's process groups


def finish(
    names: list[str], folder: Path, process: subprocess.Popen[bytes], seconds: float
) -> dict[str, Any]:
    """Part -> what it found; "failed" says why it did not finish. After so many `seconds` the
    process is killed."""
    log, reason = folder / f"{names[0]}.log", ""
    try:
        code = process.wait(max(1.0, seconds))
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = f"exit code {code}: {said[-1] if said else 'no output'}"
    except subprocess.TimeoutExpired:
        reason = f"not finished after {seconds:.0f} s"
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    results = {}
    for name in names:
        file = folder / f"{name}.json"
        results[name] = found = (
            json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        )
        if "seconds" not in found:  # the last thing that a part notes
            found["failed"] = reason
        print(f"{name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    if any("failed" in found for found in results.values()):
        print(log.read_text(encoding="utf-8", errors="replace")[-3000:], file=sys.stderr)
    return results


def run(groups: list[list[str]], folder: Path, limit: float, tiny: bool = False) -> dict[str, Any]:
    """Run the parts, those of a group in one process; part -> its findings.

    All groups of a trial run together, and only `limit` ends them: the machine may be busy with
    other tests.
    """
    end, results = time.monotonic() + limit, dict[str, Any]()
    running = [start(names, folder, tiny) for names in groups] if tiny else []
    for number, names in enumerate(groups):
        if end - time.monotonic() < LEAST:
            results |= {name: {"failed": "no time was left"} for name in names}
            continue
        process = running[number] if running else start(names, folder, tiny)
        own = limit if tiny else sum(PARTS[name].seconds for name in names)
        seconds = min(own, end - time.monotonic())
        results |= finish(names, folder, process, seconds)
    return results


def groups_of(names: list[str], tiny: bool) -> list[list[str]]:
    """One process for each part. In a trial, where times mean nothing: one for the training runs,
    and one for the others, because most of the time of such a process is its imports."""
    if not tiny:
        return [[name] for name in names]
    trains = [PARTS[name].module == "trajectory" for name in names]
    groups = [
        [name for name, one in zip(names, trains, strict=True) if one == kind]
        for kind in (True, False)
    ]
    return [group for group in groups if group]


def main() -> int:
    lines = []
    for name, part in PARTS.items():
        if part.extra:
            lines.append(f"  {name:<15}{part.what} (only where --only names it)")
        else:
            lines.append(f"  {name:<15}{part.what} (at most {part.seconds} s)")
    unasked = [name for name, part in PARTS.items() if not part.extra]
    description = "\n".join([__doc__ or "", "parts:", *lines])
    parser = argparse.ArgumentParser(
        "gpu.sh", None, description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=unasked, choices=list(PARTS), metavar="PART")
    parser.add_argument("--json", type=Path, help="write the findings to this file too")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds of all parts together")
    parser.add_argument(
        "--tiny", action="store_true", help="a trial on tiny sizes, with or without a GPU"
    )
    # a process of `start`
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        run_here(arguments.only, arguments.tiny)
    with tempfile.TemporaryDirectory(prefix="gpu_checks_") as folder:
        groups = groups_of(arguments.only, arguments.tiny)
        results = run(groups, Path(folder), arguments.limit, arguments.tiny)
    found = missed(results, right_only=arguments.tiny)
    failed = [name for name, part in results.items() if "failed" in part]
    text = json.dumps({"failed": failed, "missed": found, **results})
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if failed or any(line["right"] for line in found) else 0


if __name__ == "__main__":
    sys.exit(main())
