"""A vision tower that trains, in rollouts: generation and scoring take its weights as they are
after each update, and generation encodes the images of a prompt once for a rollout."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from features.images.image_runs import (
    alone_inputs,
    prepared_prompts,
    source_of,
    write_pictures,
    write_rows,
)
from one_rank import one_rank  # noqa: F401
from tiny_vlms import plain_logprobs, save_tiny_vlm
from transformers import AutoModelForImageTextToText

from dschat_ppo.models.loading import changes_to_train, load_causal_lm
from dschat_ppo.models.wrapped_models import PolicyModel, response_logprobs
from dschat_ppo.ppo.rollouts import prompt_batch
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import ForbiddenTokens

pytestmark = pytest.mark.usefixtures("one_rank")

QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": "a.png", "prompt": QUESTION},
    {"image": "d.png", "prompt": QUESTION},  # the ids of the first row
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?"},
    {"image": None, "prompt": "what is red ?"},
]
SAMPLES = 2
ENGINES = {
    "continuous": {"engine": "continuous", "rows": 3},
    "padded": {"engine": "padded", "rows": 3},
    "whole rows": {"engine": "uncached", "rows": 3},
}


@pytest.fixture(scope="module", params=["smolvlm", "qwen3_vl"])
def step3(request, tmp_path_factory):
    """A policy with its tower, prompts, and transformers' model for the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    vlm = save_tiny_vlm(folder / "vlm", request.param)
    write_pictures(folder)
    further = ["--train_vision_tower", "True"]
    prompts, config, tokenizer = prepared_prompts(vlm, write_rows(folder, ROWS), *further)
    new_source = partial(source_of, config, str(vlm), tokenizer, torch.device("cpu"))
    source = new_source()
    policy = PolicyModel(load_causal_lm(str(vlm), "fp32", None, changes_to_train(config, "actor_")))
    policy.given_source = source
    whole = AutoModelForImageTextToText.from_pretrained(vlm).eval()
    return SimpleNamespace(
        policy=policy.eval(), prompts=prompts, source=source, new_source=new_source, whole=whole
    )


def change_the_tower(step3):
    """As an update does: noise on all its weights."""
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in step3.policy.lm.parameters():
            if weight.requires_grad:
                weight.add_(0.02 * torch.randn_like(weight))
    step3.whole.load_state_dict(step3.policy.lm.state_dict())


@pytest.mark.parametrize("engine", ENGINES)
def test_log_probs_after_an_update_are_those_of_the_plain_model(step3, engine):
    """Of sampling, and of scoring."""
    banned_ids = step3.source.banned_ids
    stopping = StoppingCriteria(3, banned_ids=banned_ids)
    config = GenerationConfig(SamplingParameters(), stopping, SAMPLES, **ENGINES[engine])
    encoded = []
    tower = next(iter(step3.policy.lm.model.children()))
    hook = tower.register_forward_hook(lambda *_: encoded.append(1))
    for _ in range(2):
        batch = prompt_batch(step3.prompts, range(len(ROWS)), 0, step3.source)
        given = step3.source.for_prompts(batch, step3.policy.lm)
        seeds = torch.arange(SAMPLES * len(ROWS))
        encoded.clear()
        with torch.no_grad():
            rollout = generate(step3.policy.lm, RolloutRequest(batch, seeds, given=given), config)
            assert len(encoded) == 3  # one call for each prompt with images
            banned = ForbiddenTokens((), 0, banned_ids)
            scored = response_logprobs(step3.policy, rollout, 1.0, forbidden_tokens=banned)
        for row, mask in enumerate(rollout.response_mask):
            response = rollout.response_ids[row, mask]
            record = dict(step3.prompts[row // SAMPLES]) | {"answers": [response.tolist()]}
            inputs = alone_inputs(record, step3.source._processor)
            expected = plain_logprobs(step3.whole, inputs, banned_ids)[-len(response) :]
            for logprobs in (rollout.rollout_logprobs, scored.logprobs):
                torch.testing.assert_close(logprobs[row, mask], expected, atol=1e-5, rtol=1e-5)
        change_the_tower(step3)
    hook.remove()


def test_pixels_are_made_once_and_features_in_each_rollout(step3, monkeypatch):
    source = step3.new_source()
    made = []
    processor_class = type(source._processor)
    pixels = processor_class.pixels
    monkeypatch.setattr(
        processor_class, "pixels", lambda *of_row: made.append(1) or pixels(*of_row)
    )
    batch = prompt_batch(step3.prompts, range(len(ROWS)), 0, source)
    first = source.for_prompts(batch, step3.policy.lm)([0, 1, 2, 3], 4)
    change_the_tower(step3)
    second = source.for_prompts(batch, step3.policy.lm)([0, 1, 2, 3], 4)
    assert len(made) == 3  # rows with images
    assert not torch.allclose(first.features.states, second.features.states, atol=1e-3)
