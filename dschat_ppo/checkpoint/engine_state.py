"""The states of a DeepSpeed engine: save them to files in the background, and load them into an
engine of any world size, ZeRO stage, dtype or optimizer. DeepSpeed's own and universal checkpoints
do not suffice (docs/decisions.md).

At every stage a rank keeps pieces of parameters in a few flat fp32 tensors: weights, and AdamW's
two moments, or the states of another optimizer, in the same order. A `Fragment` describes which
elements of which parameter lie where. `FOLDER/rank_N.pt` holds the fragments and flat tensors of
rank N (at stage 0 rank 0 has everything), `FOLDER/common.pt` what all ranks share. Frozen
parameters are not saved, because resuming reads them from the model folder. From the fragments of
all ranks that saved and those of the engine that loads, every piece is copied directly from the
mapped files to its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from torch import Tensor, nn

from dschat_ppo.checkpoint.state_files import BackgroundWriter, load_state
from dschat_ppo.common import dist
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import quiet_prints
from dschat_ppo.errors import UserError
from dschat_ppo.features import hooks
from dschat_ppo.types import Engine

COMMON = "common.pt"
WEIGHTS = "fp32"
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def moment_names() -> list[str]:
    """Names of the states that an optimizer may keep of a parameter."""
    names = [*ADAMW_MOMENTS]
    for optimizer in hooks("optimizers.OPTIMIZER"):
        names += optimizer.state_names
    return names


def flat_masters(engine: Engine) -> list[Tensor]:
    """This rank's fp32 weights, as tensors of the optimizer: one flat shard for each group; at
    stage 0 the parameters."""
    for name in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
    ):
        if hasattr(engine.optimizer, name):  # ZeRO 3; ZeRO 1 and 2; ZeRO 1 in bf16
            return list(getattr(engine.optimizer, name))
    parameters: list[Tensor] = []
    for group in engine.optimizer.param_groups:
        parameters += group["params"]
    return parameters


def dtype_of(engine: Engine) -> str:
    """The number format of the weights, such as "bfloat16"."""
    return str(engine.get_data_types()[0]).removeprefix("torch.")


def common_state(folder: Path) -> dict[str, Any]:
    """What all ranks share: "shapes" of the parameters that train, names of "frozen" ones,
    "buffers", "dtype", "counters", "schedule", and the number of "ranks"."""
    if not (folder / COMMON).is_file():
        raise UserError(f"{folder}: holds no states of an engine ({COMMON} is missing)")
    return load_state(folder / COMMON, mapped=True)


def _shapes_of(engine: Any) -> dict[str, torch.Size]:
    """Name -> shape of each parameter that trains."""
    if not engine.zero_optimization():
        return {engine.param_names[weight]: weight.shape for weight in flat_masters(engine)}
    shapes: dict[str, torch.Size] = {}
    for group_shapes in engine._get_zero_param_shapes():
        shapes |= group_shapes
    return shapes


def _buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that `module.state_dict()` holds, under all their names."""
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in module.state_dict().items() if name in names}


def save_engine(engine: Engine, folder: Path, writer: BackgroundWriter) -> None:
    """Save trained weights, optimizer, schedule, loss scale, buffers and counters to `folder`,
    which exists. The files hold the states of this moment; they are complete after
    `writer.wait()`."""
    if dist.is_main():
        writer.save(_common_of(engine), folder / COMMON)
    if engine.zero_optimization() or dist.is_main():
        writer.save(_shard_of(engine), folder / rank_file(dist.rank()))


def _common_of(engine: Engine) -> dict[str, Any]:
    """The states that all ranks share, see `common_state`."""
    ranks = 1
    if engine.zero_optimization():
        ranks = dist.world_size()
    parameters = engine.module.named_parameters()
    schedule = engine.lr_scheduler
    return {
        "shapes": _shapes_of(engine),
        "frozen": [name for name, weight in parameters if not weight.requires_grad],
        "buffers": _buffers_of(engine.module),
        "dtype": dtype_of(engine),
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "schedule": {name: getattr(schedule, name) for name in ("last_epoch", "_step_count")},
        "ranks": ranks,
    }


def _shard_of(engine: Engine) -> dict[str, Any]:
    """The states of this rank, see `read_shards`; a fragment is the tuple of its values."""
    flats = []
    steps = 0
    for master in flat_masters(engine):
        state = engine.basic_optimizer.state.get(master, {})  # empty before the first step
        flat = {WEIGHTS: master.flatten()}
        for key in moment_names():
            if key in state:
                flat[key] = state[key].flatten()
        flats.append(flat)
        if "step" in state:
            steps = max(steps, int(state["step"]))
    loss_scale = {}
    if engine.fp16_enabled():
        loss_scale = vars(engine.optimizer.loss_scaler)
    return {
        "fragments": [astuple(fragment) for fragment in _fragments_of(engine)],
        "flats": flats,
        "steps": steps,
        "loss_scale": loss_scale,
    }


