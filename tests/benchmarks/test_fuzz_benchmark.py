"""The fuzzing of `benchmarks/fuzz.py`: thirty of its cases, and that it notices what must not happen."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from launch import forked

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fuzz  # noqa: E402
import fuzz_cases  # noqa: E402
from fuzz_mutations import mutate_bytes, mutate_file, mutate_json  # noqa: E402


def test_thirty_cases_end_with_a_result_or_one_line(tmp_path):
    found = tmp_path / "found.json"
    words = ["--cases", 30, "--seed", 1, "--jobs", 1, "--work", tmp_path / "work", "--json", found]
    ended = forked(1, "tests/workers/short_fuzz.py", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcomes = json.loads(found.read_text())["outcomes"]
    assert sum(outcomes.values()) == 30 and min(outcomes["result"], outcomes["error line"]) >= 3, outcomes


def ends(folder: Path, body, seconds: float = 60.0) -> tuple[str, str]:
    process = fuzz.fork(folder, body)
    process.deadline = time.monotonic() + seconds
    return fuzz.judge(process.wait())


def print_error(text: str, code: int = 2) -> int:
    print(text, file=sys.stderr)
    return code


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (lambda: 0, ("result", "")),
        (lambda: print_error("error: --x: wrong"), ("error line", "")),
        (lambda: print_error("error: differs:\n  a  1 -> 2", 4), ("error line", "")),
        (lambda: print_error("error: a\nand more"), ("failed", "more than one line")),
        (lambda: print_error("error: a\nerror: b"), ("failed", "2 error lines")),
        (lambda: 2, ("failed", "0 error lines")),
        (lambda: print_error("error: a", 5), ("failed", "exit code 5")),
        (lambda: print_error("error: a", 1), ("failed", "exit code 1")),
        (lambda: 1 // 0, ("failed", "traceback")),
        (lambda: print_error("Traceback (most recent call last):", 0), ("failed", "traceback")),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), ("failed", "signal SIGTERM")),
        (lambda: sys.exit(0), ("result", "")),
    ],
)
def test_the_end_of_a_case_is_judged(tmp_path, body, outcome):
    assert ends(tmp_path, body) == outcome


def test_a_case_that_waits_forever_is_ended_with_the_processes_that_it_started(tmp_path):
    def body() -> None:
        child = os.fork()
        if child:
            (tmp_path / "child").write_text(str(child))
        time.sleep(100)

    assert ends(tmp_path, body, seconds=1.0) == ("failed", "hang")
    child, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)


def test_mutations_depend_on_the_seed_alone(tmp_path):
    def mutated(seed: int) -> list[str]:
        rng, found = random.Random(seed), list[object]()
        for number in range(30):
            file = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
            file.write_text('{"a": [1, "b"], "c": {"d": null}}')
            found += [mutate_json(rng, {"a": [1, {"b": 2}]}), mutate_bytes(rng, b"some bytes " * number)]
            found.append(mutate_file(rng, file).partition(": ")[2])
            found.append(file.read_bytes() if file.is_file() and not file.is_symlink() else None)
        return [repr(each) for each in found]

    assert mutated(1) == mutated(1) != mutated(2)


def test_each_kind_of_case_is_in_every_30_in_its_share():
    for start in (0, 300):
        drawn = [fuzz_cases.kind_of(number) for number in range(start, start + 30)]
        assert {name: drawn.count(name) for name in drawn} == {k: share for k, (_, share) in fuzz_cases.KINDS.items()}
