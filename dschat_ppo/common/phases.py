"""The current phase and step of this process (for messages), and the cost of each phase (for
metrics)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat_ppo.common.heartbeat import heartbeat

_GIB = 2**30
_CURRENT = ["start"]
_STEP: list[int] = []
_PEAKS: dict[str, float] = {}  # phase -> bytes of its largest peak


def reset_phases() -> None:
    """Return to the state of a new process: phase "start", no step."""
    _CURRENT[:] = ["start"]
    _STEP.clear()


def block(name: str) -> AbstractContextManager[Any]:
    """Mark a phase, a part of one, or work between phases in the trace of a profiled step
    (`monitor/step_trace.py`)."""
    from torch.profiler import record_function  # not at the top: see `_gpu`

    return record_function(name)


def current_phase() -> str:
    """The name of the innermost phase."""
    return _CURRENT[-1]


def announce(name: str) -> None:
    """Set the name of the phase outside the timed phases."""
    _CURRENT[0] = name
    heartbeat()


def announce_step(step: int) -> None:
    """Set the number of the current training step."""
    _STEP[:] = [step]
    heartbeat()


def training_has_started() -> bool:
    """Whether `announce_step` was called."""
    return bool(_STEP)


def where(joint: str = ",") -> str:
    """The phase and, during training, the step: "phase 'train', step 12"."""
    text = f"phase '{current_phase()}'"
    if _STEP:
        text += f"{joint} step {_STEP[0]}"
    return text


def largest_peak(name: str) -> float | None:
    """Bytes of the largest peak of a phase since the start of the process; None: it has not ended
    yet."""
    return _PEAKS.get(name)


@dataclass
class PhaseClock:
    """Measures seconds, tokens and peak memory of named phases since the last `take`."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    peak_gib: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under `name`; repeated blocks add up. An exception leaves the name in
        `current_phase`."""
        _CURRENT.append(name)
        heartbeat()
        _reset_peak()
        with block(name), self._timed(name):
            yield
        peak = _peak_bytes()
        self.peak_gib[name] = max(self.peak_gib.get(name, 0.0), peak / _GIB)
        _PEAKS[name] = max(_PEAKS.get(name, 0.0), peak)
        _CURRENT.pop()
        heartbeat()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Time the block as a part of the phase in progress, under `PHASE/name`."""
        return self._timed(f"{current_phase()}/{name}")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        gpu = _gpu()
        if gpu is not None:
            gpu.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def count_tokens(self, name: str, tokens: float) -> None:
        self.tokens[name] = self.tokens.get(name, 0.0) + tokens

    def take(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Return (seconds, tokens, peak memory in GiB), each by phase, and reset them."""
        taken = (self.seconds, self.tokens, self.peak_gib)
        self.seconds = {}
        self.tokens = {}
        self.peak_gib = {}
        return taken


def _gpu() -> Any:
    """`torch.cuda`, or None if this run has no GPU."""
    # not at the top: a rank notes its phase before it imports torch, and --help never does
    import torch

    from dschat_ppo.common.dist import on_gpu

    if on_gpu():
        return torch.cuda
    return None


def _reset_peak() -> None:
    """Measure peak memory from here on."""
    gpu = _gpu()
    if gpu is not None:
        gpu.reset_peak_memory_stats()
        return
    with suppress(OSError):  # not permitted: then the peak since the start of the process counts
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_bytes() -> float:
    """Peak memory since the last reset: of the GPU, or of the process if there is none."""
    gpu = _gpu()
    if gpu is not None:
        return float(gpu.max_memory_allocated())
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))  # in KiB
    return float(peak.split()[1]) * 1024
