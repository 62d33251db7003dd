"""The computation of a repro bundle once more, in one process, for `tools/replay.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.config.cli import parse
from dschat_ppo.config.steps import PPOConfig, PreferenceConfig, StepConfig
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.engine.optimizer_step import set_random_state
from dschat_ppo.errors import counted
from dschat_ppo.models.attention_choice import check_attention
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.forward import response_logprobs, response_values
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.writers import CONFIG
from dschat_ppo.nonfinite.diagnostics import bad_gradients, bad_places, bad_weights, first_bad_output
from dschat_ppo.nonfinite.repro_bundle import MODEL, read_bundle
from dschat_ppo.ppo.collect import generation_config
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.update import ActorLoss, critic_loss, ptx_loss
from dschat_ppo.rewards.learned_reward import ModelReward
from dschat_ppo.supervised.sft import sft_loss
from dschat_ppo.supervised.train_preference import loss_of_objective
from dschat_ppo.types import LateEnds, ScoredRollout, select_rows, to_device

SHOWN = 20  # at most, of parameter names


def replay(folder: Path, dtype: str | None = None) -> bool:
    """Repeat the computation of a bundle and print what is not finite; returns whether any number is not. `dtype`: None
    for that of the run."""
    quiet_libraries()
    what, records = read_bundle(folder)
    config, device, fault = parse(what["step_name"], ["--config", str(folder / CONFIG)]), dist.device(), what["fault"]
    changed, dtype = dtype not in (None, what["dtype"]), dtype or what["dtype"]
    print(f"{what['role']}, step {what['step']}, rank {what['rank']}: {fault['kind']}; replayed in {dtype}")
    records = [to_device(record, device) for record in records]
    for number, record in enumerate(records):
        for name, places in bad_places(record).items():
            at = " and token ".join(map(str, places[0]))
            print(f"record {number}, {name}: {counted(len(places), 'number')} not finite, the first at row {at}")
    own = str(folder / MODEL)  # None without a model: a reward function, or the advantages
    path = own if what["model"] == MODEL else what["model"] and model_folder(what["model"], "model")
    actor = (
        own
        if what["model"] == MODEL
        else model_folder(config.ppo.actor_model_name_or_path, "--actor_model_name_or_path")
    )
    tokenizer = load_tokenizer(actor, "model")  # that made the records
    others = what["role"] == "reward" and path is not None  # a reward model may read other tokens than the rows hold
    if path is None or (others and load_tokenizer(path, "model").get_vocab() != tokenizer.get_vocab()):
        print(f"{fault['kind']}: not computed again; these are the recorded numbers")
        return True

    model = load_model(path, what, config, dtype)
    attention = "auto" if changed else config.memory.attn_implementation
    check_attention(attention, device)
    model.layout = replace(model.layout, attention=attention)
    model.to(device)
    for name in bad_weights(model)[:SHOWN]:
        print(f"weights that are not finite: {name}")
    ends = None
    if isinstance(config, PPOConfig) and isinstance(model, PolicyModel):
        ends = generation_config(config.ppo, tokenizer, model.lm).stopping.late_ends
    if "rows" in fault:
        return replay_rows(what, config, model, records[0], ends)
    loss_of = loss_function(what, config, model.train(), dtype, ends)
    scale = what["world_size"] * (1.0 if changed else what["loss_scale"])
    if what["random_state"]:
        set_random_state(what["random_state"])
    bad = replay_step(model, records, lambda record: loss_of(record) * scale)
    if bad and (data_rows := what["constants"].get("rows")):
        number = fault["micro_batch"]
        print(f"micro-batch {number} has rows {data_rows[number]} of the training split, counted from 0")
    return bad


def load_model(path: str, what: dict[str, Any], config: StepConfig, dtype: str) -> PolicyModel | ScalarModel:
    """The model that computed the number."""
    resize, layout = config.run.resize_vocabulary, Layout(**what["layout"])
    if isinstance(config, PreferenceConfig):
        scalar = config.reward.trains_classifier
    else:
        scalar = what["role"] in ("critic", "reward")
    if scalar:
        return ScalarModel(load_sequence_classifier(path, dtype, None, new_head=False, resize=resize), layout)
    return PolicyModel(load_causal_lm(path, dtype, None, resize=resize), layout)


def loss_function(
    what: dict[str, Any], config: Any, model: PolicyModel | ScalarModel, dtype: str, ends: LateEnds | None
) -> Callable[[Any], Tensor]:
    """The loss of one micro-batch, as in the run, but without the term of `--router_loss_coef`."""
    constants, sums, device = what["constants"], MetricSums(), dist.device()
    if what["step_name"] != "ppo":
        total = torch.tensor(constants["total"], device=device)
        loss: Any = sft_loss if what["step_name"] == "sft" else loss_of_objective(config.reward)
        return lambda batch: loss(model, batch, total, sums)
    over = Denominators(**constants["over"])
    update: MiniBatch[Any] = MiniBatch([], over, constants["value_tokens"], constants["share"])
    if what["role"] == "critic":
        return lambda rows: critic_loss(model, rows, update, config.algorithm, sums)
    reference, flags = None, config.algorithm
    if flags.kl_loss_coef != 0 and flags.kl_loss_estimator == "full":  # compares whole distributions
        path = model_folder(config.reference_folder, "--ref_model_name_or_path or --actor_model_name_or_path")
        lm = load_causal_lm(path, dtype, None, resize=config.run.resize_vocabulary)
        reference = PolicyModel(lm, Layout(fused=False)).to(device).eval().requires_grad_(False)
    actor_loss = ActorLoss(model, reference, flags, config.ppo.temperature, late_ends=ends)
    text_tokens = torch.tensor(constants["text_tokens"], device=device)

    def loss_of(rows: Any) -> Tensor:
        if isinstance(rows, SFTBatch):
            return config.ppo.unsup_coef * ptx_loss(model, rows, text_tokens, sums)
        return actor_loss(rows, update, constants["entropy_coef"], sums)

    return loss_of


def replay_step(model: PolicyModel | ScalarModel, records: Sequence[Any], loss_of: Callable[[Any], Tensor]) -> bool:
    """Forward and backward over the micro-batches in order, up to the first failure. Prints what is not finite and
    returns whether anything is not."""
    found = False
    for number, record in enumerate(records):
        with first_bad_output(model) as outputs:
            loss = loss_of(record)
        loss.backward()
        names = bad_gradients(model)
        print(f"micro-batch {number}: loss {loss.item()}")
        for output in outputs:
            print(f"  the first output that is not finite: {output}")
        if names:
            shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            print(f"  gradients that are not finite, {len(names)} parameters: {shown}")
        found = not bool(loss.isfinite()) or bool(names)
        if found:
            break
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    print(f"norm of this rank's gradients: {float(norm)}")
    return found or not bool(norm.isfinite())


def replay_rows(
    what: dict[str, Any], config: Any, model: PolicyModel | ScalarModel, rows: ScoredRollout, ends: LateEnds | None
) -> bool:
    """Compute the scores, log-probs or values of the bad `rows` again and print whether they are finite; returns
    whether they are not."""
    chosen = select_rows(rows, torch.tensor(what["fault"]["rows"], device=rows.scores.device))
    with first_bad_output(model.eval()) as outputs, torch.no_grad():
        if what["role"] == "critic":
            again = response_values(model, chosen)
        elif what["role"] == "reward":
            again = ModelReward(model).scores(chosen)
        else:
            again = response_logprobs(model, chosen, config.ppo.temperature, late_ends=ends).logprobs
    if bool(again.isfinite().all()):
        print(f"{what['fault']['kind']}: finite this time; another reward, or sampling, gave the recorded numbers")
        return False
    print(f"{what['fault']['kind']}: not finite again; the first output: {next(iter(outputs), 'none')}")
    return True
