"""The last MLP only for tokens whose states are read, against each row alone in plain transformers."""

import pytest
import torch
from test_forward import FAMILIES, PACKED, TEMPERATURE, WITH_CLASSIFIER, both, model_of, rows_alone, scores_alone
from test_shared_prompts import rollout, without_dropout
from tiny_models import new_model

from dschat_ppo.models.activation_memory import last_mlp, tile_mlps
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.forward import response_logprobs, response_values
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.types import full_sequences

WAYS = [(name, way) for name in FAMILIES for way in ("padded", "packed", "shared") if way == "padded" or name in PACKED]

CHANGED = [(*way, "") for way in WAYS]
CHANGED += [
    (*way, change) for way in WAYS if way[0] in ("llama", "gpt2", "phi") for change in ("checkpointing", "tiled")
]
OF_CLASSIFIERS = [way for way in WAYS if way[0] in WITH_CLASSIFIER]


def assert_same_gradients(found, model, expected, plain):
    """Of two losses, of two models with the same weights."""
    found, expected = (
        torch.autograd.grad(loss, list(own.parameters()), allow_unused=True)
        for loss, own in ((found, model), (expected, plain))
    )
    for key, a, b in zip(dict(model.named_parameters()), found, expected, strict=True):
        if b is None:
            assert a is None, key
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def tokens_of_products(backbone) -> list[int]:
    """How many tokens the first product of the last MLP gets, in each pass from now on."""
    sizes: list[int] = []
    first = next(module for module in last_mlp(backbone).modules() if not any(module.children()))
    first.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].shape[:-1].numel()))
    return sizes


@pytest.mark.parametrize(("name", "way", "change"), CHANGED)
def test_log_probs_and_gradients_are_those_of_each_row_alone(name, way, change):
    lm, rows = without_dropout(model_of(name, 1)), rollout()
    plain = without_dropout(model_of(name, 1))
    policy = PolicyModel(lm, Layout(packed=way != "padded", shares=way == "shared", reads_few=True))
    if change == "checkpointing":
        policy.gradient_checkpointing_enable()
        policy.train()
    if change == "tiled":
        tile_mlps(policy.backbone)
    found = response_logprobs(policy, rows, TEMPERATURE, entropy_grad=True)
    found, expected = tuple(part[rows.response_mask] for part in both(found)), scores_alone(plain, rows)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, int(rows.response_mask.sum()))
    loss, of_plain = ((weights * logprobs + 0.1 * entropy).sum() for logprobs, entropy in (found, expected))
    assert_same_gradients(loss, lm, of_plain, plain)


@pytest.mark.parametrize(("name", "way"), OF_CLASSIFIERS)
def test_values_and_scores_and_gradients_are_those_of_each_row_alone(name, way):
    classifier, rows = model_of(name, 2), rollout()
    model = ScalarModel(classifier, Layout(packed=way != "padded", shares=way == "shared", reads_few=True))
    alone = [classifier.score(classifier.base_model(input_ids=row).last_hidden_state)[0, :, 0]
             for _, row in rows_alone(rows)]  # fmt: skip
    before = torch.cat([v[start - 1 : -1] for v, (start, _) in zip(alone, rows_alone(rows), strict=True)])
    values = response_values(model, rows)[rows.response_mask]
    torch.testing.assert_close(values, before, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, len(before))  # prompts share their last token: its gradients add up
    assert_same_gradients((weights * values).sum(), classifier, (weights * before).sum(), classifier)
    scores, ends = model(*full_sequences(rows), last_only=True), torch.stack([v[-1] for v in alone])
    torch.testing.assert_close(scores, ends, rtol=0, atol=1e-5)


def test_the_same_operations_are_recorded_however_many_tokens_are_read():
    """Under ZeRO-3 the ranks gather weights together, also while activation checkpointing runs layers again."""
    ids = torch.randint(2, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    policy = PolicyModel(model_of("llama", 1), Layout(reads_few=True))
    sizes = tokens_of_products(policy.backbone)
    recorded = []
    for first_read in (0, 10):  # all tokens, and half of them
        seen: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, seen=seen: seen.append(x) or x, lambda x: x):
            policy(ids, (torch.arange(20) >= first_read).expand(2, -1))
        recorded.append([x.dim() for x in seen])
    assert sizes == [38, 20]  # nothing reads the state of the last token
    assert recorded[0] == recorded[1]


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gpt-neox", "gemma2", "gemma3", "phi3", "bloom", "falcon", "gpt-neo"]
)
def test_models_with_an_mlp_in_the_last_layer_are_selected(name):
    policy = PolicyModel(new_model(name)).eval()
    select_kernels(policy)
    assert policy.layout.reads_few


@pytest.mark.parametrize("name", ["opt", "mixtral", "phimoe", "gpt-oss", "mamba"])
def test_models_without_one_or_with_experts_run_all_tokens(name):
    policy = PolicyModel(new_model(name))
    assert last_mlp(policy.backbone) is None
    select_kernels(policy)
    assert not policy.layout.reads_few


def test_a_model_that_mixes_tokens_after_the_last_mlp_runs_all_tokens():
    lm = new_model("llama")
    lm.model.norm.forward = lambda states: states.cumsum(dim=1) / 10
    policy = PolicyModel(lm)
    select_kernels(policy)
    assert policy.layout.fused and not policy.layout.reads_few


def test_a_model_that_trains_with_dropout_runs_all_tokens():
    policies = [PolicyModel(new_model("llama")) for _ in range(2)]
    for policy in policies:
        policy.lm.model.layers[0].mlp.dropout = torch.nn.Dropout(0.1)
    select_kernels(policies[0].train())
    select_kernels(policies[1].eval())
    assert [policy.layout.reads_few for policy in policies] == [False, True]
