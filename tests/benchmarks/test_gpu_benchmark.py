"""`benchmarks/gpu.sh`: a whole trial on tiny sizes."""

import json
import subprocess
import sys

import pytest
import torch
from launch import ROOT, environment

from dschat_ppo.models import fast_layers

sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu_checks import parts, profiles  # noqa: E402


def test_the_limits_of_the_parts_leave_time_for_all():
    unasked = [part for part in parts.PARTS.values() if not part.extra]
    assert list(parts.PARTS)[:5] == ["kernels", "parity", "rollout_small", "grpo", "ppo"]
    assert sum(part.seconds for part in unasked) <= parts.LIMIT
    assert all(target.path.split(".")[0] in parts.PARTS for target in parts.TARGETS)


@pytest.mark.release
@pytest.mark.slow
def test_a_trial_of_each_kind_of_part(tmp_path):
    """On a CPU only right and wrong count, as in `--tiny` on a GPU. The parts that are left out
    have the functions of others."""
    ran = [name for name, part in parts.PARTS.items() if not part.extra and name != "ppo"]
    ran += ["resume", "rollout_gpt2"]
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
        "grpo.last_step.update_peak_to_plan",
        "grpo.profile.train.launches_per_pass",
        "grpo.without_kernels.train_mfu",
        "rollout_small.profile.launches_per_token",
        "rollout_small.profile.groups.products.ms",
        "rollout_small.without_kernels_64.tokens_per_s",
        "rollout_gpt2.ours_1.again_tokens_per_s",
        "kernels.slowest_tb_s",
    ):
        assert parts.at(found, path) > 0, path
    targets = [target.path for target in parts.TARGETS if target.path.split(".")[0] in ran]
    named = [path for path in targets if not isinstance(parts.at(found, path), (int, float))]
    assert named == [], "every target names a number that is measured"


def test_kernels_by_group_and_the_time_in_which_none_runs():
    """Two kernels at once count once; names as an H100's profile has them."""
    assert profiles.busy_us([(0, 4), (6, 8), (2, 5), (7, 7.5)]) == 7
    names = {
        "_norm_backward_kernel": "ours",
        "nvjet_tst_128x64_64x8_2x1_v_bz_TNN": "products",
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>": "attention",
        "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>": "elementwise",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "sums",
        "void at::native::multi_tensor_apply_kernel<adam>": "optimizer",
        "Memcpy DtoH (Device -> Pageable)": "copies",
        "void at::native::index_elementwise_kernel<128, 4>": "sort and index",
        "ncclDevKernel_AllReduce": "communication",
        "void gpu_unknown": "other",
    }
    assert {name: profiles.kernel_group(name) for name in names} == names


def test_without_kernels_nothing_of_tritons_runs():
    chosen = fast_layers._triton_kernels
    with profiles.without_kernels():
        assert fast_layers._triton_kernels(torch.device("cuda"), torch.bfloat16, 64) is None
    assert fast_layers._triton_kernels is chosen
