"""The functions of docs/extending.md run, as they stand there; `main.py` reads the flags that name
them."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from bash_blocks import FLAGS_OF_STEP_3, ROOT, blocks_of, files_of

from dschat_ppo.algorithms.actor_critic_losses import PolicyLossSettings, PolicyTerms
from dschat_ppo.algorithms.advantage_estimators import AdvantageInputs, rloo
from dschat_ppo.checkpoint.identity import HARMLESS
from dschat_ppo.common.own_functions import function_named, own_function
from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.form_choice import detect_form
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine.rlhf_engine import ModelFolders
from dschat_ppo.errors import UserError
from dschat_ppo.monitor.trackers import check_own_tracker
from dschat_ppo.ppo.begin_ppo import inputs_of
from dschat_ppo.ppo.own_algorithms import OwnSampler, check_own_functions, made_up_rows, own_metrics
from dschat_ppo.rewards.function_reward import parse_function

PAGE = ROOT / "docs/extending.md"
FILES = files_of(PAGE)
STEP_3, STEP_2 = (
    [
        word
        for block in blocks_of(PAGE)
        if (FLAGS_OF_STEP_3 in block.text) is is_flags
        for word in " ".join(block.commands).split()
    ]
    for is_flags in (True, False)
)
NEEDED = ["--actor_model_name_or_path", "model", "--data_path", "rows.jsonl", "--output_dir", "out"]
TICKET = {
    "ticket": "The lid is broken.",
    "replies": [
        {"text": t, "rating": r} for t, r in (("Sorry!", 3), ("No.", 1), ("We send one.", 5))
    ],
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The files of the page, in the current folder."""
    assert len(FILES) == 10
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    own_function.cache_clear()
    return tmp_path


def config(*words):
    return parse(
        "ppo",
        [*NEEDED, "--use_reward_model", "False", "--reward_function", "brevity.py:brevity", *words],
    )


def of_flag(flag: str) -> str:
    return [*STEP_3, *STEP_2][[*STEP_3, *STEP_2].index(flag) + 1]


def test_the_commands_of_the_page_pass_the_checks_of_a_run():
    found = parse("ppo", [*NEEDED, *STEP_3])
    check_own_functions(found)
    assert parse("reward", STEP_2[2:]).data.data_format == "tickets.py:read"
    assert found.algorithm.advantage_estimator == "leave_one_out.py:leave_one_out"
    assert not found.algorithm.has_critic and not found.algorithm.whitens
    parse_function(of_flag("--reward_function"))
    assert "metrics" in HARMLESS and "policy_loss" not in HARMLESS


def test_the_estimator_is_rloo():
    torch.manual_seed(0)
    mask = torch.arange(5) < torch.tensor([[5], [2], [4], [1], [3], [2]])
    rewards = torch.where(mask, torch.randn(6, 5), 0.0)
    inputs = AdvantageInputs(rewards, None, mask, torch.tensor([7, 7, 7, 2, 2, 9]), None, 1.0, 1.0)
    function = function_named(
        "--advantage_estimator", of_flag("--advantage_estimator"), {"rloo": rloo}
    )
    torch.testing.assert_close(function(inputs)[0], rloo(inputs)[0])
    assert function_named("--advantage_estimator", "rloo", {"rloo": rloo}) is rloo


def test_the_loss_has_the_gradient_of_its_formula():
    mask = torch.tensor([[True, True], [True, False]])
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, float("nan")]], requires_grad=True)
    terms = PolicyTerms(
        logprobs,
        torch.tensor([[-1.2, -2.0], [-0.4, 0.0]]),
        torch.tensor([[2.0, -1.0], [0.5, 3.0]]),
        mask,
    )
    found = own_function("--policy_loss", of_flag("--policy_loss"))(
        terms, PolicyLossSettings(clip_eps_high=0.5)
    )
    found.losses.sum().backward()
    ratio = torch.tensor([0.2, 0.0, -0.1]).exp()
    expected = ratio * (-torch.tensor([2.0, -1.0, 0.5]) + (ratio - 1) / 0.5)
    torch.testing.assert_close(logprobs.grad[mask], expected)
    assert logprobs.grad[1, 1] == 0


def test_choices_stand_in_the_prompt_as_the_message_about_them_says():
    choices = {"label": ["A", "B"], "text": ["in the hall", "on the roof"]}
    row = {"id": "1", "question": "Where is it?", "choices": choices, "answerKey": "B"}
    with pytest.raises(UserError, match="; --data_format FILE.py:FUNCTION .* as choices.py in"):
        detect_form("arc", list(row), [row], True, DataFlags(["arc"]), use="sft")
    flags = DataFlags(["arc"], data_format="choices.py:read")
    [example] = detect_form("arc", list(row), [row], True, flags, use="sft").read(row, "sft")
    asked = "Where is it?\nA. in the hall\nB. on the roof"
    assert example.prompt == [{"role": "user", "content": asked}]
    assert (example.answers, example.truth) == (["B"], "B")


