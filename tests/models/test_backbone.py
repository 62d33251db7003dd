"""Arguments of forward passes, windows that only the model's mask limits, and the widths of rows on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import POSITIONS, VOCABULARY, new_model

from dschat_ppo.models import backbone
from dschat_ppo.models.backbone import hidden_window
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, response_logprobs, response_values
from dschat_ppo.supervised.policy_objectives import answer_logprobs
from dschat_ppo.types import Rollout


def config(**facts) -> SimpleNamespace:
    text = SimpleNamespace(**facts)
    return SimpleNamespace(get_text_config=lambda: text)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(("facts", "received", "hidden"), [
    ({}, {0: None, 1: None}, False), ({"sliding_window": 8}, {0: 8, 1: 8}, False),
    ({"sliding_window": 8}, {0: None, 1: None}, True),
    ({"sliding_window": 8, "layer_types": [SLIDING, FULL]}, {0: 8, 1: None}, False),
    ({"sliding_window": 8, "layer_types": [SLIDING, FULL]}, {0: None, 1: None}, True),
    ({"sliding_window": 8, "layer_types": [FULL, FULL]}, {0: 8, 1: None}, True),
    ({"layer_types": [FULL, "chunked_attention"]}, {0: None, 1: None}, True),
    ({"layer_types": ["linear_attention", "mlp", "hybrid"]}, {2: None}, False),
    ({"attention_chunk_size": 16}, {0: None}, True),
])  # fmt: skip
def test_hidden_windows_by_hand(facts, received, hidden):
    assert hidden_window(config(**facts), received) is hidden


def rollout_of(prompt: int, response: int, rows: int = 3) -> Rollout:
    """Rows with a prompt of `prompt` tokens and responses of up to `response`."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.arange(response, response - rows, -1)
    return Rollout(
        torch.randint(2, VOCABULARY, (rows, prompt), generator=generator), torch.ones(rows, prompt, dtype=torch.bool),
        torch.randint(2, VOCABULARY, (rows, response), generator=generator),
        torch.arange(response) < lengths.unsqueeze(1), torch.zeros(rows, response), torch.zeros(rows, dtype=torch.int8),
    )  # fmt: skip


def numbers_of(policy: PolicyModel, critic: ScalarModel, rows: Rollout) -> list[torch.Tensor]:
    """Scores of every kind, and the gradients of their sums."""
    ids = torch.cat([rows.prompt_ids, rows.response_ids], dim=1)
    lengths = rows.prompt_ids.shape[1] + rows.response_mask.sum(dim=1)
    answers = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    answers[:, :3] = False
    scores = response_logprobs(policy, rows, 1.0, entropy_grad=True)
    found = [scores.logprobs, scores.entropy, answer_logprobs(policy, ids, answers)]
    values = response_values(critic, rows)
    found += [values, critic(ids, lengths, last_only=True)]
    found.append(critic(ids, lengths).gather(1, (lengths - 1).unsqueeze(1)).squeeze(1))
    leaves = [*policy.parameters(), *critic.parameters()]
    grads = torch.autograd.grad(sum(part.double().sum() for part in found), leaves, allow_unused=True)
    return found + [gradient for gradient in grads if gradient is not None]


@pytest.mark.parametrize(("name", "prompt", "response", "width"), [
    ("llama", 20, 9, 64), ("gpt2", 60, 4, 64), ("llama", 60, 10, POSITIONS), ("gpt2", 80, 16, POSITIONS),
])  # fmt: skip
def test_on_a_gpu_rows_have_few_widths_within_the_models_positions_and_the_same_numbers(
    name, prompt, response, width, monkeypatch
):
    """GPT-2 has a table of positions, in which a longer row would find nothing."""
    policy = PolicyModel(new_model(name))
    critic = ScalarModel(new_model(name))
    critic.classifier.score = torch.nn.Linear(32, 1)
    rows = rollout_of(prompt, response)
    expected, widths, sdpa = numbers_of(policy, critic, rows), set(), torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, *rest, **options):
        widths.update((query.shape[2], key.shape[2]))
        return sdpa(query, key, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(backbone, "COLUMNS", {"cpu": 64})
    found = numbers_of(policy, critic, rows)
    assert widths == {width}
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
