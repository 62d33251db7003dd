"""Pairs of answers to a prompt with images, DPO and an objective without a reference, and labelled
answers (KTO), against transformers' own pass over each row alone."""

import pytest
import torch
from features.images.image_runs import alone_inputs, source_of, write_pictures, write_rows
from features.images.image_runs import prepared_pairs as prepared
from one_rank import one_rank  # noqa: F401
from tiny_vlms import plain_logprobs, save_tiny_vlm
from transformers import AutoModelForImageTextToText

from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import changes_to_train, load_causal_lm
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


LABELLED = [
    {"image": "a.png", "prompt": QUESTION, "response": "red", "label": True},
    {"image": "d.png", "prompt": QUESTION, "response": "blue", "label": False},  # the same ids
    {"image": ["b.png", "c.png"], "prompt": QUESTION, "response": "green", "label": True},
    {"image": None, "prompt": "what is big ?", "response": "a square", "label": False},
]


def test_kto_is_that_of_each_row_alone(family, tmp_path):
    """Each row borrows the answer to another picture, also where the ids of both prompts are
    equal; log-probs, baseline and loss by hand."""
    vlm = family / "vlm"
    write_pictures(tmp_path)
    data = write_rows(tmp_path, LABELLED)
    rows, config, tokenizer = prepared(vlm, data, "--objective", "kto", "--beta", "0.5")
    policy = PolicyModel(load_causal_lm(str(vlm), "fp32", None, changes_to_train(config)))
    source = source_of(config, str(vlm), tokenizer, torch.device("cpu"))
    policy.given_source = source
    select_kernels(policy)
    built = OBJECTIVES["kto"].build(0, torch.device("cpu"), config, given_for=source.for_rows)
    train = built.prepare(policy, TokenRows(rows, None, ("rows",)), UsedRows()).train
    lenders = train["other_row"]
    assert sorted(lenders) == [0, 1, 2, 3]  # with the ids alone, two prompts would be one
    assert [lenders[row] for row in range(4)] == [3, 0, 1, 2]

    whole = AutoModelForImageTextToText.from_pretrained(vlm).eval()

    def logprob(row, lender):
        borrowed = {**rows[row], "answers": rows[lender]["answers"]}
        length = len(borrowed["answers"][0])
        return plain_logprobs(whole, alone_inputs(borrowed, source._processor))[-length:].sum()

    for row, lender in enumerate(lenders):
        expected = [logprob(row, row).item(), logprob(row, lender).item()]
        assert train["ref_logprobs"][row] == pytest.approx(expected, abs=1e-4)

    with torch.no_grad():  # another policy than the reference
        for weights in (policy.lm, whole):
            head = weights.get_output_embeddings().weight
            head += 0.05 * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
        [batch] = built.complete(policy, [built.collate(train, [0, 1, 2, 3])])
        loss = built.loss(policy, batch, torch.tensor(4), MetricSums())
    references = torch.tensor(train["ref_logprobs"])
    ratios = torch.stack([logprob(row, row) for row in range(4)]) - references[:, 0]
    mismatched = torch.stack([logprob(row, lenders[row]) for row in range(4)]) - references[:, 1]
    baseline = mismatched.mean().clamp_min(0)
    signs = torch.tensor([1.0 if row["label"] > 0.5 else -1.0 for row in rows])
    expected_loss = (1 - torch.sigmoid(0.5 * signs * (ratios - baseline))).mean()
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-4)
