"""What the metrics mean."""

import re
from pathlib import Path

import pytest

import dschat_ppo
from dschat_ppo.html_report.figures import FIGURES
from dschat_ppo.html_report.meanings import PHASES, meaning_of

NAME = "some_name"


@pytest.mark.parametrize("pattern", [pattern for figure in FIGURES for pattern in figure.metrics])
def test_every_entry_of_a_legend_has_a_meaning(pattern):
    phase = "memory/train_peak_gib" if pattern == "memory/*gib" else "time/train"
    name = pattern.replace("time/*", phase) if "/*gib" not in pattern else phase
    assert meaning_of(name.replace("*", NAME)), pattern


def test_every_timed_phase_has_a_meaning():
    """The names in `PhaseClock.phase("...")`, which are the metrics below time/ and memory/."""
    sources = Path(dschat_ppo.__file__).parent.rglob("*.py")
    timed = {name for file in sources for name in re.findall(r'clock\.phase\("([^"]+)"\)', file.read_text())}
    assert timed == set(PHASES) and len(timed) > 5


@pytest.mark.parametrize(("name", "expected"), [
    ("time/score_statistics", PHASES["score_statistics"]),
    ("memory/rollout_peak_gib", "peak, generation of the responses"),
    ("time/train_tokens_per_s", "tokens per second, forward and backward passes and the optimizer"),
    ("time/train_imbalance", "time of the slowest rank over the mean of the ranks; 1 = even"),
    ("reward/score_mean", "mean score, as the reward sources give it"),
    ("reward/length_mean", "mean score of this reward source"),
    ("eval/length_mean", "mean length on the held-out prompts"),
    ("something/else", ""),
])  # fmt: skip
def test_meanings(name, expected):
    assert meaning_of(name) == expected
