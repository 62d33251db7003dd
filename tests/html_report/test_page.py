"""The page as text: figures and their data, tables, states, escaping, and no address that a browser would load."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from report_runs import SAMPLE, ppo_lines, write_run

from dschat_ppo.html_report.page import Figure, answers, drawings, figures_of, page, rounded, thin
from dschat_ppo.html_report.run_folder import Answer, Run, read_runs

EVIL = '</script><script>document.title="run"</script><img src=x onerror="document.title=1">&amp;'


class Tags(HTMLParser):
    """Names of the elements, their attributes, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def test_an_answer_with_html_adds_no_element(tmp_path):
    turns = [{"role": EVIL, "text": EVIL, "reward": 1.0}]
    sample = SAMPLE | {"prompt": EVIL, "answer": EVIL, "turns": turns}
    event = {"step": 1, "name": EVIL, "seen": EVIL, "cause": EVIL, "change": EVIL}
    harmless = json.loads(json.dumps({"sample": sample, "event": event}).replace(json.dumps(EVIL), '"x"'))
    lines = [line | {f"reward/{EVIL}_mean": 1.0} for line in ppo_lines(2)]
    plain = [line | {"reward/x_mean": 1.0} for line in ppo_lines(2)]
    evil = write_run(tmp_path / "1", lines, {"data_path": EVIL}, samples=[sample], health=[event])
    good = write_run(
        tmp_path / "2", plain, {"data_path": "x"}, samples=[harmless["sample"]], health=[harmless["event"]]
    )
    found, expected = (Tags(page(read_runs([folder]), 0.0)) for folder in (evil, good))
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in expected.tags]
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    shown = page(read_runs([evil]), 0.0)
    (data,) = re.findall('id="data">(.*?)</script>', shown)
    assert EVIL in str(json.loads(data)) and not re.search("[<>&]", data)


