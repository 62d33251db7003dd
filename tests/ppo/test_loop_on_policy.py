"""The loop where a PPO step makes one optimizer step: its passes give old log-probs and values, with equal numbers."""

import math

import pytest
import torch
from plain_ppo import EVERYTHING, STEPS, PlainRun, StopAt

from dschat_ppo.errors import StopRequested
from dschat_ppo.nonfinite.repro_bundle import read_bundle
from dschat_ppo.types import LateEnds, RewardedRollout

ONE_UPDATE = "--per_device_training_batch_size 4 --ppo_epochs 1 --micro_batch_tokens 24"
GROUPS = f"{ONE_UPDATE} --n_samples_per_prompt 2 --per_device_generation_batch_size 2"
SKIP = "--on_nonfinite skip --max_nonfinite_skips 9"
CASES = {
    "everything": f"{ONE_UPDATE} {EVERYTHING}",
    "gae": f"{ONE_UPDATE} --kl_estimator k3 --kl_target 0.05 --kl_horizon 8 --entropy_coef 0.01",
    "limits": f"{ONE_UPDATE} --max_log_ratio 0.01 --target_kl 0.01 --off_policy_delta 0.01",
    "grpo": f"{GROUPS} --advantage_estimator grpo --kl_coef 0.1 --kl_loss_coef 0.1 --policy_loss gspo",
    "rloo": f"{GROUPS} --advantage_estimator rloo --policy_loss cispo",
    "dr_grpo": f"{GROUPS} --advantage_estimator dr_grpo --kl_loss_coef 0.1 --kl_loss_estimator full",
}


def count_rows(run: PlainRun) -> dict[str, int]:
    """Rows that the models see in forward passes of scoring and training, from now on."""
    seen = dict.fromkeys(("actor", "reference", "critic"), 0)
    engines = run.ppo.engines
    modules = {"actor": engines.actor.module, "reference": engines.reference}
    if engines.critic is not None:
        modules["critic"] = engines.critic.module

    def counted(role: str):
        def hook(module, arguments, output) -> None:
            seen[role] += arguments[0].shape[0]

        return hook

    for role, module in modules.items():
        if module is not None:
            module.register_forward_hook(counted(role))
    return seen


def run_of(assets, folder, words: str) -> tuple[PlainRun, dict[str, int]]:
    run = PlainRun(assets, folder, words)
    seen = count_rows(run)
    run.run()
    return run, seen


@pytest.mark.parametrize("case", CASES)
def test_metrics_and_weights_are_those_of_recomputed_log_probs(assets, tmp_path, case):
    run, seen = run_of(assets, tmp_path / "update", CASES[case])
    other, seen_before = run_of(assets, tmp_path / "recompute", f"{CASES[case]} --old_logprobs recompute")
    assert (run.ppo.old_logprobs, other.ppo.old_logprobs) == ("update", "recompute")
    rows = 4 * run.ppo.state.steps
    evaluated = 9 if case == "everything" else 0  # three prompts three times; scored by the actor with `recompute`
    assert seen_before["actor"] - seen["actor"] == rows + evaluated, "each row has one pass of the actor fewer"
    assert seen_before["critic"] - seen["critic"] == (rows if run.ppo.engines.critic else 0)
    assert seen_before["reference"] == seen["reference"]
    if case != "everything":  # whose evaluations score further rows, and whose first step trains no actor
        assert seen["actor"] == rows
    assert len(run.lines) == len(other.lines) >= STEPS
    for line, expected in zip(run.lines, other.lines, strict=True):
        assert line == pytest.approx(expected | own_names(line, expected), abs=1e-5, rel=1e-5)
        if "policy/ratio_mean" in line:
            assert line["policy/ratio_mean"] == line["policy/ratio_max"] == 1.0
            assert line["policy/first_log_ratio_abs_max"] == line["policy/kl_k3"] == 0.0
            assert 0 < line["rollout/logprob_diff_max"] < 1e-4
    moved = 0.0
    start = PlainRun(assets, tmp_path / "start", CASES[case]).weights
    for name, weight in other.weights.items():
        torch.testing.assert_close(run.weights[name], weight, atol=1e-5, rtol=0, msg=name)
        moved = max(moved, float((weight - start[name]).abs().max()))
    assert moved > 1e-3, "nothing was trained"


@pytest.mark.parametrize("source", ["recompute", "rollout", "auto"])
@pytest.mark.parametrize("words", ["", "--kl_loss_coef 0.1 --kl_loss_estimator full"])
def test_below_the_minimum_length_all_log_probs_are_over_tokens_that_do_not_end_an_answer(
    assets, tmp_path, source, words
):
    """Scoring and training compute what sampling recorded: the ratio starts at 1, and the KL at 0."""
    run = PlainRun(assets, tmp_path / "run", f"--min_answer_seq_len 3 --old_logprobs {source} {words}")
    ends = run.ppo.collection.generator.config.stopping.ids
    with torch.no_grad():  # likelier ends
        for policy in (run.ppo.engines.actor.module, run.ppo.engines.reference):
            policy.lm.get_output_embeddings().weight[list(ends)] *= 3
    run.run()
    assert abs(run.lines[0]["kl/ref_k1"]) < 1e-5, "the policy was the reference"
    for line in run.lines:
        assert line["policy/first_log_ratio_abs_max"] < 1e-4 and line["rollout/logprob_diff_max"] < 1e-4
    scorer = run.ppo.collection.passes.settings
    assert scorer.late_ends == run.ppo.updates.actor_loss.late_ends == LateEnds(ends, 3)


