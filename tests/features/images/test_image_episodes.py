"""Environments and tools with prompts that hold images: what they get of these, the tokens of their
prompts, and the log-probs of transformers' own pass over each episode alone."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from features.images.image_runs import (
    alone_inputs,
    flags_of_prompts,
    prepared_prompts,
    source_of,
    write_pictures,
    write_rows,
)
from one_rank import one_rank  # noqa: F401
from tiny_vlms import noise, plain_logprobs, save_tiny_vlm
from transformers import AutoModelForImageTextToText

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.features.environments.environments import Turn, message_content
from dschat_ppo.features.environments.episode_prompts import EpisodePrompt
from dschat_ppo.features.environments.episode_rollouts import EpisodeRollouts
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.features.environments.observations import ObservationTokens
from dschat_ppo.features.environments.rollouts import extension_of
from dschat_ppo.features.environments.tool_environments import VerlEnvironment
from dschat_ppo.features.environments.turns import EpisodeRecord, EpisodeTurns
from dschat_ppo.features.images.checks import check_trained_model
from dschat_ppo.features.images.columns import ROW_OF_IMAGES
from dschat_ppo.models.given_embeddings import GivenSource
from dschat_ppo.models.loading import changes_to_train, load_causal_lm, load_config
from dschat_ppo.ppo.rollouts import RolloutTask
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria

pytestmark = pytest.mark.usefixtures("one_rank")

QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": None, "prompt": "what is red ?"},
    {"image": "a.png", "prompt": QUESTION},
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?"},
    {"image": "d.png", "prompt": QUESTION},  # the ids of the second row
]
SAID = "yes or no ."
ANSWERS = ["it is red .", "no : this is big ."]
ENVIRONMENT = f'''
import json, pathlib
FOLDER = pathlib.Path(__file__).parent
ANSWERS = {ANSWERS}

class Looks:
    """Notes what it gets, and answers twice."""
    def reset(self, seed=None, options=None):
        with (FOLDER / "seen.jsonl").open("a") as file:
            print(json.dumps(options), file=file)
        self.turns = 0
        return (FOLDER / "said").read_text()
    def step(self, text):
        self.turns += 1
        if self.turns > len(ANSWERS):
            return "", 1.0, True, False, {{}}
        return ANSWERS[self.turns - 1], 0.0, False, False, {{}}
'''
SAMPLES = 2
TOKENS = 60


@dataclass(frozen=True)
class Generation:
    """Of the model in the test."""

    lm: torch.nn.Module
    source: GivenSource

    def __call__(self, batch, seeds, config, cancelled, partner=None):
        request = RolloutRequest(batch, seeds, given=self.source.for_prompts(batch, self.lm))
        return generate(self.lm, request, config, partner=partner)


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_vl",
        *(pytest.param(name, marks=pytest.mark.release) for name in ("smolvlm", "gemma3")),
    ],
)
def actor(request, tmp_path_factory):
    """A model, its prompts and their source; transformers' own model; the folder of the data."""
    folder = tmp_path_factory.mktemp(request.param)
    vlm = str(save_tiny_vlm(folder / "vlm", request.param))
    write_pictures(folder)
    prompts, config, tokenizer = prepared_prompts(vlm, write_rows(folder, ROWS))
    return SimpleNamespace(
        vlm=vlm,
        folder=folder,
        prompts=prompts,
        config=config,
        tokenizer=tokenizer,
        source=source_of(config, vlm, tokenizer, torch.device("cpu")),
        lm=load_causal_lm(vlm, "fp32", None, changes_to_train(config)).eval(),
        whole=AutoModelForImageTextToText.from_pretrained(vlm).eval(),
    )


def played(actor, folder, said=SAID):
    """The rollout of an environment that begins with a text, with two episodes to each prompt."""
    (folder / "looks.py").write_text(ENVIRONMENT)
    (folder / "said").write_text(said)
    flags = EnvironmentFlags(environment=f"{folder / 'looks.py'}:Looks")
    episodes = EpisodeRollouts(flags, actor.tokenizer, 200)
    extension = extension_of(episodes)
    engine = "continuous"
    if actor.source.reason_to_pad is not None:
        engine = "padded"
    ends = tuple(range(0, actor.lm.config.get_text_config().vocab_size, 3))
    stopping = StoppingCriteria(TOKENS, stop_ids=ends, banned_ids=actor.source.banned_ids)
    config = GenerationConfig(SamplingParameters(), stopping, SAMPLES, engine=engine)
    task = RolloutTask(actor.prompts, range(len(ROWS)), config, 0, (1,), 0, 1)
    try:
        play = extension.wrap(None, Generation(actor.lm, actor.source))
        return play(task)
    finally:
        extension.close()


def prompt_of(rollout, row):
    return rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()


