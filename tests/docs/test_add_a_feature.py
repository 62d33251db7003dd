"""The feature of docs/extending.md works in a copy of the tree, as it stands there."""

import json
import math
import re
import shutil
import subprocess
import sys

import pytest
from bash_blocks import ROOT

pytestmark = pytest.mark.ranks

PAGE = ROOT / "docs/extending.md"
FILES = dict(
    re.findall(
        r"^```python\n# dschat_ppo/features/(repeats/\w+\.py)\n(.*?)^```",
        PAGE.read_text(encoding="utf-8"),
        re.M | re.S,
    )
)
# the loss of the second token, which repeats the first, and then a run in the same process
BY_HAND_AND_A_RUN = """
import json, math, pathlib, runpy, sys, torch
from types import SimpleNamespace
from dschat_ppo.features import hooks
config = SimpleNamespace(of=lambda kind: SimpleNamespace(repeat_coef=0.1))
made = [each(config, None, None) for each in hooks("loss_terms.loss_term_of")[-1:]]
marked = [each(config, None, None) for each in hooks("passes.pass_of")[-1:]]
rows = SimpleNamespace(
    response_ids=torch.tensor([[5, 5, 7, 7]]), response_mask=torch.tensor([[True] * 3 + [False]])
)
rows.extra = marked[0].columns_of(rows)
actor = SimpleNamespace(logprobs=torch.full((1, 4), math.log(0.25)))
losses = made[0].token_losses(rows, actor).tolist()
pathlib.Path(sys.argv.pop(1)).write_text(json.dumps(losses))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with the feature."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("dschat_ppo", "training"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tree / "dschat_ppo/features/repeats"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Repetition."""\n')
    for name, text in FILES.items():
        (folder.parent / name).write_text(text)
    table = tree / "dschat_ppo/features/__init__.py"
    text = table.read_text()
    assert text.count("\n)\n") == 1
    table.write_text(text.replace("\n)\n", '\n    "repeats",\n)\n'))
    return tree


def python(tree, *words) -> str:
    """What a Python process prints, whose modules are those of the tree."""
    ended = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_page_has_the_whole_feature():
    assert sorted(FILES) == [
        f"repeats/{n}.py" for n in ("columns", "flags", "loss_terms", "passes")
    ]
    lines = [line for text in FILES.values() for line in text.splitlines() if line.strip()]
    assert len(lines) <= 45


@pytest.fixture(scope="module")
def outcome(tree, assets, tmp_path_factory):
    """(losses of the tokens, what a run printed, its metrics)."""
    folder = tmp_path_factory.mktemp("outcome")
    said = python(
        tree,
        *("-c", BY_HAND_AND_A_RUN, folder / "losses"),
        "training/step3_ppo/main.py",
        *("--actor_model_name_or_path", assets / "lm"),
        *("--critic_model_name_or_path", assets / "reward"),
        *("--data_path", assets / "prompts.jsonl", "--data_split", "0,0,1"),
        *("--output_dir", folder / "out", "--max_steps", 1, "--dtype", "fp32"),
        *("--per_device_generation_batch_size", 16, "--max_prompt_seq_len", 32),
        *("--max_answer_seq_len", 16),
        *("--repeat_coef", 0.1),
    )
    losses = json.loads((folder / "losses").read_text())
    return losses, said, (folder / "out/metrics.jsonl").read_text().splitlines()


def test_its_loss_is_that_by_hand(outcome):
    losses, _, _ = outcome
    # -log(1 - p) of the second token; p is 1/4
    assert losses[0] == pytest.approx([0, -math.log(0.75), 0, 0])


def test_a_run_has_its_term_and_its_metric(outcome):
    _, said, metrics = outcome
    assert "loss = ppo + 0.1 repeats" in said
    [step] = metrics
    assert 0 < json.loads(step)["policy/repeat_loss"] < math.inf
