"""Vision towers and projectors that train: log-probs and all gradients are those of transformers'
own pass over each row alone, from ids and pixels, also in batches without images."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from features.images.image_runs import (
    alone_inputs,
    each_row_alone,
    flags,
    prepared,
    source_of,
    write_pictures,
    write_rows,
)
from tiny_vlms import FAMILIES, save_tiny_vlm
from transformers import AutoModelForImageTextToText, Lfm2VlConfig

from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import collate_sft
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.checks import check_trained_model
from dschat_ppo.features.images.step_data import read_by_model
from dschat_ppo.models.loading import changes_to_train, load_causal_lm, load_config
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.planner.model_parts import sizes_of

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
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?", "response": "no"},
    {"image": None, "prompt": "what is red ?", "response": "this colour"},
]
TEXT_ROW = 4
BOTH = ["--train_vision_tower", "True", "--train_projector", "True"]
OFTEN = ("smolvlm", "qwen3_vl")  # the other families are tested before a release
OTHERS = [name for name in FAMILIES if name not in OFTEN]
PARAMETERS = [*OFTEN, *(pytest.param(name, marks=pytest.mark.release) for name in OTHERS)]


@pytest.fixture(scope="module", params=PARAMETERS)
def family(request, tmp_path_factory):
    """A tiny model, its rows in the order of `ROWS`, and what transformers makes of them."""
    folder = tmp_path_factory.mktemp(request.param)
    vlm = save_tiny_vlm(folder / "vlm", request.param)
    write_pictures(folder)
    rows, config, tokenizer = prepared(vlm, write_rows(folder, ROWS), *BOTH)
    source = source_of(config, str(vlm), tokenizer, torch.device("cpu"))
    order = sorted(range(len(rows)), key=lambda index: place_of(rows[index], tokenizer))
    return SimpleNamespace(
        vlm=vlm,
        data=folder / "rows.jsonl",
        config=config,
        source=source,
        rows=rows.select(order),
        pad_id=tokenizer.pad_token_id,
        whole=AutoModelForImageTextToText.from_pretrained(vlm).eval(),
    )


def place_of(row, tokenizer):
    """Which of `ROWS` a token row is, by its answer."""
    text = tokenizer.decode(row["answers"][0], skip_special_tokens=True).replace(" ", "")
    return [row["response"].replace(" ", "") for row in ROWS].index(text)


def with_flags(family, *words):
    """A configuration of step 1 with these flags, for the same model."""
    return parse("sft", flags(family.vlm, family.data, *words))


def trained_policy(family, config=None):
    """The model as a run with these flags trains it."""
    changes = changes_to_train(config or family.config)
    policy = PolicyModel(load_causal_lm(str(family.vlm), "fp32", None, changes))
    policy.given_source = family.source
    return policy


def is_tower(name):
    return ".vision" in name or ".visual" in name


def batch_of(family, indices):
    return collate_sft(family.rows, indices, family.pad_id, False, family.source.for_rows)


def expected_of(family, batch, indices):
    """Log-probs of the targets and the gradients of their sum, by transformers."""
    family.whole.zero_grad()
    alone = [alone_inputs(family.rows[index], family.source._processor) for index in indices]
    return each_row_alone(family.whole, batch.loss_mask, alone)


def assert_gradients(policy, gradients):
    """Qwen3.5's states are sums over chunks of tokens."""
    has_chunks = policy.lm.config.model_type == "qwen3_5"
    for name, parameter in policy.lm.named_parameters():
        expected = gradients[name]
        if expected is None:  # a part that transformers does not run
            assert parameter.grad is None, name
        elif has_chunks:
            assert (parameter.grad - expected).norm() < 3e-4 * expected.norm() + 1e-6, name
        else:
            torch.testing.assert_close(parameter.grad, expected, atol=3e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_log_probs_and_gradients_are_those_of_each_row_alone(family, way):
    policy = trained_policy(family)
    if WAYS[way]["packed"] and family.source.reason_to_pad is not None:
        pytest.skip("it runs padded rows alone")
    policy.layout = replace(policy.layout, **WAYS[way])
    indices = range(len(ROWS))
    batch = batch_of(family, indices)
    expected, gradients = expected_of(family, batch, indices)
    logprobs = policy(batch.input_ids, batch.loss_mask, given=batch.given)[0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    logprobs.sum().backward()
    assert_gradients(policy, gradients)
    assert any(gradient.any() for name, gradient in gradients.items() if is_tower(name))


@pytest.mark.parametrize("way", ["padded", "shared"])
def test_a_batch_without_images_runs_the_tower_too(family, way):
    """So that ranks of ZeRO-3 do not wait: all its weights get gradients, of 0."""
    policy = trained_policy(family)
    if way == "shared" and family.source.reason_to_pad is not None:
        pytest.skip("it runs padded rows alone")
    policy.layout = replace(policy.layout, **WAYS[way])
    batch = batch_of(family, [TEXT_ROW])
    expected, gradients = expected_of(family, batch, [TEXT_ROW])
    logprobs = policy(batch.input_ids, batch.loss_mask, given=batch.given)[0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    logprobs.sum().backward()
    of_parts = 0
    for name, parameter in policy.lm.named_parameters():
        if gradients[name] is None and parameter.grad is not None:
            of_parts += 1
            assert not parameter.grad.any(), name
        elif gradients[name] is not None:
            torch.testing.assert_close(
                parameter.grad, gradients[name], atol=2e-5, rtol=1e-4, msg=name
            )
    assert of_parts > 5


def test_the_planner_counts_the_parts(family):
    changes = changes_to_train(family.config)
    config = load_config(str(family.vlm), "model")
    sizes = sizes_of(config, "fp32", scalar=False, changes=changes)
    weights = sum(weight.numel() for weight in family.whole.parameters())
    assert (sizes.total, sizes.trained) == (weights, weights)


@pytest.mark.parametrize("part", ["vision_tower", "projector"])
def test_a_part_that_is_not_asked_for_stays_frozen(family, part):
    """And gets no gradient; the other has those of the whole model."""
    policy = trained_policy(family, with_flags(family, f"--train_{part}", "True"))
    batch = batch_of(family, [0, 3])
    _, gradients = expected_of(family, batch, [0, 3])
    policy(batch.input_ids, batch.loss_mask, given=batch.given)[0].sum().backward()
    projectors = ("connector", "merger", "multi_modal_projector")
    for name, parameter in policy.lm.named_parameters():
        trains = not is_tower(name)
        if any(word in name for word in projectors):
            trains = part == "projector"
        elif part == "vision_tower":
            trains = True
        assert parameter.requires_grad == trains, name
        if not trains:
            assert parameter.grad is None, name
        elif gradients[name] is not None:
            torch.testing.assert_close(
                parameter.grad, gradients[name], atol=3e-5, rtol=3e-4, msg=name
            )


def test_checkpointed_layers_give_the_same_gradients(family):
    """Also those of the tower."""
    policy = trained_policy(family)
    indices = [0, 3, TEXT_ROW]
    batch = batch_of(family, indices)
    _, gradients = expected_of(family, batch, indices)
    policy.train()
    policy.gradient_checkpointing_enable()
    policy(batch.input_ids, batch.loss_mask, given=batch.given)[0].sum().backward()
    assert_gradients(policy, gradients)


def test_lora_stays_out_of_the_tower(family):
    policy = trained_policy(family, with_flags(family, "--lora_dim", "4", *BOTH))
    adapted = [name for name, _ in policy.lm.named_parameters() if "lora_" in name]
    decoder = policy.lm.get_decoder()
    [path] = [name for name, module in policy.lm.named_modules() if module is decoder]
    assert adapted
    assert all(name.startswith(f"{path}.") for name in adapted)
    for name, parameter in policy.lm.named_parameters():
        if is_tower(name) or "connector" in name or "projector" in name:
            assert parameter.requires_grad, name


COMMAND = ["--model_name_or_path", "m", "--data_path", "x", "--output_dir", "y"]


def test_adapters_alone_are_refused():
    words = ["--train_projector", "True", "--lora_dim", "4", "--only_optimize_lora", "True"]
    with pytest.raises(UserError, match="--train_projector does not go with --only_optimize_lora"):
        parse("sft", [*COMMAND, *words])


def test_a_model_that_sees_no_images_has_no_tower(assets):
    config = parse("sft", [*COMMAND, "--train_vision_tower", "True"])
    folder = str(assets / "lm")
    tokenizer = load_tokenizer(folder, "model")
    with pytest.raises(UserError, match="--train_vision_tower True: .*LlamaConfig sees no images"):
        read_by_model(config, config.step_data, folder, tokenizer)


def test_images_of_several_sizes_in_one_call_are_refused():
    config = parse("sft", [*COMMAND, "--train_projector", "True"])
    with pytest.raises(UserError, match="Lfm2VlConfig .* do not go with --train_vision_tower or"):
        check_trained_model(config, Lfm2VlConfig(), "m")
