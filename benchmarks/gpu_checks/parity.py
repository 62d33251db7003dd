"""Generation and scoring against plain transformers on the same device: tokens, log-probs, values
and gradients."""

from __future__ import annotations

from typing import Any

import plain
import torch
from models import classifier, language_model
from tiny_models import CONTINUOUS, new_model, prompts_of, tokens_of, transformers_greedy
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config

from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.wrapped_models import (
    PolicyModel,
    ScalarModel,
    response_logprobs,
    response_values,
)
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.types import PromptBatch, Rollout, to_device
from gpu_checks.parts import Findings

FP32 = 1e-3  # largest difference of log-probs and values
GREEDY = 24  # tokens


def wide_config(tiny: bool) -> PretrainedConfig:
    """Qwen2 0.5B, or tiny, with 4 layers; weights are large enough that a token is much likelier
    than others."""
    width = (
        {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        if tiny
        else {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
    )
    return Qwen2Config(
        **width,
        vocab_size=1024 if tiny else 151936,
        num_hidden_layers=4,
        num_key_value_heads=2,
        num_labels=1,
        max_position_embeddings=2048,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def parity(found: Findings, tiny: bool) -> None:
    """Every architecture in fp32; then a model as wide as a real one in fp32 and bf16."""
    device = init_process_group()
    names = CONTINUOUS[:2] if tiny else CONTINUOUS
    found.measure("architectures", lambda: architectures(names, device))
    config = wide_config(tiny)
    prompts = prompts_of((3, 40, 17, 33) if tiny else (5, 300, 40, 129, 256, 64, 1, 200))
    prompts = to_device(prompts, device)
    found.measure("fp32", lambda: in_fp32(config, prompts))
    found.measure("bf16", lambda: in_bf16(config, prompts))


def with_kernels(module: Any) -> Any:
    """A `PolicyModel` or `ScalarModel` with the kernels that a run would select."""
    select_kernels(module)
    return module


def sampled(model: PreTrainedModel, prompts: PromptBatch, tokens: int, top_k: int = 0) -> Rollout:
    """Two answers to each prompt, three rows at a time so that rows are replaced; one greedy answer
    with `top_k` 1."""
    samples = 1 if top_k == 1 else 2
    config = GenerationConfig(
        SamplingParameters(top_k=top_k), StoppingCriteria(tokens), samples, rows=3
    )
    seeds = row_seeds(0, samples * len(prompts.prompt_ids), 0).to(prompts.prompt_ids.device)
    return generate(model, RolloutRequest(prompts, seeds), config)


def sequences(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Left-padded ids and mask (B, P + R) int64, for plain transformers."""
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1)
    return ids, torch.cat([rollout.prompt_mask, rollout.response_mask], dim=1).long()


def plain_logprobs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """(B, R) fp32, with gradient."""
    return plain.token_logprobs(model, *sequences(rollout), rollout.response_ids.shape[1])


@torch.no_grad()
def architectures(names: Any, device: torch.device) -> dict[str, Any]:
    """Of each tiny model in fp32: whether greedy tokens are those of `generate`, and how far
    log-probs are apart."""
    wrong, largest = {}, 0.0
    prompts = to_device(prompts_of(), device)
    for name in names:
        model = new_model(name).to(device)
        try:
            same = tokens_of(sampled(model, prompts, GREEDY, top_k=1)) == transformers_greedy(
                model, prompts, GREEDY
            )
            rollout = sampled(model, prompts, GREEDY)
            difference = float(
                (rollout.rollout_logprobs - plain_logprobs(model, rollout)).abs().max()
            )
        except RuntimeError as problem:  # of CUDA, or a model that cannot be captured
            wrong[name] = f"{type(problem).__name__}: {problem}"[:200]
            continue
        largest = max(largest, difference)
        if not (same and difference < FP32):
            wrong[name] = (
                f"greedy tokens are {'equal' if same else 'not equal'}, log-probs {difference:.1e}"
                " apart"
            )
    return {
        "compared": len(names),
        "wrong": len(wrong),
        "which": wrong,
        "largest_difference": largest,
    }


def gradients(model: nn.Module, output: Tensor) -> Tensor:
    """The gradient of the mean of `output` with respect to all weights, as one fp32 vector."""
    model.zero_grad(set_to_none=True)
    output.mean().backward()
    return torch.cat(
        [weight.grad.float().flatten() for weight in model.parameters() if weight.grad is not None]
    )


def in_fp32(config: PretrainedConfig, prompts: PromptBatch) -> dict[str, Any]:
    """Largest differences between ours and plain transformers, and that of the gradient relative to
    its norm."""
    device = prompts.prompt_ids.device
    model, scalar = (make(config, device.type).float() for make in (language_model, classifier))
    with torch.no_grad():
        greedy = tokens_of(sampled(model, prompts, GREEDY, top_k=1)) == transformers_greedy(
            model, prompts, GREEDY
        )
        rollout = sampled(model, prompts, 2 * GREEDY)
        mask, last = rollout.response_mask, rollout.prompt_ids.shape[1]
        critic = with_kernels(ScalarModel(scalar))
        values = plain.values_of(critic, *sequences(rollout))[:, last - 1 : -1]
        differences = {
            "sampled": (rollout.rollout_logprobs - plain_logprobs(model, rollout))[mask],
            "values": (response_values(critic, rollout) - values)[mask],
        }
    expected = plain_logprobs(model, rollout)
    ours = response_logprobs(with_kernels(PolicyModel(model)), rollout, 1.0).logprobs
    differences["scored"] = (ours - expected)[mask].detach()
    plain_gradient = gradients(model, expected[mask])
    distance = gradients(model, ours[mask]).sub_(plain_gradient).norm() / plain_gradient.norm()
    largest = {name: float(part.abs().max()) for name, part in differences.items()}
    ok = greedy and max(*largest.values(), float(distance)) < FP32
    return {"ok": int(ok), "greedy_equal": greedy, **largest, "gradient": float(distance)}


@torch.no_grad()
def in_bf16(config: PretrainedConfig, prompts: PromptBatch) -> dict[str, Any]:
    """Mean distance from the same weights in fp32: of plain transformers in bf16, and of ours,
    which may be at most 1.5 times as far."""
    device = prompts.prompt_ids.device
    model, scalar = (make(config, device.type) for make in (language_model, classifier))
    rollout, critic = sampled(model, prompts, 2 * GREEDY), with_kernels(ScalarModel(scalar))
    mask, last = rollout.response_mask, rollout.prompt_ids.shape[1]
    pairs = {
        "plain": plain_logprobs(model, rollout),
        "sampled": rollout.rollout_logprobs,
        "scored": response_logprobs(with_kernels(PolicyModel(model)), rollout, 1.0).logprobs,
        "plain_values": plain.values_of(critic, *sequences(rollout))[:, last - 1 : -1],
        "values": response_values(critic, rollout),
    }
    exact = plain_logprobs(model.float(), rollout)
    exact_values = plain.values_of(ScalarModel(scalar.float()), *sequences(rollout))[
        :, last - 1 : -1
    ]
    distance = {
        name: float((part - (exact_values if "values" in name else exact))[mask].abs().mean())
        for name, part in pairs.items()
    }
    most = 1.5 * distance["plain"] + 1e-4
    ok = max(distance["sampled"], distance["scored"]) <= most
    return {
        "ok": int(ok and distance["values"] <= 1.5 * distance["plain_values"] + 1e-4),
        **distance,
    }
