"""`python -m dschat_ppo.tools.replay FOLDER`: numbers that were not finite, once more, in one process.

FOLDER is what a run wrote under OUTPUT/nonfinite. The model as it was and the micro-batches of the rank (or the rows of
the PPO step) are loaded, and what went wrong is done again in the same number format: which loss, which module's output
first, which gradients, which rows and tokens. Exit code 0: a number is not finite again; 1: all are finite; 2: the
folder cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.config.cli import parse
from dschat_ppo.data.collators import SFTBatch
from dschat_ppo.engine.skip_update import set_random_state
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier, load_tokenizer, model_folder
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite.repro_bundle import CONFIG, MODEL, read_bundle
from dschat_ppo.ppo.losses import ActorLoss, critic_loss, ptx_loss
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.supervised.dpo_objective import dpo_loss
from dschat_ppo.supervised.reward_objective import reward_loss
from dschat_ppo.supervised.sft import sft_loss
from dschat_ppo.tools.replay_rows import SHOWN_ROWS, replay_rows
from dschat_ppo.tools.suspects import FirstBadOutput, bad_gradients, bad_weights, shown_row, single_rows
from dschat_ppo.types import to_device

Loss = Callable[[Any], Tensor]


def main(argv: Sequence[str]) -> int:
    """Replay what `argv` names; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder under OUTPUT/nonfinite")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="another number format than the run's")
    words = parser.parse_args(argv)
    try:
        bad = replay(words.folder, words.dtype)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print("a number is not finite" if bad else "all numbers are finite")
    return 0 if bad else 1