@pytest.mark.parametrize("has_template", [False, True])
def test_the_form_serves_all_steps_leaves_rows_out_and_its_identity_is_that_of_its_file(
    files, has_template
):
    flags = DataFlags(["tickets.jsonl"], data_format=of_flag("--data_format"))
    alike = TICKET | {"replies": TICKET["replies"][:1]}
    form = detect_form("tickets.jsonl", list(TICKET), [alike, TICKET], has_template, flags)
    assert form.read(alike, "preference") == []
    [pair] = form.read(TICKET, "preference")
    assert (pair.prompt, pair.answers) == ("The lid is broken.", ["We send one.", "No."])
    assert form.read(TICKET, "prompt")[0].prompt == "The lid is broken."
    with pytest.raises(
        UserError, match=r"^tickets.py:read raised KeyError: 'replies' \(.*tickets.py:3\)"
    ):
        form.read({"ticket": "?"}, "prompt")
    (files / "tickets.py").write_text(FILES["tickets.py"] + "\n")
    assert (
        detect_form("tickets.jsonl", list(TICKET), [TICKET], has_template, flags).identity
        != form.identity
    )


def test_a_conversation_in_one_text_becomes_messages(files):
    flags = DataFlags(["glaive.jsonl"], data_format="transcripts.py:read")
    row = {
        "system": "SYSTEM: You help.",
        "chat": "USER: Where?\n\n\nASSISTANT: Here. <|endoftext|>\n\n\nUSER: Thanks\n\n\nASSISTANT:"
        " Any time. <|endoftext|>\n\n\n",
    }
    form = detect_form("glaive.jsonl", list(row), [row], True, flags)
    [example] = form.read(row, "sft")
    assert [turn["content"] for turn in example.prompt] == [
        "You help.",
        "Where?",
        "Here.",
        "Thanks",
    ]
    assert [turn["role"] for turn in example.prompt] == ["system", "user", "assistant", "user"]
    assert example.answers == ["Any time."]


def test_the_metric_by_hand():
    rows = made_up_rows()
    assert own_metrics([of_flag("--metrics")], rows) == {
        "own/long_answers": 0.0,
        "own/score_of_long_answers": 0.0,
    }
    wide = torch.ones(4, 101, dtype=torch.bool) & torch.tensor([[True], [False], [True], [False]])
    found = own_metrics(["answers.py:long_answers"], replace(rows, response_mask=wide))
    assert found == {"own/long_answers": 0.5, "own/score_of_long_answers": 0.0}  # scores 1 and -1


def test_the_sampler_takes_easy_prompts_first_leaves_out_what_is_solved_and_resumes(files):
    rows = [{"level": 2}, {"level": 0}, {"level": 1}, {}]
    sampler = OwnSampler(of_flag("--sampler"), rows, 0)
    assert sampler.take(2) == [1, 3] and sampler.taken == 2
    # groups: places in the order of taking
    sampler.update(torch.tensor([0, 0, 1]), torch.tensor([1.0, 0.0, 0.5]))
    again = OwnSampler(of_flag("--sampler"), rows, 0)
    again.load_state_dict(sampler.state_dict())
    assert sampler.take(4) == again.take(4) == [2, 0, 3, 2] and again.order == [1, 3, 2, 0, 3, 2]
    (files / "own.py").write_text(
        "class Few:\n def __init__(self, rows, seed): pass\n def take(self, n): return [9]"
    )
    with pytest.raises(
        UserError, match=r"--sampler own.py:Few: take\(4\): ValueError: it must return 4 numbers"
    ):
        check_own_functions(config("--sampler", "own.py:Few"))


def test_a_metric_that_fails_is_named_in_the_run_and_before_it(files):
    (files / "own.py").write_text(
        "def mean(rows): return rows.values.mean()\ndef sets(rows): return rows.data_sources.max()"
    )
    with pytest.raises(UserError, match=r"--metrics own.py:mean: AttributeError: .*own.py:1"):
        own_metrics(["own.py:mean"], replace(made_up_rows(), values=None))
    check_own_functions(config("--metrics", "own.py:mean"))  # PPO has values
    with pytest.raises(UserError, match=r"--metrics own.py:mean: AttributeError"):
        check_own_functions(
            config("--metrics", "own.py:mean", "--advantage_estimator", "reinforce_plus_plus")
        )
    check_own_functions(config("--metrics", "own.py:sets", "--data_path", "a.jsonl", "b.jsonl"))


