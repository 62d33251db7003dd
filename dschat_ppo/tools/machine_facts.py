"""What a bug report says of the machine, found without an import of torch or DeepSpeed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

import dschat_ppo
from dschat_ppo.common.extras import CHECKOUT

Facts = list[tuple[str, str]]  # (name, value)
REPORTED_LIBRARIES = (
    "torch deepspeed transformers accelerate datasets tokenizers peft bitsandbytes triton"
    " safetensors huggingface-hub numpy pyarrow flash-attn vllm wandb trackio"
).split()
REQUIRED = ("torch", "deepspeed", "transformers", "accelerate", "datasets")
IMPORTED = ("torch", "deepspeed", "transformers", "peft")
# Features of processors on which the choice of kernels or their speed depends, as /proc/cpuinfo
# names them.
CPU_FEATURES = (
    "avx2 avx512f avx512_bf16 avx512_fp16 amx_tile amx_bf16 asimd bf16 sve sve2 i8mm"
).split()
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|ceph|glusterfs|beegfs|afs|9p|virtiofs|fuse\..*"
)
# Variables that matter to a run begin with these words; their names are shown.
PREFIXES = (
    "CUDA",
    "DS_",
    "DEEPSPEED",
    "GLOO_",
    "HF_",
    "KMP_",
    "LD_",
    "LOCAL_",
    "MASTER_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "PYTHON",
    "PYTORCH_",
    "RANK",
    "SLURM_JOB",
    "SLURM_N",
    "TMPDIR",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "WANDB_MODE",
    "WORLD_SIZE",
    "XDG_CACHE",
)
OTHER_NAMES = ("CC", "CXX", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
# Variables whose values say nothing of a person or a network.
WITH_VALUES = frozenset(
    (
        "CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES DS_ACCELERATOR"
        " HF_DATASETS_OFFLINE HF_HUB_OFFLINE KMP_AFFINITY KMP_BLOCKTIME LOCAL_RANK"
        " LOCAL_WORLD_SIZE MKL_NUM_THREADS NCCL_ALGO NCCL_DEBUG NCCL_IB_DISABLE NCCL_P2P_DISABLE"
        " NCCL_PROTO NCCL_SHM_DISABLE OMP_NUM_THREADS OMP_PROC_BIND PYTORCH_ALLOC_CONF"
        " PYTORCH_CUDA_ALLOC_CONF RANK SLURM_JOB_NUM_NODES SLURM_NNODES SLURM_NTASKS"
        " TOKENIZERS_PARALLELISM TORCH_DISTRIBUTED_DEBUG TRANSFORMERS_OFFLINE TRITON_INTERPRET"
        " WANDB_MODE WORLD_SIZE"
    ).split()
)
_HARMLESS = re.compile(r"[\w.,:+-]{1,60}", re.ASCII)
MISSING = "not found"


def libraries() -> Facts:
    """Versions of this package, Python and the libraries, and for what torch is built. Of the
    libraries that are not installed, those without which no step runs are named."""
    facts = [
        ("dschat_ppo", f"{dschat_ppo.__version__} ({commit()})"),
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
    ]
    for library in REPORTED_LIBRARIES:
        try:
            facts.append((library, version(library)))
        except PackageNotFoundError:
            if library in REQUIRED:
                facts.append((library, "not installed, and every step needs it"))
    facts.append(("torch is built for", build_of_torch()))
    return facts


def commit() -> str:
    """The commit of the sources: that of their checkout, or the one that pip recorded."""
    if (CHECKOUT / ".git").exists():
        git = ["git", "-C", str(CHECKOUT)]
        commit_id = first_line([*git, "rev-parse", "--short=12", "HEAD"])
        changes = first_line([*git, "status", "--porcelain", "--untracked-files=no"])
        if commit_id and changes:
            return f"commit {commit_id} with local changes"
        if commit_id:
            return f"commit {commit_id}"
    with suppress(PackageNotFoundError):
        # of the whole file only this: it has the address from which the package came
        origin = distribution("dschat_ppo").read_text("direct_url.json") or ""
        match = re.search(r'"commit_id"\s*:\s*"([0-9a-f]{7,40})"', origin)
        if match is not None:
            return f"commit {match[1][:12]}"
    return "commit unknown"


def build_of_torch() -> str:
    """The device for which torch is built, read from a file of the package."""
    spec = None
    with suppress(ImportError, ValueError):
        spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return MISSING
    text = file_text(Path(spec.origin).with_name("version.py"))
    for name, title in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        match = re.search(rf"^{name}\b.*=\s*['\"]([\w.+-]+)['\"]", text, re.MULTILINE)
        if match is not None:
            return f"{title} {match[1]}"
    return "CPUs only"


def machine() -> Facts:
    """The system, processor, memory, accelerators, driver and compilers."""
    cxx = os.environ.get("CXX", "c++")
    nvcc = "nvcc"
    if os.environ.get("CUDA_HOME"):
        nvcc = str(Path(os.environ["CUDA_HOME"]) / "bin/nvcc")
    return [
        ("system", f"{platform.platform()}{container()}"),
        ("processor", processor_model()),
        ("cores", f"{usable_cores()} usable of {os.cpu_count()}"),
        ("host memory", host_memory_text()),
        ("/dev/shm", size_of_file_system(Path("/dev/shm"))),
        *accelerators(),
        ("C++ compiler", first_line([*cxx.split(), "--version"]) or MISSING),
        ("nvcc", last_line([nvcc, "--version"]) or MISSING),
        ("ninja", first_line(["ninja", "--version"]) or MISSING),
    ]


def container() -> str:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return ", in a container"
    return ""


def processor_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model of the processor, and which of `CPU_FEATURES` it has."""
    text = file_text(cpuinfo)
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    name = platform.machine()
    if model is not None:
        name = f"{model[1].strip()}, {name}"
    features: list[str] = []
    if flags is not None:
        present = set(flags[1].split())
        features = [feature for feature in CPU_FEATURES if feature in present]
    return f"{name}; {' '.join(features) or 'none of ' + ' '.join(CPU_FEATURES)}"


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_memory_text() -> str:
    """Host memory that this process may use, with the limit of a container or job."""
    try:
        from dschat_ppo.common.host_memory import available_memory, host_memory

        return f"{gib(host_memory())}, {gib(available_memory())} available"
    except ModuleNotFoundError as problem:  # psutil
        return f"unknown: {problem}"


