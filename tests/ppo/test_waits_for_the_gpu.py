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
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.score import texts_of
from dschat_ppo.ppo.update import ActorLoss, critic_loss
from dschat_ppo.types import Experience, record_of, tensors_of

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
    {}, {"policy_loss": "gspo", "dual_clip": 3.0}, {"policy_loss": "sapo", "loss_aggregation": "seq_mean_token_mean"},
    {"kl_loss_coef": 0.1, "entropy_coef": 0.1, "off_policy_delta": 0.1},
]  # fmt: skip


@pytest.mark.parametrize(("role", "flags"), [*(("actor", flags) for flags in FLAGS), ("critic", {})], ids=str)
def test_a_micro_batch_waits_only_before_the_layers(role, flags):
    flags = AlgorithmFlags(**flags)

    def loss_of(model, rows, sums):
        if role == "actor":
            return ActorLoss(model, None, flags, 0.7)(rows, MINIBATCH, flags.entropy_coef, sums)
        return critic_loss(model, rows, MINIBATCH, flags, sums)

    make, sums, real = policy if role == "actor" else critic, MetricSums(), MetricSums()
    with torch.no_grad():
        expected = loss_of(make(), rows(), real)
    with pretended_gpu() as seen:
        batch = record_of(Experience, {name: on_gpu(value) for name, value in tensors_of(rows()).items()})
        model = moved(make())
        seen.waits.clear()
        found = loss_of(model, batch, sums)
        assert operations(seen.waits) == (OF_LOGPROBS if role == "actor" else OF_VALUES), seen.waits
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


def test_texts_leave_the_gpu_at_once():
    class Tokenizer:
        def batch_decode(self, rows, skip_special_tokens):
            return [str(row) for row in rows]

    ids, mask = torch.arange(12).view(4, 3), torch.ones(4, 3, dtype=torch.bool).tril()
    with pretended_gpu() as seen:
        found = texts_of(Tokenizer(), on_gpu(ids), on_gpu(mask), skip_special_tokens=True)
        assert operations(seen.waits) == {"to": 2}
    assert found == ["[0]", "[3, 4]", "[6, 7, 8]", "[9, 10, 11]"]
