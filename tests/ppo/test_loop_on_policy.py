"""Steps whose only update gives old log-probs and values; and that the host does not wait for a GPU
inside micro- batches."""

import math
from collections import Counter
from functools import cache

import pytest
import torch
from plain_ppo import EVERYTHING, STEPS, PlainRun, StopAt
from pretended_gpu import moved, on_gpu, pretended_gpu
from tiny_experience import experience, record
from tiny_models import new_model

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.errors import StopRequested
from dschat_ppo.models import packing, segment_attention
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.step_passes import on_host
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo import score
from dschat_ppo.ppo.mini_dataset import MiniBatch, MiniDataset
from dschat_ppo.ppo.response_texts import texts_of
from dschat_ppo.ppo.score import ForwardPasses
from dschat_ppo.ppo.token_losses import ActorLoss, critic_loss
from dschat_ppo.types import (
    Experience,
    ForbiddenTokens,
    RewardedRollout,
    Rollout,
    record_of,
    tensors_of,
)

ONE_UPDATE = "--per_device_training_batch_size 4 --ppo_epochs 1 --micro_batch_tokens 24"
GROUPS = f"{ONE_UPDATE} --n_samples_per_prompt 2 --per_device_generation_batch_size 2"
SKIP = "--on_nonfinite skip --max_nonfinite_skips 9"
CASES = {
    "everything": f"{ONE_UPDATE} {EVERYTHING}",
    "gae": f"{ONE_UPDATE} --kl_estimator k3 --kl_target 0.05 --kl_horizon 8 --entropy_coef 0.01",
    "limits": f"{ONE_UPDATE} --max_log_ratio 0.01 --target_kl 0.01 --off_policy_delta 0.01",
    "grpo": (
        f"{GROUPS} --advantage_estimator grpo --kl_coef 0.1 --kl_loss_coef 0.1 --policy_loss gspo"
    ),
    "rloo": f"{GROUPS} --advantage_estimator rloo --policy_loss cispo",
    "dr_grpo": (
        f"{GROUPS} --advantage_estimator dr_grpo --kl_loss_coef 0.1 --kl_loss_estimator full"
    ),
}


OFTEN = ("everything", "grpo")


@pytest.fixture(scope="module")
def ran(assets, tmp_path_factory):
    """A function: a run of a case, its weights before it, and its result."""

    @cache
    def run_of(case: str):
        run = PlainRun(assets, tmp_path_factory.mktemp("whole"), CASES[case])
        start = {name: weight.clone() for name, weight in run.weights.items()}
        return run, start, run.run()

    return run_of


@pytest.mark.parametrize(
    "case",
    [case if case in OFTEN else pytest.param(case, marks=pytest.mark.release) for case in CASES],
)
def test_metrics_and_weights_are_those_of_recomputed_log_probs(assets, tmp_path, ran, case):
    run, start, _ = ran(case)
    other = PlainRun(assets, tmp_path / "recompute", f"{CASES[case]} --old_logprobs recompute")
    other.run()
    assert (run.ppo.old_logprobs, other.ppo.old_logprobs) == ("update", "recompute")
    assert len(run.lines) == len(other.lines) >= STEPS
    for line, expected in zip(run.lines, other.lines, strict=True):
        # without a pass of the actor, in the warm-up of the critic, nothing tells the drift of
        # sampling
        missing = set(expected) - set(line)
        assert missing <= {"rollout/logprob_diff_mean", "rollout/logprob_diff_max"}
        assert line == pytest.approx(
            {name: expected[name] for name in set(expected) - missing}, abs=1e-5, rel=1e-5
        )
        if "policy/ratio_mean" in line:
            assert line["policy/ratio_mean"] == line["policy/ratio_max"] == 1.0
            assert line["policy/first_log_ratio_abs_max"] == line["policy/kl_k3"] == 0.0
            assert 0 <= line["rollout/logprob_diff_max"] < 1e-4
    for name, weight in other.weights.items():
        torch.testing.assert_close(run.weights[name], weight, atol=1e-5, rtol=0, msg=name)
    assert (
        max(float((weight - start[name]).abs().max()) for name, weight in other.weights.items())
        > 1e-3
    ), "trained"


