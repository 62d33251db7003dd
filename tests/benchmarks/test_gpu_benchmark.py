"""`benchmarks/gpu.sh`: a whole trial on tiny sizes."""

import json
import subprocess
import sys

import pytest
from launch import ROOT, environment

sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu_checks import parts  # noqa: E402


def test_the_limits_of_the_parts_leave_time_for_all():
    unasked = [part for part in parts.PARTS.values() if not part.extra]
    assert sum(part.seconds for part in unasked) <= parts.LIMIT
    assert all(target.path.split(".")[0] in parts.PARTS for target in parts.TARGETS)


@pytest.mark.release
@pytest.mark.slow
def test_a_trial_of_each_kind_of_part(tmp_path):
    """On a CPU only right and wrong count, as in `--tiny` on a GPU. The parts that are left out
    have the functions of others."""
    ran = [name for name in parts.PARTS if name not in ("rollout_large", "ppo")]
    command = [
        "bash",
        str(ROOT / "benchmarks/gpu.sh"),
        "--tiny",
        "--json",
        str(tmp_path / "found.json"),
    ]
    env = environment() | {"PYTHON": sys.executable}
    result = subprocess.run(
        [*command, "--only", *ran],
        env=env,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == found["missed"] == []
    assert set(ran) <= set(found)
    assert found["resume"]["compared"]["bit_exact"] and found["resume"]["resumed"]["steps"] == [
        3,
        4,
    ]
    assert found["trajectory"]["ppo"]["steps"] == 2
    assert found["parity"]["bf16"]["scored"] > 0, "bf16 is compared with fp32"
    for path in (
        "rollout_small.ratio_to_transformers",
        "grpo.last_step.score_mfu",
        "grpo.last_step.train_mfu",
    ):
        assert parts.at(found, path) > 0, path
    targets = [target.path for target in parts.TARGETS if target.path.split(".")[0] in ran]
    named = [path for path in targets if not isinstance(parts.at(found, path), (int, float))]
    assert named == [], "every target names a number that is measured"
