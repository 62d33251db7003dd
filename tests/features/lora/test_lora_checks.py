"""What LoRA checks before models are loaded."""

import pytest
import torch
from command_lines import config_of
from transformers import LlamaConfig

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError
from dschat_ppo.features.lora.checks import check_trained_model


def test_frozen_weights_in_8_bits_need_a_gpu(monkeypatch):
    words = (
        "--enable_mixed_precision_lora --actor_lora_dim 8 --only_optimize_lora --dtype fp16"
        " --actor_zero_stage 3"
    )
    config = config_of("ppo", *words.split())
    monkeypatch.setattr(dist, "device", lambda: torch.device("cpu"))
    check_trained_model(config_of("ppo"), LlamaConfig(), "a")
    with pytest.raises(UserError, match=r"--enable_mixed_precision_lora: .* CUDA kernels"):
        check_trained_model(config, LlamaConfig(), "a")
    monkeypatch.setattr(dist, "device", lambda: torch.device("cuda", 0))
    check_trained_model(config, LlamaConfig(), "a")