@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(how, marks=pytest.mark.release) for how in ("recompute", "rollout")),
        "auto --kl_loss_coef 0.1 --kl_loss_estimator full",
    ],
)
def test_below_the_minimum_length_all_log_probs_are_over_tokens_that_do_not_end_an_answer(
    assets, tmp_path, words
):
    """Scoring and training compute what sampling recorded: the ratio starts at 1, and the KL at
    0."""
    run = PlainRun(assets, tmp_path / "run", f"--min_answer_seq_len 3 --old_logprobs {words}")
    ends = run.ppo.collection.sampler.config.stopping.ids
    with torch.no_grad():  # likelier ends
        for policy in (run.ppo.engines.actor.module, run.ppo.engines.reference.module):
            policy.lm.get_output_embeddings().weight[list(ends)] *= 3
    run.run()
    assert abs(run.lines[0]["kl/ref_k1"]) < 1e-5, "the policy was the reference"
    for line in run.lines:
        assert (
            line["policy/first_log_ratio_abs_max"] < 1e-4
            and line["rollout/logprob_diff_max"] < 1e-4
        )
    scorer = run.ppo.collection.passes
    assert (
        scorer.forbidden_tokens
        == run.ppo.updates.actor_loss.forbidden_tokens
        == ForbiddenTokens(ends, 3)
    )


@pytest.mark.parametrize("at", [(0, 1), pytest.param((1, 1), marks=pytest.mark.release)])
def test_a_run_that_is_stopped_and_resumed_equals_the_whole_run(assets, tmp_path, ran, at):
    words = CASES["everything"]
    whole, _, result = ran("everything")
    before = PlainRun(assets, tmp_path / "run", words)
    with pytest.raises(StopRequested):
        before.run(StopAt(before, at))
    before.save(tmp_path / "saved")
    if at[1]:
        assert before.ppo.state.experience.values is not None
        assert (before.ppo.state.experience.old_logprobs is None) is (at[0] == 0), (
            "the warm-up computes none"
        )
    after = PlainRun(assets, tmp_path / "run", words)
    after.load(tmp_path / "saved")
    length = (tmp_path / "run/metrics.jsonl").stat().st_size
    assert after.run(StopAt(after), (length, at[0] + 1)) == result
    assert after.lines == whole.lines
    assert all(torch.equal(after.weights[name], weight) for name, weight in whole.weights.items())


def spoil_values(run: PlainRun, step: int) -> None:
    """One value of the critic is NaN in PPO step `step`."""

    def hook(module, arguments, output):
        return output * math.nan if run.ppo.state.steps + 1 == step else output

    run.ppo.engines.critic.module.register_forward_hook(hook)


def test_values_that_are_not_finite_make_no_update_but_a_step(assets, tmp_path):
    run = PlainRun(
        assets,
        tmp_path / "run",
        f"{ONE_UPDATE} {SKIP} --normalize_rewards running --kl_target 0.05",
    )
    spoil_values(run, 2)
    with pytest.raises(StopRequested):
        run.run(StopAt(run, (1, 0)))
    weights = {name: weight.clone() for name, weight in run.weights.items()}
    adapted = run.ppo.advantage_computation.state_dict()
    length = (tmp_path / "run/metrics.jsonl").stat().st_size
    with pytest.raises(StopRequested):
        run.run(StopAt(run, (2, 0)), (length, 2))
    assert run.lines[1]["optim/nonfinite_skipped"] == 1 and "value/loss" not in run.lines[1]
    assert all(torch.equal(weights[name], weight) for name, weight in run.weights.items())
    assert run.ppo.advantage_computation.state_dict() == adapted
    assert all(weight.grad is None for weight in run.ppo.engines.critic.parameters()), (
        "the gradients are dropped"
    )
    length = (tmp_path / "run/metrics.jsonl").stat().st_size
    run.run(StopAt(run), (length, 3))
    assert (
        run.lines[2]["optim/grad_norm/critic"] > 0
        and run.lines[2]["policy/updates_done_share"] == 1.0
    )


