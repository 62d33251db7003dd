"""Rollouts that equal training passes to the last bit, the check at the start of a run, and what is
refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import plain_ppo
import pytest
import torch
from command_lines import config_of
from plain_ppo import PlainRun
from tiny_models import new_model

from dschat_ppo.common import dist
from dschat_ppo.common.exactness import exact_rollouts, exact_rollouts_required
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.errors import UserError
from dschat_ppo.features.exact_rollout.bits import check_bits
from dschat_ppo.features.exact_rollout.runs import begin_rank
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.rollout.decode_kernels import CPUDecode
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.tools.evaluate import evaluation_request

TESTS = Path(__file__).parents[2]
SAMPLING = GenerationConfig(SamplingParameters(), StoppingCriteria(8))


@pytest.mark.parametrize(
    "models",
    [
        ["llama"],
        pytest.param(
            ["qwen2", "qwen3", "mistral-window", "mixtral", "llama, wide"],
            marks=pytest.mark.release,
        ),
    ],
    ids=["llama", "others"],
)
def test_log_probs_of_sampling_and_training_are_equal_for_any_rows_and_micro_batches(models):
    """Also in dialogues, for two threads, and where the product of one row has other bits than that
    of several."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    environment.pop("MKL_CBWR", None)
    script = Path(__file__).with_name("exact_models.py")
    finished = subprocess.run(
        [sys.executable, script, *models],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    differences = json.loads(finished.stdout.splitlines()[-1])
    assert len(differences) > 6
    assert {case: value for case, value in differences.items() if value != 0} == {}


def bf16_policy() -> PolicyModel:
    policy = PolicyModel(new_model("llama").bfloat16()).eval()
    select_kernels(policy)
    return policy


def test_the_check_names_the_first_layer_that_differs(monkeypatch):
    decode = CPUDecode.__call__
    with exact_rollouts_required("test"):
        check_bits(bf16_policy(), SAMPLING, has_partner=True)
        monkeypatch.setattr(CPUDecode, "__call__", lambda *call: decode(*call) * 1.01)
        with pytest.raises(
            UserError, match=r"first layer that differs is model\.layers\.0\.(self_attn|post_att)"
        ):
            check_bits(bf16_policy(), SAMPLING, has_partner=False)


def test_models_that_cannot_be_exact_are_refused(monkeypatch):
    hybrid = PolicyModel(new_model("lfm2").bfloat16()).eval()
    with pytest.raises(UserError, match="carry a state from token to token"):
        check_bits(hybrid, SAMPLING, has_partner=False)
    monkeypatch.setattr(operations, "kernels", lambda dtype: None)
    with pytest.raises(UserError, match="kernels for this processor are not available"):
        check_bits(bf16_policy(), SAMPLING, has_partner=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rollout_engine padded", "omit --rollout_engine padded"),
        ("--unpin_actor_parameters", "--unpin_actor_parameters gathers each layer by itself"),
        ("--actor_dropout 0.1", "--actor_dropout changes the log-probs"),
        ("--attn_implementation sdpa", "--attn_implementation sdpa adds in another order"),
        ("--sequence_parallel_size 2", "omit --sequence_parallel_size"),
        ("--inference_tp_size 2", "omit --inference_tp_size"),
        ("--actor_lora_dim 4", "omit --actor_lora_dim"),
    ],
)
def test_flags_that_round_differently_are_refused(words, message):
    with pytest.raises(UserError, match=f"--exact_rollout: .*{message}"):
        config_of("ppo", "--exact_rollout", *words.split())


def test_a_mode_of_mkl_that_is_not_strict_is_refused(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    with pytest.raises(UserError, match="MKL_CBWR is AVX2 in the environment; unset it or use"):
        config_of("ppo", "--exact_rollout")
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    config_of("ppo", "--exact_rollout")


def test_a_gpu_is_refused_and_without_the_flag_nothing_changes(monkeypatch):
    begin_rank(config_of("ppo"))
    assert not exact_rollouts()
    monkeypatch.setattr(dist, "device", lambda: torch.device("cuda"))
    with pytest.raises(UserError, match="generation on a GPU is not exact yet"):
        begin_rank(config_of("ppo", "--exact_rollout"))
    assert not exact_rollouts()


def test_a_run_of_several_updates_takes_the_log_probs_of_sampling(assets, tmp_path, monkeypatch):
    """Without a forward pass that only scores, also in bf16; and they are those of training."""
    assert not config_of("ppo", "--dtype", "bf16", "--exact_rollout").recompute_old_logprobs
    assert config_of("ppo", "--dtype", "bf16").recompute_old_logprobs
    entropies = ["--exact_rollout", "--high_entropy_share", "0.5"]
    assert config_of("ppo", *entropies).recompute_old_logprobs

    def packed_policy(lm):
        return PolicyModel(lm.bfloat16(), Layout(packed=True))

    monkeypatch.setattr(plain_ppo, "PolicyModel", packed_policy)
    with exact_rollouts_required("test"):
        run = PlainRun(assets, tmp_path / "run", "--exact_rollout --ppo_epochs 2 --dtype bf16")
        assert run.ppo.old_logprobs == "rollout"
        run.run()
    assert [line["rollout/logprob_diff_max"] for line in run.lines] == [0.0] * len(run.lines)


EVALUATIONS = """
import sys
from dschat_ppo.tools.evaluate import main
for size in (1, 6):
    code = main([word.replace("SIZE", str(size)) for word in sys.argv[1:]])
    if code:
        sys.exit(code)
"""


@pytest.mark.release
def test_an_evaluation_checks_its_models(assets, tmp_path):
    """And its answers do not depend on how many prompts run at a time."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}"}
    environment.pop("MKL_CBWR", None)
    words = f"--model {assets}/lm --data_path {assets}/prompts.jsonl --max_tokens 12"
    words += " --max_prompts 6 --samples 2 --decoding sampled --batch_size SIZE --dtype fp32"
    words += f" --exact_rollout --json {tmp_path}/SIZE.json"
    finished = subprocess.run(
        [sys.executable, "-c", EVALUATIONS, *words.split()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("log-probs equal those of training to the last bit") == 2
    responses = []
    for size in (1, 6):
        found = json.loads((tmp_path / f"{size}.json").read_text())
        responses.append([result["prompts"] for result in found["results"]])
    assert responses[0] == responses[1]


def test_an_evaluation_refuses_a_mode_of_mkl_that_is_not_strict(assets, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    words = f"--model {assets}/lm --data_path {assets}/prompts.jsonl --exact_rollout"
    with pytest.raises(UserError, match="MKL_CBWR is COMPATIBLE in the environment"):
        evaluation_request(words.split())
