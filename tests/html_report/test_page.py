"""Reports: reading the files of a run, whatever state they are in; the page as text, with no
address that a browser would load; that a report is never the end of a finished run."""

import json
import re
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import SAMPLE, ppo_lines, write_run

from dschat_ppo.errors import NonFiniteError, StopRequested, UnhealthyRun
from dschat_ppo.html_report.charts import charts, thin
from dschat_ppo.html_report.figures import Figure, figures_of
from dschat_ppo.html_report.page import page, report_run, reporting
from dschat_ppo.html_report.responses import shown_responses
from dschat_ppo.html_report.run_folder import ReportedResponse, Run, read_run, read_runs
from dschat_ppo.html_report.tables import rounded


def test_metrics_become_columns(tmp_path):
    first = {"step": 1, "time": 5.0, "rollout/count": 4, "text": "x"}
    # of two lines of a step the later counts
    again = {"step": 2, "time": 6.5, "loss": None, "rollout/count": 5}
    write_run(tmp_path, [first, {"step": 2, "time": 6.0, "loss": 1.0}, again])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ti')  # incomplete: the run is running
    run = read_run(tmp_path, "a")
    assert run.metrics == {"rollout/count": [(1, 4), (2, 5)], "loss": [(2, None)]}
    assert run.times == {1: 5.0, 2: 6.5}
    assert (run.result, run.health, run.responses, run.starts) == (None, None, [], [])
    config = {"actor_model_name_or_path": "m", "advantage_estimator": "grpo"}
    assert read_run(write_run(tmp_path / "grpo", [first], config), "a").kind == "PPO (grpo)"


def test_damaged_lines_and_files_are_skipped_and_the_rest_is_read(tmp_path):
    write_run(tmp_path, [{"step": 1, "loss": 1.0}])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n[1]\n{"step": 2, "loss": 2.0}\n')
    (tmp_path / "config.yaml").write_text("remote_reward_url: http://me:secret@host/score\n")
    assert read_run(tmp_path, "a").config == {"remote_reward_url": "http://***@host/score"}
    (tmp_path / "config.yaml").write_text("{a: [")
    (tmp_path / "result.json").write_text("{")
    run = read_run(tmp_path, "a")
    assert run.metrics["loss"] == [(1, 1.0), (2, 2.0)]
    assert run.config == {}
    assert run.result is None


def test_answers_of_evaluations_and_of_training(tmp_path):
    row = {
        "index": 0,
        "prompt": "p",
        "answers": ["a", "b"],
        "scores": [1.0, None],
        "lengths": [3, 4],
        "ended": ["stop", "length"],
        "kl": [0.75, None],
        "scores_by_source": {"rule": [1.0, None], "learned": [0.5, 2.0]},
    }
    alone = {
        "prompt": "p",
        "answers": ["a"],
        "scores": [1],
        "lengths": [3],
        "ended": ["eos"],
        "kl": None,
        "scores_by_source": {},
    }
    sample = {
        "step": 2,
        "prompt": "q",
        "answer": "c",
        "tokens": 5,
        "score": 2.0,
        "scores": {"rule": 2.0},
        "kl": 0.5,
        "length": 5,
        "ended": "stop",
    }
    files = {
        "step_000010": [row],
        "step_000011": [alone],
        "step_000011_copy": [row],
        "samples": [sample],
    }
    run = read_run(write_run(tmp_path, ppo_lines(1), **files), "a")
    found = [
        (one.kind, one.step, one.prompt, one.text, one.score, one.kl, one.tokens, one.ended)
        for one in run.responses
    ]
    assert found == [
        ("training", 2, "q", "c", 2.0, 0.5, 5, "stop"),
        ("held-out", 10, "p", "a", 1.0, 0.25, 3, "stop"),  # KL: 0.75 over 3 tokens
        ("held-out", 10, "p", "b", None, None, 4, "length"),
        ("held-out", 11, "p", "a", 1, None, 3, "eos"),
    ]
    assert [one.scores for one in run.responses] == [
        {"rule": 2.0},
        {"rule": 1.0, "learned": 0.5},
        {"rule": None, "learned": 2.0},
        {},
    ]