def test_the_page_loads_nothing(tmp_path):
    made = Tags(page(read_runs([write_run(tmp_path, ppo_lines(3))]), 0.0))
    assert not [
        tag for tag, attributes in made.tags if {"src", "srcset"} & attributes.keys() or tag in ("link", "iframe")
    ]
    links = [attributes["href"] for tag, attributes in made.tags if "href" in attributes]
    assert links[:3] == ["#overview", "#policy", "#critic"]
    assert {link[1:] for link in links} <= {attributes.get("id") for _, attributes in made.tags}
    (policy,) = [a["content"] for _, a in made.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy and "The MIT License" in " ".join(made.words)  # of the chart library


def text_of(*folders, now: float = 1015.0) -> str:
    return " ".join(" ".join(Tags(page(read_runs(folders), now)).words).split())


def test_the_overview_tells_finished_from_unfinished_runs(tmp_path):
    done = write_run(tmp_path / "done", ppo_lines(3), {"actor_model_name_or_path": "m", "seed": 1}, {"world_size": 2})
    starts = [{"step": 1}, {"step": 2}]
    cut = write_run(tmp_path / "cut", ppo_lines(2), {"actor_model_name_or_path": "n", "seed": 1}, starts=starts)
    found = text_of(done, cut)
    assert "state finished not finished; last step 0:05 before this report" in found
    assert "times started - 2 " in found
    assert "score 0.1 → 0.3 0.1 → 0.2" in found
    assert "duration 0:10 0:05" in found
    assert "flag done cut --actor_model_name_or_path m n" in found
    assert "--seed 1 1" not in found


def test_one_run_has_its_models_its_changed_flags_long_answers_cut(tmp_path):
    """And one evaluation is one number, as --validate_only writes it."""
    line = {"step": 0, "time": 1000.0, "eval/score": 7.497, "eval_loss": 2.0}
    config = {"actor_model_name_or_path": "m", "temperature": 1.0, "kl_coef": 0.5}
    run = write_run(tmp_path / "1", [line], config, {"world_size": 1}, samples=[SAMPLE | {"answer": "x" * 3500}])
    (run / "models.json").write_text('{"actor": "llama, 1.7 M parameters", "devices": "2 cpu ranks, bf16"}')
    found = text_of(run)
    assert "steps 0, evaluation without training" in found and "held-out score 7.497 held-out loss 2 " in found
    assert " actor llama, 1.7 M parameters devices 2 cpu ranks, bf16 " in found
    assert "differ from their defaults flag value --actor_model_name_or_path m --kl_coef 0.5" in found
    assert "temperature" not in found
    assert "x" * 2000 + " [... 1,500 more characters]" in found and "x" * 2001 not in found


def run_of(name: str = "a", answers=(), **metrics) -> Run:
    """A run with these metrics: name -> values of steps 1, 2, ..."""
    points = {key: [(step, value) for step, value in enumerate(values, 1)] for key, values in metrics.items()}
    steps = max((len(values) for values in metrics.values()), default=1)
    return Run(name, Path(name), points, dict.fromkeys(range(1, steps + 1), 0.0), {}, {}, None, None, [], [*answers])


def panels_of(title: str, *runs: Run) -> list[dict]:
    return next(made.panels for made in drawings(runs) if made.figure.title == title)


def test_one_run_has_a_panel_of_lines_and_several_have_a_panel_for_each_metric():
    (panel,) = panels_of("Loss", run_of(loss=[3.0, 2.0], eval_loss=[4.0]))
    assert [(line["label"], line["x"], line["y"]) for line in panel["series"]] == [
        ("loss", [1, 2], [3, 2]), ("eval_loss", [1], [4]),
    ]  # fmt: skip
    panels = panels_of("Loss", run_of("a", loss=[3.0, None]), run_of("b", loss=[2.0], eval_loss=[4.0]))
    found = [(panel["title"], [(line["label"], line["run"]) for line in panel["series"]]) for panel in panels]
    assert found == [("loss", [("a", 0), ("b", 1)]), ("eval_loss", [("b", 1)])]


def test_a_long_series_keeps_the_lowest_the_highest_a_nan_and_the_last_point_of_its_stretches():
    points = [(1, 1.0), (2, 3.0), (3, 2.0), (4, None), (5, 9.0), (6, None), (7, 4.0), (8, 5.0)]
    assert thin(points, 8) == points
    assert thin(points, 4) == [(1, 1.0), (2, 3.0), (4, None), (5, 9.0), (6, None), (7, 4.0), (8, 5.0)]
    long = thin([(step, 7.0 if step == 12345 else 1.0) for step in range(1, 20001)], 400)
    assert (12345, 7.0) in long and long[-1] == (20000, 1.0) and len(long) <= 402
    assert [rounded(value) for value in (0.123456, 12345.678, -2.0, None)] == [0.1235, 12350, -2, None]


def answer(kind: str, step: int, prompt: str, text: str = "a", score: float = 1.0) -> Answer:
    return Answer(kind, step, prompt, text, score, {}, None, 1, "eos")


def test_answers_of_one_run_compare_its_first_and_last_evaluation_and_of_two_runs_their_last_ones():
    held_out = [answer("held-out", step, "p", f"at {step}") for step in (0, 5, 10)]
    samples = [answer("training", 2, "q", str(score), score) for score in (1, 3, 2)]
    found = answers([run_of(answers=held_out + samples)])
    assert [(prompt, [(title, own[0].text) for title, own in compared]) for prompt, compared in found["held_out"]] == [
        ("p", [("step 0", "at 0"), ("step 10", "at 10")]),
    ]  # fmt: skip
    assert [(title, [one.text for one in own]) for title, own in found["training"]] == [("step 2", ["3", "2", "1"])]
    [(_, compared)] = answers([run_of("a", held_out), run_of("b", held_out)])["held_out"]
    assert [title for title, _ in compared] == ["a, step 10", "b, step 10"]


def shown_by(title: str, known: list[str]) -> list[str]:
    return next(names for figure, names in figures_of(known) if figure.title == title)


def test_the_table_of_figures_sorts_the_names_of_metrics():
    assert Figure("s", "t", ("b", "a/*"), "r", without=("a/x",)).names(["a/1", "a/x", "c", "b"]) == ["b", "a/1"]
    known = ["reward/score_mean", "reward/total_mean", "reward/rule_mean", "reward/rule_share", "reward/score_mean/web"]
    assert shown_by("Reward by source", known) == ["reward/rule_mean", "reward/score_mean/web", "reward/rule_share"]
    known = ["time/rollout", "time/rollout_tokens_per_s"]
    assert [shown_by(title, known) for title in ("Time per step by phase", "Throughput")] == [known[:1], known[1:]]
    others = [names for figure, names in figures_of(["step", "time", "loss", "zeta", "a/b"]) if not figure.reading]
    assert others == [["a/b"], ["zeta"]]
