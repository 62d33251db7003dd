"""What `--dtype auto` stands for, decided once, before a model is loaded.

On a GPU it is bf16, or fp16 where the hardware has no bf16 arithmetic. On a CPU it is the faster of
bf16 and fp32, which differs: some processors multiply bf16 numbers twice as fast as fp32 numbers,
others at a fifth of the rate. So matrix products of the model's sizes are timed in both. fp32 takes
twice the memory for weights and activations, so it must be faster by `LEAST_GAIN` and has to fit.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import PretrainedConfig

from dschat_ppo.common import dist
from dschat_ppo.common.host_memory import available_memory, host_memory
from dschat_ppo.common.logging import logger
from dschat_ppo.config.run_flags import AUTO
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.engine.ds_config import read_overlay
from dschat_ppo.errors import UserError, attempt
from dschat_ppo.models.loading import DTYPES, load_config
from dschat_ppo.models.model_folders import base_folder, settings_only
from dschat_ppo.models.weight_headers import checkpoint_shapes
from dschat_ppo.planner.model_parts import read_model_configs
from dschat_ppo.planner.plan_step import plan_step
from dschat_ppo.run.output_folder import earlier_dtype

SECONDS = 0.3  # of the measurement
MOST_SECONDS = 2.0  # where it has to be repeated
ROWS = 256  # tokens of a product: with more of them the rates hardly change
WIDEST = 1024  # wider matrices are cut to this: their rates are the same
LEAST_GAIN = 1.1
CPU_FORMATS = ("bf16", "fp32")
# Of a tool on a CPU: the weights, and the copies of them that generation lays out for its products.
TOOL_COPIES = 2

Config = TypeVar("Config", bound=StepConfig)


@dataclass(frozen=True)
class NumberFormat:
    """A number format, and why it was chosen, for the log."""

    dtype: str  # "bf16", "fp16" or "fp32"
    reason: str

    def __str__(self) -> str:
        return f"dtype: {self.dtype} ({self.reason})"


def with_dtype(config: Config) -> Config:
    """`config` with a number format in place of `--dtype auto`, which rank 0 decides and logs.
    Collective, after the ranks have joined.

    A run that resumes keeps the format of its checkpoint, also on another machine.
    """
    if config.run.dtype != AUTO:
        return config
    chosen = dist.on_main(lambda: _format_without_measuring(config))
    if chosen is None:
        hidden, inner = dist.on_main(lambda: widths_of(_trained_model_config(config)))
        seconds = time_products(hidden, inner)
        chosen = dist.on_main(lambda: _faster_that_fits(config, seconds, _fits_in_memory))
    logger().info(str(chosen))
    return _config_in(config, chosen.dtype)


def dtype_for_plan(
    config: Config, model: PretrainedConfig, on_gpu: bool, fits: Callable[[Config], bool]
) -> NumberFormat:
    """The number format with which the planner plans: a GPU is assumed to have bf16 arithmetic, and
    a CPU to be like this one. `fits`: whether a configuration in fp32 does."""
    chosen = _format_of_overlay(config)
    if chosen is not None:
        return chosen
    if on_gpu:
        return NumberFormat("bf16", "on GPUs that have bf16 arithmetic")
    if not _multiplies_bf16():
        return NumberFormat("fp32", "this processor has no bf16 arithmetic")
    return _faster_that_fits(config, time_products(*widths_of(model)), fits)


def dtype_for_tool(dtype: str, folders: Sequence[str]) -> str:
    """The number format for a tool that runs the models in `folders`, and trains none. `dtype`: of
    its command line; a choice is printed to stderr, because some tools print answers alone."""
    if dtype != AUTO:
        return dtype
    chosen = _format_of_hardware()
    if chosen is None:
        hidden, inner = widths_of(load_config(folders[0], "--model"))
        needed = TOOL_COPIES * torch.float32.itemsize * sum(map(parameters_of, folders))
        chosen = faster_format(time_products(hidden, inner), needed <= available_memory())
    print(chosen, file=sys.stderr)
    return chosen.dtype


def parameters_of(folder: str) -> int:
    """Of the model in a folder, or of its base."""
    shapes = checkpoint_shapes(base_folder(folder, "--model"))
    return sum(math.prod(shape) for shape in shapes.values())


def _config_in(config: Config, dtype: str) -> Config:
    """`config` with the number format `dtype`. `UserError`: its other flags do not go with it."""
    run = replace(config.run, dtype=cast(Any, dtype))
    return replace(config, run=run)


def _format_without_measuring(config: StepConfig) -> NumberFormat | None:
    """The format that an earlier run, `--deepspeed_config` or the device decides; None: processors
    of this kind differ, so products have to be timed. On rank 0."""
    earlier = earlier_dtype(config)
    if earlier is not None:
        return NumberFormat(*earlier)
    chosen = _format_of_overlay(config)
    if chosen is not None:
        return chosen
    return _format_of_hardware()


def _format_of_overlay(config: StepConfig) -> NumberFormat | None:
    """The format that `--deepspeed_config` enables, if it does."""
    settings = read_overlay(config.run.deepspeed_config)
    for dtype in ("bf16", "fp16"):
        section = settings.get(dtype)
        if isinstance(section, dict) and section.get("enabled") is True:
            return NumberFormat(dtype, f"as --deepspeed_config {config.run.deepspeed_config} says")
    return None


def _format_of_hardware() -> NumberFormat | None:
    """The format if the device leaves no choice; None on a CPU with bf16 arithmetic."""
    if not dist.on_gpu():
        if _multiplies_bf16():
            return None
        return NumberFormat("fp32", "this processor has no bf16 arithmetic")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return NumberFormat("bf16", "this GPU has bf16 arithmetic")
    return NumberFormat("fp16", "this GPU has no bf16 arithmetic")


def _multiplies_bf16() -> bool:
    """Whether this processor can run products of bf16 numbers without emulating each number."""
    is_supported = bool(get_accelerator().is_bf16_supported())
    has_library = torch.backends.mkldnn.is_available()
    return is_supported and has_library and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _trained_model_config(config: StepConfig) -> PretrainedConfig:
    """The configuration of the model that trains; of step 3 that of the actor."""
    with settings_only():
        models = read_model_configs(config)
    if "actor" in models:
        return models["actor"]
    return models["model"]


def widths_of(model: PretrainedConfig) -> tuple[int, int]:
    """Width of the hidden states, and of the MLP, up to `WIDEST`. Models without such settings are
    refused later, so their widths do not matter."""
    text = model.get_text_config()
    hidden = getattr(text, "hidden_size", None) or WIDEST
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    return min(hidden, WIDEST), min(inner, WIDEST)


def time_products(hidden: int, inner: int) -> dict[str, float]:
    """CPU seconds of a training pass's products in each of `CPU_FORMATS`, of the slowest rank, for
    a square matrix and those into and out of an MLP of these widths. All ranks measure at once, as
    they will compute; the formats alternate, and the best pass of each counts. What other programs
    take of the processor is no part of it. Collective."""
    operands = {dtype: _operands(hidden, inner, DTYPES[dtype]) for dtype in CPU_FORMATS}
    passes: dict[str, list[float]] = {dtype: [] for dtype in CPU_FORMATS}
    dist.barrier()
    began = time.perf_counter()
    seconds = 0.0
    while seconds < SECONDS or (seconds < MOST_SECONDS and not _are_confirmed(passes)):
        for dtype in CPU_FORMATS:
            started = time.process_time()
            for states, weight, gradient in operands[dtype]:
                _run_products(states, weight, gradient)
            passes[dtype].append(time.process_time() - started)
        seconds = time.perf_counter() - began
    best = [min(passes[dtype]) for dtype in CPU_FORMATS]
    slowest = dist.all_reduce(torch.tensor(best), "max")
    return dict(zip(CPU_FORMATS, slowest.tolist(), strict=True))


def _are_confirmed(passes: dict[str, list[float]]) -> bool:
    """Whether the best pass of each format is no accident: a second one took about as long. The
    first pass is slower, because the library generates its code; on a busy processor, where threads
    wait for each other, others are too."""
    for seconds in passes.values():
        best_two = sorted(seconds)[:2]
        if len(seconds) < 3 or best_two[1] > LEAST_GAIN * best_two[0]:
            return False
    return True


def _operands(hidden: int, inner: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """States (ROWS, inputs), weight (outputs, inputs) and gradient of the outputs (ROWS, outputs)
    of each product. The values do not affect the time, if they are no denormal numbers."""
    operands = []
    for inputs, outputs in ((hidden, hidden), (hidden, inner), (inner, hidden)):
        states = torch.ones(ROWS, inputs, dtype=dtype)
        weight = torch.ones(outputs, inputs, dtype=dtype)
        gradient = torch.ones(ROWS, outputs, dtype=dtype)
        operands.append((states, weight, gradient))
    return operands


def _run_products(states: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """The products of a linear layer in a forward and a backward pass."""
    torch.nn.functional.linear(states, weight)
    gradient @ weight
    gradient.t() @ states


def faster_format(seconds: dict[str, float], fp32_fits: bool) -> NumberFormat:
    """The format for a CPU. `seconds`: of the same work in each of `CPU_FORMATS`."""
    gain = seconds["bf16"] / seconds["fp32"]  # of fp32
    if gain >= LEAST_GAIN and fp32_fits:
        return NumberFormat(
            "fp32", f"products {gain:.1f} times as fast as in bf16 on this processor"
        )
    if gain >= LEAST_GAIN:
        return NumberFormat(
            "bf16", f"products in fp32 are {gain:.1f} times as fast, but it does not fit in memory"
        )
    if gain * LEAST_GAIN > 1:
        return NumberFormat("bf16", "products about as fast as in fp32, with half the memory")
    return NumberFormat(
        "bf16", f"products {1 / gain:.1f} times as fast as in fp32 on this processor"
    )


def _faster_that_fits(
    config: Config, seconds: dict[str, float], fits: Callable[[Config], bool]
) -> NumberFormat:
    """`faster_format`, or bf16 if the other flags do not go with fp32. `seconds`: those of
    `time_products`; `fits`: whether a configuration in fp32 fits in memory."""
    try:
        in_fp32 = _config_in(config, "fp32")
    except UserError:  # another flag needs bf16
        return NumberFormat("bf16", "the other flags do not go with fp32")
    return faster_format(seconds, fits(in_fp32))


def _fits_in_memory(config: StepConfig) -> bool:
    """Whether a run on a CPU fits by the plan; True if there is no plan, which the run says
    (`show_memory_plan`)."""
    with attempt() as tried, settings_only():
        models = read_model_configs(config)
        plan = plan_step(
            config, models, dist.world_size(), 0, host_memory(), dist.local_world_size()
        )
    return tried.problem is not None or not plan.missing
