"""`benchmarks/curves.py`: its commands parse, and its pictures are those of the documents."""

import re
import sys
from pathlib import Path

import pytest

from dschat_ppo.config.cli import parse

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from curves import PICTURES, RUNS  # noqa: E402

sys.path.pop(0)
PICTURE = re.compile(r"!\[[^\]]+\]\((?:docs/)?pictures/([\w-]+)\.png\)")


@pytest.mark.parametrize("run", RUNS)
def test_a_run_has_a_script_and_flags_of_step_3(run):
    words = RUNS[run].format(work="w", out="o").split()
    assert (ROOT / words[0]).exists()
    flags = words[next(i for i, word in enumerate(words) if word.startswith("--")) :]
    models = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c", "--n_samples_per_prompt", "8"]
    parse("ppo", [*models, "--data_path", "d", "--eval_data_path", "e", "--output_dir", "o", *flags])


def test_each_picture_has_runs_and_is_shown():
    assert {run for runs, _ in PICTURES.values() for run in runs} == set(RUNS)
    pages = (ROOT / page for page in ("README.md", "docs/reading-curves.md"))
    shown = [name for page in pages for name in PICTURE.findall(page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(PICTURES)
    files = {file.stem for file in (ROOT / "docs/pictures").iterdir()}
    assert files == {*PICTURES, "learning", "distillation", "episodes"}
