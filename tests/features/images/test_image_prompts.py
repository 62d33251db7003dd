"""Prompts with images in step 3: their numbers, and what the model gets for them and for the rows
of a rollout."""

from dataclasses import replace

import pytest
import torch
from features.images.image_runs import (
    alone_inputs,
    prepared_prompts,
    source_of,
    write_pictures,
    write_rows,
)
from tiny_vlms import plain_logprobs, save_tiny_vlm
from transformers import AutoModelForImageTextToText

from dschat_ppo.config.cli import parse
from dschat_ppo.data.encode import EncodedExample
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.checks import check_trained_model
from dschat_ppo.features.images.columns import ROW_OF_IMAGES
from dschat_ppo.features.images.content import SPANS, RowImages
from dschat_ppo.features.images.lm_kinds import OF_IMAGES
from dschat_ppo.features.images.references import ImagePlaces
from dschat_ppo.models.given_embeddings import given_arguments
from dschat_ppo.models.loading import ModelChanges, load_causal_lm, load_config
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.ppo.rollouts import prompt_batch
from dschat_ppo.types import Rollout, concat_rows, full_sequences, select_rows

QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": None, "prompt": "what is red ?"},
    {"image": "a.png", "prompt": QUESTION},
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?"},
    {"image": "d.png", "prompt": QUESTION},  # the ids of the second row
]


@pytest.fixture(
    scope="module",
    params=["smolvlm", "qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.release)],
)
def step3(request, tmp_path_factory):
    """(prompts of step 3 in the order of `ROWS`, the source of their images, the model's
    folder)."""
    folder = tmp_path_factory.mktemp(request.param)
    vlm = save_tiny_vlm(folder / "vlm", request.param)
    write_pictures(folder)
    prompts, config, tokenizer = prepared_prompts(vlm, write_rows(folder, ROWS))
    return prompts, source_of(config, str(vlm), tokenizer, torch.device("cpu")), vlm


def rollout_of(batch, responses):
    """A rollout with these responses, right-padded with 0 where they are shorter."""
    width = max(map(len, responses))
    ids = torch.tensor([response + [0] * (width - len(response)) for response in responses])
    lengths = torch.tensor([len(response) for response in responses])
    mask = torch.arange(width) < lengths.unsqueeze(1)
    reasons = torch.zeros(len(ids), dtype=torch.int8)
    return Rollout(
        batch.prompt_ids,
        batch.prompt_mask,
        ids,
        mask,
        torch.zeros(ids.shape),
        reasons,
        extra=batch.extra,
    )


def test_rows_have_the_numbers_of_their_data_set(step3):
    prompts, source, _ = step3
    held_out = prompts.select([3, 0])
    assert source.prompt_columns(prompts, [2, 0, 1])[ROW_OF_IMAGES].tolist() == [2, -1, 1]
    assert source.prompt_columns(held_out, [1, 0])[ROW_OF_IMAGES].tolist() == [-1, 4]
    assert source.prompt_columns(prompts, [3])[ROW_OF_IMAGES].tolist() == [3]
    without = prompts.remove_columns(["images"])
    assert source.prompt_columns(without, [1])[ROW_OF_IMAGES].tolist() == [-1]


def test_a_rollout_gets_the_images_of_its_prompts(step3):
    """The log-probs of rows with their responses are those of transformers over each row alone; so
    they are after rows were joined, picked and repeated, as between rollout and update."""
    prompts, source, vlm = step3
    policy = PolicyModel(load_causal_lm(str(vlm), "fp32", None, ModelChanges(kinds=(OF_IMAGES,))))
    whole = AutoModelForImageTextToText.from_pretrained(vlm).eval()
    responses = [[40], [41, 42, 43], [44, 45], [46, 47, 48]]
    batch = prompt_batch(prompts, range(4), 0, source)
    first = rollout_of(select_rows(batch, torch.tensor([0, 1])), responses[:2])
    rows = concat_rows([first, rollout_of(select_rows(batch, torch.tensor([2, 3])), responses[2:])])
    rows = select_rows(rows, torch.tensor([3, 1, 2, 0, 1]))
    input_ids, lengths = full_sequences(rows)
    targets = torch.arange(input_ids.shape[1]) < lengths.unsqueeze(1)
    with torch.no_grad():
        logprobs = policy(input_ids, targets, given=source.for_rollout(rows))[0]
    expected = []
    for index in (3, 1, 2, 0, 1):
        record = dict(prompts[index]) | {"answers": [responses[index]]}
        expected.append(plain_logprobs(whole, alone_inputs(record, source._processor)))
    torch.testing.assert_close(logprobs, torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert source.for_rollout(select_rows(rows, torch.tensor([3]))) is None


def test_prompts_get_their_images_when_they_are_asked_for(step3):
    """The model's states of some prompts of a batch, without the last columns of the longest, and
    beyond the longest."""
    prompts, source, vlm = step3
    policy = PolicyModel(load_causal_lm(str(vlm), "fp32", None, ModelChanges(kinds=(OF_IMAGES,))))
    whole = AutoModelForImageTextToText.from_pretrained(vlm).eval()
    given_prompts = source.for_prompts(prompt_batch(prompts, range(4), 0, source), policy.lm)
    given_prompts([0, 1, 2, 3], 4)  # the tower runs
    calls = source.tower_calls
    for order in ([2, 0], [0, 3], [2]):
        longest = max(len(prompts[index]["prompt_ids"]) for index in order)
        for width in (longest - 1, longest + 3):
            given = given_prompts(order, width)
            for row, index in enumerate(order):
                record = dict(prompts[index]) | {"answers": [[50, 51, 52]]}
                inputs = alone_inputs(record, source._processor)
                length = min(width, inputs["input_ids"].shape[1])
                slots = row * width + torch.arange(length).unsqueeze(0)
                positions = {"position_ids": torch.arange(length).unsqueeze(0)}
                with torch.no_grad():
                    logits = policy.lm(
                        input_ids=inputs["input_ids"][:, :length],
                        **given_arguments(given, slots, policy.lm, positions),
                    ).logits
                    expected = whole(**inputs).logits[:, :length]
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert given_prompts([0], 4) is None
    assert source.tower_calls == calls  # they were kept


def test_a_prompt_may_not_end_with_an_image(step3):
    """Its last token is fed to the model without what is given for images; an answer may follow."""
    content = RowImages(step3[1]._processor, ImagePlaces(None, (), ".", "."), 1, None)
    prompt = EncodedExample([5, 9, 9], [], [], fixed_spans=[(1, 3)])
    with pytest.raises(UserError, match="the prompt ends with an image"):
        content.values(prompt, [])
    assert content.values(replace(prompt, answers=[[4]]), [])[SPANS] == [[1, 3]]
    assert content.values(replace(prompt, prompt=[5, 9, 9, 6]), [])[SPANS] == [[1, 3]]


@pytest.mark.parametrize("words", [["--exact_rollout", "True"], ["--inference_tp_size", "2"]])
def test_ways_to_generate_that_have_no_images(step3, words):
    vlm = str(step3[2])
    given = ["--actor_model_name_or_path", vlm, "--data_path", "data", "--output_dir", "out"]
    given += ["--use_reward_model", "False", "--reward_function", "numbers:value", *words]
    config = parse("ppo", given)
    with pytest.raises(UserError, match=f"sees images, which do not go with {words[0]}"):
        check_trained_model(config, load_config(vlm, ""), vlm)
