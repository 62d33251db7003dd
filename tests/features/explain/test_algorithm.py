"""`dschat-algorithm`: the printed program, executed on a record, gives the numbers of the run."""

import subprocess
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plain_ppo import PlainRun
from scored_rows import scored

from dschat_ppo.algorithms.actor_critic_losses import POLICY_LOSSES
from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS
from dschat_ppo.features.explain.algorithm_command import config_of
from dschat_ppo.features.explain.algorithm_program import algorithm_program
from dschat_ppo.features.explain.programs import algorithm_main
from dschat_ppo.features.explain.record_files import recorded_steps
from dschat_ppo.features.explain.token_records import token_record_of
from dschat_ppo.models.step_passes import StepPasses
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import ResponseLogprobs
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo import token_losses
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.ppo.loss_terms import loss_terms
from dschat_ppo.ppo.mini_dataset import MiniDataset
from dschat_ppo.ppo.token_losses import (
    TOKENS_OF_ACTOR,
    TOKENS_OF_CRITIC,
    ActorLoss,
    RecordedTokens,
    critic_loss,
)
from dschat_ppo.ppo.token_records import StepTokens, UpdateTokens

RELEASE = pytest.mark.release
GROUPS = "--n_samples_per_prompt 2"
FLAGS = [
    # each aggregation, form of the KL, mask and correction once
    "--loss_aggregation seq_mean_token_sum --entropy_coef 0.01 --gamma 0.9 --gae_lambda 0.5",
    "--loss_aggregation seq_mean_token_mean --value_clip_eps 0 --whiten_advantages False",
    "--loss_aggregation constant --mask_truncated_answers True --missing_eos_penalty 0.5",
    "--kl_loss_coef 0.1 --kl_loss_estimator k1 --reward_clip 2 --normalize_rewards running",
    "--kl_loss_coef 0.1 --kl_loss_estimator k2 --overlong_buffer 2 --overlong_penalty 0.7",
    "--kl_loss_coef 0.1 --kl_loss_estimator k3 --kl_straight_through False --dual_clip 3",
    "--kl_loss_coef 0.1 --kl_loss_estimator abs --kl_coef 0.3 --high_entropy_share 0.5",
    "--importance_correction token --importance_cap 1.3 --importance_floor 0.8",
    "--importance_correction sequence --importance_mode mask --off_policy_delta 0.01",
    f"--advantage_estimator grpo {GROUPS} --normalize_group_std False --kl_coef 0.2",
    f"--advantage_estimator grpo {GROUPS} --group_std batch --clip_eps_low 0.1 --clip_eps_high 0.3",
    "--entropy_target 1 --entropy_coef 0.02 --policy_loss sapo --sapo_tau_positive 2",
]


def words_of(estimator: str, loss: str) -> str:
    words = f"--advantage_estimator {estimator} --policy_loss {loss}"
    if estimator not in ("gae", "reinforce_plus_plus", "remax", "none"):
        words += f" {GROUPS}"
    if loss in ("clip_cov", "kl_cov"):
        words += " --covariance_share 0.3"
    return words


def config_for(words: str, folder: Path):
    return config_of(
        [*words.split(), *f"--output_dir {folder} --record_rows all --max_answer_seq_len 4".split()]
    )


def step_rows(config):
    """Six rows of three prompts, with what the flags ask for."""
    estimator = config.algorithm.advantage_estimator
    columns = {"source_scores": torch.stack([scored().scores, scored().scores ** 2], dim=1)}
    if estimator == "remax":
        columns["baselines"] = torch.linspace(-1, 1, 6)
    if estimator == "maxrl":  # for scores of 0 or more
        columns["scores"] = scored().scores.abs()
    if estimator != "gae":
        columns["values"] = None
    return scored(**columns)


