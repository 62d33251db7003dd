"""The load-balancing loss is that of the whole optimizer step, however it is divided."""

import pytest
import torch
from one_rank import one_rank  # noqa: F401
from tiny_models import new_model
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.engine.step_loss import StepLoss
from dschat_ppo.features.router import step_terms
from dschat_ppo.features.router.step_terms import RouterTerm
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.sft import sft_loss

pytestmark = pytest.mark.usefixtures("one_rank")


LENGTHS = torch.tensor([7, 4, 6, 5])


def real_rows(batch: SFTBatch) -> torch.Tensor:
    return batch.loss_mask.any(dim=1)


def whole_step(lm):
    """Rows of an optimizer step, the last one a padding row, and the loss of plain transformers."""
    ids = torch.randint(2, 48, (4, 7), generator=torch.Generator().manual_seed(5))
    slots = torch.arange(7)
    wanted = (slots >= 2) & (slots < LENGTHS.unsqueeze(1)) & (torch.arange(4) < 3).unsqueeze(1)
    output = lm(input_ids=ids, use_cache=False, output_router_logits=True)
    logits, losses = output.logits[:, :-1], wanted[:, 1:]
    nll = torch.nn.functional.cross_entropy(logits[losses], ids[:, 1:][losses])
    counted = (slots < (LENGTHS - 1).unsqueeze(1)) & (torch.arange(4) < 3).unsqueeze(1)
    router = load_balancing_loss_func(output.router_logits, 4, 2, counted.long())
    return ids, wanted, nll, router


@pytest.mark.parametrize(
    ("parts", "packed"), [([[0, 1], [2, 3]], False), ([[0], [1], [2], [3]], True)]
)
def test_micro_batches_add_up_to_transformers_loss_of_the_whole_step(parts, packed):
    lm = new_model("mixtral")
    ids, wanted, nll, router = whole_step(lm)
    (nll + 0.5 * router).backward()
    expected = {name: p.grad.clone() for name, p in lm.named_parameters()}
    lm.zero_grad()

    policy, sums, total = PolicyModel(lm, Layout(packed=packed)), MetricSums(), wanted.sum()
    batches = [SFTBatch(ids[rows], wanted[rows]) for rows in parts]
    step_loss = StepLoss(
        batches,
        lambda batch, sums: sft_loss(policy, batch, total, sums),
        real_rows,
        sums,
    )
    loss_of = RouterTerm(0.5, 2)(step_loss)
    losses = [loss_of(batch) for batch in batches]
    sum(losses).backward()
    assert sum(losses).item() == pytest.approx((nll + 0.5 * router).item(), rel=1e-5)
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    metrics = sums.reduce()
    assert metrics["router_loss"] == pytest.approx(router.item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(nll.item(), rel=1e-5), (
        "the counting passes add no metrics"
    )


def test_the_load_is_that_of_all_ranks(monkeypatch):
    """Beside a rank with as many tokens and the same choices, a rank has half of the loss."""
    monkeypatch.setattr(step_terms, "all_reduce", lambda counts: 2 * counts)
    lm = new_model("mixtral")
    ids, wanted, _, router = whole_step(lm)
    policy = PolicyModel(lm)
    step_loss = StepLoss(
        [SFTBatch(ids, wanted)],
        lambda batch, sums: 0 * sft_loss(policy, batch, wanted.sum(), sums),
        real_rows,
        MetricSums(),
    )
    loss_of = RouterTerm(1.0, 2)(step_loss)
    assert loss_of(SFTBatch(ids, wanted)).item() == pytest.approx(router.item() / 2, rel=1e-5)


def test_dropout_is_the_same_in_both_passes():
    lm = new_model("mixtral", attention_dropout=0.5).train()
    policy = PolicyModel(lm, Layout(fused=False))
    ids, wanted, *_ = whole_step(lm)
    batch, seen = SFTBatch(ids, wanted), []

    def loss(batch, sums):
        logprobs, _ = policy(batch.input_ids, batch.loss_mask)
        seen.append(logprobs.detach())
        return -logprobs.sum()

    torch.manual_seed(3)
    state = torch.get_rng_state()
    loss_of = RouterTerm(1.0, 2)(StepLoss([batch], loss, real_rows, MetricSums()))
    assert torch.equal(torch.get_rng_state(), state)
    loss_of(batch)
    torch.testing.assert_close(seen[0], seen[1])
    assert not torch.equal(torch.get_rng_state(), state), "there is dropout"
