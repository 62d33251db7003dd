"""Runs the three steps of many architectures in the same ranks, and one update with rows that
differ by rank.

architectures.py FOLDER

    FOLDER/cases.json: {"runs": name -> [number of ranks, step, words],
        "updates": name -> [model folder, rows of each rank, weight of the router loss]}
    writes found_RANKS.json: name -> log; beside each saved model outputs.pt; for updates
    NAME.updated, the weights
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.common import dist
from dschat_ppo.common.ranks import world_size
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.engine.optimizer_step import accumulate, apply
from dschat_ppo.engine.step_loss import StepLoss
from dschat_ppo.features.router.checks import router_top_k
from dschat_ppo.features.router.step_terms import RouterTerm
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.loading import load_causal_lm
from dschat_ppo.models.saving import gather_state, save_model
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo import train_ppo
from dschat_ppo.run.launch import leave
from dschat_ppo.run.session import join_ranks
from dschat_ppo.supervised import sft, train_preference, trainer
from workers.quick import be_quick

TRAIN = {
    "sft": sft.train_sft,
    "reward": train_preference.train_preferences,
    "ppo": train_ppo.train_ppo,
}
# of the rows for every saved model
IDS, LENGTHS = torch.arange(40, 88).view(3, 16), torch.tensor([16, 11, 5])


@torch.no_grad()
def save_with_outputs(engine, tokenizer, folder, *arguments, **options) -> None:
    """`save_model`, and what the model computes for `IDS`: log-probs, or values (0 after a row's
    end)."""
    save_model(engine, tokenizer, folder, *arguments, **options)
    engine.eval()
    real = torch.arange(IDS.shape[1]) < LENGTHS.unsqueeze(1)
    found = (
        engine(IDS, real)[0]
        if isinstance(engine.module, PolicyModel)
        else engine(IDS, LENGTHS)[real]
    )
    if dist.is_main():
        torch.save(found, Path(folder) / "outputs.pt")


def update(folder: str, rows: list[list[list[int]]], coef: float, out: str) -> None:
    """One update on this rank's rows, packed, by almost the gradient (epsilon 1); rank 0 writes the
    weights after it. Each weight is gathered where it is used, and layers run again in the backward
    pass."""
    config = train_config(3, "fp32", False, dist.world_size(), 0.0)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model = PolicyModel(load_causal_lm(folder, "fp32", config), Layout(packed=True, shares=True))
    model.gradient_checkpointing_enable()
    engine = train_engine(
        model, config, OptimizerSettings(1.0, 0.0, "constant", 0, 1, (0.9, 0.95), 1.0)
    )
    ids = pad_sequence([torch.tensor(row) for row in rows[dist.rank()]], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows[dist.rank()]])
    slots = torch.arange(ids.shape[1])
    batch = SFTBatch(ids, (slots > 0) & (slots < lengths.unsqueeze(1)))
    total = torch.tensor(sum(len(row) - 1 for part in rows for row in part))
    sums = MetricSums()

    def loss(rows: SFTBatch, sums: MetricSums) -> torch.Tensor:
        return sft.sft_loss(engine, rows, total, sums)

    loss_of = StepLoss([batch], loss, lambda rows: rows.loss_mask.any(dim=1), sums)
    if coef > 0:
        loss_of = RouterTerm(coef, router_top_k(model.config, "the model"))(loss_of)
    apply(accumulate(engine, [batch], loss_of))
    weights = gather_state(engine.module.lm)
    if dist.is_main():
        save_file(weights, out)


def main() -> None:
    be_quick()
    trainer.save_model = train_ppo.save_model = save_with_outputs
    folder, found = Path(sys.argv[-1]), {}
    cases = json.loads((folder / "cases.json").read_text())
    for name, (ranks, step, words) in cases["runs"].items():
        if ranks != world_size():
            continue
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                config = parse(step, words)
                join_ranks(config)
                TRAIN[step](config)
        finally:
            print(f"--- {name}\n{said.getvalue()}", flush=True)
        found[name] = said.getvalue()
    for name, (model, rows, coef) in cases["updates"].items() if world_size() == 2 else ():
        print(f"--- {name}: update", flush=True)
        update(model, rows, coef, f"{folder}/{name}.updated")
    if dist.is_main():
        (folder / f"found_{world_size()}.json").write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


if __name__ == "__main__":
    main()