def rank_file(rank: int) -> str:
    """The name of the file of a rank, also in the folder of a checkpoint."""
    return f"rank_{rank}.pt"


@dataclass(frozen=True)
class Fragment:
    """`length` elements of flattened parameter `name`, from `start` on, lie in flat tensor `flat`
    from `offset` on."""

    name: str
    start: int
    length: int
    flat: int
    offset: int


def load_engine(engine: Engine, folder: Path) -> None:
    """Load the states in `folder`, saved with any layout, into a freshly built engine of the same
    model. Collective.

    Weights (the fp32 masters, if any), moments, step count, place in the schedule and counters are
    restored bit for bit, the loss scale if the dtype is the same. Rate, schedule, betas, epsilon
    and weight decay remain those of the engine (`--resume_force` may have changed them). Frozen
    parameters stay as built.
    """
    common = common_state(folder)
    _require_same_parameters(folder, common, engine)
    shards = read_shards(folder, common)
    saved_keys = set[str]()
    for shard in shards:
        saved_keys.update(*shard["flats"])
    for optimizer in hooks("optimizers.OPTIMIZER"):
        trains = any(group.get(optimizer.mark) for group in engine.optimizer.param_groups)
        has_trained = not saved_keys.isdisjoint(optimizer.state_names)
        if "exp_avg" in saved_keys and has_trained != trains:
            raise UserError(
                f"{folder}: another --optimizer trained the saved run: use that one, or start from"
                " its model"
            )
    flats = gather(
        shards, _fragments_of(engine), [tensor.numel() for tensor in flat_masters(engine)]
    )
    with quiet_prints():
        _load_flats(engine, flats, shards[0]["steps"])
    if shards[0]["loss_scale"] and common["dtype"] == dtype_of(engine):
        vars(engine.optimizer.loss_scaler).update(shards[0]["loss_scale"])
    engine.module.load_state_dict(common["buffers"], strict=False)
    resume_schedule(engine, common["schedule"])
    for name, value in common["counters"].items():
        setattr(engine, name, value)


