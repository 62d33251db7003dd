"""Runs the three steps of many architectures in the same ranks, and one update of experts that differ by rank.

architectures.py FOLDER

    FOLDER/cases.json: {"runs": name -> [number of ranks, step, words], "experts": name -> [model folder, ids of each
        rank, weight of the router loss]}
    writes found_RANKS.json: name -> log; beside each saved model outputs.pt; for experts NAME.experts, the weights
"""

import contextlib
import io
import json
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from dschat_ppo.common import dist
from dschat_ppo.common.ranks import world_size
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.engine.optimizer_step import accumulate, apply
from dschat_ppo.engine.router_term import router_settings, with_router_term
from dschat_ppo.models.loading import load_causal_lm
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.saving import gather_state, save_model
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo import train_ppo
from dschat_ppo.run.launch import leave
from dschat_ppo.supervised import sft, train_preference, trainer
from workers.quick import be_quick

TRAIN = {"sft": sft.train_sft, "reward": train_preference.train_preferences, "ppo": train_ppo.train_ppo}
IDS, LENGTHS = torch.arange(40, 88).view(3, 16), torch.tensor([16, 11, 5])  # of the rows for every saved model


@torch.no_grad()
def save_with_outputs(engine, tokenizer, folder, *arguments, **options) -> None:
    """`save_model`, and what the model computes for `IDS`: log-probs, or values (0 after a row's end)."""
    save_model(engine, tokenizer, folder, *arguments, **options)
    engine.eval()
    real = torch.arange(IDS.shape[1]) < LENGTHS.unsqueeze(1)
    found = engine(IDS, real)[0] if isinstance(engine.module, PolicyModel) else engine(IDS, LENGTHS)[real]
    if dist.is_main():
        torch.save(found, Path(folder) / "outputs.pt")


def train_experts(folder: str, ids: list[int], coef: float, out: str) -> None:
    """One update on this rank's row, by almost the gradient (epsilon 1); rank 0 writes the weights after it."""
    config = train_config(3, "fp32", False, dist.world_size(), 0.0)
    model = PolicyModel(load_causal_lm(folder, "fp32", config))
    engine = train_engine(model, config, OptimizerSettings(1.0, 0.0, "constant", 0, 1, (0.9, 0.95), 1.0))
    batch = SFTBatch(torch.tensor([ids]), torch.tensor([[False] + [True] * (len(ids) - 1)]))
    total, sums, settings = torch.tensor(dist.world_size() * (len(ids) - 1)), MetricSums(), router_settings(coef, model)

    def loss(rows: SFTBatch, sums: MetricSums) -> torch.Tensor:
        return sft.sft_loss(engine, rows, total, sums)

    loss_of = partial(loss, sums=sums)
    if settings is not None:
        loss_of = with_router_term(settings, "router_loss", [batch], loss, lambda rows: rows.loss_mask.any(dim=1), sums)
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
                TRAIN[step](parse(step, words))
        finally:
            print(f"--- {name}\n{said.getvalue()}", flush=True)
        found[name] = said.getvalue()
    for name, (model, ids, coef) in cases["experts"].items() if world_size() == 2 else ():
        print(f"--- {name}: experts", flush=True)
        train_experts(model, ids[dist.rank()], coef, f"{folder}/{name}.experts")
    if dist.is_main():
        (folder / f"found_{world_size()}.json").write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


if __name__ == "__main__":
    main()
