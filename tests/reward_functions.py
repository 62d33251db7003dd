"""Reward functions of every form and with every fault, for the tests. Workers load this file by its
path."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def lengths(prompts, responses):
    return [len(response) for response in responses]


def columns(prompts, responses, **others):
    """Sum of all arguments, which the test computes too."""
    assert sorted(others) == ["answer", "extra"], sorted(others)
    return [
        len(prompt) + 10 * len(response) + 100 * (answer or 0) + (1000 if extra is None else 0)
        for prompt, response, answer, extra in zip(
            prompts, responses, others["answer"], others["extra"], strict=True
        )
    ]


def named_column(answer, missing, optional=7):
    """Takes neither prompts nor responses; no row has `missing`."""
    assert missing == [None] * len(answer)
    return [-1.0 if value is None else value + optional for value in answer]


def per_row(prompt, response, answer):
    return len(prompt) - len(response) + (answer or 0)


def per_row_bool(response):
    return response == "yes"


async def slow_batch(prompts, responses):
    await asyncio.sleep(0.01)
    return [float(len(prompt)) for prompt in prompts]


async def slow_row(prompt, response):
    await asyncio.sleep(0.01)
    return len(prompt)


class Counter:
    def __call__(self, response):
        return float(response.count("a"))


counter = Counter()


def who(response):
    return os.getpid()


def scaled(response, factor=1.0, sign=True, word="x", count=2):
    assert (
        isinstance(factor, float)
        and isinstance(sign, bool)
        and isinstance(word, str)
        and isinstance(count, int)
    )
    return (1 if sign else -1) * factor * count * response.count(word)


def noisy(response):
    print("a line on standard output")
    os.write(1, b"bytes on descriptor 1\n")
    subprocess.run([sys.executable, "-c", "print('a child prints too'); input()"], check=False)
    return 1.0


def fail(problem):
    raise problem


def forge(reply):
    """Write into every pipe of the process, as a library may that prints where it should not."""
    for number in range(3, 64):
        with suppress(OSError):
            os.write(number, reply)


FAULTS = {
    "garbage": lambda: forge(b"no JSON\n"),
    "raise": lambda: 1 / 0,
    "bare": lambda: fail(KeyError()),
    "long": lambda: fail(RuntimeError("x" * 2**24)),
    "lines": lambda: fail(OSError(" one\n\ttwo\n")),
    "hang": lambda: time.sleep(60),
    "exit": lambda: os._exit(0),
    "quit": lambda: sys.exit(3),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "surrogate": lambda: (_ for _ in ()).throw(ValueError("\ud800")),
    "nan": lambda: float("nan"),
    "inf": lambda: -float("inf"),
    "huge": lambda: 1e39,
    "text": lambda: "3",
    "none": lambda: None,
    "complex": lambda: 1j,
}


def faulty_row(response):
    return FAULTS[response]() if response in FAULTS else len(response)


def faulty_batch(responses):
    return [FAULTS[response]() if response in FAULTS else len(response) for response in responses]


def wrong_length(responses):
    """One score too few for a batch, the right number for one row, and two for the response
    `two`."""
    if len(responses) > 1:
        return [1.0] * (len(responses) - 1)
    return [1.0, 2.0] if responses == ["two"] else [len(responses[0])]


class Ranking:
    """Ranks each group by length: 0 for the shortest, 1 for the longest. The first call fails."""

    def __init__(self):
        self.calls = 0

    def __call__(self, responses, groups):
        self.calls += 1
        if self.calls == 1 or "raise" in responses:
            raise RuntimeError(f"call {self.calls}")
        scores = []
        for response, group in zip(responses, groups, strict=True):
            rivals = [text for text, other in zip(responses, groups, strict=True) if other == group]
            shorter = sum(len(rival) < len(response) for rival in rivals)
            scores.append(shorter / (len(rivals) - 1))
        return scores


ranking = Ranking()


def one_short(responses, num_generations):
    """A score too few for a group with the response `short`, and for a batch of several groups."""
    if "short" in responses or len(responses) > num_generations:
        return [1.0] * (len(responses) - 1)
    return [float(num_generations)] * len(responses)


def ranks_one(response, groups):
    return 1.0


def waits(response):
    time.sleep(0.3)
    return 1.0


def leaves_a_process(response):
    """Starts a process, writes its id and the own one into the file that the response names, then
    waits."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(response).write_text(f"{child.pid} {os.getpid()}")
    time.sleep(60)


def never_releases_the_lock(response):
    """A regular expression that backtracks for ever, after its process id is in the file that the
    response names."""
    Path(response).write_text(f"{os.getpid()} {os.getpid()}")
    re.match("(a+)+$", "a" * 60 + "b")


def ends_its_processes(response):
    """Gets the signals of the launcher, and ends a fork and a program by SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    forked = os.fork()
    if not forked:
        time.sleep(60)
    time.sleep(0.5)
    os.kill(forked, signal.SIGTERM)
    started = subprocess.Popen(["sleep", "60"])
    started.terminate()
    return -float(started.wait() + os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))


def forks(response):
    """A child without `os._exit` returns while the next response is scored."""
    if response:
        time.sleep(0.4)
    elif not os.fork():
        time.sleep(0.2)
    return len(response)


def by_position(response, /):
    return 1.0


def of_two_forms(solution_str, response, **others):
    return 1.0


not_callable = 3
