"""Repeat the forward and backward passes of a repro bundle, and print what is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
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
from dschat_ppo.engine.optimizer_step import set_random_state
from dschat_ppo.errors import UserError
from dschat_ppo.features import hooks
from dschat_ppo.features.replay.bad_steps import BUNDLE, MODEL
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.loading import (
    ModelChanges,
    frozen_changes,
    load_causal_lm,
    load_sequence_classifier,
)
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite import bad_rows
from dschat_ppo.ppo.loss_terms import loss_terms
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.token_losses import ActorLoss, critic_loss
from dschat_ppo.supervised.sft import sft_loss, sft_terms
from dschat_ppo.supervised.train_preference import OBJECTIVES
from dschat_ppo.types import Experience, ForbiddenTokens, RewardedRollout, record_of, to_device

_BATCHES = {objective.batch for objective in OBJECTIVES.values()}
KINDS: tuple[Any, ...] = (SFTBatch, Experience, RewardedRollout, *_BATCHES)
RECORDS = {kind.__name__: kind for kind in KINDS}
MOST_NAMES = 20  # of parameters that are not finite, on a line


def read_bundle(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Read a bundle: what it holds by name, and the micro-batches."""
    for name in (BUNDLE, CONFIG):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder}: is not a complete repro bundle ({name} is missing or not a file);"
                " a run keeps its newest, --max_nonfinite_skips + 1"
            )
    bundle = load_state(folder / BUNDLE)
    micro_batches = [record_of(RECORDS[name], columns) for name, columns in bundle["records"]]
    return bundle, micro_batches


def replay(folder: Path, words: list[str]) -> bool:
    """Repeat the optimizer step of a bundle without its update, up to the first micro-batch that
    fails. Prints what is not finite, and returns whether anything is not. `words`: flags in place
    of those of the run."""
    bundle, micro_batches = read_bundle(folder)
    config: Any = parse(bundle["step_name"], ["--config", str(folder / CONFIG), *words])
    dtype = config.run.dtype
    print(f"{bundle['role']}, step {bundle['step']}: {bundle['fault']}; replayed in {dtype}")
    model = load_model(folder, bundle, config)
    model.to(dist.device()).train()
    print_bad("weights", model.named_parameters())
    loss_of = loss_function(bundle, config, model)
    set_random_state(bundle["random_state"])
    rows_of_batches = bundle["constants"].get("rows")  # None in step 3
    for index, micro_batch in enumerate(micro_batches):
        for name, rows in bad_rows(micro_batch).items():
            print(f"micro-batch {index}: {name} is not finite in {rows} of its rows")
        with first_bad_output(model) as outputs:
            loss = loss_of(to_device(micro_batch, dist.device()))
        (loss * bundle["world_size"] * bundle["loss_scale"].get(dtype, 1.0)).backward()
        print(f"micro-batch {index}: loss {loss.item()}")
        for output in outputs:
            print(f"  the first output that is not finite: {output}")
        gradients = {
            name: weight.grad
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }
        if print_bad("  gradients", gradients.items()) or not loss.isfinite():
            if rows_of_batches is not None:
                print(
                    f"micro-batch {index} has rows {rows_of_batches[index]} of the training"
                    " split, from 0"
                )
            return True
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    print(f"norm of this rank's gradients: {float(norm)}")
    return not bool(norm.isfinite())


def load_model(folder: Path, bundle: dict[str, Any], config: Any) -> PolicyModel | ScalarModel:
    """The model of a bundle, with the weights that it had at the fault."""
    dtype = config.run.dtype
    resize = config.run.resize_vocabulary
    layout = Layout(**bundle["layout"], attention=config.memory.attn_implementation)
    is_classifier = bundle["role"] == "critic"
    if bundle["step_name"] == "reward":
        is_classifier = config.reward.trains_classifier
    weights_folder = str(folder / MODEL)
    if is_classifier:
        classifier = load_sequence_classifier(
            weights_folder, dtype, None, new_head=False, changes=ModelChanges(resize=resize)
        )
        return ScalarModel(classifier, layout)
    return PolicyModel(
        load_causal_lm(weights_folder, dtype, None, ModelChanges(resize=resize)), layout
    )


