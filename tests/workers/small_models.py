"""PPO steps of a small model under ZeRO-3, whole on each rank and gathered layer by layer, and checkpoints of both.

small_models.py ASSETS FOLDER
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dschat_ppo.checkpoint.engine_state import load_engine, save_engine
from dschat_ppo.checkpoint.state_files import BackgroundWriter
from dschat_ppo.common import dist
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.engine.optimizer_step import accumulate, apply
from dschat_ppo.models.loading import load_causal_lm
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.saving import gather_state
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.ppo.report import PPOReport
from dschat_ppo.runtime.launch import leave
from workers.ppo_setup import make_ppo, run_all
from workers.quick import be_quick

STEPS = 2
CASES = {
    "bf16": "--dtype bf16 --ppo_epochs 2 --enable_ema",
    "lora": "--actor_lora_dim 4 --only_optimize_lora --actor_gradient_checkpointing",
}
WAYS = {"whole": 10_000, "layers": 9_999}  # `stage3_param_persistence_threshold`: the first is this project's own
SETTINGS = OptimizerSettings(0.01, 0.0, "constant", 0, 6, (0.9, 0.95), 1e-8)


class Collectives(TorchDispatchMode):
    """Counts the collectives in the block, by kind."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("c10d::"):
            self.found[func._schema.name.removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


def run(assets: Path, folder: Path, case: str, way: str) -> None:
    """All PPO steps; writes metrics, weights, and the collectives of the last step."""
    out = folder / f"{case} {way}"
    out.mkdir(exist_ok=True)
    settings = out / "ds.json"
    settings.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": WAYS[way]}}))
    rows = 8 // dist.world_size()
    words = ["--actor_zero_stage", 3, "--critic_zero_stage", 3, "--deepspeed_config", settings]
    words += ["--per_device_generation_batch_size", rows, "--per_device_training_batch_size", rows // 2]
    words += ["--max_answer_seq_len", 6, "--actor_learning_rate", 0.003, "--critic_learning_rate", 0.003]
    words += ["--enable_test_mode", "--test_stop_step", STEPS, *CASES[case].split()]
    seed_everything(1)
    ppo = make_ppo(assets, *words)
    counted, finish = Collectives(), PPOReport.finish

    def finished(self, step):
        finish(self, step)
        if step == STEPS - 1:
            counted.__enter__()
        if step == STEPS:
            counted.__exit__(None, None, None)

    PPOReport.finish = finished
    with MetricsWriter(out, None) as writer:
        run_all(ppo, writer)
    PPOReport.finish = finish
    weights = {}
    for role, engine in ppo.engines.trained.items():
        weights |= {f"{role}.{name}": weight for name, weight in gather_state(engine.module).items()}
    average = ppo.engines.actor_average
    weights |= {} if average is None else {f"average.{name}": weight for name, weight in average.gathered().items()}
    if dist.is_main():
        torch.save(weights, out / "weights.pt")
        (out / "collectives.json").write_text(json.dumps(counted.found))


def resume(assets: Path, folder: Path) -> dict[str, bool]:
    """ "WAY to WAY" -> whether an engine that loads what the other has saved continues with its bits."""
    ids = torch.randint(2, 300, (4, 9), generator=torch.Generator().manual_seed(dist.rank()))

    def engine_of(layer_by_layer: bool):
        config = train_config(3, "bf16", False, dist.world_size(), 0.5)
        return train_engine(
            PolicyModel(load_causal_lm(str(assets / "lm"), "bf16", config)), config, SETTINGS, layer_by_layer
        )

    def train(engine, steps: int) -> list:
        def loss(part):
            return -engine(part, torch.ones_like(part, dtype=torch.bool))[0].sum() / 50

        return [apply(accumulate(engine, [ids[:2], ids[2:]], loss)).grad_norm for _ in range(steps)]

    found, writer = {}, BackgroundWriter()
    for way in WAYS:
        engine = engine_of(way == "layers")
        train(engine, 2)
        (folder / way / "state").mkdir(parents=True, exist_ok=True)
        save_engine(engine, folder / way, writer)
        writer.wait()
        torch.distributed.barrier()
        norms, after = train(engine, 2), gather_state(engine.module)
        for other in WAYS:
            resumed = engine_of(other == "layers")
            load_engine(resumed, folder / way)
            same = train(resumed, 2) == norms
            weights = gather_state(resumed.module)
            found[f"{way} to {other}"] = same and all(torch.equal(weights[name], after[name]) for name in after)
    return found


def main() -> None:
    be_quick()
    assets, folder = Path(sys.argv[-2]), Path(sys.argv[-1])
    for case in CASES:
        for way in WAYS:
            run(assets, folder, case, way)
    found = dist.gather_objects(resume(assets, folder))
    if dist.is_main():
        (folder / "resumed.json").write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


if __name__ == "__main__":
    main()
