"""The table of figures: names of metrics and patterns."""

from dschat_ppo.html_report.figures import FIGURES, Figure, others


def test_a_figure_shows_what_its_patterns_match_in_their_order():
    figure = Figure("s", "t", "r", ("b", "a/*"), without=("a/x",))
    assert figure.names(["a/1", "a/x", "c", "b"]) == ["b", "a/1"]


def figure_of(title: str) -> Figure:
    return next(figure for figure in FIGURES if figure.title == title)


def test_reward_by_source_shows_sources_and_data_sets_alone():
    known = ["reward/score_mean", "reward/total_mean", "reward/rule_mean", "reward/rule_share", "reward/score_mean/web"]
    assert figure_of("Reward by source").names(known) == [
        "reward/rule_mean",
        "reward/score_mean/web",
        "reward/rule_share",
    ]


def test_time_and_throughput_share_a_prefix_and_do_not_mix():
    known = ["time/rollout", "time/rollout_tokens_per_s"]
    assert figure_of("Time per step by phase").names(known) == ["time/rollout"]
    assert figure_of("Throughput").names(known) == ["time/rollout_tokens_per_s"]


def test_other_metrics_are_those_that_no_figure_shows():
    assert others(["step", "time", "epoch", "loss", "zeta", "advantage/std"]) == ["advantage/std", "zeta"]


def test_every_figure_says_how_to_read_it_in_one_sentence():
    assert all(figure.reading.endswith(".") and ". " not in figure.reading for figure in FIGURES)
    assert len({figure.title for figure in FIGURES}) == len(FIGURES)
