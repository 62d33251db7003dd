"""Data of the figures and the choice of answers, by hand."""

from pathlib import Path

import pytest
from report_runs import ppo_lines, write_run

from dschat_ppo.html_report import page_data
from dschat_ppo.html_report.page_data import answer_rows, cut, drawings, evenly, health_marks
from dschat_ppo.html_report.run_folder import Answer, Run, read_runs


def run_of(name: str = "a", answers=(), health=None, **metrics) -> Run:
    """A run with these metrics: name -> values of steps 1, 2, ..."""
    points = {key: [(step, value) for step, value in enumerate(values, 1)] for key, values in metrics.items()}
    steps = max((len(values) for values in metrics.values()), default=1)
    return Run(name, Path(name), "PPO", points, dict.fromkeys(range(1, steps + 1), 0.0), {}, {}, None, health, [],
               list(answers), {})  # fmt: skip


def panels_of(title: str, *runs: Run) -> list[dict]:
    return next(made.panels for made in drawings(runs) if made.figure.title == title)


def test_one_run_has_one_panel_with_a_line_for_each_metric():
    (panel,) = panels_of("Loss", run_of(loss=[3.0, 2.0], eval_loss=[4.0]))
    assert [(line["label"], line["colour"], line["x"], line["y"]) for line in panel["series"]] == [
        ("loss", 0, [1, 2], [3, 2]), ("eval_loss", 1, [1], [4]),
    ]  # fmt: skip


def test_several_runs_have_a_panel_for_each_metric_with_a_line_for_each_run():
    panels = panels_of("Loss", run_of("a", loss=[3.0]), run_of("b", loss=[2.0], eval_loss=[4.0]))
    found = [(panel["title"], [(line["label"], line["colour"]) for line in panel["series"]]) for panel in panels]
    assert found == [("loss", [("a", 0), ("b", 1)]), ("eval_loss", [("b", 1)])]


def test_a_metric_without_a_finite_value_has_no_line():
    assert [made.figure.title for made in drawings([run_of(loss=[None, None], accuracy=[0.5])])] == ["Accuracy"]


def test_reward_against_kl_pairs_the_steps_that_have_both():
    run = run_of(**{"kl/ref_k1": [0.1, None, 0.3, 0.4], "reward/score_mean": [1.0, 2.0, 3.0]})
    (panel,) = panels_of("Reward versus KL", run)
    (line,) = panel["series"]
    assert (line["steps"], line["x"], line["y"]) == ([1, 3], [0.1, 0.3], [1, 3])
    assert (panel["across"], panel["up"]) == ("kl/ref_k1", "reward/score_mean")


def test_reward_against_kl_needs_both_metrics():
    assert "Reward versus KL" not in [made.figure.title for made in drawings([run_of(**{"kl/ref_k1": [0.1]})])]


def test_phases_are_stacked_largest_first_and_a_missing_one_is_0():
    (panel,) = panels_of("Time per step by phase", run_of(**{"time/a": [1.0, 1.0, 1.0], "time/b": [2.0, None, 4.0]}))
    assert [(band["label"], band["y"]) for band in panel["series"]] == [("time/b", [2, 0, 4]), ("time/a", [1, 1, 1])]


def test_the_smallest_of_many_phases_are_added_up():
    (panel,) = panels_of("Time per step by phase", run_of(**{f"time/{n}": [float(n)] for n in range(1, 11)}))
    assert [band["label"] for band in panel["series"]][-2:] == ["time/4", "other phases"]
    assert panel["series"][-1]["y"] == [1 + 2 + 3]


def test_the_summary_and_the_table_give_the_numbers_in_words():
    (made,) = [made for made in drawings([run_of(loss=[3.0, None, 0.5, 1.0])]) if made.figure.title == "Loss"]
    assert made.summary == "Line chart. Loss: loss of a from 3 to 1."
    assert made.table == [("a", "loss", ["3", "1", "0.5", "3"])]


def test_health_events_without_a_step_have_no_mark():
    run = run_of(health=[{"step": 3, "name": "kl"}, {"name": "x"}], loss=[1.0])
    assert health_marks(run) == [{"step": 3, "name": "kl"}]


def answer(kind: str, step: int, prompt: str, text: str = "a") -> Answer:
    return Answer(kind, step, prompt, text, 1.0, {}, None, 1, "eos")


def test_answers_that_do_not_fit_lose_whole_prompts_and_whole_steps(monkeypatch):
    monkeypatch.setattr(page_data, "MOST_TEXT", 120)  # 60 characters for each kind
    held_out = [answer("held-out", step, f"prompt {n}", "x" * 12) for n in range(9) for step in (0, 5)]  # 40 a prompt
    training = [answer("training", step, "p" * 10, "x" * 20) for step in range(5)]  # 30 a step
    rows, count = answer_rows([run_of(answers=held_out + training)])
    assert count == 23
    assert [(row["step"], row["prompt"]) for row in rows if row["kind"] == "held-out"] == [
        (0, "prompt 8"),
        (5, "prompt 8"),
    ]
    assert [row["step"] for row in rows if row["kind"] == "training"] == [0, 4]


def test_a_long_answer_is_cut_and_says_so():
    assert cut("x" * 2000) == "x" * 2000
    assert cut("x" * 3500) == "x" * 2000 + " [... 1,500 more characters]"


@pytest.mark.parametrize(("count", "expected"), [(1, [9]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, list(range(10)))])
def test_evenly_keeps_both_ends(count, expected):
    assert evenly(list(range(10)), count) == expected


def test_six_runs_of_twenty_thousand_steps_stay_small(tmp_path):
    lines = ppo_lines(20)
    runs = read_runs([write_run(tmp_path / str(number), lines) for number in range(6)])
    long = [run_of(str(n), **{name: [v for _, v in points] * 1000 for name, points in runs[n].metrics.items()})
            for n in range(6)]  # fmt: skip
    made = [line for drawing in drawings(long) for panel in drawing.panels for line in panel["series"]]
    assert max(len(line["x"]) for line in made) == page_data.MOST_POINTS_OF_MANY
