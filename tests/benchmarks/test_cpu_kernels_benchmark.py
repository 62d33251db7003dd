"""The benchmark of the kernels runs, on tiny sizes."""

import json
import subprocess
import sys

from launch import ROOT


def test_it_compares_each_kernel_with_pytorch(tmp_path):
    command = [
        sys.executable,
        "benchmarks/cpu_kernels.py",
        "--tiny",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "found"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found").read_text())
    names = " ".join(found)
    assert all(part in names for part in ("RMSNorm", "SwiGLU", "attention", "decode step", "forward", "backward"))
    assert all(before > 0 and ours > 0 for before, ours in found.values())
    assert all(name in done.stdout for name in found)
