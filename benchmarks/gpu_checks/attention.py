"""Every value of `--attn_implementation` that this machine can run, for padded, packed and shared rows, against eager
attention of padded rows: log-probs and gradients."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import torch
from models import language_model
from tiny_models import prompts_of
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.forward import response_logprobs
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.types import PromptBatch, Rollout, repeat_rows, to_device
from gpu_checks.parity import FP32, gradients, wide_config
from gpu_checks.run_part import Findings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAMPLES = 4  # answers to each prompt
LAYOUTS = {"padded": (False, False), "packed": (True, False), "shared": (True, True)}  # packs, shares
CHOICES = ("auto", "sdpa", "eager")


def attention(found: Findings, tiny: bool) -> None:
    """All choices in fp32 and in bf16."""
    device, config = init_process_group(), wide_config(tiny)
    prompts = prompts_of((9, 40, 17, 33) if tiny else (20, 300, 40, 129, 256, 64, 9, 200))
    rows = to_device(random_answers(prompts, 8 if tiny else 48), device)
    results: dict[str, dict[str, Any]] = {"fp32": {"wrong": 0, "which": []}, "bf16": {"wrong": 0, "which": []}}
    for name, result in results.items():
        for choice, entry, wrong in compared(config, rows, DTYPES[name]):
            result[choice] = entry
            result["which"] += wrong
            found.add(name, result | {"wrong": len(result["which"])})


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


def scored(model: PreTrainedModel, rows: Rollout, choice: str, layout: str) -> tuple[Tensor, Tensor]:
    """Log-probs of all response tokens (N,) fp32, and the gradient of their mean as one vector."""
    packs, shares = LAYOUTS[layout]
    policy = PolicyModel(model, Layout(packed=packs, shares=shares, attention=choice))
    logprobs = response_logprobs(policy, rows, 1.0).logprobs[rows.response_mask]
    return logprobs.detach(), gradients(model, logprobs)


def compared(
    config: PretrainedConfig, rows: Rollout, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Each choice with its distances from eager attention of padded rows in fp32, whether a run would pack and share,
    and the layouts that are wrong. Distances are the largest in fp32, and the mean in bf16, where those of eager
    attention in bf16 are the measure."""
    device = rows.prompt_ids.device
    model = language_model(config, device.type).float()
    exact, slope = scored(model, rows, "eager", "padded")
    model = model.to(dtype)
    most, most_slope = FP32, FP32
    if dtype != torch.float32:
        logprobs, of_eager = scored(model, rows, "eager", "padded")
        most, most_slope = 1.5 * float((logprobs - exact).abs().mean()), 1.5 * apart(of_eager, slope)
    for choice in CHOICES:
        found, wrong = dict[str, Any](largest_allowed={"logprobs": most, "gradient": most_slope}), []
        try:
            found["run"] = selected(model, choice)
            for layout in LAYOUTS:
                logprobs, own = scored(model, rows, choice, layout)
                differences = (logprobs - exact).abs()
                distance = float(differences.max() if dtype == torch.float32 else differences.mean())
                found[layout] = entry = {"logprobs": distance, "gradient": apart(own, slope)}
                if not (distance <= most and entry["gradient"] <= most_slope):
                    wrong.append(f"{choice} {layout}")
        except Exception as problem:  # noqa: BLE001  one choice that fails must not cost the others
            traceback.print_exc()
            found["failed"] = f"{type(problem).__name__}: {problem}"[:300]
            wrong.append(f"{choice} failed")
        yield choice, found, wrong


def apart(one: Tensor, other: Tensor) -> float:
    """Distance of two gradients, relative to the norm of the second."""
    return float((one - other).norm() / other.norm())


@torch.no_grad()
def selected(model: PreTrainedModel, choice: str) -> str:
    """What a run would do with rows."""
    policy = PolicyModel(model, Layout(attention=choice))
    reason = select_kernels(policy)
    return reason or ("packs and shares" if policy.layout.shares else "packs")
