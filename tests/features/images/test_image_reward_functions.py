"""Reward functions that name `images` get the images of each prompt, opened in their worker; texts
of prompts show a place for each image."""

import json
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from features.images.image_runs import SIZES, prepared_prompts, write_pictures, write_rows
from PIL import Image
from tiny_vlms import save_tiny_vlm

from dschat_ppo.features.images.prompt_contents import content_of
from dschat_ppo.ppo.rollouts import prompt_batch
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.rewards.build_rewards import check_columns
from dschat_ppo.rewards.function_reward import FunctionReward, parse_function
from dschat_ppo.types import Rollout, repeat_rows

QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?"},
    {"image": None, "prompt": "what is red ?"},
    {"image": "a.png", "prompt": QUESTION},
]
FUNCTIONS = """
def first_pixel(responses, images):
    return [sum(of_prompt[0].getpixel((0, 0))) if of_prompt else -1 for of_prompt in images]

def total_width(response, images):
    return sum(image.width for image in images)

def sees(responses, **columns):
    return [len(columns) for _ in responses]

def places(prompts, responses):
    return [prompt.count("<image>") + 10 * prompt.count("_image") for prompt in prompts]

def places_of_messages(prompts, completions):
    return [str(prompt).count("<image>") + 10 * (not str(prompt).isascii()) for prompt in prompts]
"""


@pytest.fixture(scope="module", params=["idefics3"])
def asked(request, tmp_path_factory):
    """The folder of a run, the request for two responses to each prompt, and their rows."""
    folder = tmp_path_factory.mktemp(request.param)
    vlm = save_tiny_vlm(folder / "vlm", request.param)
    write_pictures(folder)
    (folder / "mine.py").write_text(FUNCTIONS)
    prompts, _, tokenizer = prepared_prompts(vlm, write_rows(folder, ROWS))
    batch = repeat_rows(prompt_batch(prompts, range(3), 0, None), 2)
    tokens = torch.full((6, 1), tokenizer.convert_tokens_to_ids("red"))
    rollout = Rollout(
        batch.prompt_ids,
        batch.prompt_mask,
        tokens,
        torch.ones(6, 1, dtype=torch.bool),
        torch.zeros(6, 1),
        torch.zeros(6, dtype=torch.int8),
    )
    requests = RewardRequests(None, prompts, tokenizer)
    request_of_step = requests.request(rollout, [0, 1, 2], 0)
    return SimpleNamespace(folder=folder, request=request_of_step, rollout=rollout, prompts=prompts)


def scores_of(asked, function):
    """The scores of a function in `FUNCTIONS`, and the number of its failures."""
    reward = FunctionReward(parse_function(f"{asked.folder}/mine.py:{function}"), 1, 60.0)
    with closing(reward):
        return reward(asked.request, asked.rollout).tolist(), int(reward.failed.sum())


def test_a_function_gets_the_images_of_each_prompt(asked):
    widths = {name: size[0] for name, size in SIZES.items()}
    both = widths["b.png"] + widths["c.png"]
    expected = [both, both, 0, 0, widths["a.png"], widths["a.png"]]
    assert scores_of(asked, "total_width") == (expected, 0)
    pixels = {}
    for name in ("a.png", "b.png"):
        pixels[name] = sum(Image.open(asked.folder / name).getpixel((0, 0)))
    expected = [pixels["b.png"]] * 2 + [-1] * 2 + [pixels["a.png"]] * 2
    assert scores_of(asked, "first_pixel") == (expected, 0)


def test_a_function_that_names_none_gets_the_columns_alone(asked):
    """As without images: prompts, image, and what data preparation adds for all."""
    row = json.loads(asked.prompts[0]["row"])
    columns = {"prompts", *(name for name in row if not name.startswith("_"))}
    assert scores_of(asked, "sees") == ([len(columns)] * 6, 0)


def test_texts_show_a_place_for_each_image(asked):
    """No token of an image, of which a prompt may have thousands."""
    assert scores_of(asked, "places") == ([2, 2, 0, 0, 1, 1], 0)
    assert scores_of(asked, "places_of_messages") == ([2, 2, 0, 0, 1, 1], 0)
    assert "first" in asked.request.prompts[0] and "second" in asked.request.prompts[0]
    assert len(asked.request.prompts[0].split()) < 20


def test_an_image_that_has_changed_costs_its_row(asked):
    """With its name; the scores of others stay."""
    file = asked.folder / "a.png"
    content = file.read_bytes()
    file.write_bytes(content + b"!")
    reward = FunctionReward(parse_function(f"{asked.folder}/mine.py:total_width"), 1, 60.0)
    with closing(reward):
        reward(asked.request, asked.rollout)
    file.write_bytes(content)
    assert reward.failed.tolist() == [False] * 4 + [True] * 2
    assert "a.png: the image has changed since the data were prepared" in reward.counts.cause


def test_the_argument_needs_no_column(asked):
    reward = FunctionReward(parse_function(f"{asked.folder}/mine.py:total_width"), 1, 60.0)
    reward.close()
    further = content_of(asked.prompts[0]).arguments
    check_columns([(reward.spec, reward.signature)], "--data_path", asked.prompts["row"], further)