def recorded_step(config, monkeypatch, tokenizer) -> Path:
    """The record of a PPO step of two updates that the functions of the loop compute, on a policy
    and a critic that have moved."""
    rows = step_rows(config)
    flags = config.algorithm
    weights = [1.0, 0.5]
    computation = AdvantageComputation(flags, 4, 0, config.score_clip, source_weights=weights)
    experience = computation.advantages(computation.with_rewards(rows), step=1)
    generator = torch.Generator().manual_seed(1)
    moved = 0.2 * torch.randn(rows.response_mask.shape, generator=generator)
    entropies = torch.rand(rows.response_mask.shape, generator=generator)

    def at(part, column):
        width = part.response_mask.shape[1]
        return column[part.row_indices, :width]

    def response_logprobs(model, part, *_, **__):
        return ResponseLogprobs(
            (part.old_logprobs + at(part, moved)).requires_grad_(), at(part, entropies), []
        )

    def response_values(model, part, *_):
        return (part.values + at(part, moved)).requires_grad_()

    monkeypatch.setattr(token_losses, "response_logprobs", response_logprobs)
    monkeypatch.setattr(token_losses, "response_values", response_values)
    terms = loss_terms(config, lambda role: None, None)
    loss_of = ActorLoss("actor", flags, 1.0, None, terms, config.has_policy_loss)
    updates = []
    for minibatch in MiniDataset(3, 8, 4, seed=0).minibatches(experience, 1, step=1):
        minibatch = replace(minibatch, passes=StepPasses())  # there are no models
        of_actor = RecordedTokens(TOKENS_OF_ACTOR)
        of_critic = RecordedTokens(TOKENS_OF_CRITIC)
        for part in minibatch.micro_batches:
            loss = loss_of(part, minibatch, flags.entropy_coef, MetricSums(), of_actor)
            if loss.requires_grad:
                (3 * loss).backward()  # as with a factor of the loss
            if flags.has_critic:
                critic_loss("critic", part, minibatch, flags, MetricSums(), of_critic).backward()
        tokens = of_actor.of_all_names(experience)
        if flags.has_critic:
            tokens |= of_critic.of_all_names(experience)
        updates.append(
            UpdateTokens(
                tokens, vars(minibatch.denominators), minibatch.value_tokens, flags.entropy_coef
            )
        )
    record = token_record_of(config, tokenizer, ["first", "second"])
    Path(config.run.folder).mkdir(exist_ok=True)
    record.write(StepTokens(1, experience, updates, computation.settings))
    return recorded_steps(Path(config.run.folder))[1]


@pytest.fixture(scope="module")
def tokenizer(assets):
    return load_tokenizer(str(assets / "lm"), "model")


def executed(program: str, record: Path) -> bool:
    """What the program says of the record, in this process."""
    names = {"__name__": "program"}
    exec(compile(program, "step.py", "exec"), names)
    # dataclasses look their module up
    return names["compare_step"](str(record))


RULES = [name for name in ESTIMATORS if name != "none"]  # which has no policy loss
PAIRS = [(estimator, loss) for estimator in RULES for loss in POLICY_LOSSES]
# each estimator and each loss; the program computes them one after another, so a release alone
# combines all
ONCE = [*zip(RULES, cycle(POLICY_LOSSES), strict=False)]


@pytest.mark.parametrize(
    "words",
    [
        *(words_of(*pair) for pair in ONCE),
        *FLAGS,
        *(pytest.param(words_of(*pair), marks=RELEASE) for pair in PAIRS if pair not in ONCE),
    ],
)
def test_the_program_gives_the_losses_and_gradients_of_the_loop(
    words, tmp_path, monkeypatch, tokenizer, capsys
):
    config = config_for(words, tmp_path / "run")
    record = recorded_step(config, monkeypatch, tokenizer)
    program = algorithm_program(config)
    monkeypatch.setitem(sys.modules, "program", SimpleNamespace())
    assert executed(program, record), capsys.readouterr().out
    printed = capsys.readouterr().out
    assert printed.count("gradient of the log-probs: norm") == 2
    if config.algorithm.has_critic:
        assert printed.count("gradient of the values") == 2
    if config.has_policy_loss:
        assert "gradient of the log-probs: norm 0," not in printed


@pytest.mark.parametrize(
    "formula, changed",
    [
        ("gamma * lam", "gamma * gamma"),
        ("advantages * ratio", "1.01 * advantages * ratio"),
        ("0.5 * torch.maximum(error", "0.51 * torch.maximum(error"),
        ("-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO", "-0.01, 0.01"),
    ],
)
def test_a_changed_formula_is_seen(formula, changed, tmp_path, monkeypatch, tokenizer):
    config = config_for("--gae_lambda 0.5", tmp_path / "run")
    record = recorded_step(config, monkeypatch, tokenizer)
    program = algorithm_program(config)
    assert formula in program
    monkeypatch.setitem(sys.modules, "program", SimpleNamespace())
    assert not executed(program.replace(formula, changed), record)


