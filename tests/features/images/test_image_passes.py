"""Rows with images give the numbers and the gradients of transformers' own pass over each row
alone, from ids and pixels: padded, packed, and with shared prompts."""

from dataclasses import replace

import pytest
import torch
from features.images.image_runs import alone_inputs, prepared, write_pictures, write_rows
from tiny_vlms import FAMILIES, plain_logprobs, save_tiny_vlm
from transformers import AutoModelForImageTextToText

from dschat_ppo.data.batches import collate_sft
from dschat_ppo.features.images.given_embeddings import source_of
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import changes_to_train, load_causal_lm
from dschat_ppo.models.pass_rows import PassRows
from dschat_ppo.models.wrapped_models import PolicyModel

WAYS = {
    "padded": {"packed": False, "shares": False},
    "packed": {"packed": True, "shares": False},
    "shared": {"packed": True, "shares": True},
}
QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": "a.png", "prompt": QUESTION, "response": "red"},
    {"image": "a.png", "prompt": QUESTION, "response": "blue circle"},
    {"image": "d.png", "prompt": QUESTION, "response": "green"},  # the ids of the first row
    {"image": None, "prompt": "what is red ?", "response": "this colour"},
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?", "response": "no"},
]


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request, tmp_path_factory):
    """(a policy without its tower, a batch of `ROWS`, the whole model, the inputs of each row)."""
    folder = tmp_path_factory.mktemp(request.param)
    vlm = save_tiny_vlm(folder / "vlm", request.param)
    write_pictures(folder)
    rows, config, tokenizer = prepared(vlm, write_rows(folder, ROWS))
    device = torch.device("cpu")
    policy = PolicyModel(load_causal_lm(str(vlm), "fp32", None, changes_to_train(config)))
    policy.given_source = source_of(config, str(vlm), tokenizer, device)
    order = sorted(range(len(rows)), key=lambda index: rows[index]["answers"][0])
    pad_id = tokenizer.pad_token_id
    batch = collate_sft(rows, order, pad_id, False, policy.given_source.for_rows)
    whole = AutoModelForImageTextToText.from_pretrained(vlm).eval()
    processor = policy.given_source._processor
    alone = [alone_inputs(rows[index], processor) for index in order]
    return policy, batch, whole, alone


@pytest.mark.parametrize("way", WAYS)
def test_log_probs_are_those_of_each_row_alone(trained, way):
    policy, batch, whole, alone = trained
    policy.layout = replace(policy.layout, **WAYS[way])
    expected = []
    for mask, inputs in zip(batch.loss_mask, alone, strict=True):
        of_row = plain_logprobs(whole, inputs)
        expected.append(of_row[mask[1 : len(of_row) + 1]])
    with torch.no_grad():
        logprobs = policy(batch.input_ids, batch.loss_mask, given=batch.given)[0]
    torch.testing.assert_close(logprobs, torch.cat(expected), atol=1e-5, rtol=1e-5)
    # the pictures matter: the third row has the ids of the first one
    assert not torch.allclose(batch.given.features.states[0], batch.given.features.states[-1])


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_each_row_alone(trained, way):
    policy, batch, whole, alone = trained
    policy.layout = replace(policy.layout, **WAYS[way])
    policy.zero_grad()
    policy(batch.input_ids, batch.loss_mask, given=batch.given)[0].sum().backward()
    whole.zero_grad()
    for mask, inputs in zip(batch.loss_mask, alone, strict=True):
        logits = whole(**inputs).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        logprobs[mask[1 : len(logprobs) + 1]].sum().backward()
    gradients = dict(whole.named_parameters())
    for name, parameter in policy.lm.named_parameters():
        expected = gradients[name].grad
        torch.testing.assert_close(parameter.grad, expected, atol=2e-5, rtol=1e-4, msg=name)


def test_a_probe_with_an_image_selects_packed_rows_with_shared_prompts(trained):
    policy, batch, *_ = trained
    seen = []
    hook = policy.backbone.register_forward_pre_hook(
        lambda backbone, args, kwargs: seen.append(kwargs.get("mm_encoder_outputs")),
        with_kwargs=True,
    )
    assert select_kernels(policy) is None
    hook.remove()
    assert policy.layout.packed and policy.layout.shares
    assert seen and all(seen)


def test_prompts_with_the_same_ids_and_other_pictures_are_not_merged(trained):
    """Those with `a.png` and `d.png` have equal ids; two rows with `a.png` share their prompt."""
    policy, batch, *_ = trained
    layout = replace(policy.layout, packed=True, shares=True)
    of_ids = PassRows.of_targets(batch.input_ids, batch.loss_mask, layout)
    rows = PassRows.of_targets(batch.input_ids, batch.loss_mask, layout, batch.given)
    read = int((batch.lengths - 1).sum())  # the last token of a row predicts nothing
    assert len(of_ids.packed.slots) < len(rows.packed.slots) < read