def test_a_value_loss_that_is_not_finite_skips_the_critic_alone(assets, tmp_path):
    run = PlainRun(assets, tmp_path / "run", f"{ONE_UPDATE} {SKIP}")
    weight = run.ppo.engines.critic.module.classifier.score.weight
    weight.register_hook(lambda grad: grad * math.nan if run.ppo.state.steps == 1 else grad)
    bad_steps = []
    run.ppo.nonfinite.recorders = [lambda bad_step: bad_steps.append(bad_step) or ""]
    run.run()
    second = run.lines[1]
    assert second["optim/nonfinite_skipped"] == 1 and second["optim/grad_norm/actor"] > 0
    assert "optim/grad_norm/critic" not in second
    [bad_step] = bad_steps
    assert bad_step.role == "critic"
    assert str(bad_step.fault).startswith("the gradient is not finite")
    for bad_rows in bad_step.records:
        assert type(bad_rows) is RewardedRollout and bad_rows.values is None


MINIBATCH = MiniBatch(
    [], Denominators(tokens=4.0, rows=2.0, constant=9.0), value_tokens=4.0, metric_weight=0.5
)
# Per forward pass, all before any layer: the longest row, transformers' check of positions, and the
# number of wanted tokens.
OF_VALUES = Counter({"__int__": 1, "__bool__": 1, "index": 1})
OF_LOGPROBS = Counter({"__int__": 1, "__bool__": 1, "nonzero": 1})


def policy() -> PolicyModel:
    return PolicyModel(new_model("llama"))


def critic() -> ScalarModel:
    model = ScalarModel(new_model("llama"))
    torch.manual_seed(2)
    model.classifier.score = torch.nn.Linear(32, 1, bias=False)
    return model


def rows() -> Experience:
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.rand(3, 3, generator=generator)
        for name in ("advantages", "returns", "values", "loss_weights")
    }
    drawn |= {
        name: -torch.rand(3, 3, generator=generator) for name in ("old_logprobs", "ref_logprobs")
    }
    return experience(**drawn)


