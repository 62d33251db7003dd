"""The wheel: installed in a fresh environment, its commands train outside of the source tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from launch import ROOT

import dschat_ppo
from dschat_ppo import __main__ as program

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]

STEPS = ("sft", "reward", "dpo", "ppo")
TASKS = {"toy"}  # of the scripts: no command of an installed package


def run(*command: object, **settings) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **settings,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources, with this environment's setuptools."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        ROOT / "dschat_ppo", source / "dschat_ppo", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, source)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """(programs of a fresh virtual environment with the wheel, variables for them). The libraries
    are those of this environment, but not its dschat_ppo."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    programs = folder / "bin"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        programs / "python",
        "install",
        "--no-deps",
        "--no-index",
        wheel,
    )
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return programs, own | {
        "PATH": f"{programs}:{own['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def test_the_wheel_holds_the_package_and_its_data(wheel):
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = Parser().parsestr(
            archive.read(f"dschat_ppo-{dschat_ppo.__version__}.dist-info/METADATA").decode()
        )
    sources = [
        path
        for path in (ROOT / "dschat_ppo").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert {str(path.relative_to(ROOT)) for path in sources} <= names
    assert not any(name.startswith(("tests/", "training/")) for name in names)
    assert metadata["Author"] == "dschat_ppo developers"
    assert metadata["License"] == "Apache-2.0"
    assert any(line.startswith("Topic :: ") for line in metadata.get_all("Classifier"))


def test_each_step_has_a_command_with_help(environment, tmp_path):
    programs, variables = environment
    for step in STEPS:
        said = run(programs / f"dschat-{step}", "--help", cwd=tmp_path, env=variables)
        assert f"dschat-{step} [--num_accelerators N]" in said
    assert "dschat_ppo.tools.chat" in run(
        programs / "dschat-chat", "--help", cwd=tmp_path, env=variables
    )
    assert "--host" in run(programs / "dschat-serve-reward", "--help", cwd=tmp_path, env=variables)
    assert {file.name for file in programs.glob("dschat-*")} == {
        f"dschat-{name.replace('_', '-')}" for name in {*STEPS, *program.TOOLS} - TASKS
    }
    where = run(
        programs / "python",
        "-c",
        "import dschat_ppo; print(dschat_ppo.__file__)",
        cwd=tmp_path,
        env=variables,
    )
    assert Path(where.strip()).is_relative_to(programs.parent)


def test_an_installed_command_trains(environment, assets, tmp_path):
    programs, variables = environment
    flags = [
        "--model_name_or_path",
        assets / "lm",
        "--data_path",
        assets / "sft.jsonl",
        "--max_seq_len",
        64,
    ]
    flags += ["--data_split", "1,0,0", "--max_steps", 2, "--dtype", "fp32", "--output_dir", "out"]
    said = run(programs / "dschat-sft", *flags, cwd=tmp_path, env=variables)
    out, weights = tmp_path / "out", tmp_path / "out/model.safetensors"
    assert (out / "result.json").exists()
    assert "checkpoints: removed (" in said
    without_report = sum(
        file.stat().st_size
        for file in out.rglob("*")
        if file.is_file() and file.name != "report.html"
    )
    # a checkpoint has three times the size of the weights, in fp32
    assert without_report < 2 * weights.stat().st_size
