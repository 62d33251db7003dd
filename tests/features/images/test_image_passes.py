"""Rows with images give the numbers and the gradients of transformers' own pass over each row
alone, from ids and pixels: padded, packed, and with shared prompts."""

from dataclasses import replace

import pytest
import torch
from features.images.image_runs import (
    alone_inputs,
    each_row_alone,
    prepared,
    source_of,
    write_pictures,
    write_rows,
)
from features.images.lfm2_by_hand import by_hand
from tiny_vlms import FAMILIES, save_tiny_vlm
from transformers import AutoModelForImageTextToText

from dschat_ppo.data.batches import collate_sft
from dschat_ppo.features.images import processors
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


OFTEN = ("smolvlm", "qwen3_vl", "gemma3")  # the other families are tested before a release
OTHERS = [
    pytest.param(name, marks=pytest.mark.release)
    for name in (*FAMILIES, "lfm2_vl")
    if name not in OFTEN
]


@pytest.fixture(scope="module", params=[*OFTEN, *OTHERS])
def trained(request, tmp_path_factory):
    """(a policy without its tower, a batch of `ROWS`, log-probs and gradients by transformers)."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    vlm = save_tiny_vlm(folder / "vlm", family)
    write_pictures(folder)
    with pytest.MonkeyPatch.context() as patch:
        if family == "lfm2_vl":
            patch.setattr(processors, "load_processor", by_hand)
        rows, config, tokenizer = prepared(vlm, write_rows(folder, ROWS))
        policy = PolicyModel(load_causal_lm(str(vlm), "fp32", None, changes_to_train(config)))
        policy.given_source = source_of(config, str(vlm), tokenizer, torch.device("cpu"))
    order = sorted(range(len(rows)), key=lambda index: rows[index]["answers"][0])
    pad_id = tokenizer.pad_token_id
    batch = collate_sft(rows, order, pad_id, False, policy.given_source.for_rows)
    processor = policy.given_source._processor
    alone = [alone_inputs(rows[index], processor) for index in order]
    whole = AutoModelForImageTextToText.from_pretrained(vlm).eval()
    return policy, batch, *each_row_alone(whole, batch.loss_mask, alone)


@pytest.mark.parametrize("way", WAYS)
def test_log_probs_are_those_of_each_row_alone(trained, way):
    """And gradients."""
    policy, batch, expected, gradients = trained
    if WAYS[way]["packed"] and policy.given_source.reason_to_pad is not None:
        pytest.skip("it runs padded rows alone")
    policy.layout = replace(policy.layout, **WAYS[way])
    policy.zero_grad()
    logprobs = policy(batch.input_ids, batch.loss_mask, given=batch.given)[0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    # the pictures matter: the third row has the ids of the first one
    assert not torch.allclose(batch.given.features.states[0], batch.given.features.states[-1])
    logprobs.sum().backward()
    has_chunks = policy.lm.config.model_type == "qwen3_5"  # of tokens, by which its states are sums
    for name, parameter in policy.lm.named_parameters():
        if has_chunks:
            error = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
            assert error < 3e-4, name
        else:
            torch.testing.assert_close(
                parameter.grad, gradients[name], atol=2e-5, rtol=1e-4, msg=name
            )


def test_a_probe_with_an_image_selects_packed_rows_with_shared_prompts(trained):
    policy, batch, *_ = trained
    if policy.given_source.reason_to_pad is not None:
        pytest.skip("it runs padded rows alone")
    seen = []
    hook = policy.backbone.register_forward_pre_hook(
        lambda backbone, args, kwargs: seen.append(kwargs.get("mm_encoder_outputs")),
        with_kwargs=True,
    )
    assert select_kernels(policy) is None
    hook.remove()
    assert policy.layout.packed and policy.layout.shares
    assert seen and all(seen)


def test_rows_of_gemma_stay_padded(trained, caplog):
    """Whose probe has an image too. With packed rows, the numbers of rows with images are others,
    since an image's tokens do not see its later ones."""
    policy, batch, expected, _ = trained
    if policy.lm.config.model_type != "gemma3":
        pytest.skip("of another family")
    with caplog.at_level("INFO"):
        reason = select_kernels(policy)
    assert reason is not None and "see each other both ways" in reason
    assert reason in caplog.text
    assert not policy.layout.packed and not policy.layout.shares
    policy.layout = replace(policy.layout, **WAYS["packed"])
    with torch.no_grad():
        packed = policy(batch.input_ids, batch.loss_mask, given=batch.given)[0]
    assert (packed - expected).abs().max() > 1e-3


def test_prompts_with_the_same_ids_and_other_pictures_are_not_merged(trained):
    """Those with `a.png` and `d.png` have equal ids; two rows with `a.png` share their prompt."""
    policy, batch, *_ = trained
    layout = replace(policy.layout, packed=True, shares=True)
    of_ids = PassRows.of_targets(batch.input_ids, batch.loss_mask, layout)
    rows = PassRows.of_targets(batch.input_ids, batch.loss_mask, layout, batch.given)
    read = int((batch.lengths - 1).sum())  # the last token of a row predicts nothing
    assert len(of_ids.packed.slots) < len(rows.packed.slots) < read