def test_turns_of_episodes(tmp_path):
    turns = [
        {"role": "model", "text": "3", "reward": 0.5},
        {"role": "environment", "text": "no"},
        {"role": "call", "text": "f", "reward": None},
    ]
    row = {
        "prompt": "p",
        "answers": ["a", "b"],
        "lengths": [3, 4],
        "ended": ["eos", "eos"],
        "kl": None,
    }
    files = {"step_1": [row, row | {"turns": [[], turns]}], "samples": [SAMPLE | {"turns": turns}]}
    run = read_run(write_run(tmp_path, ppo_lines(1), **files), "a")
    read = [("model", "3", 0.5), ("environment", "no", None), ("call", "f", None)]
    assert [list(one.turns) for one in run.responses] == [read, [], [], [], read]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "metrics.jsonl").unlink(),
        lambda folder: (folder / "report.html").mkdir(),
    ],
)
def test_a_finished_run_gets_a_warning_when_its_report_fails(tmp_path, capsys, spoil):
    folder = write_run(tmp_path, ppo_lines(1))
    spoil(folder)
    report_run(folder)
    assert f"no report: {folder}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("inner", "problem"),
    [
        ("", None),
        ("validation", None),
        ("", StopRequested),
        ("", UnhealthyRun),
        ("", NonFiniteError),
        ("", RuntimeError),
    ],
)
def test_a_run_that_writes_metrics_leaves_a_report_unless_it_crashes(tmp_path, inner, problem):
    other = write_run(tmp_path / ("validation" if not inner else ""), ppo_lines(1))
    with nullcontext() if problem is None else pytest.raises(problem), reporting(tmp_path):
        folder = write_run(tmp_path / inner, ppo_lines(2))
        if problem is not None:
            raise problem("ends")
    assert (folder / "report.html").exists() is (problem is not RuntimeError)
    assert not (other / "report.html").exists()


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_run_killed_behind_its_result_gets_its_report_when_it_starts_again(tmp_path, is_finished):
    write_run(tmp_path, ppo_lines(1))
    (tmp_path / "result.json").unlink(missing_ok=True)
    if is_finished:
        (tmp_path / "result.json").write_text("{}")
    with pytest.raises(StopRequested), reporting(tmp_path):
        raise StopRequested("this run is done")
    assert (tmp_path / "report.html").exists() is is_finished


def test_a_run_without_a_step_leaves_the_report_of_the_run_before_it(tmp_path):
    write_run(tmp_path, ppo_lines(1))
    with pytest.raises(StopRequested), reporting(tmp_path):
        raise StopRequested("this run is done")
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(NonFiniteError), reporting(tmp_path):
        (tmp_path / "metrics.jsonl").write_text("")
        raise NonFiniteError("the loss is NaN")
    assert not (tmp_path / "report.html").exists()


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
    harmless = json.loads(
        json.dumps({"sample": sample, "event": event}).replace(json.dumps(EVIL), '"x"')
    )
    lines = [line | {f"reward/{EVIL}_mean": 1.0} for line in ppo_lines(2)]
    plain = [line | {"reward/x_mean": 1.0} for line in ppo_lines(2)]
    evil = write_run(tmp_path / "1", lines, {"data_path": EVIL}, samples=[sample], health=[event])
    good = write_run(
        tmp_path / "2",
        plain,
        {"data_path": "x"},
        samples=[harmless["sample"]],
        health=[harmless["event"]],
    )
    found, expected = (Tags(page(read_runs([folder]), 0.0)) for folder in (evil, good))
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in expected.tags]
    assert not [
        name for _, attributes in found.tags for name in attributes if name.startswith("on")
    ]
    shown = page(read_runs([evil]), 0.0)
    (data,) = re.findall('id="data">(.*?)</script>', shown)
    assert EVIL in str(json.loads(data)) and not re.search("[<>&]", data)


