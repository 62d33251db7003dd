"""The page as text: tables, states, escaping, and no address that a browser would load."""

import json
import re
from html.parser import HTMLParser

from report_runs import ppo_lines, write_run

from dschat_ppo.html_report.page import json_in_html, page
from dschat_ppo.html_report.run_folder import read_runs

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
    sample = {"step": 1, "prompt": EVIL, "answer": EVIL, "score": 1.0}
    event = {"step": 1, "name": EVIL, "seen": EVIL, "cause": EVIL, "change": EVIL}
    harmless = json.loads(json.dumps({"sample": sample, "event": event}).replace(json.dumps(EVIL), '"x"'))
    lines = [line | {f"reward/{EVIL}_mean": 1.0} for line in ppo_lines(2)]
    plain = [line | {"reward/x_mean": 1.0} for line in ppo_lines(2)]
    evil = write_run(tmp_path / "1", lines, {"data_path": EVIL}, samples=[sample], health=[event])
    good = write_run(
        tmp_path / "2", plain, {"data_path": "x"}, samples=[harmless["sample"]], health=[harmless["event"]]
    )
    found, expected = (Tags(page(read_runs([folder]), 0.0, tmp_path)) for folder in (evil, good))
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in expected.tags]
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]


def test_json_in_html_is_the_same_json_without_angle_brackets():
    text = json_in_html({"a": EVIL, "b": ["<!--", "\u2028"]})
    assert json.loads(text) == {"a": EVIL, "b": ["<!--", "\u2028"]}
    assert re.search("[<>&\u2028]", text) is None