@pytest.mark.parametrize(
    "words",
    [
        "",
        f"--advantage_estimator grpo {GROUPS} --policy_loss kl_cov --kl_loss_coef 0.1",
        pytest.param(
            f"--advantage_estimator gdpo {GROUPS} --policy_loss gspo --entropy_coef 0.01",
            marks=RELEASE,
        ),
    ],
)
def test_the_program_of_a_run_stands_alone(words, assets, tmp_path, capsys):
    """A run with real models, and the program in a process without this package."""
    run = PlainRun(assets, tmp_path / "run", f"--record_steps 2 {words}")
    run.run()
    program = algorithm_program(run.config)
    (tmp_path / "step.py").write_text(program)
    ended = subprocess.run(
        [sys.executable, "-I", "step.py", str(recorded_steps(run.folder)[2])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("equal to the run but for rounding\n")
    assert "dschat_ppo" not in program.split('"""')[2]


@pytest.mark.parametrize("words", ["", FLAGS[3], FLAGS[8], words_of("rloo", "clip_cov")])
def test_the_text_is_formatted_and_clean(words, tmp_path):
    path = tmp_path / "step.py"
    path.write_text(algorithm_program(config_for(words, tmp_path)))
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--line-length", "100", "--isolated"]
    subprocess.run([*ruff, "format", "--check", *settings, path], check=True)
    subprocess.run([*ruff, "check", "--select", "E,F,I", *settings, path], check=True)


def test_what_flags_switch_off_is_not_in_the_text(tmp_path):
    plain = algorithm_program(config_for("", tmp_path))
    for absent in (
        "off_policy",
        "entropy_coef *",
        "kl_loss",
        "def grpo",
        "importance_weights",
        "overlong",
    ):
        assert absent not in plain, absent
    assert "def gae(" in plain and "masked_whiten" in plain
    assert "masked_whiten" not in algorithm_program(config_for(FLAGS[1], tmp_path))


OWN = '''
"""An estimator of one's own."""
from math import sqrt

from dschat_ppo.algorithms.aggregation import zero_outside

SCALE = sqrt(4)


def advantages(inputs):
    """Twice the rewards."""
    twice = zero_outside(SCALE * inputs.rewards, inputs.response_mask)
    return twice, twice
'''


def test_an_estimator_of_ones_own_is_in_it(tmp_path, monkeypatch, tokenizer):
    (tmp_path / "mine.py").write_text(OWN)
    words = f"--advantage_estimator {tmp_path}/mine.py:advantages --kl_coef 0.1"
    config = config_for(words, tmp_path / "run")
    monkeypatch.setitem(sys.modules, "program", SimpleNamespace())
    record = recorded_step(config, monkeypatch, tokenizer)
    program = algorithm_program(config)
    assert '"""Twice the rewards."""' in program and "SCALE = sqrt(4)" in program
    assert executed(program, record)


def test_errors_name_the_way_out(tmp_path, monkeypatch, tokenizer, capsys):
    def error_of(*words) -> str:
        assert algorithm_main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    assert "is not the output folder of a run" in error_of(tmp_path)
    (tmp_path / "config.yaml").write_text("model_name_or_path: m\n")
    assert "is a run of step 1 or 2; the program exists for step 3" in error_of(tmp_path)
    (tmp_path / "mine.py").write_text("globals()['f'] = lambda inputs: (inputs, inputs)\n")
    own = f"{tmp_path}/mine.py:f"
    assert f"--advantage_estimator {own}: its source cannot be read" in error_of(
        "--advantage_estimator", own
    )
    assert "the whole score to the last token" in error_of(
        *f"--environment {tmp_path}/e.py:E --turn_reward to_go".split()
    )


def test_a_record_that_does_not_fit_is_refused(tmp_path, monkeypatch, tokenizer):
    record = recorded_step(config_for("", tmp_path / "run"), monkeypatch, tokenizer)
    names = {"__name__": "program"}
    monkeypatch.setitem(sys.modules, "program", SimpleNamespace())
    exec(algorithm_program(config_for("--policy_loss gspo", tmp_path)), names)
    with pytest.raises(SystemExit, match="written with --policy_loss ppo, this program is for"):
        names["compare_step"](str(record))
    with pytest.raises(SystemExit, match="none: there is no such file"):
        names["compare_step"](str(tmp_path / "none"))
