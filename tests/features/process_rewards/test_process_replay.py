"""A repro bundle of batches of labelled steps."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_config
from transformers import AutoTokenizer, LlamaForSequenceClassification

from dschat_ppo.config.cli import parse
from dschat_ppo.engine.optimizer_step import Fault, random_state
from dschat_ppo.features.process_rewards.batches import StepBatch
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.nonfinite import BadStep

bad_steps = pytest.importorskip("dschat_ppo.features.replay.bad_steps")
programs = pytest.importorskip("dschat_ppo.features.replay.programs")

POISON = 301  # a token whose embedding is not finite


def test_a_bad_token_is_found_in_the_loss(assets, tmp_path, capsys):
    model = ScalarModel(LlamaForSequenceClassification(tiny_config(num_labels=1)))
    with torch.no_grad():
        model.backbone.embed_tokens.weight[POISON, 3] = math.nan
    mask = torch.tensor([[False, True, True], [False, False, True]])
    batch = StepBatch(
        torch.tensor([[11, 12, 13], [14, POISON, 15]]), torch.tensor([3, 3]), mask, 0.5 * mask
    )
    words = f"--model_name_or_path {assets / 'lm'} --data_path d --output_dir {tmp_path}"
    config = parse("reward", [*words.split(), "--objective", "process", "--dtype", "fp32"])
    bundles = bad_steps.ReproBundles(config, AutoTokenizer.from_pretrained(assets / "lm"))
    engine = SimpleNamespace(module=model, fp16_enabled=lambda: False)
    fault = Fault("loss", 0, 0, [], random_state())
    folder = bundles.write(BadStep("model", 7, fault, engine, [batch], {"total": 3.0}))
    assert programs.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "embed_tokens (Embedding; its inputs are finite)" in said
    assert "micro-batch 0: loss nan" in said
