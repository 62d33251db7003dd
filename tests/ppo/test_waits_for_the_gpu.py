"""How often the host waits for a GPU in a micro-batch, counted on tensors that claim to be on one."""

from collections import Counter

import pytest
import torch
from pretended_gpu import moved, on_gpu, pretended_gpu
from tiny_experience import experience
from tiny_models import new_model

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.models import packing, segment_attention
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.score import ForwardPasses, PassSettings, texts_of
from dschat_ppo.ppo.update import ActorLoss, critic_loss
from dschat_ppo.rewards.reward_source import Scores
from dschat_ppo.types import Experience, Rollout, record_of, tensors_of

MINIBATCH = MiniBatch([], Denominators(tokens=4.0, rows=2.0, constant=9.0), value_tokens=4.0, metric_weight=0.5)
# Per forward pass, all before any layer: the longest row, transformers' check of positions, and the number of wanted
# tokens.
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
        name: torch.rand(3, 3, generator=generator) for name in ("advantages", "returns", "values", "loss_weights")
    }
    drawn |= {name: -torch.rand(3, 3, generator=generator) for name in ("old_logprobs", "ref_logprobs")}
    return experience(**drawn)


def operations(waits: Counter[tuple[str, str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for (operation, _), number in waits.items():
        found[operation] += number
    return found


FLAGS = [
    {}, {"policy_loss": "gspo"}, {"policy_loss": "sapo"}, {"kl_loss_coef": 0.1}, {"entropy_coef": 0.1},
    {"off_policy_delta": 0.1}, {"loss_aggregation": "seq_mean_token_mean"}, {"dual_clip": 3.0},
]  # fmt: skip


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_micro_batch_of_the_actor_waits_only_before_its_layers(flags):
    flags, sums, real = AlgorithmFlags(**flags), MetricSums(), MetricSums()
    with torch.no_grad():
        expected = ActorLoss(policy(), None, flags, 0.7)(rows(), MINIBATCH, flags.entropy_coef, real)
    with pretended_gpu() as seen:
        batch = record_of(Experience, {name: on_gpu(value) for name, value in tensors_of(rows()).items()})
        loss = ActorLoss(moved(policy()), None, flags, 0.7)
        seen.waits.clear()
        found = loss(batch, MINIBATCH, flags.entropy_coef, sums)
        assert operations(seen.waits) == OF_LOGPROBS, seen.waits
        assert not seen.mixed
        metrics = sums.reduce()
    torch.testing.assert_close(found.held, expected, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(real.reduce(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("shares", "reads_few", "waits"), [(False, False, 4), (True, False, 5), (False, True, 4), (True, True, 6)]
)
def test_packed_rows_wait_only_before_the_second_layer(monkeypatch, shares, reads_few, waits):
    """The host finds the wanted tokens, reads lengths, and to share prompts the rows; it copies the layout, and in the
    first layer the segments. Where rows share the tokens before a wanted one, it finds them once. The attention is
    replaced by its query."""
    monkeypatch.setattr(segment_attention, "_VARLEN", lambda query, *_, **__: query)
    monkeypatch.setattr(packing, "suits_varlen", lambda *_: True)
    ids = torch.arange(20).repeat(4, 1)
    ids[:, 12:] += torch.arange(4).unsqueeze(1)
    wanted = (torch.arange(20) >= 12) & (torch.arange(20) < torch.tensor([20, 17, 14, 20]).unsqueeze(1))
    with pretended_gpu() as seen:
        engine, until_second = moved(policy()), []
        engine.layout = Layout(packed=True, shares=shares, reads_few=reads_few)
        engine.lm.model.layers[1].register_forward_pre_hook(lambda *_: until_second.append(seen.waits.total()))
        arguments = on_gpu(ids), on_gpu(wanted)
        seen.waits.clear()
        engine(*arguments)
        assert [seen.waits.total()] == until_second == [waits], seen.waits
        assert not seen.mixed


def test_a_micro_batch_of_the_critic_waits_only_before_its_layers():
    sums, real = MetricSums(), MetricSums()
    with torch.no_grad():
        expected = critic_loss(critic(), rows(), MINIBATCH, AlgorithmFlags(value_clip_eps=0.2), real)
    with pretended_gpu() as seen:
        batch = record_of(Experience, {name: on_gpu(value) for name, value in tensors_of(rows()).items()})
        engine = moved(critic())
        seen.waits.clear()
        found = critic_loss(engine, batch, MINIBATCH, AlgorithmFlags(value_clip_eps=0.2), sums)
        assert operations(seen.waits) == OF_VALUES, seen.waits
        assert not seen.mixed
        metrics = sums.reduce()
    torch.testing.assert_close(found.held, expected, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(real.reduce(), rel=1e-4, abs=1e-6)


def test_scoring_waits_a_few_times_for_each_model():
    names = [field for field in tensors_of(rows()) if field in Rollout.__dataclass_fields__]
    rollout = record_of(Rollout, {name: tensors_of(rows())[name] for name in names})
    scores, groups = Scores(torch.zeros(3), torch.zeros(3, 1)), torch.arange(3)
    settings = PassSettings(0.7, 1000, "recompute", "k1")
    expected = ForwardPasses(policy(), policy(), critic(), settings)(rollout, scores, groups)
    with pretended_gpu() as seen:
        batch = record_of(Rollout, {name: on_gpu(value) for name, value in tensors_of(rollout).items()})
        scorer = ForwardPasses(moved(policy()), moved(policy()), moved(critic()), settings)
        scores, groups = Scores(on_gpu(scores.total), on_gpu(scores.by_source)), on_gpu(groups)
        seen.waits.clear()
        found = scorer(batch, scores, groups)
        of_models = OF_LOGPROBS + OF_LOGPROBS + OF_VALUES
        assert not seen.mixed
        assert seen.waits.total() <= of_models.total() + 8, seen.waits  # 8 of dealing the rows to the only micro-batch
    for name in ("old_logprobs", "ref_logprobs", "kl", "values"):
        torch.testing.assert_close(getattr(found, name).held, getattr(expected, name), rtol=1e-4, atol=1e-5)


def test_metrics_make_the_host_wait_only_when_they_are_reduced():
    values, mask = torch.tensor([1.0, torch.nan, 3.0, -5.0]), torch.tensor([True, False, True, True])
    sources = torch.tensor([0, 1, 1, 0])

    def fill(sums: MetricSums, *tensors: torch.Tensor) -> MetricSums:
        values, mask, sources = tensors
        sums.add_mean("mean", values, mask)
        sums.add_mean("all", sources.float())
        sums.add_mean_if_any("some", values, mask)
        sums.add_mean_if_any("none", values, torch.zeros_like(mask))
        sums.add_max("max", values, mask)
        sums.add_max("nothing", values[:0])
        sums.add_by_source("part", values, sources, mask)
        return sums

    expected = fill(MetricSums(["a", "b"]), values, mask, sources).reduce()
    assert expected == {
        "mean": -1 / 3, "all": 0.5, "some": -1 / 3, "max": 3.0, "nothing": 0.0, "part/a": -2.0, "part/b": 3.0,
    }  # fmt: skip
    with pretended_gpu() as seen:
        sums = fill(MetricSums(["a", "b"]), *map(on_gpu, (values, mask, sources)))
        assert not seen.waits and not seen.mixed
        assert sums.reduce() == expected
        assert operations(seen.waits) == {"tolist": 1}


def test_texts_leave_the_gpu_at_once():
    class Tokenizer:
        def batch_decode(self, rows, skip_special_tokens):
            return [str(row) for row in rows]

    ids, mask = torch.arange(12).view(4, 3), torch.ones(4, 3, dtype=torch.bool).tril()
    with pretended_gpu() as seen:
        found = texts_of(Tokenizer(), on_gpu(ids), on_gpu(mask), skip_special_tokens=True)
        assert operations(seen.waits) == {"to": 2}
    assert (
        found
        == texts_of(Tokenizer(), ids, mask, skip_special_tokens=True)
        == ["[0]", "[3, 4]", "[6, 7, 8]", "[9, 10, 11]"]
    )