def own_names(line: dict, expected: dict) -> dict:
    """Without a pass of the actor, in the warm-up of the critic, nothing tells the drift of sampling."""
    assert set(line) <= set(expected)
    missing = set(expected) - set(line)
    assert missing <= {"rollout/logprob_diff_mean", "rollout/logprob_diff_max"}
    for name in missing:
        del expected[name]
    return {}


@pytest.mark.parametrize("at", [(0, 1), (1, 0), (1, 1), (2, 1)])
def test_a_run_that_is_stopped_and_resumed_equals_the_whole_run(assets, tmp_path, at):
    words = CASES["everything"]
    whole, before = PlainRun(assets, tmp_path / "whole", words), PlainRun(assets, tmp_path / "run", words)
    result = whole.run()
    with pytest.raises(StopRequested):
        before.run(StopAt(before, at))
    before.save(tmp_path / "saved")
    if at[1]:
        assert before.ppo.state.experience.values is not None
        assert (before.ppo.state.experience.old_logprobs is None) is (at[0] == 0), "the warm-up computes none"
    after = PlainRun(assets, tmp_path / "run", words)
    after.load(tmp_path / "saved")
    length = (tmp_path / "run/metrics.jsonl").stat().st_size
    assert after.run(StopAt(after), (length, at[0] + 1)) == result
    assert after.lines == whole.lines
    for name, weight in whole.weights.items():
        assert torch.equal(after.weights[name], weight), name


def spoil_values(run: PlainRun, step: int) -> None:
    """One value of the critic is NaN in PPO step `step`."""

    def hook(module, arguments, output):
        return output * math.nan if run.ppo.state.steps + 1 == step else output

    run.ppo.engines.critic.module.register_forward_hook(hook)


def test_values_that_are_not_finite_make_no_update_but_a_step(assets, tmp_path):
    run = PlainRun(assets, tmp_path / "run", f"{ONE_UPDATE} {SKIP} --normalize_rewards running --kl_target 0.05")
    spoil_values(run, 2)
    with pytest.raises(StopRequested):
        run.run(StopAt(run, (1, 0)))
    weights = {name: weight.clone() for name, weight in run.weights.items()}
    adapted = run.ppo.shaping.state_dict()
    length = (tmp_path / "run/metrics.jsonl").stat().st_size
    with pytest.raises(StopRequested):
        run.run(StopAt(run, (2, 0)), (length, 2))
    assert run.lines[1]["optim/nonfinite_skipped"] == 1 and "value/loss" not in run.lines[1]
    assert all(torch.equal(weights[name], weight) for name, weight in run.weights.items())
    assert run.ppo.shaping.state_dict() == adapted
    assert all(weight.grad is None for weight in run.ppo.engines.critic.parameters()), "the gradients are dropped"
    length = (tmp_path / "run/metrics.jsonl").stat().st_size
    run.run(StopAt(run), (length, 3))
    assert run.lines[2]["optim/grad_norm/critic"] > 0 and run.lines[2]["policy/updates_done_share"] == 1.0


def test_a_value_loss_that_is_not_finite_skips_the_critic_alone(assets, tmp_path):
    run = PlainRun(assets, tmp_path / "run", f"{ONE_UPDATE} {SKIP}")
    weight = run.ppo.engines.critic.module.classifier.score.weight
    weight.register_hook(lambda grad: grad * math.nan if run.ppo.state.steps == 1 else grad)
    run.run()
    second = run.lines[1]
    assert (
        second["optim/nonfinite_skipped"] == 1
        and "optim/grad_norm/critic" not in second
        and second["optim/grad_norm/actor"] > 0
    )
    [folder] = (tmp_path / "run/nonfinite").iterdir()
    what, records = read_bundle(folder)
    assert (what["role"], what["fault"]["kind"]) == ("critic", "gradient")
    assert all(type(record) is RewardedRollout and record.values is None for record in records)


def test_the_start_of_the_log_says_where_old_log_probs_come_from(assets, tmp_path, said):
    PlainRun(assets, tmp_path / "one", ONE_UPDATE)
    PlainRun(assets, tmp_path / "two", "")
    assert [line for line in said if line.startswith("old log-probs: ")] == [
        "old log-probs: those of the update, which also gives the values; ratios are 1",
        "old log-probs: those recorded while sampling, because a PPO step makes 4 optimizer steps "
        "(--old_logprobs auto)",
    ]
