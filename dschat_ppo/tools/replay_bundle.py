"""Repeat the forward and backward passes of a repro bundle, and print what is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.checkpoint.state_files import load_state
from dschat_ppo.common import dist
from dschat_ppo.common.paths import CONFIG
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.data.supervised_batches import LabelledBatch, PairBatch, StepBatch
from dschat_ppo.engine.optimizer_step import set_random_state
from dschat_ppo.errors import UserError
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite import BUNDLE, MODEL, bad_rows
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.teaching import full_kl_reference, teachers_of
from dschat_ppo.ppo.token_losses import ActorLoss, critic_loss, ptx_loss
from dschat_ppo.supervised.sft import SFTTeacher, sft_loss
from dschat_ppo.supervised.train_preference import OBJECTIVES
from dschat_ppo.types import Experience, MinimumLength, RewardedRollout, record_of, to_device

KINDS: tuple[Any, ...] = (
    SFTBatch,
    PairBatch,
    LabelledBatch,
    StepBatch,
    Experience,
    RewardedRollout,
)
RECORDS = {kind.__name__: kind for kind in KINDS}


def read_bundle(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Read a bundle: what it holds by name, and the micro-batches."""
    for name in (BUNDLE, CONFIG):
        if not (folder / name).is_file():
            kept = "a run keeps its newest, --max_nonfinite_skips + 1"
            raise UserError(
                f"{folder}: is not a complete repro bundle ({name} is missing or not a file);"
                f" {kept}"
            )
    what = load_state(folder / BUNDLE)
    return what, [record_of(RECORDS[name], held) for name, held in what["records"]]


def replay(folder: Path, words: list[str]) -> bool:
    """Repeat the optimizer step of a bundle without its update, up to the first micro-batch that
    fails. Prints what is not finite, and returns whether anything is not. `words`: flags in place
    of those of the run."""
    what, records = read_bundle(folder)
    config: Any = parse(what["step_name"], ["--config", str(folder / CONFIG), *words])
    dtype = config.run.dtype
    resize = config.run.resize_vocabulary
    constants = what["constants"]
    print(f"{what['role']}, step {what['step']}: {what['fault']}; replayed in {dtype}")
    layout = Layout(**what["layout"], attention=config.memory.attn_implementation)
    if what["role"] == "critic" or (
        what["step_name"] == "reward" and config.reward.trains_classifier
    ):
        classifier = load_sequence_classifier(
            str(folder / MODEL), dtype, None, new_head=False, resize=resize
        )
        model: Any = ScalarModel(classifier, layout)
    else:
        model = PolicyModel(load_causal_lm(str(folder / MODEL), dtype, None, resize=resize), layout)
    model.to(dist.device()).train()
    print_bad("weights", model.named_parameters())
    loss_of = loss_function(what, config, model)
    set_random_state(what["random_state"])
    for number, record in enumerate(records):
        for name, rows in bad_rows(record).items():
            print(f"micro-batch {number}: {name} is not finite in {rows} of its rows")
        with first_bad_output(model) as outputs:
            loss = loss_of(to_device(record, dist.device()))
        (loss * what["world_size"] * what["loss_scale"].get(dtype, 1.0)).backward()
        print(f"micro-batch {number}: loss {loss.item()}")
        for output in outputs:
            print(f"  the first output that is not finite: {output}")
        gradients = {
            name: weight.grad
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }
        if print_bad("  gradients", gradients.items()) or not loss.isfinite():
            if "rows" in constants:
                print(
                    f"micro-batch {number} has rows {constants['rows'][number]} of the training"
                    " split, from 0"
                )
            return True
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    print(f"norm of this rank's gradients: {float(norm)}")
    return not bool(norm.isfinite())


def print_bad(what: str, tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Print the first names of those that are not finite; returns whether there are any."""
    bad = [name for name, tensor in tensors if not tensor.isfinite().all()]
    if bad:
        print(
            f"{what} that are not finite, {len(bad)} parameters:"
            f" {', '.join(bad[:20])}{', ...' * (len(bad) > 20)}"
        )
    return bool(bad)


def loss_function(what: dict[str, Any], config: Any, model: Any) -> Callable[[Any], Tensor]:
    """The loss of one micro-batch, as in the run, but without the term of `--router_loss_coef`."""
    constants = what["constants"]
    sums = MetricSums()
    device = dist.device()

    def frozen(role: str) -> Any:  # in place of an engine
        path = model_folder(*reversed(config.models[role]))
        lm = load_causal_lm(str(path), config.run.dtype, None, resize=config.run.resize_vocabulary)
        return PolicyModel(lm).to(device).eval().requires_grad_(False)

    if what["step_name"] == "sft":
        if config.teacher.teachers:
            of_sft = SFTTeacher.of(frozen("teacher"), config.teacher)
        else:
            of_sft = None
        return lambda batch: sft_loss(model, batch, constants["total"], sums, of_sft)
    if what["step_name"] != "ppo":
        loss: Any = OBJECTIVES[config.reward.objective](0, device, config).loss
        return lambda batch: loss(model, batch, constants["total"], sums)
    minibatch: MiniBatch[Any] = MiniBatch(
        [],
        Denominators(**constants["denominators"]),
        constants["value_tokens"],
        constants["metric_weight"],
    )
    if what["role"] == "critic":
        return lambda rows: critic_loss(model, rows, minibatch, config.algorithm, sums)
    minimum_length = constants["minimum_length"] and MinimumLength(*constants["minimum_length"])

    if config.algorithm.full_kl_loss:
        reference = frozen("reference")
    else:
        reference = None
    coef = config.distill_loss_coef
    teachers = None
    if coef > 0:
        roles = [*config.teacher.models] or ["reference"]
        teachers = teachers_of(config, [frozen(role) for role in roles], None, minimum_length)
    actor_loss = ActorLoss(
        model,
        full_kl_reference(config, reference, minimum_length),
        config.algorithm,
        config.ppo.temperature,
        minimum_length,
        teachers,
        coef,
    )

    def loss_of(rows: Any) -> Tensor:
        if isinstance(rows, SFTBatch):
            return config.ppo.unsup_coef * ptx_loss(model, rows, constants["text_tokens"], sums)
        return actor_loss(rows, minibatch, constants["entropy_coef"], sums)

    return loss_of


@contextmanager
def first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Yields a list that receives a description of the first module output of `model` that is not
    finite."""
    names = {module: name for name, module in model.named_modules()}
    found = list[str]()

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        if module in names and not found and not is_finite(output):
            if is_finite(inputs):
                state = "its inputs are finite"
            else:
                state = "so are its inputs"
            found.append(f"{names[module] or 'the model'} ({type(module).__name__}; {state})")

    with register_module_forward_hook(check):
        yield found


def is_finite(value: Any) -> bool:
    """Whether every number is finite in a tensor, or in the tensors of nested tuples, lists and
    dicts."""
    return all(
        bool(leaf.isfinite().all()) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
    )
