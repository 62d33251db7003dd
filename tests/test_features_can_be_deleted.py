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
# feature -> those whose modules it imports: it goes with them
BUILDS_ON = {"agents": ("environments",)}
# which of the loop's tests run without each feature: without repetitions, except for a release
CHOSEN = "not test_loop or order_of_a_run or metrics_of_a_run or equals_the_whole_run"
ALL = "test"

pytestmark = pytest.mark.ranks


def copied(folder: Path, without: str | None) -> Path:
    """A copy of the tree without a feature, and without those that build on it."""
    tree = folder / (without or "whole")
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name)  # with what Python has compiled
        else:
            shutil.copy(source, tree / name)
    deleted = [without] if without else []
    deleted += [feature for feature, needed in BUILDS_ON.items() if without in needed]
    for feature in deleted:
        shutil.rmtree(tree / "dschat_ppo/features" / feature)
        shutil.rmtree(tree / "tests/features" / feature, ignore_errors=True)
        table = tree / "dschat_ppo/features/__init__.py"
        lines = table.read_text().splitlines(keepends=True)
        table.write_text("".join(line for line in lines if line.strip() != f'"{feature}",'))
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

    def result(self, without: str | None, chosen: str) -> dict:
        """What a default run and these tests of the loop give in a tree without the feature."""
        if self.process.poll() is not None:
            self.process = self.started()  # the feature before ended it: only that one failed
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
    return worker.result(None, ALL)


def test_a_feature_that_cannot_be_deleted_yet_is_a_feature():
    assert set(NOT_YET) <= set(FEATURES)


def test_the_loops_tests_pass_in_a_copy(whole):
    assert whole["tests"] == 0, whole["said"]


# each takes ten seconds: only a release deletes these
SELDOM_CHANGED = ("averages", "cuda_graphs", "muon", "ptx", "push_to_hub", "replay", "sleep")


def marks_of(feature):
    """The marks of the test that deletes a feature."""
    if feature in SELDOM_CHANGED:
        return [pytest.mark.release]
    return []


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(CHOSEN, id="chosen tests"),
        pytest.param(ALL, id="all tests", marks=pytest.mark.release),
    ],
)
@pytest.mark.parametrize(
    "feature",
    [pytest.param(name, marks=marks_of(name)) for name in FEATURES if name not in NOT_YET],
)
def test_the_rest_works_without_it(worker, whole, feature, chosen):
    result = worker.result(feature, chosen)
    assert result["digest"] == whole["digest"], result["said"]
    assert result["tests"] == 0, result["said"]
