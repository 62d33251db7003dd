"""Whole distributions of a `PolicyModel`, compared with the language model alone."""

import pytest
import torch
from tiny_models import new_model

from dschat_ppo.models.policy_model import PolicyModel

TEMPERATURE = 0.7


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two right-padded rows of 6 and 4 tokens with answers of 3 and 2."""
    ids = torch.randint(2, 48, (2, 6), generator=torch.Generator().manual_seed(3))
    slots = torch.arange(6)
    wanted = torch.stack([(slots >= 3) & (slots < 6), (slots >= 2) & (slots < 4)])
    return ids, wanted


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_distributions_are_those_of_each_row_alone(name):
    lm = new_model(name)
    ids, wanted = rows()
    with torch.no_grad():
        logprobs, entropy, table = PolicyModel(lm)(ids, wanted, TEMPERATURE, distributions=True)
        expected = [
            torch.log_softmax(
                lm(input_ids=ids[i : i + 1, :length], use_cache=False).logits[0].double() / TEMPERATURE, -1
            )
            for i, length in enumerate((6, 4))
        ]
        parts = torch.cat([expected[0][2:5], expected[1][1:3]])
    torch.testing.assert_close(table.double(), parts, rtol=0, atol=2e-5)
    chosen = parts.gather(1, ids[wanted].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logprobs.double(), chosen, rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), -(parts.exp() * parts).sum(1), rtol=0, atol=2e-5)


def test_distributions_have_the_gradient_of_a_plain_forward():
    lm = new_model("llama")
    ids, wanted = rows()
    weights = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    (PolicyModel(lm)(ids, wanted, 1.0, distributions=True)[2] * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in lm.named_parameters()}
    lm.zero_grad()
    plain = torch.log_softmax(lm(input_ids=ids, use_cache=False).logits, dim=-1)
    (plain[:, :-1][wanted[:, 1:]] * weights).sum().backward()
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
