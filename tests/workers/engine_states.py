"""Saves engines of many layouts, trains on, loads the files into new engines and trains those;
writes the results.

engine_states.py FOLDER first|main|last

`first` (1 rank) saves what `main` (2 ranks) loads; `main` saves what `last` (1 rank) loads. Each
rank writes to FOLDER/PART.RANK.
"""

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from dschat_ppo.checkpoint import engine_state
from dschat_ppo.checkpoint.state_files import BackgroundWriter
from dschat_ppo.common import dist
from dschat_ppo.common.dist import rank_shard
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import train_config
from dschat_ppo.engine.optimizer_step import accumulate, apply, learning_rates
from dschat_ppo.engine.optimizers import further_optimizers
from workers.quick import joined_ranks

BEFORE, AFTER = 4, 3
ROWS, WORDS, VOCABULARY = 8, 5, 13
# steps whose gradients are too large for fp16, one before the save and one after
OVERFLOWS = 1, 5
MATRICES = ("narrow.weight", "widen.weight")  # which Muon trains
OVERLAY = {"zero_optimization": {"stage3_param_persistence_threshold": 20, "sub_group_size": 60}}


@dataclass(frozen=True)
class Case:
    stage: int
    dtype: str = "fp32"
    offload: bool = False
    begun: int = BEFORE  # steps before the save
    frozen: bool = False  # most of the weights, among them the tied ones
    muon: bool = False

    def __str__(self) -> str:
        marks = {
            "offload": self.offload,
            "unstarted": not self.begun,
            "frozen": self.frozen,
            "muon": self.muon,
        }
        return " ".join(
            [f"stage {self.stage} {self.dtype}", *(mark for mark, there in marks.items() if there)]
        )


