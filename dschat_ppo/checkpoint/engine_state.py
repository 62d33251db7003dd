"""Save the states of a DeepSpeed engine to files in the background, and load them into an engine of the same layout.

The files are DeepSpeed's own (`engine.save_checkpoint`), in `FOLDER/state/`. Four things differ from DeepSpeed's way
to write them: tensors are copied to host memory and written while training continues; each file is hashed while it is
written; only tensors, plain values and the few classes of `_CLASSES` are ever unpickled; and frozen parameters are left
out, because a run that resumes loads them from its model folder.
"""

from __future__ import annotations

import copy
import copyreg
import hashlib
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from dschat_ppo.common.dist import local_rank, world_size
from dschat_ppo.common.heartbeat import heartbeat, watchdog_paused
from dschat_ppo.common.logging import quiet_prints
from dschat_ppo.errors import UserError
from dschat_ppo.types import Engine

TAG = "state"
LAYOUT, PARAMETER_NAMES = "dschat_ppo_layout", "dschat_ppo_parameter_names"
FROZEN = "dschat_ppo_frozen_parameters"  # names of the parameters that the files do not hold

# Every class that DeepSpeed 0.19.8 pickles for ZeRO stages 0 to 3 in fp32, bf16 and fp16, with and without offload.
_CLASSES = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
# Enum members by value: Python 3.11.0 to 3.11.3 would write a `getattr`, which `load_file` refuses.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.Size, ZeroStageEnum, fragment_address)


class BackgroundWriter(CheckpointEngine):
    """DeepSpeed's interface for files of an engine: `save` copies and returns, a thread writes, `wait` waits for it.

    One writer serves any number of engines. The host holds a copy of each state until it is written. `save` and
    `makedirs` raise no errors of the disk, because the other ranks would then wait for this one at DeepSpeed's
    barriers; `wait` raises them.

    Args:
        on_each_machine: the first rank of each machine, not only rank 0, writes what all ranks share.
    """

    def __init__(self, on_each_machine: bool = False) -> None:
        super().__init__()
        self.on_each_machine = on_each_machine
        self.name = "BackgroundWriter"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: dict[Path, Future[tuple[int, str]]] = {}
        self._problem: OSError | None = None

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def commit(self, info: Any) -> bool:
        """Nothing to do: a checkpoint is complete when its manifest is written, after `wait`."""
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder; `wait` raises a failure."""
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as problem:
            self._problem = self._problem or problem

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Copy the state as it is now, and let the thread write it to `path`.

        Raises:
            TypeError: it contains a value that `load_file` would refuse.
        """
        self._written[Path(path)] = self._thread.submit(_write, host_copy(state_dict), Path(path))

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """The state in `path`, on the host. Weights are mapped from the file; optimizer states are copied."""
        with watchdog_paused():  # this waits only for the disk
            state = load_file(path)
            return {key: value if key == "module" else host_copy(value) for key, value in state.items()}

    def done(self) -> bool:
        """Whether everything is written, so that `wait` returns (or raises) at once."""
        return all(future.done() for future in self._written.values())

    def wait(self) -> dict[Path, tuple[int, str]]:
        """Wait until everything that was saved since the last call is on the disk, however long the disk takes.

        The writing thread sends no heartbeat: training runs at the same time, and a heartbeat of this thread would hide
        that training hangs.

        Returns:
            For each file of this rank its length in bytes and the SHA-256 of its content, as 64 hex digits.

        Raises:
            OSError: a file could not be written. The writer can be used again.
        """
        written, problem = self._written, self._problem
        self._written, self._problem = {}, None
        with watchdog_paused():
            failures = [failure for future in written.values() if (failure := future.exception())]
        if problem or failures:
            raise problem or failures[0]
        return {path: future.result() for path, future in written.items()}


class _HashedFile:
    """A file for `torch.save`: counts and hashes the bytes, and remembers the error of the disk.

    When a write fails, torch's archive writer raises a RuntimeError, which hides the reason.
    """

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._hash = hashlib.sha256()
        self.length = 0
        self.problem: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            self._file.write(data)
        except OSError as problem:
            self.problem = self.problem or problem
            raise
        self._hash.update(data)
        self.length += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _write(state: dict[str, Any], path: Path) -> tuple[int, str]:
    """Write, flush to the disk, and return (bytes, SHA-256)."""
    with open(path, "wb") as file:
        hashed = _HashedFile(file)
        try:
            torch.save(state, cast(IO[bytes], hashed))
        except RuntimeError:
            if hashed.problem is None:
                raise
            raise hashed.problem from None
        os.fsync(file.fileno())
    return hashed.length, hashed.hexdigest()


