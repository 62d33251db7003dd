"""Save the states of a DeepSpeed engine to files in the background; `reshard.py` loads them.

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
from torch import Tensor, nn

from dschat_ppo.checkpoint.state_files import BackgroundWriter, load_state
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


def dtype_of(engine: Engine) -> str:
    """The number format of the weights, such as "bfloat16"."""
    return str(engine.get_data_types()[0]).removeprefix("torch.")


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


def save_engine(engine: Engine, folder: Path, writer: BackgroundWriter) -> None:
    """Save trained weights, optimizer, schedule, loss scale and counters below `folder`. Collective, between steps. The
    files hold the states of this moment; they are complete after `writer.wait()`, which raises errors of the disk only
    on the ranks where they occur: synchronise them."""
    names = [] if engine.zero_optimization() else [engine.param_names[weight] for weight in flat_masters(engine)]
    frozen = [name for name, weight in engine.module.named_parameters() if not weight.requires_grad]
    extra = {LAYOUT: {"dtype": dtype_of(engine)}, PARAMETER_NAMES: names, FROZEN: frozen}
    with _files_of(engine, writer), quiet_prints():
        engine.save_checkpoint(
            str(folder), tag=TAG, save_latest=False, client_state=extra, exclude_frozen_parameters=True
        )


@contextmanager
def _files_of(engine: Any, files: BackgroundWriter) -> Iterator[None]:
    """Let `files` write for the engine, and prevent DeepSpeed from copying its recovery scripts: on a full disk that
    raises only on rank 0, and the other ranks would wait forever. DeepSpeed's own exclusion of frozen weights keeps
    those that have a second name, such as a head tied to the embedding, so `trained_state` takes its place."""
    original = engine.checkpoint_engine
    engine.checkpoint_engine = files
    engine._copy_recovery_script = lambda save_path: None
    engine.module_state_dict = lambda **_: trained_state(engine.module)
    try:
        yield
    finally:
        engine.checkpoint_engine = original
        del engine._copy_recovery_script, engine.module_state_dict