class Tiny(nn.Module):
    """Odd sizes, so that partitions are padded; tied weights, a frozen parameter and a buffer that
    training changes."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 7)
        self.narrow = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.widen = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(7, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.shift = nn.Parameter(torch.linspace(-1, 1, 7), requires_grad=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, ids):
        self.passes += 1
        hidden = self.embedding(ids) + self.shift
        return self.head(hidden + self.widen(torch.tanh(self.norm(self.narrow(hidden)))))


def build(case: Case, seed: int = 0):
    overlay = OVERLAY | ({"fp16": {"initial_scale_power": 10}} if case.dtype == "fp16" else {})
    config = train_config(case.stage, case.dtype, case.offload, dist.world_size(), 1.0, overlay)
    # their fp32 powers by multiplication and by pow() differ from the third step on
    betas = 0.85, 0.98
    settings = OptimizerSettings(0.05, 0.3, "cosine", 2, 20, betas, 1e-8)
    if case.muon:
        [muon] = [optimizer for optimizer in further_optimizers() if optimizer.name == "muon"]
        muon = replace(muon, takes=lambda name, shape: name in MATRICES)
        settings = replace(settings, optimizer=muon, taken_learning_rate=0.1)
    model = Tiny(seed)
    if case.frozen:  # as loaded from a folder: the same whatever the seed
        model.embedding.weight, model.head.weight = (
            Tiny(99).embedding.weight.requires_grad_(False),
        ) * 2
        model.narrow.weight = Tiny(99).narrow.weight.requires_grad_(False)
    return train_engine(model, config, settings)


def train(engine, steps) -> list[list[float]]:
    """Loss of the global batch, gradient norm, learning rate and loss scale of each step."""
    found = []
    for step in steps:
        rows = torch.randint(
            VOCABULARY, (ROWS, WORDS), generator=torch.Generator().manual_seed(step)
        )
        mine = rows[dist.rank() :: dist.world_size()]
        losses = []
        too_large = engine.fp16_enabled() and step in OVERFLOWS

        def loss_of(part, losses=losses, factor=1e6 if too_large else 1.0):
            scores = engine(part[:, :-1]).float().log_softmax(dim=-1)
            loss = -scores.gather(2, part[:, 1:, None]).sum() / (ROWS * (WORDS - 1))
            losses.append(loss.detach())
            return loss * factor

        rate = learning_rates(engine)["lr"]
        norm = apply(accumulate(engine, mine.split(2), loss_of)).grad_norm
        scale = getattr(engine.optimizer, "cur_scale", 1.0)
        found.append([float(dist.all_reduce(torch.stack(losses).sum())), norm, rate, float(scale)])
    return found


def without_padding(engine) -> list[torch.Tensor]:
    """The masters of this rank, whose padding is uninitialised and never used."""
    flats = engine_state.flat_masters(engine)
    return [
        flats[at.flat].flatten()[at.offset :][: at.length]
        for at in engine_state._fragments_of(engine)
    ]


def digest(engine) -> str:
    """SHA-256 of the state of this rank: weights, masters, moments, counts, buffers, scale,
    counters, schedule."""
    # without padding, which is uninitialised
    weights = [rank_shard(weight)[1] for weight in engine.module.parameters()]
    held = [
        engine.basic_optimizer.state.get(master, {}) for master in engine_state.flat_masters(engine)
    ]
    states = [state[key] for state in held for key in sorted(state)]
    tensors = [
        *weights,
        *without_padding(engine),
        *engine.module.buffers(),
        *map(torch.as_tensor, states),
    ]
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().clone().flatten().view(torch.uint8).numpy().tobytes())
    scaler = vars(engine.optimizer.loss_scaler) if hasattr(engine.optimizer, "loss_scaler") else {}
    counters = [engine.global_steps, engine.global_samples, engine.skipped_steps]
    groups = [
        {key: group[key] for key in group if key != "params"}
        for group in engine.optimizer.param_groups
    ]
    schedule = {
        key: value for key, value in engine.lr_scheduler.state_dict().items() if key != "lr_lambdas"
    }
    hashed.update(repr([scaler, counters, groups, schedule]).encode())
    return hashed.hexdigest()


def full_states(engine) -> dict[str, dict[str, torch.Tensor]]:
    """Name -> fp32 weight and moments, whole, by DeepSpeed's own functions. Collective."""
    if engine.zero_optimization_stage() in (1, 2) and engine.basic_optimizer.state:
        # by itself it links the first group alone
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for weight, name in engine.param_names.items():
        if not weight.requires_grad:
            continue
        muon = name in MATRICES and "use_muon" in engine.optimizer.param_groups[-1]
        keys = (
            (("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq"))
            if engine.basic_optimizer.state
            else ()
        )
        if engine.zero_optimization():
            states = {key: safe_get_full_optimizer_state(weight, key) for key in keys}
            found[name] = {engine_state.WEIGHTS: safe_get_full_fp32_param(weight), **states}
        else:
            found[name] = {
                engine_state.WEIGHTS: weight,
                **{key: engine.optimizer.state[weight][key] for key in keys},
            }
    return {
        name: {key: value.detach().clone() for key, value in states.items()}
        for name, states in found.items()
    }


def steps_of(engine) -> list[int]:
    return sorted(
        {int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}
    )


def save_and_go_on(case: Case, folder: Path) -> dict:
    """Train, save, and train on while the state is written."""
    engine, writer = build(case), BackgroundWriter()
    before = train(engine, range(case.begun))
    saved, full, steps = digest(engine), full_states(engine), steps_of(engine)
    folder.mkdir(parents=True, exist_ok=True)
    engine_state.save_engine(engine, folder, writer)
    after = train(engine, range(case.begun, case.begun + AFTER))
    writer.wait()
    if dist.is_main():
        torch.save({"full": full, "steps": steps, "after": after}, folder / "expected.pt")
    dist.barrier()
    return {"before": before, "after": after, "saved": saved, "end": digest(engine)}