def test_a_checkpoint_belongs_to_the_files_of_estimator_and_loss(files):
    words = [
        "--advantage_estimator",
        of_flag("--advantage_estimator"),
        "--policy_loss",
        of_flag("--policy_loss"),
    ]
    inputs = inputs_of(config(*words), ModelFolders("model", None, None), TokenRows(None, None), [])
    found = {flag: path for flag, path in inputs.files if flag in words}
    assert found == {
        words[0]: str(files / "leave_one_out.py"),
        words[2]: str(files / "squared_ratio.py"),
    }
    assert not {"--advantage_estimator", "--policy_loss"} & {
        flag
        for flag, _ in inputs_of(
            config(), ModelFolders("model", None, None), TokenRows(None, None), []
        ).files
    }


WRONG = {
    "there is no file none.py": ("--policy_loss", "none.py:f", ""),
    "own.py has no function 'g'; it has: f": ("--metrics", "own.py:g", "def f(rows): return 1"),
    "cannot be loaded: ZeroDivisionError": ("--policy_loss", "own.py:f", "1 / 0"),
    r"TypeError: f\(\) takes 0 positional": ("--advantage_estimator", "own.py:f", "def f(): pass"),
    r"advantages must be a tensor \(4, 3\) torch.float32, got \(4,\)": (
        "--advantage_estimator",
        "own.py:f",
        "def f(i): return i.scores, i.rewards",
    ),
    "advantages must be 0 outside response_mask": (
        "--advantage_estimator",
        "own.py:f",
        "def f(i): return i.rewards + 1, i.rewards",
    ),
    "it must return TokenLosses, not Tensor": (
        "--policy_loss",
        "own.py:f",
        "def f(t, s): return t.logprobs",
    ),
    "losses have no gradient": (
        "--policy_loss",
        "own.py:f",
        (
            "from dschat_ppo.algorithms.actor_critic_losses import *\n"
            "def f(t, s): return TokenLosses(t.advantages, t.advantages, t.mask)"
        ),
    ),
    "losses are not finite": (
        "--policy_loss",
        "own.py:f",
        (
            "from dschat_ppo.algorithms.actor_critic_losses import *\ndef f(t, s): return"
            " TokenLosses(t.logprobs / t.mask.cumsum(0).sub(1), t.advantages, t.mask)"
        ),
    ),
    "it must return a number or a dict of numbers": (
        "--metrics",
        "own.py:f",
        "def f(rows): return 'x'",
    ),
    "expected FILE.py:FUNCTION": ("--metrics", "kl", ""),
}


@pytest.mark.parametrize("cause", WRONG)
def test_a_wrong_function_ends_the_run_before_a_model_is_loaded(files, cause):
    flag, name, text = WRONG[cause]
    if text:
        (files / "own.py").write_text(text)
    with pytest.raises(UserError, match=f"{flag} {re.escape(name)}: .*{cause}"):
        check_own_functions(config(flag, name))


def test_what_a_form_makes_must_fit(files):
    (files / "own.py").write_text("def f(row): return [row['ticket']]\ndef g(row): return None")
    for name, cause in (
        ("f", "own.py:f must return a dict, a list of dicts or None"),
        ("g", "own.py:g: makes no row"),
    ):
        flags = DataFlags(["tickets.jsonl"], data_format=f"own.py:{name}")
        with pytest.raises(UserError, match=cause):
            detect_form(
                "tickets.jsonl", list(TICKET), [json.loads(json.dumps(TICKET))], False, flags
            )


def test_the_trackers_call_their_libraries(monkeypatch):
    """The libraries are stand-ins that note their calls."""
    called = []

    class Library:
        def __getattr__(self, name):
            def call(*arguments, **named):
                called.append((name, *arguments, *named.values()))
                return self

            return call

    for name in ("mlflow", "swanlab"):
        monkeypatch.setitem(sys.modules, name, Library())
    given = {"seed": 3}
    for name in ("mlflow_tracker.py:MLflow", "swanlab_tracker.py:SwanLab"):
        assert name in STEP_3
        check_own_tracker(name)
        tracker = own_function("--tracker", name)("ppo", given)
        tracker.log({"eval/pass@1": 0.5}, 7)
        tracker.close()
    assert called == [
        ("start_run", "ppo"),
        ("log_params", given),
        ("log_metrics", {"eval/pass_1": 0.5}, 7),
        ("end_run",),
        ("init", "dschat_ppo", "ppo", given),
        ("log", {"eval/pass@1": 0.5}, 7),
        ("finish",),
    ]