def print_bad(what: str, tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Print the first names of those that are not finite; returns whether there are any."""
    bad_names = [name for name, tensor in tensors if not tensor.isfinite().all()]
    if bad_names:
        listed = bad_names[:MOST_NAMES]
        if len(bad_names) > MOST_NAMES:
            listed.append("...")
        print(f"{what} that are not finite, {len(bad_names)} parameters: {', '.join(listed)}")
    return bool(bad_names)


def loss_function(bundle: dict[str, Any], config: Any, model: Any) -> Callable[[Any], Tensor]:
    """The loss of one micro-batch, as in the run, but without what terms of the whole optimizer
    step add to it; micro-batches of such terms have their losses."""
    constants = bundle["constants"]
    sums = MetricSums()
    if bundle["step_name"] == "sft":
        terms = sft_terms(config, partial(frozen_model, config))
        return lambda batch: sft_loss(model, batch, constants["total"], sums, terms)
    if bundle["step_name"] != "ppo":
        objective: Any = OBJECTIVES[config.reward.objective].build(0, dist.device(), config)
        return lambda batch: objective.loss(model, batch, constants["total"], sums)
    minibatch: MiniBatch[Any] = MiniBatch(
        [],
        Denominators(**constants["denominators"]),
        constants["value_tokens"],
        constants["metric_weight"],
    )
    if bundle["role"] == "critic":
        return lambda rows: critic_loss(model, rows, minibatch, config.algorithm, sums)
    actor_loss = _actor_loss(bundle, config, model)
    # kind of micro-batch that a term of the optimizer step has added -> its loss
    losses: dict[type, Callable[[Any], Tensor]] = {}
    for losses_of_batches in hooks("step_terms.losses_of_batches"):
        losses |= losses_of_batches(config, model, constants, sums)

    def loss_of(rows: Any) -> Tensor:
        if type(rows) in losses:
            return losses[type(rows)](rows)
        return actor_loss(rows, minibatch, constants["entropy_coef"], sums)

    return loss_of


def _actor_loss(bundle: dict[str, Any], config: Any, model: Any) -> ActorLoss:
    """The actor's loss, with the frozen models that it compares with."""
    forbidden_tokens = bundle["constants"]["forbidden_tokens"]
    if forbidden_tokens:
        forbidden_tokens = ForbiddenTokens(*forbidden_tokens)
    return ActorLoss(
        model,
        config.algorithm,
        config.ppo.temperature,
        forbidden_tokens,
        loss_terms(config, partial(frozen_model, config), forbidden_tokens),
        config.has_policy_loss,
    )


def frozen_model(config: Any, role: str) -> Any:
    """A model that does not train, such as "reference", from the folder from which the run loaded
    it; it stands in place of an engine."""
    flag, name = config.models[role]
    lm = load_causal_lm(
        str(model_folder(name, flag)),
        config.run.dtype,
        None,
        frozen_changes(config),
    )
    return PolicyModel(lm).to(dist.device()).eval().requires_grad_(False)


@contextmanager
def first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Yields a list that receives a description of the first module output of `model` that is not
    finite."""
    names = {module: name for name, module in model.named_modules()}
    descriptions = list[str]()

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        if descriptions or module not in names or is_finite(output):
            return
        state = "so are its inputs"
        if is_finite(inputs):
            state = "its inputs are finite"
        name = names[module] or "the model"
        descriptions.append(f"{name} ({type(module).__name__}; {state})")

    with register_module_forward_hook(check):
        yield descriptions


def is_finite(value: Any) -> bool:
    """Whether every number is finite in a tensor, or in the tensors of nested tuples, lists and
    dicts."""
    return all(
        bool(leaf.isfinite().all()) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
    )
