"""The page of an evaluation in headless Chromium: it fits on screens of all widths, and answers stand in even rows."""

from pathlib import Path

import pytest
import torch
from headless_chromium import Chromium, needs_chromium

from dschat_ppo.ppo.evaluation import Answered
from dschat_ppo.tools.evaluate_models import Answers, Share
from dschat_ppo.tools.evaluate_report import html_of, model_table, notes
from dschat_ppo.tools.evaluate_run import Evaluated, Result

FOLDER = Path("/a/long/path/that/no/table/has/room/for") / ("x" * 80)
NAMES = ["sft", "ppo/actor", "best/actor", "a-name-of-a-model-7B-instruct", "fifth"]
METRICS = {"score": 7.061, "length_mean": 17.18, "ended_share": 1.0, "pass@1": 0.5938, "pass@2": 0.7, "majority@2": 0.5}
COLUMNS = "[...document.querySelectorAll('.cells')].map(e => getComputedStyle(e).gridTemplateColumns.split(' ').length)"
WIDER = "document.documentElement.scrollWidth > innerWidth || [...document.querySelectorAll('.table')].some(e => e.scrollWidth > e.clientWidth)"  # noqa: E501


def made(models: int, prompts: int = 2, sources: tuple[str, ...] = ("model", "length")) -> Evaluated:
    """An evaluation of models with one greedy and two sampled answers to each prompt."""
    results = []
    for name in NAMES[:models]:
        for decoding, samples in (("greedy", 1), ("sampled", 2)):
            rows = [
                Answered(i, f"user: Where is {i}?", ["In the hall. " * 9] * samples, [1.25] * samples, [18] * samples,
                         ["eos"] * samples, None)
                for i in range(prompts)
            ]  # fmt: skip
            scores = torch.zeros(prompts * samples, len(sources))
            answers = Answers(str(FOLDER / name), name, decoding, rows, list(sources), scores, 0)
            wins = None if name == "sft" else Share(0.5, 0.41, 0.59, prompts)
            results.append(Result(answers, METRICS, dict.fromkeys(sources, 1.5), wins))
    flags = {"pass_score": "1.0", "samples": "2", "seed": "3"}
    return Evaluated(flags, True, results, {}, [])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@needs_chromium
@pytest.mark.parametrize(("models", "wide"), [(1, [2]), (2, [2, 2]), (4, [4, 4]), (5, [3, 3])])
def test_the_page_fits_and_answers_are_in_even_rows(tmp_path, browser, models, wide):
    (tmp_path / "page.html").write_text(html_of(made(models, prompts=1)))
    for width, expected in ((1200, wide), (390, [1] * len(wide))):
        browser.size(width, 900)
        browser.open((tmp_path / "page.html").as_uri())
        assert browser.evaluate(COLUMNS) == expected
        assert not browser.evaluate(WIDER), f"something is wider than {width} pixels"
    assert browser.problems() == []


@needs_chromium
def test_short_names_have_their_path_as_a_tooltip(tmp_path, browser):
    (tmp_path / "page.html").write_text(html_of(made(2)))
    browser.open((tmp_path / "page.html").as_uri())
    titles = "[...document.querySelectorAll('.results th[scope=row], .cell h3')].map(e => [e.textContent, e.title])"
    found = dict(browser.evaluate(titles))
    assert found["sft"] == found["sft, greedy"] == found["sft, sampled"] == str(FOLDER / "sft")


def test_sources_of_rewards_are_not_taken_for_other_columns():
    head, first, *_ = model_table(made(2))
    assert dict(zip(head, first, strict=True))["score of model"] == "1.5" and head.count("model") == 1


def test_one_sample_is_a_share_of_prompts():
    found = made(1)
    found.flags["samples"] = "1"
    assert notes(found)[0] == "pass@1: share of prompts whose answer scores at least 1 (--pass_score)"
    assert not any(line.startswith(("pass@k", "wins")) for line in notes(found))
