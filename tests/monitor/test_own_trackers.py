"""`--tracker FILE.py:CLASS`: what the object receives, what is refused before a model is loaded,
and that the run continues when the object fails."""

import json
import math

import pytest

from dschat_ppo.common.own_functions import own_function
from dschat_ppo.errors import UserError
from dschat_ppo.monitor.trackers import Tracking, check_own_tracker
from dschat_ppo.monitor.writers import MetricsWriter

FILE = """
import json

class Lines:
    def __init__(self, run_name, config):
        self.file = open("received.jsonl", "a")
        self.write([run_name, config])

    def write(self, line):
        print(json.dumps(line), file=self.file, flush=True)

    def log(self, metrics, step):
        self.write([step, metrics])

    def close(self):
        self.write("closed")

class Failing(Lines):
    def log(self, metrics, step):
        if step == 2:
            raise ConnectionError("no server,\\ntry later")
        super().log(metrics, step)

class Unreachable(Lines):
    def __init__(self, run_name, config):
        raise ConnectionError("no server")

class Silent:
    def __init__(self, run_name, config):
        pass

    def log(self, metrics, step):
        pass

class WithoutStep(Silent):
    def log(self, metrics):
        pass

    close = None

class WithoutInit:
    pass

class WithoutConfig(Lines):
    def __init__(self, run_name):
        pass

def function(run_name, config):
    pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    own_function.cache_clear()
    return tmp_path


def received(folder) -> list:
    return [json.loads(line) for line in (folder / "received.jsonl").read_text().splitlines()]


def writer_of(folder, name: str, run_name=None, resumed=None) -> MetricsWriter:
    """The metrics of a run whose output folder is `folder/ppo`."""
    output = folder / "ppo"
    output.mkdir(exist_ok=True)
    flags = {"seed": 3}
    return MetricsWriter(
        output, Tracking((f"own.py:{name}",), output, output, None, run_name, flags), resumed
    )


def test_it_gets_name_flags_and_metrics_and_a_resumed_run_logs_no_step_again(folder):
    with writer_of(folder, "Lines") as writer:
        for step in range(3):
            writer.write(step, {"loss": step / 2})
    with writer_of(folder, "Lines", "mine", resumed=(0, 2)) as writer:
        for step in (2, 3):
            writer.write(step, {"loss": math.inf})
    steps = [[step, {"loss": step / 2}] for step in range(3)]
    assert received(folder) == [
        ["ppo", {"seed": 3}],
        *steps,
        "closed",
        ["mine", {"seed": 3}],
        [3, {"loss": math.inf}],
        "closed",
    ]


def test_the_run_continues_without_a_tracker_that_fails_and_one_line_says_so(folder, said):
    with writer_of(folder, "Failing") as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 0.5})
    assert received(folder) == [["ppo", {"seed": 3}], [1, {"loss": 0.5}]]
    lines = (folder / "ppo/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    [line] = said
    assert line.startswith(
        "--tracker own.py:Failing cannot write, and the run continues without it: rank 0: log of"
        f" step 2: ConnectionError: no server, try later ({folder}/own.py:"
    )


def test_a_tracker_that_cannot_begin_ends_the_run(folder):
    with pytest.raises(UserError, match="own.py:Unreachable: __init__: ConnectionError: no server"):
        writer_of(folder, "Unreachable")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py:Lines", "there is no file none.py"),
        ("broken.py:Lines", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_li"),
        ("own.py:Line", "has no function 'Line'; it has: Lines"),
        ("own.py:function", "it is no class"),
        ("own.py:Silent", "it has no method close"),
        ("own.py:WithoutStep", "log: too many positional arguments"),
        ("own.py:WithoutInit", "__init__: too many positional arguments"),
        ("own.py:WithoutConfig", "__init__: too many positional arguments"),
    ],
)
def test_what_is_no_tracker_is_refused_by_name(name, message):
    with pytest.raises(UserError) as raised:
        check_own_tracker(name)
    assert str(raised.value).startswith(f"--tracker {name}: ") and message in str(raised.value)


def test_a_tracker_passes_the_check_and_is_not_made_by_it(folder):
    check_own_tracker("own.py:Lines")
    assert not (folder / "received.jsonl").exists()