def host_copy(value: Any, seen: dict[Any, Tensor] | None = None, where: str = "state") -> Any:
    """A copy of nested containers in which every tensor is a contiguous copy in host memory.

    A view becomes a tensor of only its elements, so that a file does not contain the buffer behind it. Two names of one
    tensor (tied weights) share one copy, so that `torch.save` writes it once.

    Raises:
        TypeError: a value has a class that `load_file` refuses; the message says where.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        identity = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() == 0 or identity not in seen:
            seen[identity] = value.detach().to("cpu", copy=True).contiguous()
            heartbeat()
        return seen[identity]
    if isinstance(value, LossScaler | DynamicLossScaler):
        return copy.copy(value)  # training changes it in place
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, host_copy(item, seen, f"{where}.{key}")) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(host_copy(item, seen, f"{where}[{number}]") for number, item in enumerate(value))
    raise TypeError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold")


def load_file(path: str | Path) -> dict[str, Any]:
    """Load a file of `BackgroundWriter`. Tensors are mapped from the file: copy those that must outlive it.

    Raises:
        UserError: the file is no archive of torch, or contains an object of a class that no engine saves. No code in it
            has been executed.
    """
    try:
        with torch.serialization.safe_globals(_CLASSES):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as problem:
        reason = str(problem).rpartition("WeightsUnpickler error: ")[2].split(". ")[0].splitlines()[0]
        raise UserError(f"{path}: not a file of engine states that is safe to open ({reason})") from None


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
    """The file of rank 0 with counters, schedule and (except at stage 3) weights.

    Raises:
        UserError: `folder` has no such file, or it cannot be opened.
    """
    found = sorted((folder / TAG).glob("*mp_rank_00_model_states.pt"))
    if not found:
        raise UserError(f"{folder}: holds no states of an engine ({TAG}/*_model_states.pt is missing)")
    return load_file(found[0])


def trained_state(module: nn.Module) -> dict[str, Any]:
    """The entries of `module.state_dict()` that training changes: parameters that train, under all their names, and
    buffers. The rest is frozen weights, and what a quantised layer stores with them."""
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
    """Save trained weights, optimizer, schedule, loss scale and counters below `folder`. Collective.

    Call it between optimizer steps. The files hold the states of this moment; they are complete after `writer.wait()`.
    `wait` raises errors of the disk only on the ranks where they occur: synchronise them.
    """
    names = [] if engine.zero_optimization() else [engine.param_names[weight] for weight in flat_masters(engine)]
    frozen = [name for name, weight in engine.module.named_parameters() if not weight.requires_grad]
    extra = {LAYOUT: layout(engine), PARAMETER_NAMES: names, FROZEN: frozen}
    with _files_of(engine, writer), quiet_prints():
        engine.save_checkpoint(
            str(folder), tag=TAG, save_latest=False, client_state=extra, exclude_frozen_parameters=True
        )


def load_engine(engine: Engine, folder: Path) -> None:
    """Load the states in `folder`, bit for bit, into a freshly built engine of the same layout. Collective.

    Raises:
        UserError: the layout differs (see `reshard.load_engine_resharded`), other parameters train, or a file is
            missing or not safe.
    """
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
    saves_shared = engine.save_non_zero_checkpoint

    def copy_with_watchdog_paused(*args: Any, **kwargs: Any) -> None:
        with watchdog_paused():
            copy_weights(*args, **kwargs)

    engine.checkpoint_engine = files
    engine.save_non_zero_checkpoint = saves_shared or (files.on_each_machine and local_rank() == 0)
    engine._copy_recovery_script = lambda save_path: None
    engine.load_module_state_dict = copy_with_watchdog_paused
    engine.module_state_dict = lambda **_: trained_state(engine.module)
    try:
        yield
    finally:
        engine.checkpoint_engine, engine.save_non_zero_checkpoint = original, saves_shared
        del engine._copy_recovery_script, engine.load_module_state_dict, engine.module_state_dict