def resume_schedule(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Go to the step of the saved schedule, on the engine's own schedule and rates."""
    scheduler = engine.lr_scheduler
    scheduler.last_epoch = saved["last_epoch"]
    scheduler._step_count = saved["_step_count"]
    for group, rate, factor in zip(
        engine.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = rate * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in engine.optimizer.param_groups]


def _require_same_parameters(folder: Path, common: Mapping[str, Any], engine: Any) -> None:
    """Refuse states of other parameters or buffers than those of the engine."""
    shapes = _shapes_of(engine)
    saved = common["shapes"]
    differing = [name for name in {**shapes, **saved} if saved.get(name) != shapes.get(name)]
    differing += sorted(_buffers_of(engine.module).keys() ^ common["buffers"].keys())
    if differing:
        raise UserError(
            f"{folder}: other parameters train here than in the checkpoint (differing:"
            f" {len(differing)}; the first is {differing[0]}); use the flags and the model of the"
            " saved run"
        )


def read_shards(folder: Path, common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states of all ranks that saved, in rank order. `common` is `common_state(folder)`.
    "fragments" says which elements the tensors of "flats" hold; each of these has "fp32" (weights)
    and, after the first step, some of `moment_names` -> 1-D fp32 tensors in the same order. "steps"
    is AdamW's step count, "loss_scale" the attributes of DeepSpeed's loss scaler in fp16."""
    shards = []
    for rank in range(common["ranks"]):
        shard = load_state(folder / rank_file(rank), mapped=True)
        shard["fragments"] = [Fragment(*values) for values in shard["fragments"]]
        shards.append(shard)
    return shards


def partitioned_fragments(
    shapes: Sequence[Mapping[str, torch.Size]], rank: int, ranks: int
) -> list[Fragment]:
    """The fragments of a rank under ZeRO-3, which pads each parameter and divides it into equal
    shards, one for each rank. `shapes`: for each flat tensor, of the parameters whose shards lie
    in it one after another."""
    fragments = []
    for flat, flat_shapes in enumerate(shapes):
        offset = 0
        for name, shape in flat_shapes.items():
            shard_length = -(-shape.numel() // ranks)
            start = rank * shard_length
            length = min(shard_length, shape.numel() - start)  # without the padding
            if length > 0:
                fragments.append(Fragment(name, start, length, flat, offset))
            offset += shard_length
    return fragments


def _fragments_of(engine: Any) -> list[Fragment]:
    """Which elements of which parameters lie where in `flat_masters`."""
    if engine.zero_optimization_partition_weights():
        return partitioned_fragments(
            engine._get_zero_param_shapes(), dist.rank(), dist.world_size()
        )
    if not engine.zero_optimization():
        weights = flat_masters(engine)
        return [
            Fragment(engine.param_names[weight], 0, weight.numel(), flat, 0)
            for flat, weight in enumerate(weights)
        ]
    fragments = []
    for weight, name in engine.param_names.items():
        mapping = getattr(weight, "_hp_mapping", None)  # None: other ranks hold it, or it is frozen
        if mapping is not None:
            in_weight = mapping.lp_fragment_address
            in_flat = mapping.hp_fragment_address
            flat = mapping.param_group_index
            fragments.append(Fragment(name, in_weight.start, in_weight.numel, flat, in_flat.start))
    return fragments


def gather(
    shards: Sequence[Mapping[str, Any]], targets: Sequence[Fragment], lengths: Sequence[int]
) -> list[dict[str, Tensor]]:
    """For each flat tensor a dict as in "flats", fp32 on the host, with the elements of the
    `targets`, copied from the shards of all ranks that saved; other elements of the flat tensors of
    `lengths` are 0, and one of padding alone has no moments, which nothing reads."""
    saved = _pieces(shards)
    flats = [{WEIGHTS: torch.zeros(length)} for length in lengths]
    for target in targets:
        pieces = saved[target.name]
        flat = flats[target.flat]
        if pieces:
            _, saved_flat = pieces[0]
            for key in saved_flat.keys() - flat.keys():
                flat[key] = torch.zeros(lengths[target.flat])
        _copy(pieces, target, flat)
    return flats


def master_weights(folder: Path, common: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Name and fp32 master weight, whole and in its shape on the host, of each parameter that the
    states hold. One at a time: the states themselves stay in their mapped files. `common` is
    `common_state(folder)`."""
    saved = _pieces(read_shards(folder, common))
    for name, shape in common["shapes"].items():
        flat = {WEIGHTS: torch.empty(shape.numel())}
        _copy(saved[name], Fragment(name, 0, shape.numel(), 0, 0), flat)
        yield name, flat[WEIGHTS].view(shape)


def _pieces(
    shards: Sequence[Mapping[str, Any]],
) -> dict[str, list[tuple[Fragment, dict[str, Tensor]]]]:
    """Parameter -> its fragments on all ranks that saved, each with the flat tensors that it lies
    in."""
    pieces: dict[str, list[tuple[Fragment, dict[str, Tensor]]]] = defaultdict(list)
    for shard in shards:
        for fragment in shard["fragments"]:
            pieces[fragment.name].append((fragment, shard["flats"][fragment.flat]))
    return pieces


def _copy(
    pieces: Sequence[tuple[Fragment, dict[str, Tensor]]],
    target: Fragment,
    flat: Mapping[str, Tensor],
) -> None:
    """Copy the elements of the fragment `target` from the saved `pieces` to where it lies in
    `flat`, each exactly once."""
    copied = 0
    for source, saved_flat in pieces:
        start = max(target.start, source.start)
        end = min(target.start + target.length, source.start + source.length)
        length = end - start
        if length > 0:
            copied += length
            source_offset = source.offset + start - source.start
            target_offset = target.offset + start - target.start
            for key, values in flat.items():
                overlap = saved_flat[key].narrow(0, source_offset, length)
                values.narrow(0, target_offset, length).copy_(overlap)
        heartbeat()  # the states of the other ranks are read from their files here
    if copied != target.length:
        raise UserError(
            f"the states hold {copied} of the {target.length} elements of {target.name}"
        )


def _load_flats(engine: Engine, flats: Sequence[Mapping[str, Tensor]], steps: int) -> None:
    """Load the flat tensors into the engine, in the form of its state dict."""
    masters = flat_masters(engine)
    moments: dict[int, dict[str, Any]] = {}
    if steps:
        for index, (master, flat) in enumerate(zip(masters, flats, strict=True)):
            names = [name for name in moment_names() if name in flat]
            moments[index] = {name: flat[name].view_as(master) for name in names}
            if "exp_avg" in flat:
                moments[index]["step"] = torch.tensor(float(steps))
    state = engine.optimizer.state_dict()
    if not engine.zero_optimization():
        for weight, flat in zip(masters, flats, strict=True):
            weight.data.copy_(flat[WEIGHTS].view_as(weight))
        engine.optimizer.load_state_dict(state | {"state": moments})
        return
    weights = [flat[WEIGHTS] for flat in flats]
    states_of_ranks = [state] * dist.world_size()  # of which each rank reads its own
    if engine.zero_optimization_partition_weights():
        state[OPTIMIZER_STATE_DICT]["state"] = moments
        state[FP32_FLAT_GROUPS] = weights
        engine.optimizer.checkpoint_event_prologue()
        engine.optimizer.load_state_dict(states_of_ranks, load_from_fp32_weights=True)
        engine.optimizer.checkpoint_event_epilogue()
    else:
        state[BASE_OPTIMIZER_STATE]["state"] = moments
        state[SINGLE_PARTITION_OF_FP32_GROUPS] = weights
        engine.optimizer.load_state_dict(states_of_ranks, load_from_fp32_weights=True)
        engine.optimizer.update_lp_params()
