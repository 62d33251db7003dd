"""Pairs of answers to a prompt with images: DPO and an objective without a reference, against
transformers' own pass over each row alone."""

import pytest
import torch
from features.images.image_runs import alone_inputs, write_pictures, write_rows
from features.images.image_runs import prepared_pairs as prepared
from one_rank import one_rank  # noqa: F401
from tiny_vlms import plain_logprobs, save_tiny_vlm
from transformers import AutoModelForImageTextToText

from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.checks import check_trained_model
from dschat_ppo.features.images.given_embeddings import source_of
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import (
    changes_to_train,
    check_sequence_classifier,
    load_causal_lm,
    load_config,
)
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.objective import UsedRows
from dschat_ppo.supervised.train_preference import OBJECTIVES

pytestmark = pytest.mark.usefixtures("one_rank")

QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": "a.png", "prompt": QUESTION, "chosen": "red", "rejected": "blue circle"},
    {"image": ["b.png", "c.png"], "prompt": QUESTION, "chosen": "green", "rejected": "no"},
    {"image": None, "prompt": "what is big ?", "chosen": "this", "rejected": "a red square"},
]


@pytest.fixture(scope="module", params=["smolvlm", "qwen3_vl"])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vlm(folder / "vlm", request.param)
    write_pictures(folder)
    write_rows(folder, ROWS)
    return folder


@pytest.mark.parametrize("objective", ["dpo", "cpo"])
def test_the_log_probs_of_pairs_are_those_of_each_row_alone(family, objective):
    vlm = family / "vlm"
    rows, config, tokenizer = prepared(vlm, family / "rows.jsonl", "--objective", objective)
    policy = PolicyModel(load_causal_lm(str(vlm), "fp32", None, changes_to_train(config)))
    source = source_of(config, str(vlm), tokenizer, torch.device("cpu"))
    policy.given_source = source
    select_kernels(policy)
    assert policy.layout.shares  # both answers share one prompt with its images
    built = OBJECTIVES[objective].build(0, torch.device("cpu"), config, given_for=source.for_rows)
    token_rows = TokenRows(rows, None, ("rows",))
    if built.prepare is not None:
        token_rows = built.prepare(policy, token_rows, UsedRows())
    batch = built.collate(token_rows.train, [0, 1, 2])
    sums = MetricSums()
    with torch.no_grad():
        built.loss(policy, batch, torch.tensor(3), sums)
    metrics = sums.reduce()
    whole = AutoModelForImageTextToText.from_pretrained(vlm).eval()
    expected = torch.zeros(2, 3)
    for index, row in enumerate(rows):
        for side in (0, 1):
            inputs = alone_inputs(row, source._processor, side)
            length = len(row["answers"][side])
            expected[side, index] = plain_logprobs(whole, inputs)[-length:].sum()
    assert metrics["chosen_logprob"] == pytest.approx(expected[0].mean().item(), abs=1e-4)
    assert metrics["rejected_logprob"] == pytest.approx(expected[1].mean().item(), abs=1e-4)
    if objective == "dpo":  # the model is its own reference
        assert metrics["loss"] == pytest.approx(0.6931472, abs=1e-5)


def test_kto_and_reward_models_take_no_images_yet(family):
    vlm = str(family / "vlm")
    _, config, _ = prepared(vlm, family / "rows.jsonl", "--objective", "kto")
    with pytest.raises(UserError, match="--objective kto yet"):
        check_trained_model(config, load_config(vlm, ""), vlm)
    with pytest.raises(UserError, match="so far SFT, DPO"):
        check_sequence_classifier(vlm, True)