def replay(folder: Path, dtype: str | None = None) -> bool:
    """Do it again and print what is found; whether a number is not finite.

    Args:
        folder: of the dump.
        dtype: number format; None for that of the run.

    Raises:
        UserError: the folder cannot be used.
    """
    what, records, states = read_bundle(folder)
    config = parse(what["step_name"], ["--config", str(folder / CONFIG)])
    dtype = dtype or what["dtype"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{what['role']}, step {what['step']}, rank {what['rank']}: {what['fault']['kind']}; replayed in {dtype}")
    model = load_model(folder, what, config, dtype)
    tokenizer = load_tokenizer(tokenizer_folder(folder, what, config), "model")
    if model is not None:
        model.to(device)
        for name in bad_weights(model)[:SHOWN_ROWS]:
            print(f"weights that are not finite: {name}")
    records = [to_device(record, device) for record in records]
    if what["role"] == "reward" and model is not None and not _shares_tokens(what["model"], tokenizer):
        model = None  # it has a tokenizer of its own
    if "rows" in what["fault"]:
        return replay_rows(what, config, model, records[0], tokenizer)
    assert model is not None
    scale = what["world_size"] * what["loss_scale"] if dtype == what["dtype"] else what["world_size"]
    loss_of = loss_function(what, config, model.train(), dtype, device)
    if states:
        set_random_state(states)
    bad = replay_step(model, records, lambda record: loss_of(record) * scale)
    if bad:
        shown = records[what["fault"]["micro_batch"]]
        print(f"rows of micro-batch {what['fault']['micro_batch']}, each alone:")
        show_rows(model, shown, loss_of, tokenizer, what["constants"].get("rows", []), what["fault"]["micro_batch"])
    return bad


def load_model(folder: Path, what: dict[str, Any], config: Any, dtype: str) -> PolicyModel | ScalarModel | None:
    """The model that made the number; None where no model did."""
    if what["model"] is None:
        return None
    path = str(folder / MODEL) if what["model"] == MODEL else model_folder(what["model"], "model")
    resize = config.run.resize_vocabulary
    scalar = what["role"] in ("critic", "reward")
    if what["step_name"] == "reward":
        scalar = config.reward.objective == "reward"
    if scalar:
        return ScalarModel(load_sequence_classifier(path, dtype, None, new_head=False, resize=resize), what["packed"])
    return PolicyModel(load_causal_lm(path, dtype, None, resize=resize), what["fused"], what["packed"])


def tokenizer_folder(folder: Path, what: dict[str, Any], config: Any) -> str:
    """Where the tokenizer of the tokens is."""
    if what["model"] == MODEL:
        return str(folder / MODEL)
    return model_folder(config.ppo.actor_model_name_or_path, "--actor_model_name_or_path")


def _shares_tokens(folder: str, tokenizer: Any) -> bool:
    return bool(load_tokenizer(model_folder(folder, "model"), "model").get_vocab() == tokenizer.get_vocab())


def loss_function(what: dict[str, Any], config: Any, model: Any, dtype: str, device: torch.device) -> Loss:
    """A micro-batch's part of the loss, as the run made it."""
    constants, sums = what["constants"], MetricSums()
    if what["step_name"] != "ppo":
        total = torch.tensor(constants["total"], device=device)
        if what["step_name"] == "sft":
            return lambda batch: sft_loss(model, batch, total, sums)
        pair_loss = reward_loss if config.reward.objective == "reward" else dpo_loss
        return lambda batch: pair_loss(model, batch, total, sums, config.reward)
    update = MiniBatch([], Denominators(**constants["over"]), constants["value_tokens"], constants["share"])
    if what["role"] == "critic":
        return lambda rows: critic_loss(model, rows, update, config.algorithm.value_clip_eps, sums)
    actor_loss = ActorLoss(model, _reference(config, dtype, device), config.algorithm, config.ppo.temperature)
    text_tokens = torch.tensor(constants["text_tokens"], device=device)

    def loss_of(rows: Any) -> Tensor:
        if isinstance(rows, SFTBatch):
            return config.ppo.unsup_coef * ptx_loss(model, rows, text_tokens, sums)
        return actor_loss(rows, update, constants["entropy_coef"], sums)

    return loss_of


def _reference(config: Any, dtype: str, device: torch.device) -> PolicyModel | None:
    """The reference, where the loss compares whole distributions with it."""
    flags = config.algorithm
    if flags.kl_loss_coef == 0 or flags.kl_loss_estimator != "full":
        return None
    path = model_folder(config.ppo.actor_model_name_or_path, "--actor_model_name_or_path")
    model = PolicyModel(load_causal_lm(path, dtype, None, resize=config.run.resize_vocabulary), fused=False)
    model.to(device).eval().requires_grad_(False)
    return model


def replay_step(model: nn.Module, records: Sequence[Any], loss_of: Loss) -> bool:
    """Forward and backward of the micro-batches, in order; prints what is not finite and says whether anything is."""
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
            shown = ", ".join(names[:SHOWN_ROWS]) + (", ..." if len(names) > SHOWN_ROWS else "")
            print(f"  gradients that are not finite, {len(names)} parameters: {shown}")
        found = found or not bool(loss.isfinite()) or bool(names)
        if found:
            break
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    print(f"norm of this rank's gradients: {float(norm)}")
    return found or not bool(norm.isfinite())


def show_rows(
    model: nn.Module, record: Any, loss_of: Loss, tokenizer: Any, numbers: list[list[int]], micro_batch: int
) -> None:
    """Print the rows whose own loss or gradient is not finite, with their tokens."""
    shown = 0
    for row, alone in enumerate(single_rows(record)):
        model.zero_grad()
        loss = loss_of(alone)
        loss.backward()
        if shown < SHOWN_ROWS and (not bool(loss.isfinite()) or bad_gradients(model)):
            shown += 1
            of_data = (
                f" (training row {numbers[micro_batch][row]}, counted from 0 after the data were divided)"
                if numbers
                else ""
            )
            print(f"  row {row}{of_data}: loss {loss.item()}, {len(bad_gradients(model))} bad gradients")
            for line in shown_row(alone, tokenizer):
                print(f"    {line}")
    if not shown:
        print("  none: it takes several rows together")


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main(sys.argv[1:]))
