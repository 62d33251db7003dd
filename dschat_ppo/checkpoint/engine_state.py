"""Save the states of a DeepSpeed engine to files in the background, and load them into an engine of the same layout.

The files are DeepSpeed's own (`engine.save_checkpoint`), in `FOLDER/state/`. Four things differ from DeepSpeed's way
to write them. `state_files.py` implements three: tensors are copied to host memory and written while training
continues; each file is hashed while it is written; only tensors, plain values and a few classes are ever unpickled.
The fourth: frozen parameters are left out, because resuming reads them from the model folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor, nn

from dschat_ppo.checkpoint.state_files import BackgroundWriter, load_state
from dschat_ppo.common.dist import world_size
from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.logging import quiet_prints
from dschat_ppo.errors import UserError
from dschat_ppo.types import Engine

TAG = "state"
LAYOUT, PARAMETER_NAMES = "dschat_ppo_layout", "dschat_ppo_parameter_names"
FROZEN = "dschat_ppo_frozen_parameters"  # names of the parameters that the files do not hold


def flat_masters(engine: Engine) -> list[Tensor]:
    """This rank's fp32 weights, as tensors of the optimizer: one flat part per group; at stage 0 the parameters."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(engine.optimizer, name):  # ZeRO 3; ZeRO 1 and 2; ZeRO 1 in bf16
            return list(getattr(engine.optimizer, name))
    return [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]


def layout(engine: Engine) -> dict[str, Any]:
    """What must be the same for `load_engine`; the same on every rank."""
    masters = flat_masters(engine)
    return {
        "ranks": world_size(),
        "ZeRO stage": engine.zero_optimization_stage(),
        "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
        "optimizer": type(engine.basic_optimizer).__name__,
        "elements": f"{sum(tensor.numel() for tensor in masters)} in {len(masters)} tensors",
    }


def model_states(folder: Path) -> dict[str, Any]:
    """The file of rank 0 with counters, schedule and (except at stage 3) weights."""
    found = sorted((folder / TAG).glob("*mp_rank_00_model_states.pt"))
    if not found:
        raise UserError(f"{folder}: holds no states of an engine ({TAG}/*_model_states.pt is missing)")
    return load_state(found[0], mapped=True)


def trained_state(module: nn.Module) -> dict[str, Any]:
    """The entries of `module.state_dict()` that training changes: weights that train, under all names, and buffers."""
    names = {name for name, weight in module.named_parameters(remove_duplicate=False) if weight.requires_grad}
    names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in module.state_dict().items() if name in names}


def trained_shapes(common: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Name -> shape of each parameter that the states hold, in their order; `common` is `model_states(folder)`."""
    if common["param_shapes"] is None:  # stage 0
        return {name: common["module"][name].shape for name in common[PARAMETER_NAMES]}
    return {name: shape for group in common["param_shapes"] for name, shape in group.items()}


def has_layout_of(engine: Engine, folder: Path) -> bool:
    """Whether an engine of this world size, ZeRO stage, dtype and optimizer saved the states in `folder`."""
    return model_states(folder).get(LAYOUT) == layout(engine)


def save_engine(engine: Engine, folder: Path, writer: BackgroundWriter) -> None:
    """Save trained weights, optimizer, schedule, loss scale and counters below `folder`. Collective, between steps. The
    files hold the states of this moment; they are complete after `writer.wait()`, which raises errors of the disk only
    on the ranks where they occur: synchronise them."""
    names = [] if engine.zero_optimization() else [engine.param_names[weight] for weight in flat_masters(engine)]
    frozen = [name for name, weight in engine.module.named_parameters() if not weight.requires_grad]
    extra = {LAYOUT: layout(engine), PARAMETER_NAMES: names, FROZEN: frozen}
    with _files_of(engine, writer), quiet_prints():
        engine.save_checkpoint(
            str(folder), tag=TAG, save_latest=False, client_state=extra, exclude_frozen_parameters=True
        )


def load_engine(engine: Engine, folder: Path) -> None:
    """Load the states in `folder`, bit for bit, into a freshly built engine of the same layout. Collective. For another
    layout see `reshard.load_engine_resharded`."""
    common = model_states(folder)
    saved, own = common.get(LAYOUT, {}), layout(engine)
    differing = [f"{name} {saved.get(name)} there and {own[name]} here" for name in own if saved.get(name) != own[name]]
    if differing:
        raise UserError(f"{folder}: saved by an engine of another layout ({', '.join(differing)})")
    _require_same_names(folder, common, engine)
    with _files_of(engine, BackgroundWriter()), quiet_prints():
        loaded, _ = engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=False)  # frozen weights are absent
    if loaded is None:
        raise UserError(f"{folder}: DeepSpeed found no states to load in it")
    replay_bias_correction(engine)


def _require_same_names(folder: Path, common: Mapping[str, Any], engine: Any) -> None:
    """Require the states of exactly the parameters that train here, in the same order, and of all buffers."""
    if engine.zero_optimization():
        own = {name: shape for group in engine._get_zero_param_shapes() for name, shape in group.items()}
    else:
        own = {engine.param_names[weight]: weight.shape for weight in flat_masters(engine)}
    saved, held = trained_shapes(common), common["module"].keys()
    differing = [name for name in {**own, **saved} if saved.get(name) != own.get(name)]
    differing += sorted(trained_state(engine.module).keys() - held)
    differing += sorted(held - engine.module.state_dict().keys())
    if not differing and list(saved) != list(own):
        differing = [name for name, here in zip(saved, own, strict=True) if name != here]
    if differing:
        raise UserError(
            f"{folder}: other parameters train here than in the checkpoint (differing: {len(differing)}; the first is "
            f"{differing[0]}); use the flags and the model of the saved run"
        )


def replay_bias_correction(engine: Engine) -> None:
    """Restore the powers of beta inside DeepSpeedCPUAdam for the step count in its states.

    Its C++ code multiplies float32 powers from step to step, and no file contains them. A new optimizer would start
    with `pow(beta, step)`, which rounds differently. So the steps are repeated here, on a single number. Other
    optimizers have no such state.
    """
    adam = engine.basic_optimizer
    if not isinstance(adam, DeepSpeedCPUAdam):
        return
    steps = max((int(state["step"]) for state in adam.state.values() if "step" in state), default=0)
    group = adam.param_groups[0]
    settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
    numbers = [torch.zeros(1) for _ in ("weight", "gradient", "exp_avg", "exp_avg_sq")]
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, *settings, *numbers)


@contextmanager
def _files_of(engine: Any, files: BackgroundWriter) -> Iterator[None]:
    """Let `files` write and read for the engine, and prevent DeepSpeed from copying its recovery scripts.

    On a full disk that copying raises only on rank 0, and the other ranks would wait forever. Copying the weights reads
    them from a mapped file, so the watchdog is paused for it, as in `load`. DeepSpeed's own exclusion of frozen weights
    keeps those that have a second name, such as a head tied to the embedding, so `trained_state` takes its place.
    """
    original, copy_weights = engine.checkpoint_engine, engine.load_module_state_dict

    def copy_with_watchdog_paused(*args: Any, **kwargs: Any) -> None:
        with watchdog_paused():
            copy_weights(*args, **kwargs)

    engine.checkpoint_engine = files
    engine._copy_recovery_script = lambda save_path: None
    engine.load_module_state_dict = copy_with_watchdog_paused
    engine.module_state_dict = lambda **_: trained_state(engine.module)
    try:
        yield
    finally:
        engine.checkpoint_engine = original
        del engine._copy_recovery_script, engine.load_module_state_dict, engine.module_state_dict