def accelerators(devices: Path = Path("/dev")) -> Facts:
    """The GPUs with their memory, and the driver, as `nvidia-smi` or `rocm-smi` names them."""
    query = "--query-gpu=name,memory.total,compute_cap,driver_version"
    gpus = output_of(["nvidia-smi", query, "--format=csv,noheader"])
    facts = []
    for index, line in enumerate(gpus.splitlines()):
        facts.append((f"GPU {index}", line))
    if facts:
        return facts
    if any(devices.glob("nvidia[0-9]*")):
        driver = file_text(Path("/proc/driver/nvidia/version")).partition("\n")[0]
        return [("GPU", f"is there, but nvidia-smi does not answer; driver: {driver or MISSING}")]
    if (devices / "kfd").exists():
        return [("GPU", first_line(["rocm-smi", "--showproductname", "--csv"]) or "AMD")]
    return [("GPU", "none")]


def folders(run: Path | None) -> Facts:
    """File system and free space of the folders that a run writes to; without their paths, other
    than the run's."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    named = {
        "working folder": Path(),
        "cache of the hub": Path(os.environ.get("HF_HOME") or cache / "huggingface"),
        "cache of compiled operations": Path(
            os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions"
        ),
        "temporary folder": Path(tempfile.gettempdir()),
    }
    if run is not None:
        named[str(run)] = run
    return [(name, file_system_of(folder)) for name, folder in named.items()]


def file_system_of(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of the file system that holds a folder, which need not exist, and its free space."""
    path = folder.resolve()
    while not path.exists() and path != path.parent:
        path = path.parent
    longest = ""
    kind = "unknown"
    for line in file_text(mounts).splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        # spaces and the like are octal numbers there
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1])
        if path.is_relative_to(mount) and len(mount) >= len(longest):
            longest = mount
            kind = fields[2]
    network = ""
    if NETWORK_FILE_SYSTEMS.fullmatch(kind):
        network = " (network)"
    return f"{kind}{network}, {size_of_file_system(path)}"


def size_of_file_system(path: Path) -> str:
    """Free and total space where a path is."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as problem:
        return f"unknown: {problem.strerror}"
    return f"{gib(usage.free)} free of {gib(usage.total)}"


def environment_variables() -> Facts:
    """The variables that matter to a run: names, and the values of those in `WITH_VALUES`."""
    facts = []
    for name, value in sorted(os.environ.items()):
        if not (name.startswith(PREFIXES) or name.upper() in OTHER_NAMES):
            continue
        if not re.fullmatch(r"\w+", name):
            continue
        if name in WITH_VALUES and _HARMLESS.fullmatch(value):
            facts.append((name, value))
        elif value:
            facts.append((name, "is set"))
        else:
            facts.append((name, "is empty"))
    return facts or [("none", "of those that matter is set")]


_ASK_TORCH = (
    "import torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0;"
    " print('sees', n, 'GPUs; threads', torch.get_num_threads())"
)


def imports() -> Facts:
    """What an import of each of `IMPORTED` says, in a process of its own."""
    facts = []
    for library in IMPORTED:
        done = _finished([sys.executable, "-c", f"import {library}"], seconds=120)
        if done is None:
            facts.append((library, "the import does not end within two minutes"))
        elif done.returncode == 0:
            facts.append((library, "can be imported"))
        else:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            facts.append((library, f"cannot be imported: {lines[-1]}"))
    facts.append(("torch", first_line([sys.executable, "-c", _ASK_TORCH]) or "cannot name devices"))
    return facts


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def file_text(file: Path) -> str:
    """The text of a file; "" where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _finished(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """A finished command; None if there is no such program, or it does not end in time."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def output_of(command: Sequence[str]) -> str:
    """What a command prints if it succeeds, else ""."""
    done = _finished(command, seconds=20)
    if done is None or done.returncode != 0:
        return ""
    return done.stdout.strip()


def first_line(command: Sequence[str]) -> str:
    """The first line that a command prints; "" if it fails."""
    return output_of(command).partition("\n")[0]


def last_line(command: Sequence[str]) -> str:
    """The last line that a command prints; "" if it fails."""
    return output_of(command).rpartition("\n")[2]
