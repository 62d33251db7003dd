"""`ranks.sh`: the number of GPUs by the driver, and what `launch` starts."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANKS_SH = Path(__file__).parents[2] / "training_scripts/ranks.sh"
DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
"""
STUB = '#!/usr/bin/env bash\necho "$(basename "$0") ${CUDA_VISIBLE_DEVICES-unset} $*"\n'


@pytest.fixture
def script(tmp_path) -> Path:
    """The script in a folder without a virtual environment, which it would put before the stubs in
    PATH."""
    folder = tmp_path / "training_scripts"
    folder.mkdir()
    return Path(shutil.copy(RANKS_SH, folder))


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> dict[str, str]:
    """The environment of a machine whose driver knows three GPUs."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    words = [
        "g++",
        "-x",
        "c",
        "-shared",
        "-fPIC",
        folder / "driver.c",
        "-o",
        folder / "libcuda.so.1",
    ]
    subprocess.run(words, check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture
def stubs(tmp_path) -> dict[str, str]:
    """An environment in which `python` and `deepspeed` print their arguments."""
    for name in ("python", "deepspeed"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def bash(script: Path, command: str, **env: str) -> str:
    """What a command prints after the script, without the settings of this process."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    words = ["bash", "-euo", "pipefail", "-c", f'source "{script}"; {command}']
    return subprocess.run(
        words, env=kept | env, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_gpus_are_those_of_the_driver(script, driver):
    assert bash(script, 'echo "$gpus $RANKS"', **driver) == "3 3"
    assert bash(script, 'echo "$gpus $RANKS"', **driver, RANKS="2") == "3 2"
    assert bash(script, 'echo "$gpus"', **driver, DS_ACCELERATOR="cpu") == "0"
    for visible, found in (("", "0 cpu"), ("-1", "0 cpu"), ("0", "3")):
        assert (
            bash(script, 'echo "$gpus ${DS_ACCELERATOR-}"', **driver, CUDA_VISIBLE_DEVICES=visible)
            == found
        )


def test_one_rank_needs_no_launcher_and_sees_one_gpu(script, driver, stubs):
    for visible, expected in (({}, "0"), ({"CUDA_VISIBLE_DEVICES": "2,1"}, "2")):
        printed = bash(
            script, 'launch main.py --flag "a b"', **driver, **stubs, **visible, RANKS="1"
        )
        assert printed == f"python {expected} -u main.py --flag a b"
    on_cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    assert bash(script, "launch main.py", **stubs, RANKS="1", **on_cpu) == "python  -u main.py"


@pytest.mark.parametrize(
    ("visible", "ranks", "expected"),
    [
        ({}, "3", ["0", "1", "2"]),
        ({"CUDA_VISIBLE_DEVICES": "4,2,GPU-ab12"}, "3", ["4", "2", "GPU-ab12"]),
        ({"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "0"}, "2", ["0", "1"]),
    ],
)
def test_several_ranks_get_the_visible_gpus(script, driver, stubs, visible, ranks, expected):
    printed = bash(
        script, "launch main.py --flag", **driver, **stubs, **visible, RANKS=ranks, MASTER_PORT="77"
    )
    words = printed.split()
    assert words[2:5] == ["-u", "-m", "deepspeed.launcher.launch"]
    assert words[6:] == ["--master_port=77", "--log_level=warning", "main.py", "--flag"]
    world = base64.urlsafe_b64decode(words[5].removeprefix("--world_info="))
    assert json.loads(world) == {"localhost": expected}


def test_the_exit_code_is_that_of_the_step(script, tmp_path):
    (tmp_path / "main.py").write_text("raise SystemExit(3)")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with pytest.raises(subprocess.CalledProcessError) as problem:
        bash(script, f"launch {tmp_path}/main.py", RANKS="1", DS_ACCELERATOR="cpu", PATH=path)
    assert problem.value.returncode == 3


WAITS = """
import os, pathlib, signal, sys, time
def stop(number, frame):
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
rank = os.environ.get("RANK", 0)
note = pathlib.Path(__file__).with_name(f"making_{rank}")
note.write_text(f"{os.environ.get('WORLD_SIZE')} {sys.argv[1:]}")
note.rename(note.with_name(f"rank_{rank}"))
time.sleep(100)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_program_runs_on_each_rank_and_ctrl_c_of_a_process_group_returns_130(
    script, tmp_path, ranks
):
    """All its processes get the signal, as from a terminal; ranks end with 0, and DeepSpeed's
    launcher with 1."""
    (tmp_path / "main.py").write_text(WAITS)
    env = {**os.environ, "RANKS": str(ranks), "DS_ACCELERATOR": "cpu"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    words = [
        "bash",
        "-euo",
        "pipefail",
        "-c",
        f'source "{script}"; launch {tmp_path}/main.py --flag "a b"; echo after',
    ]
    run = subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(list(tmp_path.glob("rank_*"))) < ranks:
        assert run.poll() is None
        time.sleep(0.05)
    notes = {file.name: file.read_text() for file in tmp_path.glob("rank_*")}
    if ranks > 1:
        assert notes == {
            f"rank_{rank}": f"2 ['--local_rank={rank}', '--flag', 'a b']" for rank in range(2)
        }
    os.killpg(run.pid, signal.SIGINT)
    rest = run.communicate(timeout=60)[0]
    assert (run.returncode, "after" in rest) == (130, False)