def resume(case: Case, folder: Path) -> dict:
    """Load into a new engine with other weights, and train on."""
    engine = build(case, seed=1)
    other = digest(engine)
    engine_state.load_engine(engine, folder)
    loaded = digest(engine)
    after = train(engine, range(case.begun, case.begun + AFTER))
    return {"other": other, "loaded": loaded, "after": after, "end": digest(engine)}


def reshard_engine(case: Case, folder: Path) -> dict:
    """Load into a new engine of another layout, compare to the last bit, and train on."""
    expected = torch.load(folder / "expected.pt", weights_only=True)
    engine = build(case, seed=1)
    partitioned = [weight for weight in engine.module.parameters() if hasattr(weight, "ds_id")]
    for weight in partitioned:
        weight.all_gather()  # as a forward pass may leave it
    engine_state.load_engine(engine, folder)
    settled = all(
        (weight.ds_status == ZeroParamStatus.AVAILABLE) == weight.ds_persist
        for weight in partitioned
    )
    full = full_states(engine)
    differing = [
        f"{name} {key}"
        for name in expected["full"]
        for key, value in expected["full"][name].items()
        if not torch.equal(full[name][key], value)
    ]
    half = all(
        torch.equal(v["fp32"], v["fp32"].bfloat16().float()) for v in expected["full"].values()
    )
    counters = [engine.global_steps, engine.skipped_steps, int(engine.module.passes)]
    decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
    steps, names = steps_of(engine), sorted(full)
    after = train(engine, range(case.begun, case.begun + AFTER))
    return {
        "settled": settled,
        "differing": differing,
        "masters_are_bf16": half,
        "counters": counters,
        "decays": decays,
        "steps": [steps, expected["steps"]],
        "names": names,
        "after": after,
        "expected": expected["after"],
    }


SAVED = {
    "first": [Case(0), Case(2, "bf16"), Case(0, muon=True)],
    "main": [
        Case(0),
        Case(3),
        Case(1, "bf16"),
        Case(3, "bf16"),
        Case(2, "bf16", offload=True),
        Case(3, "bf16", offload=True),
        Case(2, "fp16"),
        Case(3, begun=0),
        Case(3, frozen=True),
        Case(1, "bf16", muon=True),
    ],
    "last": [],
}
RESHARDED = {
    "first": [],
    "main": [
        ("first", Case(0), Case(3)),
        ("first", Case(2, "bf16"), Case(3, "bf16")),
        ("first", Case(0, muon=True), Case(1, "bf16", muon=True)),
        ("main", Case(3), Case(0)),
        ("main", Case(1, "bf16"), Case(3, "bf16")),
        ("main", Case(3, "bf16"), Case(2, "bf16", offload=True)),
        ("main", Case(2, "fp16"), Case(3, "fp16")),
        ("main", Case(3, "bf16"), Case(3, "fp32")),
        ("main", Case(2, "fp16"), Case(2, "bf16")),
        ("main", Case(3, begun=0), Case(2, begun=0)),
    ],
    "last": [
        ("main", Case(3), Case(2)),
        ("main", Case(3, "bf16", offload=True), Case(1, "bf16")),
        ("main", Case(3, frozen=True), Case(2, frozen=True)),
        ("main", Case(1, "bf16", muon=True), Case(0, muon=True)),
    ],
}


def main() -> None:
    folder, part = Path(sys.argv[-2]), sys.argv[-1]
    type(get_accelerator()).is_fp16_supported = lambda self: True  # slow on most CPUs, but there
    found: dict[str, dict] = {"saved": {}, "resumed": {}, "resharded": {}}
    for case in SAVED[part]:
        here = folder / part / str(case)
        found["saved"][str(case)] = save_and_go_on(case, here)
        found["resumed"][str(case)] = resume(case, here)
    for source, before, after in RESHARDED[part]:
        how = reshard_engine(after, folder / source / str(before))
        found["resharded"][f"{source}: {before} -> {after}"] = {"source": source, **how}
    (folder / f"{part}.{dist.rank()}").write_text(json.dumps(found))


if __name__ == "__main__":
    with joined_ranks():
        main()
