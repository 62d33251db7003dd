"""What the matrix products of a phase take by themselves, at the best rate of the machine.

The rate is measured: the highest of products of the model's sizes, in bf16 and in fp32. Operations
are counted by arithmetic: 2 for each weight that a token passes, three times that with a backward
pass, and in attention 4 x the hidden size for each pair of a token and one that it sees. What
shared prompts and unread tokens save is subtracted only where a prompt runs once for its answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from measure import markdown, matmul_rate
from models import Workload
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.planner.number_format import faster_format, time_products, widths_of

ROWS = 1024  # tokens of a measured product
FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}
BACKWARD = 3  # operations of a forward and a backward pass, in those of a forward pass


def faster_dtype(config: PretrainedConfig) -> str:
    """What `--dtype auto` stands for where memory is ample."""
    if torch.cuda.is_available():
        return "bf16"
    return faster_format(time_products(*widths_of(config)), fp32_fits=True).dtype


def best_rate(device: torch.device, config: Any) -> float:
    """Operations per second of the fastest product of the model's sizes, in the faster format."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = [(hidden, hidden), (hidden, inner), (inner, hidden), (hidden, config.vocab_size)]
    return max(
        matmul_rate(device, ROWS, width, columns, dtype)
        for dtype in FORMATS.values()
        for width, columns in shapes
    )


@dataclass(frozen=True)
class Operations:
    """Operations of one pass over a workload's rows."""

    layers: float  # of the decoder layers, for a forward pass
    head: float  # of the output head, at the tokens of the answers

    @property
    def generation(self) -> float:
        return self.layers + self.head


def operations_of(model: PreTrainedModel, work: Workload, shares: bool) -> Operations:
    """Those of a language model. `shares`: the prompt of several answers runs once."""
    config: Any = model.config
    head = config.vocab_size * config.hidden_size
    tables = head if config.tie_word_embeddings else 2 * head
    weights = sum(weight.numel() for weight in model.parameters()) - tables
    prompts = work.prompts.prompt_mask.sum(dim=1).double()  # (B,)
    answers = work.answer_lengths.view(-1, work.samples).double()  # (B, samples)
    runs = 1 if shares else work.samples
    tokens = float(runs * prompts.sum() + answers.sum())
    seen = runs * prompts * prompts / 2  # pairs of tokens, (B,)
    seen = seen + (answers * prompts.unsqueeze(1) + answers * answers / 2).sum(dim=1)
    attention = 4 * config.hidden_size * config.num_hidden_layers * float(seen.sum())
    return Operations(2 * weights * tokens + attention, 2 * head * work.tokens)


def operations_of_step(ppo: Any, work: Workload) -> dict[str, float]:
    """Phase of `ppo.clock` -> operations of a PPO step with one update. Old log-probs and values
    come from the passes of the update."""
    engines = ppo.engines
    model = engines.actor.module.pretrained
    apart = operations_of(model, work, shares=False)
    passes = operations_of(model, work, shares=engines.actor.module.layout.shares)
    found = {"rollout": operations_of(model, work, shares=True).generation}
    found["train"] = BACKWARD * passes.generation
    if engines.critic is not None:
        found["train"] += BACKWARD * apart.layers
    if engines.reference is not None:
        found["score"] = passes.generation
    if engines.reward is not None:
        found["reward"] = apart.layers
    return found


def shares_of(
    seconds: Mapping[str, float], operations: Mapping[str, float], rate: float
) -> dict[str, dict[str, float]]:
    """Phase -> its seconds, those of its products alone at the rate, and their share."""
    found = {}
    for phase, count in operations.items():
        alone = count / rate
        found[phase] = {
            "seconds": seconds[phase],
            "products": alone,
            "share": alone / seconds[phase],
        }
    return found


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """For each workload and phase a line. `found`: workload -> `shares_of`."""
    rows = []
    for workload, phases in found.items():
        for phase, numbers in phases.items():
            rows.append(
                [
                    workload,
                    phase,
                    f"{numbers['seconds']:.2f}",
                    f"{numbers['products']:.2f}",
                    f"{numbers['share']:.2f}",
                ]
            )
    return markdown(["workload", "phase", "s", "products alone, s", "share"], rows)