def test_hidden_characters_of_an_answer_are_escaped_and_its_lines_stay(tmp_path):
    sample = SAMPLE | {"prompt": "p\x00", "answer": "a\x1b[2Jb\n\tc\x7f"}
    shown = page(read_runs([write_run(tmp_path, ppo_lines(2), samples=[sample])]), 0.0)
    assert r"p\x00" in shown and "a\\x1b[2Jb\n\tc\\x7f" in shown
    body = re.sub("<(style|script).*?</\\1>", "", shown, flags=re.DOTALL)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", body)


def test_the_page_loads_nothing(tmp_path):
    made = Tags(page(read_runs([write_run(tmp_path, ppo_lines(3))]), 0.0))
    assert not [
        tag
        for tag, attributes in made.tags
        if {"src", "srcset"} & attributes.keys() or tag in ("link", "iframe")
    ]
    links = [attributes["href"] for tag, attributes in made.tags if "href" in attributes]
    assert links[:3] == ["#overview", "#policy", "#critic"]
    assert {link[1:] for link in links} <= {attributes.get("id") for _, attributes in made.tags}
    (policy,) = [
        a["content"] for _, a in made.tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    # of the chart library
    assert "default-src 'none'" in policy and "The MIT License" in " ".join(made.words)


def text_of(*folders, now: float = 1015.0) -> str:
    return " ".join(" ".join(Tags(page(read_runs(folders), now)).words).split())


def test_the_overview_tells_finished_from_unfinished_runs(tmp_path):
    done = write_run(
        tmp_path / "done",
        ppo_lines(3),
        {"actor_model_name_or_path": "m", "seed": 1},
        {"world_size": 2},
    )
    starts = [{"step": 1}, {"step": 2}]
    cut = write_run(
        tmp_path / "cut", ppo_lines(2), {"actor_model_name_or_path": "n", "seed": 1}, starts=starts
    )
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
    run = write_run(
        tmp_path / "1", [line], config, {"world_size": 1}, samples=[SAMPLE | {"answer": "x" * 3500}]
    )
    (run / "models.json").write_text(
        '{"actor": "llama, 1.7 M parameters", "devices": "2 cpu ranks, bf16"}'
    )
    found = text_of(run)
    assert (
        "steps 0, evaluation without training" in found
        and "held-out score 7.497 held-out loss 2 " in found
    )
    assert " actor llama, 1.7 M parameters devices 2 cpu ranks, bf16 " in found
    assert (
        "differ from their defaults flag value --actor_model_name_or_path m --kl_coef 0.5" in found
    )
    assert "temperature" not in found
    assert "x" * 2000 + " [... 1,500 more characters]" in found and "x" * 2001 not in found


def test_a_name_in_a_cell_is_one_word_and_a_sentence_wraps_anywhere(tmp_path):
    event = {"step": 2, "name": "reward_function_faults", "seen": "x" * 41, "cause": "a few words"}
    text = page(read_runs([write_run(tmp_path, ppo_lines(3), health=[event])]), 0.0)
    assert '<td class="word">reward_function_faults</td>' in text
    assert f"<td>{'x' * 41}</td>" in text and "<td>a few words</td>" in text


def run_of(name: str = "a", responses=(), **metrics) -> Run:
    """A run with these metrics: name -> values of steps 1, 2, ..."""
    points = {
        key: [(step, value) for step, value in enumerate(values, 1)]
        for key, values in metrics.items()
    }
    steps = max((len(values) for values in metrics.values()), default=1)
    return Run(
        name,
        Path(name),
        points,
        dict.fromkeys(range(1, steps + 1), 0.0),
        {},
        {},
        None,
        None,
        [],
        [*responses],
    )


def panels_of(title: str, *runs: Run) -> list[dict]:
    return next(chart.panels for chart in charts(runs) if chart.figure.title == title)


def test_one_run_has_a_panel_of_lines_and_several_have_a_panel_for_each_metric():
    (panel,) = panels_of("Loss", run_of(loss=[3.0, 2.0], eval_loss=[4.0]))
    assert [(line["label"], line["x"], line["y"]) for line in panel["series"]] == [
        ("loss", [1, 2], [3, 2]),
        ("eval_loss", [1], [4]),
    ]
    panels = panels_of(
        "Loss", run_of("a", loss=[3.0, None]), run_of("b", loss=[2.0], eval_loss=[4.0])
    )
    found = [
        (panel["title"], [(line["label"], line["run"]) for line in panel["series"]])
        for panel in panels
    ]
    assert found == [("loss", [("a", 0), ("b", 1)]), ("eval_loss", [("b", 1)])]


def test_a_long_series_keeps_the_lowest_the_highest_a_nan_and_the_last_point_of_its_stretches():
    points = [(1, 1.0), (2, 3.0), (3, 2.0), (4, None), (5, 9.0), (6, None), (7, 4.0), (8, 5.0)]
    assert thin(points, 8) == points
    assert thin(points, 4) == [
        (1, 1.0),
        (2, 3.0),
        (4, None),
        (5, 9.0),
        (6, None),
        (7, 4.0),
        (8, 5.0),
    ]
    long = thin([(step, 7.0 if step == 12345 else 1.0) for step in range(1, 20001)], 400)
    assert (12345, 7.0) in long and long[-1] == (20000, 1.0) and len(long) <= 402
    assert [rounded(value) for value in (0.123456, 12345.678, -2.0, None)] == [
        0.1235,
        12350,
        -2,
        None,
    ]


def response(
    kind: str, step: int, prompt: str, text: str = "a", score: float = 1.0
) -> ReportedResponse:
    return ReportedResponse(kind, step, prompt, text, score, {}, None, 1, "eos")


def test_one_run_compares_its_first_and_last_evaluation_and_two_runs_their_last_ones():
    held_out = [response("held-out", step, "p", f"at {step}") for step in (0, 5, 10)]
    samples = [response("training", 2, "q", str(score), score) for score in (1, 3, 2)]
    shown = shown_responses([run_of(responses=held_out + samples)])
    assert [
        (prompt, [(title, responses[0].text) for title, responses in columns])
        for prompt, columns in shown.held_out
    ] == [
        ("p", [("step 0", "at 0"), ("step 10", "at 10")]),
    ]
    (title, best_first) = shown.training[0]
    assert (title, [one.text for one in best_first]) == ("step 2", ["3", "2", "1"])
    [(_, columns)] = shown_responses([run_of("a", held_out), run_of("b", held_out)]).held_out
    assert [title for title, _ in columns] == ["a, step 10", "b, step 10"]


def shown_by(title: str, known: list[str]) -> list[str]:
    return next(names for figure, names in figures_of(known) if figure.title == title)


def test_the_table_of_figures_sorts_the_names_of_metrics():
    assert Figure("s", "t", ("b", "a/*"), "r", without=("a/x",)).names(
        ["a/1", "a/x", "c", "b"]
    ) == ["b", "a/1"]
    known = [
        "reward/score_mean",
        "reward/total_mean",
        "reward/rule_mean",
        "reward/rule_share",
        "reward/score_mean/web",
    ]
    assert shown_by("Reward by source", known) == [
        "reward/rule_mean",
        "reward/score_mean/web",
        "reward/rule_share",
    ]
    known = ["time/rollout", "time/rollout_tokens_per_s"]
    assert [shown_by(title, known) for title in ("Time per step by phase", "Throughput")] == [
        known[:1],
        known[1:],
    ]
    others = [
        names
        for figure, names in figures_of(["step", "time", "loss", "zeta", "a/b"])
        if not figure.reading
    ]
    assert others == [["a/b"], ["zeta"]]
