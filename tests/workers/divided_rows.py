"""Models whose rows are divided among the ranks against the same models on whole rows, for
`layouts.py`."""

from dataclasses import replace
from itertools import product

import torch
from episodes import fixed_episodes, logprobs_alone, rollout_of
from tiny_models import VOCABULARY, new_model

from dschat_ppo.algorithms.fused_logprobs import Forbidden
from dschat_ppo.common import dist
from dschat_ppo.errors import UserError
from dschat_ppo.features.sequence_parallel.row_runners import DIVIDED
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, response_logprobs

# so that 41 tokens are a long row
SHORT_ROPE = {"phi3-longrope": {"original_max_position_embeddings": 32}}
FAMILIES = (
    "llama",
    "mistral-window",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "opt",
    "gpt2",
    "gpt-neox",
    "phi3-longrope",
)


def families() -> dict[str, list[float]]:
    """Name -> largest differences of outputs and of gradients."""
    found = {}
    for kind, packed in product(FAMILIES, (False, True)):
        found[f"{kind}{' packed' * packed}"] = against_whole_rows(
            kind, packed, **SHORT_ROPE.get(kind, {})
        )
    for heads in (1, 3):
        changes = {"num_key_value_heads": heads, "num_attention_heads": 12, "hidden_size": 48}
        found[f"{heads} key heads"] = against_whole_rows("llama", True, **changes)
    for kind, packed in product(("llama", "mistral-window"), (False, True)):
        found[f"{kind} eager{' packed' * packed}"] = against_whole_rows(
            kind, packed, choice="eager"
        )
    found["scalar"] = against_whole_rows("llama", False, scalar=True)
    found["scalar packed"] = against_whole_rows("mistral-window", True, scalar=True)
    for packed in (False, True):
        found[f"contexts{' packed' * packed}"] = against_contexts_alone(packed)
    return found


def against_contexts_alone(packed: bool) -> list[float]:
    """Largest differences of log-probs, and of gradients relative to them, between rows of several
    contexts that are divided and each context alone in plain transformers."""
    lm, made = new_model("llama"), fixed_episodes()
    rows = rollout_of(made)
    policy = PolicyModel(lm, Layout(packed=packed, runner=DIVIDED))
    found = response_logprobs(policy, rows, 1.0).logprobs[rows.response_mask]
    results = []
    for logprobs in (found, logprobs_alone(lm, made)[0]):
        lm.zero_grad()
        (torch.linspace(-1, 1, len(logprobs)) * logprobs).sum().backward()
        results.append(torch.cat([p.grad.flatten() for p in lm.parameters()]))
    gradients, expected = dist.all_reduce(results[0]), results[1]
    return [
        float((found - logprobs).detach().abs().max()),
        float((gradients - expected).abs().max() / expected.abs().max()),
    ]


def against_whole_rows(
    kind: str, packed: bool, scalar: bool = False, choice: str = "auto", **changes
) -> list[float]:
    """Largest differences between divided and whole rows: of the outputs, and of the gradients
    relative to them. `choice`: attention of the divided rows."""
    lm = new_model(kind, **changes)
    # 41 columns and 65 tokens: neither is a multiple of the ranks
    lengths = torch.tensor([41, 9, 15])
    ids = torch.randint(2, VOCABULARY, (3, 41), generator=torch.Generator().manual_seed(3))
    slots = torch.arange(41)
    wanted = (slots >= torch.tensor([[4], [2], [12]])) & (slots < lengths.unsqueeze(1))
    factors = torch.randn(2, int(wanted.sum()), generator=torch.Generator().manual_seed(4))
    if scalar:
        lm.score = torch.nn.Linear(32, 1)
        torch.nn.init.normal_(lm.score.weight, generator=torch.Generator().manual_seed(5))
        model = ScalarModel(lm, Layout(packed=packed))
    else:
        model = PolicyModel(lm, Layout(packed=packed))
    results = []
    for divided in (False, True):
        model.zero_grad()
        model.layout = replace(
            model.layout,
            runner=DIVIDED if divided else None,
            attention=choice if divided else "auto",
        )
        if scalar:
            outputs = model(ids, lengths)[wanted].unsqueeze(0)
            assert (
                torch.equal(
                    model(ids, lengths, last_only=True),
                    model(ids, lengths).gather(1, (lengths - 1).unsqueeze(1)).squeeze(1),
                )
                or not divided
            )
        else:
            forbidden = Forbidden(wanted & (slots % 3 == 0), (0, 1))
            outputs = torch.stack(model(ids, wanted, 0.7, True, forbidden=forbidden))
        (outputs * factors[: len(outputs)]).sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((outputs.detach(), dist.all_reduce(gradients) if divided else gradients))
    (whole, expected), (found, gradients) = results
    return [
        float((found - whole).abs().max()),
        float((gradients - expected).abs().max() / expected.abs().max()),
    ]


def refusals() -> list[str]:
    """Why models are not divided whose tokens meet outside attention, or whose window is in their
    mask alone."""
    found = []
    for change in ("shift", "window"):
        lm = new_model("llama")
        if change == "shift":
            mlp = lm.model.layers[0].mlp
            mlp.forward = lambda states, inner=mlp.forward: inner(states) + states.roll(1, dims=1)
        else:
            lm.config.sliding_window = 9
        try:
            select_kernels(PolicyModel(lm))
        except UserError as problem:
            found.append(str(problem))
    return found
