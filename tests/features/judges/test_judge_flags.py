"""`--judge SPEC`: what it says, and what is refused before a model is loaded."""

import pytest

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.features.judges.flags import JudgeFlags
from dschat_ppo.features.judges.spec import parse_judge

ALONE = (
    "--actor_model_name_or_path a --data_path d --output_dir o --use_reward_model False"
    " --advantage_estimator rloo --n_samples_per_prompt 2"
)


def parsed(more: str):
    return parse("ppo", f"{ALONE} {more}".split())


@pytest.mark.parametrize(
    ("text", "model", "weight", "sources", "labels"),
    [
        ("J", "J", 1.0, (), ("no", "yes")),
        ("org/name:0.5", "org/name", 0.5, (), ("no", "yes")),
        ("math,gsm8k=J?labels=1..3:-2", "J", -2.0, ("math", "gsm8k"), ("1", "2", "3")),
        ("J?labels=bad, so%2Cso ,good:0", "J", 0.0, (), ("bad", "so", "so", "good")),
    ],
)
def test_what_a_spec_says(text, model, weight, sources, labels):
    if len(set(labels)) < len(labels):  # percent-decoded before it is split
        with pytest.raises(UserError, match="'so' is given twice"):
            parse_judge(text)
        return
    spec = parse_judge(text)
    assert (spec.model, spec.weight, spec.sources, spec.labels) == (model, weight, sources, labels)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--judge J?labels=yes", "--judge J?labels=yes: labels=yes: expected two labels or more"),
        ("--judge J?labels=a,b,a", "the label 'a' is given twice"),
        ("--judge J?labels=a,,b", "a label is empty"),
        ("--judge J?lables=a,b", "there is no setting 'lables'; there are: labels, template"),
        ("--judge J?labels=a,b&labels=c,d", "a setting is given twice"),
        ("--judge J?answer=all", "answer=all: expected one of final, spoken, thoughts, episode"),
        ("--judge J:nan", "the weight must be finite"),
        ("--judge =J", "expected a data source before '='"),
        ("--judge ?labels=a,b", "expected the folder or hub name of a language model"),
        ("--judge J?template=no.jinja", "template no.jinja: neither a file nor one of grade"),
        (f"--judge J?template={'x' * 5000}", "x: neither a file nor one of grade"),
        ("--offload_judge_models", "has no effect: it is for --judge"),
        ("--judge J --offload_judge_models", "needs --actor_zero_stage 3"),
        ("--judge J --sequence_parallel_size 2", "--judge needs whole rows on a rank"),
        ("--judge J?rivals=2", "rivals is for compare=pairs"),
        ("--judge J?compare=reference&rivals=2", "rivals is for compare=pairs"),
        ("--judge J?compare=pairs&rivals=no", "rivals=no: expected a number from 1"),
        ("--judge J?compare=pairs&rivals=2", "rivals=2: an answer has 1 others to meet"),
        ("--judge J?compare=all", "compare=all: expected one of pairs, reference"),
        ("--judge J?compare=pairs&rubric=r", "rubric and compare=pairs exclude each other"),
        ("--judge J?compare=pairs&labels=a,b", "the verdicts of compare=pairs are A and B"),
        (
            "--judge J?compare=pairs --n_samples_per_prompt 1 --advantage_estimator gae",
            "--judge J: compare=pairs needs --n_samples_per_prompt 2 or more",
        ),
        ("--judge J?compare=pairs --eval_data_path e", "needs --eval_samples 2 or more"),
        (
            "--judge J?compare=pairs --advantage_estimator remax",
            "needs --advantage_estimator another",
        ),
        ("--judge J --eval_judge K", "--eval_judge scores held-out prompts: give --eval_data_path"),
        (
            "--judge J --eval_data_path e --eval_judge a=K",
            "--eval_judge a=K: it judges all",
        ),
        ("--judge J --eval_data_path e --eval_judge K:nan", "--eval_judge K:nan: the weight must"),
        (
            "--judge J --eval_data_path e --eval_judge K --eval_reward_function length",
            "--eval_judge and --eval_reward_function both score",
        ),
        (
            "--judge J --eval_data_path e --eval_judge K?compare=pairs",
            "--eval_judge K: compare=pairs needs --eval_samples 2 or more",
        ),
        ("", "give --reward_function, --remote_reward_url, .*--judge"),
    ],
)
def test_what_is_refused(flags, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        parsed(flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n{{ prompt }}\n{{ anser }}", "line 3: there is no variable 'anser'; there are: prompt"),
        ("{{ prompt }}", "does not read 'answer', so it would not be judged"),
        ("{% if %}", "line 1: "),
        ("{{ answer | nothing }}", "line 1: No filter named 'nothing'"),
        ("{{ answer }}{{ " + "[" * 5000, "cannot be used: maximum recursion depth"),
        ("{{ answer }}" + "{% for i in [1] %}" * 50 + "{% endfor %}" * 50, "cannot be used: "),
    ],
)
def test_what_is_wrong_with_a_template(tmp_path, text, message):
    file = tmp_path / "my.jinja"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        parsed(f"--judge J?template={file}")
    assert str(caught.value).startswith(f"--judge J: template {file}")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        ("", "{{ answer }}{{ criterion }}", "there is no variable 'criterion'"),
        ("&rubric=r", "{{ answer }}", "does not read 'criterion'"),
        ("&compare=pairs", "{{ answer }}", "does not read 'answer_b'"),
    ],
)
def test_templates_read_what_their_settings_give(tmp_path, settings, text, message):
    file = tmp_path / "my.jinja"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        parsed(f"--judge J?template={file}{settings}")


def test_loops_and_functions_of_jinja_are_no_variables(tmp_path):
    file = tmp_path / "my.jinja"
    file.write_text("{% for i in range(2) %}{{ loop.index }}{% endfor %}{{ answer }}")
    assert parsed(f"--judge J?template={file}").has_rewards


def test_judges_of_one_model_share_it():
    config = parsed("--judge a=J b=J?labels=1..3 K:0")
    assert config.of(JudgeFlags).roles == {"J": "judge", "K": "judge 2"}
    models = config.further_models
    assert [(model.role, model.name, list(model.sources)) for model in models] == [
        ("judge", "J", ["a", "b"]),
        ("judge 2", "K", []),
    ]
    assert [model.label for model in models] == ["--judge a b J", "--judge K"]


def test_a_message_about_a_judge_is_one_line():
    with pytest.raises(UserError) as raised:
        parse_judge("J\nb?answer=all")
    assert str(raised.value).startswith("--judge J b?answer=all: answer=all: expected")
