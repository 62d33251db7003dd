"""Without the folder of a feature and its line of the table, the rest of the project works: the
loop's tests pass, and a default run of step 3 leaves the same bits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dschat_ppo.features import FEATURES

ROOT = Path(__file__).parent.parent
COPIED = ("dschat_ppo", "training", "tests", "pyproject.toml")
# features that the core still imports or asks for by name, and what hinders their deletion
NOT_YET: dict[str, str] = {}

pytestmark = pytest.mark.ranks


def copied(folder: Path, without: str | None) -> Path:
    """A copy of the tree without a feature."""
    tree = folder / (without or "whole")
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    if without:
        shutil.rmtree(tree / "dschat_ppo/features" / without)
        shutil.rmtree(tree / "tests/features" / without, ignore_errors=True)
        table = tree / "dschat_ppo/features/__init__.py"
        lines = table.read_text().splitlines(keepends=True)
        table.write_text("".join(line for line in lines if line.strip() != f'"{without}",'))
    return tree


@pytest.fixture(scope="module")
def results(assets, tmp_path_factory) -> dict[str, dict]:
    """What `workers/without_features.py` finds in the whole tree and without each feature."""
    folder = tmp_path_factory.mktemp("trees")
    names = [None, *(name for name in FEATURES if name not in NOT_YET)]
    trees = [copied(folder, name) for name in names]
    command = [sys.executable, str(ROOT / "tests/workers/without_features.py"), str(assets), *trees]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    # libraries print lines of their own
    printed = [line for line in ended.stdout.splitlines() if line.startswith('{"tree"')]
    tree_results = map(json.loads, printed)
    return {Path(result["tree"]).name: result for result in tree_results}


def test_a_feature_that_cannot_be_deleted_yet_is_a_feature():
    assert set(NOT_YET) <= set(FEATURES)


def test_the_loops_tests_pass_in_a_copy(results):
    assert results["whole"]["tests"] == 0, results["whole"]["said"]


@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in NOT_YET])
def test_the_rest_works_without_it(results, feature):
    result = results[feature]
    assert result["digest"] == results["whole"]["digest"], result["said"]
    assert result["tests"] == 0, result["said"]
