"""A teacher in step 1: its term of the loss, beside the cross entropy."""

import pytest
import torch
from pairs_of_answers import CPU, ROWS, language_model
from pass_count import PassCount

from dschat_ppo.algorithms.divergence import Divergence
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.features.distillation.sft_terms import sft_divergence_term, sft_term_of
from dschat_ppo.models.pass_observers import observed
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.sft import sft_objective

NEEDED = "--model_name_or_path m --data_path d --output_dir o".split()


def nll_and_divergence(model, teacher, row: int) -> tuple[float, torch.Tensor, int]:
    """Of the answer of a row, by whole logits: the sum of -log p, the forward KL, and its
    tokens."""
    prompt, answer = ROWS[row]["prompt_ids"], ROWS[row]["answers"][0]
    tables = []
    for each in (model, teacher):
        logits = each(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        tables.append(torch.log_softmax(logits, dim=-1))
    log_p, log_q = tables
    nll = -float(log_p[torch.arange(len(answer)), torch.tensor(answer)].sum().detach())
    return nll, (log_q.exp() * (log_q - log_p)).sum(), len(answer)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_with_a_teacher_the_loss_is_a_mixture_of_its_divergence_and_the_cross_entropy(share):
    model, teacher = language_model(1), language_model(2)
    term = sft_divergence_term(PolicyModel(teacher), Divergence("forward_kl"), share)
    objective = sft_objective(0, False, CPU, [term])
    batch = objective.collate(ROWS, [3, PADDING_ROW, 0])
    nll, divergence, tokens = 0.0, torch.zeros(()), 0
    for row in (3, 0):
        nll_of_row, divergence_of_row, length = nll_and_divergence(model, teacher, row)
        nll += nll_of_row
        divergence = divergence + divergence_of_row
        tokens += length
    passes = PassCount()  # observers read the passes of the model that trains
    with observed(passes):
        assert term.distribution(batch) and passes.passes == 0
    sums = MetricSums()
    loss = objective.loss(PolicyModel(model), batch, torch.tensor(tokens), sums)
    expected = (share * divergence + (1 - share) * nll) / tokens
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    metrics = objective.summary(sums.reduce())
    assert metrics["divergence"] == pytest.approx(divergence.item() / tokens, rel=1e-4)
    assert metrics["loss"] == pytest.approx(nll / tokens, rel=1e-4)
    assert objective.headline == ("divergence", "loss")


@pytest.mark.parametrize(("words", "share"), [("", 1.0), ("--distill_coef 0.4", 0.4)])
def test_the_flags_name_the_teacher_and_its_share(words, share):
    asked = []

    def frozen(role):
        asked.append(role)

    taught = parse("sft", [*NEEDED, "--teacher_model_name_or_path", "t", *words.split()])
    term = sft_term_of(taught, frozen)
    assert (term.share, term.metric, asked) == (share, "divergence", ["teacher"])
    assert sft_term_of(parse("sft", NEEDED), frozen) is None
