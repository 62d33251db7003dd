"""Without the folders of features and their lines of the table, the rest of the project works: the
loop's tests pass, and a default run of step 3 leaves the same bits.

A change deletes features in four groups, a release also each one alone. Which modules import a
feature, `test_import_layers.py` checks without a run.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from dschat_ppo.features import FEATURES

ROOT = Path(__file__).parent.parent
COPIED = ("dschat_ppo", "training", "tests", "pyproject.toml")
# feature -> those whose modules it imports: it goes with them
BUILDS_ON = {"agents": ("environments",)}
# which of the loop's tests run without each group: no repetitions
CHOSEN = "not test_loop or order_of_a_run or metrics_of_a_run or equals_the_whole_run"
ALL = "test"

pytestmark = pytest.mark.ranks


def groups() -> list[tuple[str, ...]]:
    """Four groups of features: each feature is in two of them, so that each is deleted, and runs
    beside what is deleted. The six pairs of groups are given in turn."""
    pairs = list(combinations(range(4), 2))
    members: list[list[str]] = [[], [], [], []]
    for number, feature in enumerate(FEATURES):
        for group in pairs[number % len(pairs)]:
            members[group].append(feature)
    return [tuple(group) for group in members]


def copied(folder: Path, without: Sequence[str]) -> Path:
    """A copy of the tree without these features, and without those that build on them."""
    tree = folder / "tree"
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name)  # with what Python has compiled
        else:
            shutil.copy(source, tree / name)
    deleted = set(without)
    for feature, needed in BUILDS_ON.items():
        if deleted & set(needed):
            deleted.add(feature)
    for feature in deleted:
        shutil.rmtree(tree / "dschat_ppo/features" / feature)
        shutil.rmtree(tree / "tests/features" / feature, ignore_errors=True)
    table = tree / "dschat_ppo/features/__init__.py"
    lines = table.read_text().splitlines(keepends=True)
    deleted_lines = {f'"{feature}",' for feature in deleted}
    table.write_text("".join(line for line in lines if line.strip() not in deleted_lines))
    return tree


class Worker:
    """`workers/without_features.py`, and the folder of its trees."""

    def __init__(self, assets: Path, folder: Path):
        self.assets = assets
        self.folder = folder
        self.process = self.started()

    def started(self) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = "1"
        return subprocess.Popen(
            [sys.executable, str(ROOT / "tests/workers/without_features.py"), str(self.assets)],
            env=environment,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def result(self, without: Sequence[str], chosen: str) -> dict:
        """What a default run and these tests of the loop give in a tree without the features."""
        if self.process.poll() is not None:
            self.process = self.started()  # what was deleted before ended it: only that failed
        tree = copied(self.folder, without)
        print(tree, chosen, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith('{"tree"'):  # libraries print lines of their own
                shutil.rmtree(tree)
                return json.loads(line)
        shutil.rmtree(tree)
        raise AssertionError(f"the worker has ended with {self.process.wait()}")


@pytest.fixture(scope="module")
def worker(assets, tmp_path_factory):
    made = Worker(assets, tmp_path_factory.mktemp("trees"))
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="module")
def whole(worker) -> dict:
    return worker.result((), CHOSEN)


def test_the_loops_tests_pass_in_a_copy(whole):
    assert whole["tests"] == 0, whole["said"]


def test_each_feature_is_deleted_in_two_of_the_groups():
    deleted = [feature for group in groups() for feature in group]
    assert sorted(deleted) == sorted(2 * FEATURES)


def works_without(worker, whole, features, chosen):
    result = worker.result(features, chosen)
    assert result["digest"] == whole["digest"], result["said"]
    assert result["tests"] == 0, result["said"]


@pytest.mark.parametrize("features", groups(), ids=" ".join)
def test_the_rest_works_without_a_group(worker, whole, features):
    works_without(worker, whole, features, CHOSEN)


@pytest.mark.release
@pytest.mark.parametrize("feature", FEATURES)
def test_the_rest_works_without_it(worker, whole, feature):
    works_without(worker, whole, [feature], ALL)