def test_log_probs_of_episodes_are_those_of_each_row_alone(actor, tmp_path):
    rollout = played(actor, tmp_path)
    assert rollout.extra[ROW_OF_IMAGES].tolist() == [-1, -1, 1, 1, 2, 2, 3, 3]
    answer = actor.tokenizer.encode(ANSWERS[0], add_special_tokens=False)
    went_on = 0
    for row, length in enumerate(rollout.response_lengths.tolist()):
        response = rollout.response_ids[row, :length].tolist()
        chosen = rollout.response_mask[row, :length]
        record = dict(actor.prompts[row // SAMPLES])
        record |= {"prompt_ids": prompt_of(rollout, row), "answers": [response]}
        inputs = alone_inputs(record, actor.source._processor)
        logprobs = plain_logprobs(actor.whole, inputs, actor.source.banned_ids)
        torch.testing.assert_close(
            rollout.rollout_logprobs[row, :length][chosen],
            logprobs[-length:][chosen],
            atol=1e-5,
            rtol=1e-5,
        )
        observed = rollout.response_ids[row, :length][~chosen].tolist()
        if observed:
            went_on += 1
            start = observed.index(answer[0])
            assert observed[start : start + len(answer)] == answer
    assert went_on >= len(ROWS)


def test_prompts_are_those_of_rows_with_the_same_text(actor, tmp_path):
    """The first words of the environment end the last message: so does a row with these words."""
    rollout = played(actor, tmp_path)
    write_pictures(tmp_path)
    rows = [{**row, "prompt": f"{row['prompt']}\n\n{SAID}"} for row in ROWS]
    expected, *_ = prepared_prompts(actor.vlm, write_rows(tmp_path, rows))
    for row in range(SAMPLES * len(ROWS)):
        assert prompt_of(rollout, row) == expected[row // SAMPLES]["prompt_ids"]


def test_environments_get_places_for_images(actor, tmp_path):
    played(actor, tmp_path)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert len(seen) == SAMPLES * len(ROWS)
    assert {row["prompt"] for row in seen} == {row["prompt"] for row in ROWS}
    prompt = EpisodePrompt.of(actor.prompts[2])
    assert prompt.messages == [
        {"role": "user", "content": "first <image> second <image> ?"},
    ]
    text = prompt.text(actor.tokenizer)
    assert text.count("<image>") == 2
    assert "first" in text and text.index("first") < text.index("<image>")


def test_a_message_may_name_what_stands_for_an_image(actor, tmp_path):
    """It is encoded as other text is."""
    [placeholder] = actor.tokenizer.convert_ids_to_tokens(actor.source.banned_ids[:1])
    rollout = played(actor, tmp_path, f"{SAID} {placeholder}")
    image_id = actor.source.banned_ids[0]
    for row in range(SAMPLES * len(ROWS)):
        of_data = actor.prompts[row // SAMPLES]["prompt_ids"]
        assert len(prompt_of(rollout, row)) > len(of_data)
        assert prompt_of(rollout, row).count(image_id) == of_data.count(image_id)


def test_a_text_beside_the_template_may_not(actor):
    """As OpenRLHF's environments answer: at the beginning, and later."""
    banned_ids = actor.source.banned_ids
    [placeholder] = actor.tokenizer.convert_ids_to_tokens(banned_ids[:1])
    observations = ObservationTokens(actor.tokenizer, [], 100)
    prompt = EpisodePrompt.of(actor.prompts[1])
    written = Turn(text=f"no {placeholder}")
    with pytest.raises(UserError, match="stands for an image; environments answer in text"):
        prompt.opened(observations, written, None, banned_ids)
    assert prompt.opened(observations, Turn(text="no"), None, banned_ids)[:-1] == prompt.ids
    ended = []
    episodes = SimpleNamespace(poll=lambda seconds: [(0, written)], finish=ended.append)
    turns = EpisodeTurns(
        episodes,
        observations,
        actor.tokenizer,
        8,
        [EpisodeRecord(ends=[0], rewards=[0.0])],
        banned_ids,
    )
    assert turns.observed(wait=False) == [(0, [])]
    assert "stands for an image" in turns.records[0].problem and ended == [0]


@pytest.mark.parametrize(
    "answer",
    [
        noise(4, 4, 0),
        ["a", noise(4, 4, 0)],
        [{"type": "image_url", "image_url": {"url": "a.png"}}],
        {"type": "image", "image": "a.png"},
        {"type": "image", "base64": "aaaa"},
        {"type": "input_image", "image_url": "a.png"},
        {"content": [{"type": "image", "data": "aaaa", "mimeType": "image/png"}]},
    ],
)
def test_an_answer_with_an_image_is_refused(answer):
    with pytest.raises(TypeError, match="answered with an image"):
        message_content(answer)


def test_an_answer_about_images_is_text():
    listed = [{"type": "image", "name": "a.png"}]
    assert json.loads(message_content(listed)) == listed


def test_a_tool_of_verl_that_returns_an_image_has_failed():
    response = SimpleNamespace(text="this", image=[noise(4, 4, 0)])
    tool = SimpleNamespace(create=lambda _: "0", execute=lambda *_: (response, 0.0, {}))
    environment = VerlEnvironment({"look": tool})
    environment.reset({}, 0)
    content, has_returned = environment.call("look", {})
    assert not has_returned and "answered with an image" in content


@pytest.mark.parametrize(
    "words",
    [["--environment", "looks.py:Looks"], ["--tools", "tools.py:add"], ["--tool_config", "t.yaml"]],
    ids=lambda words: words[0],
)
def test_flags_of_environments_go_with_images(actor, words):
    given = [*flags_of_prompts(actor.vlm, actor.folder / "rows.jsonl"), *words]
    given += ["--use_reward_model", "False", "--reward_function", "numbers:value"]
    config = parse("ppo", given)
    check_trained_model(config, load_config(actor.vlm, ""), actor.vlm)