def test_the_page_loads_nothing(tmp_path):
    made = Tags(page(read_runs([write_run(tmp_path, ppo_lines(3))]), 0.0, tmp_path))
    assert not [
        tag for tag, attributes in made.tags if {"src", "srcset"} & attributes.keys() or tag in ("link", "iframe")
    ]
    links = [attributes["href"] for tag, attributes in made.tags if "href" in attributes]
    assert links[:3] == ["#main", "#overview", "#reward-and-kl"]
    assert {link[1:] for link in links} <= {attributes.get("id") for _, attributes in made.tags}
    (policy,) = [a["content"] for _, a in made.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy


def test_every_figure_has_words_for_its_picture(tmp_path):
    made = Tags(page(read_runs([write_run(tmp_path, ppo_lines(3))]), 0.0, tmp_path))
    summaries = [a["data-summary"] for tag, a in made.tags if a.get("class") == "plot"]
    assert len(summaries) == len([tag for tag, _ in made.tags if tag == "figure"]) > 8
    assert "Line chart. Reward: reward/score_mean of" in summaries[0]


def text_of(*folders, now: float = 1015.0) -> str:
    return " ".join(" ".join(Tags(page(read_runs(folders), now, folders[0])).words).split())


def test_the_overview_tells_finished_from_unfinished_runs(tmp_path):
    done = write_run(tmp_path / "done", ppo_lines(3), {"actor_model_name_or_path": "m", "seed": 1}, {"world_size": 2})
    starts = [{"step": 1, "versions": {"torch": "2.7"}}, {"step": 2, "versions": {"torch": "2.8"}}]
    cut = write_run(tmp_path / "cut", ppo_lines(2), {"actor_model_name_or_path": "n", "seed": 1}, starts=starts)
    found = text_of(done, cut)
    assert "state finished not finished; last step 5 s before this report" in found
    assert "times started - 2, resumed at step 2" in found
    assert "score 0.1 → 0.3 0.1 → 0.2" in found
    assert "duration 10 s 5 s" in found
    assert "flag done cut --actor_model_name_or_path m n" in found
    assert "--seed 1 1" not in found
    assert "library done cut torch - 2.7, then 2.8" in found


def test_the_overview_names_models_data_algorithm_and_rewards(tmp_path):
    config = {
        "actor_model_name_or_path": "sft", "critic_model_name_or_path": "rm", "use_reward_model": True,
        "reward_model_name_or_path": None, "reward_function": ["f.py:g"], "remote_reward_url": None,
        "advantage_estimator": "gae", "policy_loss": "ppo", "data_path": ["a.jsonl", "b.jsonl"], "eval_data_path": [],
    }  # fmt: skip
    run = write_run(tmp_path / "1", ppo_lines(2), config)
    (run / "models.json").write_text('{"actor": "llama, 1.7 M parameters", "devices": "2 cpu ranks, bf16"}')
    found = text_of(run).partition("Reward The score")[0]
    for row in ("actor llama, 1.7 M parameters devices 2 cpu ranks, bf16", "algorithm gae advantages, ppo policy loss",
                "reward rm, f.py:g", "data a.jsonl, b.jsonl"):  # fmt: skip
        assert f" {row} " in found
    assert "held-out data" not in found
    without = write_run(tmp_path / "2", ppo_lines(2), config | {"use_reward_model": False})
    assert " reward f.py:g " in text_of(without)
    assert "reward rm" not in text_of(write_run(tmp_path / "3", ppo_lines(2), {"model_name_or_path": "rm"}))


def test_reports_link_the_steps_before_and_after(tmp_path):
    sft = write_run(tmp_path / "out/my sft", ppo_lines(1), {"model_name_or_path": "llama"})
    reward = write_run(tmp_path / "out/rm", ppo_lines(1), {"model_name_or_path": str(sft)})
    models = {"actor_model_name_or_path": str(sft), "critic_model_name_or_path": str(reward)}
    ppo = write_run(tmp_path / "out/ppo", ppo_lines(1), models)
    again = write_run(tmp_path / "again", ppo_lines(1), {"actor_model_name_or_path": str(ppo / "actor")})
    write_run(tmp_path / "out/other", ppo_lines(1), {"model_name_or_path": str(tmp_path / "my sft 2")})
    (write_run(tmp_path / "out/bad", ppo_lines(1)) / "config.yaml").write_text("my sft: [")

    def links(run):
        made = Tags(page(read_runs([run]), 0.0, tmp_path / "reports"))
        return {a["href"] for _, a in made.tags if a.get("href", "").endswith("html")}

    assert links(sft) == {"../out/rm/report.html", "../out/ppo/report.html"}
    assert links(reward) == {"../out/my%20sft/report.html", "../out/ppo/report.html"}
    assert links(ppo) == {"../out/my%20sft/report.html", "../out/rm/report.html"}
    assert links(again) == {"../out/ppo/report.html"}


def test_one_evaluation_is_one_number(tmp_path):
    """As --validate_only writes it."""
    found = text_of(
        write_run(
            tmp_path, [{"step": 0, "time": 1000.0, "eval/score": 7.497, "eval_loss": 2.0}], result={"world_size": 1}
        )
    )
    assert "steps 0, evaluation without training" in found
    assert "held-out score 7.497, one evaluation" in found and "held-out loss 2, one evaluation" in found
    assert "score 0.1, one step" in text_of(write_run(tmp_path / "one", ppo_lines(1)))


def test_the_overview_leaves_out_the_explained_variance_whose_last_value_misleads(tmp_path):
    found = text_of(write_run(tmp_path, ppo_lines(3)))
    assert "explained variance" not in found.partition("Reward and KL")[0].casefold()
    assert "value/explained_variance" in found, "its figure stays"


def test_flags_of_one_run_are_compared_with_their_defaults(tmp_path):
    config = {"actor_model_name_or_path": "m", "temperature": 1.0, "kl_coef": 0.5}
    found = text_of(write_run(tmp_path, ppo_lines(1), config))
    assert "differ from their defaults flag value --actor_model_name_or_path m --kl_coef 0.5 All flags" in found


def test_no_health_event_is_said_and_no_health_file_is_not(tmp_path):
    assert "No health event" not in text_of(write_run(tmp_path / "a", ppo_lines(1)))
    assert "No health event" in text_of(write_run(tmp_path / "b", ppo_lines(1), health=[]))
    event = {
        "step": 4,
        "since": 2,
        "name": "kl",
        "level": "warning",
        "seen": "0.9",
        "cause": "rate",
        "change": "lower it",
    }
    found = text_of(write_run(tmp_path / "c", ppo_lines(1), health=[event]))
    assert "4 (since 2) warning kl 0.9 rate lower it" in found


def test_damage_is_said(tmp_path):
    write_run(tmp_path / "a", ppo_lines(1), samples=[])
    (tmp_path / "a" / "samples.jsonl").write_text("oops\n")
    assert "a: samples.jsonl has 1 damaged part(s)" in text_of(tmp_path / "a")
