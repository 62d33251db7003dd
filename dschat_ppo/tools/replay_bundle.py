"""The computation of a repro bundle once more, in one process, for `tools/replay.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.config.cli import notes, parse
from dschat_ppo.config.steps import PPOConfig, PreferenceConfig, StepConfig
from dschat_ppo.data.batches import LabelledBatch, SFTBatch, StepBatch, real_rows
from dschat_ppo.engine.optimizer_step import set_random_state
from dschat_ppo.engine.router_term import replayed_term
from dschat_ppo.errors import UserError, counted
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
from dschat_ppo.nonfinite.diagnostics import FirstBadOutput, bad_gradients, bad_places, bad_weights
from dschat_ppo.nonfinite.repro_bundle import MODEL, read_bundle
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.ppo.collect import generation_config
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.update import ActorLoss, critic_loss, ptx_loss
from dschat_ppo.rewards.learned_reward import ModelReward
from dschat_ppo.supervised.sft import sft_loss
from dschat_ppo.supervised.train_preference import loss_of_objective
from dschat_ppo.types import Experience, LateEnds, ScoredRollout, select_rows, to_device

SHOWN = 20  # at most, of parameter names
Loss = Callable[[Any], Tensor]


def replay(folder: Path, dtype: str | None = None) -> bool:
    """Repeat the computation of a bundle and print what is not finite; returns whether any number is not. `dtype`: None
    for that of the run."""
    quiet_libraries()
    what, records = read_bundle(folder)
    config = parse(what["step_name"], ["--config", str(folder / CONFIG)])
    for line in notes(what["step_name"], config):
        print(f"note: {line}")
    dtype, device, fault = dtype or what["dtype"], dist.device(), what["fault"]
    print(f"{what['role']}, step {what['step']}, rank {what['rank']}: {fault['kind']}; replayed in {dtype}")
    model = load_model(folder, what, config, dtype)
    own = what["model"] == MODEL  # the bundle has the model, and with it the tokenizer that made the records
    actor = "" if own else config.ppo.actor_model_name_or_path
    place = str(folder / MODEL) if own else model_folder(actor, "--actor_model_name_or_path")
    tokenizer = load_tokenizer(place, "model")
    if model is not None:
        model.layout = replace(model.layout, attention=attention_of(config, dtype, device))
        model.to(device)
        for name in bad_weights(model)[:SHOWN]:
            print(f"weights that are not finite: {name}")
    records = [to_device(record, device) for record in records]
    for number, record in enumerate(records):
        print_bad_places(f"record {number}, ", bad_places(record))
    if "rows" in fault:
        return replay_rows(what, config, model, records[0], tokenizer)

    assert model is not None
    scale = what["world_size"] * what["loss_scale"] if dtype == what["dtype"] else what["world_size"]
    loss_of = loss_function(what, config, model.train(), dtype, device, tokenizer)
    if "router" in what["constants"]:
        loss_of = with_replayed_router(what["step_name"], loss_of, what["constants"]["router"], device)
    if what["random_state"]:
        set_random_state(what["random_state"])
    bad = replay_step(model, records, lambda record: loss_of(record) * scale)
    if bad and (data_rows := what["constants"].get("rows")):
        number = fault["micro_batch"]
        print(f"micro-batch {number} has rows {data_rows[number]} of the training split, counted from 0")
    return bad


def load_model(folder: Path, what: dict[str, Any], config: StepConfig, dtype: str) -> PolicyModel | ScalarModel | None:
    """The model that computed the number; None if none did."""
    if what["model"] is None:
        return None
    path = str(folder / MODEL) if what["model"] == MODEL else model_folder(what["model"], "model")
    resize, layout = config.run.resize_vocabulary, Layout(**what["layout"])
    scalar = what["role"] in ("critic", "reward")
    if isinstance(config, PreferenceConfig):
        scalar = config.reward.trains_classifier
    if scalar:
        return ScalarModel(load_sequence_classifier(path, dtype, None, new_head=False, resize=resize), layout)
    return PolicyModel(load_causal_lm(path, dtype, None, resize=resize), layout)


def attention_of(config: StepConfig, dtype: str, device: torch.device) -> str:
    """The value of `--attn_implementation` of the run; "auto", with a note, if it cannot run here."""
    choice: str = config.memory.attn_implementation
    try:
        check_attention(choice, device)
    except UserError as problem:
        print(f"note: replayed with --attn_implementation auto: {problem}")
        return "auto"
    if choice == "flash_attention_2" and dtype == "fp32":
        print("note: replayed with --attn_implementation auto: flash_attention_2 does not compute in fp32")
        return "auto"
    return choice


def loss_function(
    what: dict[str, Any], config: Any, model: PolicyModel | ScalarModel, dtype: str, device: torch.device,
    tokenizer: PreTrainedTokenizerBase,
) -> Loss:  # fmt: skip
    """The loss of one micro-batch, as in the run."""
    constants, sums = what["constants"], MetricSums()
    if what["step_name"] != "ppo":
        total = torch.tensor(constants["total"], device=device)
        if what["step_name"] == "sft":
            return lambda batch: sft_loss(model, batch, total, sums)
        step2_loss = loss_of_objective(config.reward)
        return lambda batch: step2_loss(model, batch, total, sums)
    update: MiniBatch[Any] = MiniBatch(
        [], Denominators(**constants["over"]), constants["value_tokens"], constants["share"]
    )
    if what["role"] == "critic":
        return lambda rows: critic_loss(model, rows, update, config.algorithm, sums)

    reference, flags = None, config.algorithm
    if flags.kl_loss_coef != 0 and flags.kl_loss_estimator == "full":  # compares whole distributions
        path = model_folder(config.reference_folder, "--ref_model_name_or_path or --actor_model_name_or_path")
        if config.ppo_schedule.ref_sync_interval > 0:
            print("note: the reference is that of the start of the run; --ref_sync_interval may have moved it")
        reference = PolicyModel(
            load_causal_lm(path, dtype, None, resize=config.run.resize_vocabulary), Layout(fused=False)
        )
        reference.to(device).eval().requires_grad_(False)
    late_ends = late_ends_of(config, tokenizer, model)
    actor_loss = ActorLoss(model, reference, flags, config.ppo.temperature, late_ends=late_ends)
    text_tokens = torch.tensor(constants["text_tokens"], device=device)

    def loss_of(rows: Any) -> Tensor:
        if isinstance(rows, SFTBatch):
            return config.ppo.unsup_coef * ptx_loss(model, rows, text_tokens, sums)
        return actor_loss(rows, update, constants["entropy_coef"], sums)

    return loss_of


def late_ends_of(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, model: PolicyModel | ScalarModel
) -> LateEnds | None:
    """The tokens that `--min_answer_seq_len` kept from being drawn in the run."""
    assert isinstance(model, PolicyModel)
    return generation_config(config.ppo, tokenizer, model.lm).stopping.late_ends


def rows_of(record: Any) -> Tensor:
    """(rows,) bool, False on the rows of a micro-batch that only fill it."""
    if isinstance(record, LabelledBatch):
        return record.row_mask
    if isinstance(record, StepBatch):
        return record.label_mask.any(dim=1)
    return record.response_mask.any(dim=1) if isinstance(record, Experience) else real_rows(record)


def with_replayed_router(step_name: str, loss_of: Loss, constants: dict[str, Any], device: torch.device) -> Loss:
    """A loss with the load-balancing loss of `--router_loss_coef`, as in the run."""
    term, sums = replayed_term(constants, device), MetricSums()

    def loss(record: Any) -> Tensor:
        if step_name == "ppo" and isinstance(record, SFTBatch):
            return loss_of(record)  # the term is over the experience, not over plain text
        rows = rows_of(record)
        return term.add_to(partial(loss_of, record), rows, sums, "router_loss")

    return loss


def replay_step(model: PolicyModel | ScalarModel, records: Sequence[Any], loss_of: Loss) -> bool:
    """Forward and backward over the micro-batches in order, up to the first failure. Prints what is not finite and
    returns whether anything is not."""
    found = False
    for number, record in enumerate(records):
        with FirstBadOutput(model) as outputs:
            loss = loss_of(record)
        loss.backward()
        print(f"micro-batch {number}: loss {loss.item()}")
        if outputs.first is not None:
            print(f"  the first output that is not finite: {outputs.first}")
        names = bad_gradients(model)
        if names:
            shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            print(f"  gradients that are not finite, {len(names)} parameters: {shown}")
        found = found or not bool(loss.isfinite()) or bool(names)
        if found:
            break
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    print(f"norm of this rank's gradients: {float(norm)}")
    return found or not bool(norm.isfinite())


def replay_rows(
    what: dict[str, Any], config: Any, model: PolicyModel | ScalarModel | None, rows: ScoredRollout,
    tokenizer: PreTrainedTokenizerBase,
) -> bool:  # fmt: skip
    """Compute scores, log-probs, values or advantages of `rows` of all ranks again, by the model that computed them
    (None if no model did), and print what is not finite; returns whether anything is not. Scores of Python functions
    and services are taken from the bundle."""
    name = what["fault"]["kind"]
    if what["role"] == "shaping":
        shaping = AdvantageComputation(
            config.algorithm, config.ppo.max_answer_seq_len, config.run.seed, config.score_clip
        )
        shaping.load_state_dict(what["constants"]["shaping"])
        places = bad_places(shaping.advantages(shaping.with_rewards(rows), what["step"]))
        print_bad_places("computed again: ", places)
        return bool(places)

    if what["role"] == "reward" and model is not None:
        own = load_tokenizer(model_folder(what["model"], "model"), "model")
        if own.get_vocab() != tokenizer.get_vocab():
            model = None  # its tokens are not those of the rows
    if model is None:
        print(f"{name}: not computed again; these are the recorded numbers")
        return name in bad_places(rows)

    chosen = select_rows(rows, torch.tensor(what["fault"]["rows"], device=rows.scores.device))
    with FirstBadOutput(model.eval()) as outputs, torch.no_grad():
        if what["role"] == "critic":
            again = response_values(model, chosen)
        elif what["role"] == "reward":
            again = ModelReward(model).scores(chosen)
        else:
            late_ends = late_ends_of(config, tokenizer, model)
            again = response_logprobs(model, chosen, config.ppo.temperature, late_ends=late_ends).logprobs
    if bool(again.isfinite().all()):
        print(f"{name}: finite this time; another source of reward, or sampling, gave the recorded numbers")
        return False
    print(f"{name}: not finite again; the first output: {outputs.first}")
    return True


def print_bad_places(where: str, places: dict[str, list[list[int]]]) -> None:
    """One line for each field of `bad_places`."""
    for field, found in places.items():
        at = " and token ".join(map(str, found[0]))
        print(f"{where}{field}: {counted(len(found), 'number')} not finite, the first at row {at}")
