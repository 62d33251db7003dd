"""The constants that the planner computes time from, one row for each kind of device."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """A kind of device. FLOPs are floating-point operations per second, a multiplication and an addition being two.

    Attributes:
        name: for `--device_kind`.
        flops: peak of dense bf16 (fp16) matrix products.
        fp32_flops: peak of dense fp32 matrix products.
        bandwidth: bytes per second from device memory.
        link: bytes per second between the devices of a machine, in one direction.
        host_link: bytes per second between device and host memory.
        utilisation: share of the peak that training and scoring reach.
        decode_share: share of the bandwidth that decoding reaches.
        step_seconds: of a decode step in addition to the bytes that it reads: sampling, launches.
        context: bytes of a device that no tensor has: libraries, the context of CUDA.
        fragmentation: share of the tensors' bytes that the allocator holds in addition.
        memory: bytes of device memory; 0: as much as the host has.
        measured: whether the constants were measured with this project; else they are a data sheet's, and the shares
            are assumed.
        source: of the constants.
        node_link: bytes per second of a device to other machines, in one direction.
    """

    name: str
    flops: float
    fp32_flops: float
    bandwidth: float
    link: float
    host_link: float
    utilisation: float
    decode_share: float
    step_seconds: float
    context: int
    fragmentation: float
    memory: int
    measured: bool
    source: str
    node_link: float = 2.5e10

    @property
    def on_gpu(self) -> bool:
        """Whether device memory is not that of the host."""
        return self.memory > 0


def _gpu(name: str, tflops: float, fp32: float, bandwidth: float, link: float, host: float, gib: int) -> Hardware:
    """A GPU by its data sheet: FLOPs in 10^12, bandwidths in 10^9 bytes per second."""
    return Hardware(
        name, tflops * 1e12, fp32 * 1e12, bandwidth * 1e9, link * 1e9, host * 1e9, UTILISATION, DECODE_SHARE,
        GPU_STEP_SECONDS, CUDA_CONTEXT, FRAGMENTATION, gib * GIB, False, f"NVIDIA's data sheet of {name}",
    )  # fmt: skip


# Assumptions about GPUs, not measured with this project; `node_link` is a network of 200 Gbit/s for each device.
UTILISATION = 0.35  # of large products in bf16, with all that is between them
DECODE_SHARE = 0.6
GPU_STEP_SECONDS = 1e-3
CUDA_CONTEXT = 1 * GIB  # context of CUDA, NCCL's buffers, cuBLAS' workspaces
FRAGMENTATION = 0.06

HARDWARE = {
    part.name: part
    for part in (
        # a core of an AMD EPYC with AVX-512 bf16, by `matmul_rate` and `read_bandwidth` of benchmarks/measure.py; the
        # shares by the PPO step of docs/benchmarks.md; ranks on one machine exchange bytes through memory
        Hardware("cpu", 2.15e11, 7.7e10, 2.8e10, 1e9, 1e10, 0.9, 0.5, 5e-3, 0, 0.0, 0, True, "docs/benchmarks.md"),
        # name, bf16 TFLOPs, fp32 TFLOPs (TF32 off), memory GB/s, link GB/s one way, PCIe GB/s, GiB
        _gpu("v100", 125, 15.7, 900, 150, 16, 32),
        _gpu("a100-40gb", 312, 19.5, 1555, 300, 32, 40),
        _gpu("a100-80gb", 312, 19.5, 2039, 300, 32, 80),
        _gpu("h100", 989, 67, 3350, 450, 64, 80),
        _gpu("h200", 989, 67, 4800, 450, 64, 141),
        _gpu("l4", 121, 30, 300, 32, 32, 24),
        _gpu("l40s", 362, 91, 864, 32, 32, 48),
        _gpu("rtx4090", 165, 82, 1008, 32, 32, 24),
    )
}
DEFAULT_GPU = "a100-80gb"
