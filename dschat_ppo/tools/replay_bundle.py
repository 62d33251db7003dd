"""Repeat the forward and backward passes of a repro bundle, and print what is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.engine.optimizer_step import set_random_state
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.writers import CONFIG
from dschat_ppo.nonfinite import MODEL, bad_rows, read_bundle
from dschat_ppo.ppo.collect import generation_config
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.update import ActorLoss, critic_loss, ptx_loss
from dschat_ppo.supervised.sft import sft_loss
from dschat_ppo.supervised.train_preference import OBJECTIVES
from dschat_ppo.types import to_device

SHOWN = 20  # at most, of parameter names


def replay(folder: Path, dtype: str | None) -> bool:
    """Repeat the optimizer step of a bundle without its update, up to the first micro-batch that fails. Prints what is
    not finite, and returns whether anything is not. `dtype`: None for that of the run."""
    what, records = read_bundle(folder)
    config: Any = parse(what["step_name"], ["--config", str(folder / CONFIG)])
    fault, constants, changed = what["fault"], what["constants"], dtype not in (None, what["dtype"])
    dtype = dtype or what["dtype"]
    print(f"{what['role']}, step {what['step']}, rank {what['rank']}: {fault['kind']}; replayed in {dtype}")
    attention = "auto" if changed else config.memory.attn_implementation
    loads_scalar = what["role"] == "critic" or (what["step_name"] == "reward" and config.reward.trains_classifier)
    model = load(folder / MODEL, loads_scalar, config, dtype, Layout(**what["layout"], attention=attention)).train()
    print_names("weights", [name for name, weight in model.named_parameters() if not weight.isfinite().all()])
    loss_of = loss_function(what, config, model, folder, dtype)
    if what["random_state"]:
        set_random_state(what["random_state"])
    for number, record in enumerate(records):
        for name, rows in bad_rows(record).items():
            print(f"micro-batch {number}: {name} is not finite, first in its row {rows[0]}")
        with first_bad_output(model) as outputs:
            loss = loss_of(to_device(record, dist.device()))
        (loss * what["world_size"] * (1.0 if changed else what["loss_scale"])).backward()
        print(f"micro-batch {number}: loss {loss.item()}")
        for output in outputs:
            print(f"  the first output that is not finite: {output}")
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        print_names("  gradients", bad)
        if bad or not loss.isfinite():
            if "rows" in constants:
                rows = constants["rows"][number]
                print(f"micro-batch {number} has rows {rows} of the training split, counted from 0")
            return True
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    print(f"norm of this rank's gradients: {float(norm)}")
    return not bool(norm.isfinite())


def print_names(what: str, names: Sequence[str]) -> None:
    """Print the first names of parameters, if there are any."""
    if names:
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        print(f"{what} that are not finite, {len(names)} parameters: {shown}")


def load(path: str | Path, scalar: bool, config: Any, dtype: str, layout: Layout) -> PolicyModel | ScalarModel:
    """A model on this process's device."""
    resize = config.run.resize_vocabulary
    if scalar:
        classifier = load_sequence_classifier(str(path), dtype, None, new_head=False, resize=resize)
        return ScalarModel(classifier, layout).to(dist.device())
    return PolicyModel(load_causal_lm(str(path), dtype, None, resize=resize), layout).to(dist.device())


def loss_function(what: dict[str, Any], config: Any, model: Any, folder: Path, dtype: str) -> Callable[[Any], Tensor]:
    """The loss of one micro-batch, as in the run, but without the term of `--router_loss_coef`."""
    constants, sums, device = what["constants"], MetricSums(), dist.device()
    if what["step_name"] != "ppo":
        total = torch.tensor(constants["total"], device=device)
        is_sft = what["step_name"] == "sft"
        loss: Any = sft_loss if is_sft else OBJECTIVES[config.reward.objective](0, device, config).loss
        return lambda batch: loss(model, batch, total, sums)
    over = Denominators(**constants["over"])
    update: MiniBatch[Any] = MiniBatch([], over, constants["value_tokens"], constants["share"])
    if what["role"] == "critic":
        return lambda rows: critic_loss(model, rows, update, config.algorithm, sums)
    reference = None
    if config.algorithm.full_kl_loss:  # compares whole distributions
        path = model_folder(config.reference_folder, "--ref_model_name_or_path or --actor_model_name_or_path")
        reference = load(path, False, config, dtype, Layout(fused=False)).eval().requires_grad_(False)
    stopping = generation_config(config.ppo, load_tokenizer(str(folder / MODEL), "model"), model.lm).stopping
    actor_loss = ActorLoss(model, reference, config.algorithm, config.ppo.temperature, stopping.late_ends)
    text_tokens = torch.tensor(constants["text_tokens"], device=device)

    def loss_of(rows: Any) -> Tensor:
        if isinstance(rows, SFTBatch):
            return config.ppo.unsup_coef * ptx_loss(model, rows, text_tokens, sums)
        return actor_loss(rows, update, constants["entropy_coef"], sums)

    return loss_of


@contextmanager
def first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Yields a list that receives a description of the first module output of `model` that is not finite."""
    found: list[str] = []

    def check(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not _is_finite(output):
            state = "its inputs are finite" if _is_finite(inputs) else "so are its inputs"
            found.append(f"{name or 'the model'} ({type(module).__name__}; {state})")

    hooks = [module.register_forward_hook(partial(check, name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(value: Any) -> bool:
    """Whether every number is finite in a tensor, or in the tensors of nested tuples, lists and dicts."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
