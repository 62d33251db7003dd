"""`--help` and wrong flags: the answer comes before torch and the Hugging Face libraries are
imported. Benchmarks, entry points and launched tests are rarely run: every name that they import
must exist."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAINS = sorted((ROOT / "training").glob("*/main.py"))
HEAVY = {
    "torch",
    "transformers",
    "deepspeed",
    "datasets",
    "tokenizers",
    "numpy",
    "pyarrow",
    "pandas",
}
_IMPORTED = re.compile(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", re.MULTILINE)


WRONG_VALUE = "--seed -1 --output_dir o --data_path d --model_name_or_path m".split()


@pytest.mark.parametrize(
    ("main", "words", "code", "printed"),
    [
        (MAINS[0], ["--help"], 0, "--output_dir"),
        (MAINS[0], ["--no_such_flag", "1"], 2, "unknown flag or value: --no_such_flag 1"),
        # what is imported to read and refuse the values differs among the steps
        *((main, WRONG_VALUE, 2, "error: ") for main in MAINS),
    ],
    ids=lambda value: value.parent.name if isinstance(value, Path) else None,
)
def test_help_and_wrong_flags_import_no_large_library(main, words, code, printed):
    command = [sys.executable, "-X", "importtime", str(main), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr[-2000:]
    assert printed in done.stdout + done.stderr
    imported = {name.split(".")[0] for name in _IMPORTED.findall(done.stderr)}
    assert {"argparse", "dschat_ppo"} <= imported, "the pattern reads the names of modules"
    assert imported & HEAVY == set()


@pytest.mark.parametrize(
    "tool", ["chat", "data", "env", "evaluate", "export", "plan", "replay", "report"]
)
def test_a_tool_answers_wrong_flags_without_a_large_library(tool):
    command = [sys.executable, "-X", "importtime", "-m", "dschat_ppo", tool, "--no_such_flag", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and re.search("^(error|.*: error): ", done.stderr, re.MULTILINE), (
        done.stderr[-2000:]
    )
    imported = {name.split(".")[0] for name in _IMPORTED.findall(done.stderr)}
    assert "dschat_ppo" in imported and imported & HEAVY == set()


FOLDERS = ("benchmarks", "training", "tests/workers", "tests/ranks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_names_imported_from_the_package_exist(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dschat_ppo":
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")