def operations(waits: Counter[tuple[str, str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for (operation, _), number in waits.items():
        found[operation] += number
    return found


FLAGS = [
    {},
    {"policy_loss": "gspo", "dual_clip": 3.0},
    {"policy_loss": "sapo", "loss_aggregation": "seq_mean_token_mean"},
    {"kl_loss_coef": 0.1, "entropy_coef": 0.1, "off_policy_delta": 0.1},
]


@pytest.mark.parametrize(
    ("role", "flags"), [*(("actor", flags) for flags in FLAGS), ("critic", {})], ids=str
)
def test_a_micro_batch_waits_only_before_the_layers(role, flags):
    flags = AlgorithmFlags(**flags)

    def loss_of(model, rows, sums):
        if role == "actor":
            return ActorLoss(model, flags, 0.7)(rows, MINIBATCH, flags.entropy_coef, sums)
        return critic_loss(model, rows, MINIBATCH, flags, sums)

    make, sums, real = policy if role == "actor" else critic, MetricSums(), MetricSums()
    with torch.no_grad():
        expected = loss_of(make(), rows(), real)
    with pretended_gpu() as seen:
        batch = record_of(
            Experience, {name: on_gpu(value) for name, value in tensors_of(rows()).items()}
        )
        model = moved(make())
        seen.waits.clear()
        found = loss_of(model, batch, sums)
        assert operations(seen.waits) == (OF_LOGPROBS if role == "actor" else OF_VALUES), seen.waits
        assert not seen.mixed
        metrics = sums.reduce()
    torch.testing.assert_close(found.held, expected, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(real.reduce(), rel=1e-4, abs=1e-6)


@pytest.fixture
def attention_of_a_gpu(monkeypatch):
    """One call for all segments, which is replaced by its query."""
    monkeypatch.setattr(segment_attention, "_VARLEN", lambda query, *_, **__: query)
    monkeypatch.setattr(packing, "suits_varlen", lambda *_: True)


PACKED = [
    {"packed": True},
    {"packed": True, "shares": True},
    {"packed": True, "reads_few": True},
    {"packed": True, "shares": True, "reads_few": True},
]


@pytest.mark.parametrize("ways", PACKED, ids=str)
def test_packed_rows_wait_only_before_the_layers(attention_of_a_gpu, ways):
    """The host finds the wanted tokens, reads the rows, and copies their layout and their
    segments."""
    ids = torch.arange(20).repeat(4, 1)
    ids[:, 12:] += torch.arange(4).unsqueeze(1)
    wanted = (torch.arange(20) >= 12) & (
        torch.arange(20) < torch.tensor([20, 17, 14, 20]).unsqueeze(1)
    )
    with pretended_gpu() as seen:
        engine, until_first = moved(policy()), []
        engine.layout = Layout(**ways)
        engine.lm.model.layers[0].register_forward_pre_hook(
            lambda *_: until_first.append(seen.waits.total())
        )
        arguments = on_gpu(ids), on_gpu(wanted)
        seen.waits.clear()
        engine(*arguments)
        assert [seen.waits.total()] == until_first == [4], seen.waits
        assert not seen.mixed


def rows_of_a_step() -> Experience:
    """Answers of 5 to 14 tokens, all different, to three prompts of 20."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    mask = torch.arange(14) < torch.tensor([9, 14, 11, 12, 10, 13, 8, 7, 6, 5]).unsqueeze(1)
    return record(
        Experience,
        mask,
        prompt_ids=torch.randint(0, 24, (3, 20), generator=generator)[groups],
        prompt_mask=torch.ones(10, 20, dtype=torch.bool),
        response_ids=torch.randint(0, 24, mask.shape, generator=generator),
        loss_weights=mask.float(),
        groups=groups,
    )


# padded rows wait once, in transformers' check of positions
@pytest.mark.parametrize(("ways", "waits"), [({}, 1), *((ways, 0) for ways in PACKED)], ids=str)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_later_micro_batches_of_an_update_do_not_wait(attention_of_a_gpu, role, ways, waits):
    with pretended_gpu() as seen:
        model = moved(policy() if role == "actor" else critic())
        model.layout = Layout(**ways)
        batch = record_of(
            Experience,
            {name: on_gpu(value) for name, value in tensors_of(rows_of_a_step()).items()},
        )
        dataset = MiniDataset(10, 80, 14, seed=0, shares_prompts="shares" in ways)
        [minibatch] = dataset.minibatches(batch, 1, step=1)
        assert len(minibatch.micro_batches) > 1
        waits_of_passes = []
        for rows in minibatch.micro_batches:
            seen.waits.clear()
            if role == "actor":
                ActorLoss(model, AlgorithmFlags(), 0.7, ForbiddenTokens((2,), 3))(
                    rows, minibatch, 0.0, MetricSums()
                )
            else:
                critic_loss(model, rows, minibatch, AlgorithmFlags(), MetricSums())
            waits_of_passes.append(seen.waits.total())
        assert waits_of_passes[0] > waits
        assert set(waits_of_passes[1:]) == {waits}, seen.waits


@pytest.mark.parametrize("ways", PACKED, ids=str)
def test_later_micro_batches_of_scoring_do_not_wait(attention_of_a_gpu, monkeypatch, ways):
    with pretended_gpu() as seen:
        models = [moved(policy()), moved(policy()), moved(critic())]
        for model in models:
            model.layout = Layout(**ways)
        before_passes = []
        monkeypatch.setattr(score, "heartbeat", lambda: before_passes.append(seen.waits.total()))
        passes = ForwardPasses(*models, 0.7, 80, "recompute", "k3")
        step = rows_of_a_step()
        rollout = {name: on_gpu(column) for name, column in tensors_of(on_host(step)).items()}
        passes(record_of(Rollout, rollout), on_gpu(step.groups))
        first, second, *later = before_passes
        assert later
        assert first < second == later[-1], seen.waits


def test_texts_leave_the_gpu_at_once():
    class Tokenizer:
        def batch_decode(self, rows, skip_special_tokens):
            return [str(row) for row in rows]

    ids, mask = torch.arange(12).view(4, 3), torch.ones(4, 3, dtype=torch.bool).tril()
    with pretended_gpu() as seen:
        found = texts_of(Tokenizer(), on_gpu(ids), on_gpu(mask), skip_special_tokens=True)
        assert operations(seen.waits) == {"to": 2}
    assert found == ["[0]", "[3, 4]", "[6, 7, 8]", "[9, 10, 11]"]
