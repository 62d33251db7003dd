"""Every value of `--attn_implementation` that this machine can run, for padded, packed and shared rows, against eager
attention of padded rows: log-probs and gradients."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from models import language_model
from tiny_models import prompts_of
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.models.forward import response_scores
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.runtime.process_group import init_process_group
from dschat_ppo.types import PromptBatch, Rollout, repeat_rows, to_device
from gpu_checks.parity import FP32, gradients, wide_config
from gpu_checks.run_part import Findings

SAMPLES = 4  # answers to each prompt
LAYOUTS = {"padded": (False, False), "packed": (True, False), "shared": (True, True)}  # packs, shares


def attention(found: Findings, tiny: bool) -> None:
    """All choices in fp32, then in bf16."""
    device, config = init_process_group(), wide_config(tiny)
    prompts = prompts_of((9, 40, 17, 33) if tiny else (20, 300, 40, 129, 256, 64, 9, 200))
    rows = to_device(random_answers(prompts, 8 if tiny else 48), device)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        found.measure(name, lambda dtype=dtype: compared(config, rows, dtype))  # type: ignore[misc]


def choices(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The values that can run. On a CPU, flex attention has no gradient."""
    found = ["auto", "sdpa", "eager", "flex_attention"]
    half = dtype in (torch.float16, torch.bfloat16)
    return found + ["flash_attention_2"] * (device.type == "cuda" and half and find_spec("flash_attn") is not None)


def random_answers(prompts: PromptBatch, longest: int) -> Rollout:
    """`SAMPLES` random answers of 1 to `longest` tokens to each prompt."""
    generator = torch.Generator().manual_seed(0)
    prompts = repeat_rows(prompts, SAMPLES)
    count = len(prompts.prompt_ids)
    lengths = torch.randint(1, longest + 1, (count, 1), generator=generator)
    mask = torch.arange(longest) < lengths
    ids = torch.randint(2, 48, mask.shape, generator=generator)
    zeros = torch.zeros(mask.shape)
    return Rollout(prompts.prompt_ids, prompts.prompt_mask, ids, mask, zeros, zeros[:, 0].to(torch.int8))


def scored(
    model: PreTrainedModel, rows: Rollout, choice: str, layout: str, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of all response tokens (N,) fp32, and the gradient of their mean as one vector."""
    policy = PolicyModel(model)
    policy.attention = choice
    policy.packed, policy.shares = LAYOUTS[layout]
    with torch.set_grad_enabled(with_gradient):
        logprobs = response_scores(policy, rows, 1.0).logprobs[rows.response_mask]
    return logprobs.detach(), gradients(model, logprobs) if with_gradient else None


def compared(config: PretrainedConfig, rows: Rollout, dtype: torch.dtype) -> dict[str, Any]:
    """Distances from eager attention of padded rows in fp32: largest in fp32, mean in bf16, where those of eager
    attention in bf16 are the measure; and for each choice whether a run would pack and share."""
    device = rows.prompt_ids.device
    model = language_model(config, device.type).float()
    exact, slope = scored(model, rows, "eager", "padded", True)
    model = model.to(dtype)
    most, most_slope = FP32, FP32
    if dtype != torch.float32:
        logprobs, of_eager = scored(model, rows, "eager", "padded", True)
        most, most_slope = 1.5 * float((logprobs - exact).abs().mean()), 1.5 * apart(of_eager, slope)
    result: dict[str, Any] = {"largest_allowed": {"logprobs": most, "gradient": most_slope}}
    wrong = []
    for choice in choices(device, dtype):
        has_gradient = device.type != "cpu" or choice != "flex_attention"
        result[choice] = {"run": selected(model, choice)}
        for layout in LAYOUTS:
            logprobs, own = scored(model, rows, choice, layout, has_gradient)
            differences = (logprobs - exact).abs()
            distance = float(differences.max() if dtype == torch.float32 else differences.mean())
            entry = {"logprobs": distance} | ({"gradient": apart(own, slope)} if has_gradient else {})
            result[choice][layout] = entry
            if not (entry["logprobs"] <= most and entry.get("gradient", 0.0) <= most_slope):
                wrong.append(f"{choice} {layout}")
    return {"wrong": len(wrong), "which": wrong, **result}


def apart(one: Tensor | None, other: Tensor | None) -> float:
    """Distance of two gradients, relative to the norm of the second."""
    assert one is not None and other is not None
    return float((one - other).norm() / other.norm())


@torch.no_grad()
def selected(model: PreTrainedModel, choice: str) -> str:
    """What a run would do with rows."""
    policy = PolicyModel(model)
    policy.attention = choice
    reason = select_kernels(policy)
    return reason or ("packs and shares" if policy.shares else "packs")
