"""Responses to prompts with images, by each engine: the tokens of transformers' `generate`, and
log-probs of its plain pass over each row alone."""

from copy import copy
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
from features.images.lfm2_by_hand import by_hand
from tiny_vlms import plain_logprobs, save_tiny_vlm
from transformers import AutoModelForImageTextToText

from dschat_ppo.features.images import processors
from dschat_ppo.models.backbone import has_states
from dschat_ppo.models.loading import changes_to_train, load_causal_lm
from dschat_ppo.ppo.rollouts import prompt_batch
from dschat_ppo.rollout import continuous_batching
from dschat_ppo.rollout.continuous_batching import ContinuousBatching
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.running_pool import RunningPool
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.self_check import Echo, choose_engine

QUESTION = "what is the colour of this picture ?"
LONG = "describe the shape and the colour of this big picture : " * 3
ROWS = [
    {"image": None, "prompt": "what is red ?"},
    {"image": "a.png", "prompt": QUESTION},
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?"},
    {"image": "d.png", "prompt": QUESTION},  # the ids of the second row
    {"image": "b.png", "prompt": LONG},
]
ENGINES = {
    "batches": {"static": False},
    "pool": {"static": True},
    "few rows": {"static": True, "rows": 3},
    "padded": {"engine": "padded"},
    "recomputed": {"engine": "recomputed", "rows": 4},
}
OFTEN = ("batches", "pool", "padded")
OTHER_FAMILIES = ("smolvlm", "qwen2_5_vl", "qwen3_5", "llava", "internvl", "lfm2_vl")
TOKENS = 7
SAMPLES = 2


def before_a_release(name):
    """A parameter of tests that are not run on each change."""
    return pytest.param(name, marks=pytest.mark.release)


class Setting:
    """A tiny model with its prompts; `whole` is transformers' own."""

    def __init__(self, folder, family):
        self.vlm = str(save_tiny_vlm(folder / "vlm", family))
        write_pictures(folder)
        self.patch = pytest.MonkeyPatch()
        if family == "lfm2_vl":
            self.patch.setattr(processors, "load_processor", by_hand)
        prompts = prepared_prompts(self.vlm, write_rows(folder, ROWS))
        self.prompts, self.config, self.tokenizer = prompts
        self.lm = load_causal_lm(self.vlm, "fp32", None, changes_to_train(self.config)).eval()
        self.greedy = {}  # the tokens after each prompt
        self.whole = AutoModelForImageTextToText.from_pretrained(self.vlm).eval()

    def source(self):
        """A source that has kept nothing yet."""
        return source_of(self.config, self.vlm, self.tokenizer, torch.device("cpu"))

    def generate(self, source, how, partner=None, stop_ids=()):
        """Greedy responses to all prompts."""
        batch = prompt_batch(self.prompts, range(len(ROWS)), 0, source)
        stopping = StoppingCriteria(TOKENS, stop_ids=stop_ids, banned_ids=source.banned_ids)
        config = GenerationConfig(SamplingParameters(top_k=1), stopping, SAMPLES, **how)
        seeds = torch.arange(SAMPLES * len(ROWS))
        request = RolloutRequest(batch, seeds, given=source.for_prompts(batch, self.lm))
        return generate(self.lm, request, config, partner=partner)

    def skip_unless_fit(self, how, restarts=False):
        """Gemma 3 has padded rows alone. Layers with a state have no pool, whose sequences start
        again."""
        is_continuous = how.get("engine", "continuous") == "continuous"
        if is_continuous and self.source().reason_to_pad is not None:
            pytest.skip("it runs padded rows alone")
        if restarts and has_states(self.lm.config):
            pytest.skip("it has no pool")

    def alone(self, index, response=()):
        """What transformers takes of a prompt and a response."""
        record = dict(self.prompts[index]) | {"answers": [list(response)]}
        return alone_inputs(record, self.source()._processor)

    def expected(self, index, banned_ids):
        """The tokens of transformers' `generate` after a prompt. InternVL's `generate` draws other
        tokens than its passes of whole rows: then those of such passes."""
        if index in self.greedy:
            return self.greedy[index]
        if self.whole.config.model_type == "internvl":
            response = []
            for _ in range(TOKENS):
                logits = self.whole(**self.alone(index, response)).logits[0, -1]
                logits[list(banned_ids)] = -torch.inf
                response.append(int(logits.argmax()))
            self.greedy[index] = response
            return response
        inputs = self.alone(index)
        ids = self.whole.generate(
            **inputs,
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(banned_ids),
        )
        self.greedy[index] = ids[0, inputs["input_ids"].shape[1] :].tolist()
        return self.greedy[index]

    def assert_log_probs(self, rollout, banned_ids):
        """The recorded log-probs are those of each row alone, where banned tokens have none."""
        assert rollout.rollout_logprobs[rollout.response_mask].abs().min() > 0
        for row, length in enumerate(rollout.response_lengths.tolist()):
            response = rollout.response_ids[row, :length].tolist()
            inputs = self.alone(row // SAMPLES, response)
            chosen = rollout.response_mask[row, :length]
            logprobs = plain_logprobs(self.whole, inputs, banned_ids)[-length:][chosen]
            recorded = rollout.rollout_logprobs[row, :length][chosen]
            torch.testing.assert_close(recorded, logprobs, atol=1e-5, rtol=1e-5)


@pytest.fixture(
    scope="module",
    params=["qwen3_vl", "gemma3", *(before_a_release(name) for name in OTHER_FAMILIES)],
)
def setting(request, tmp_path_factory):
    built = Setting(tmp_path_factory.mktemp(request.param), request.param)
    yield built
    built.patch.undo()


@pytest.mark.parametrize(
    "engine", [*OFTEN, *(before_a_release(name) for name in ENGINES if name not in OFTEN)]
)
def test_an_engine_gives_the_tokens_of_generate(setting, engine):
    setting.skip_unless_fit(ENGINES[engine])
    source = setting.source()
    rollout = setting.generate(source, ENGINES[engine])
    for row, ids in enumerate(rollout.response_ids.tolist()):
        assert ids == setting.expected(row // SAMPLES, source.banned_ids)
    setting.assert_log_probs(rollout, source.banned_ids)
    # once for the images of a prompt, whose responses share what the tower gives
    assert source.tower_calls == 4


def from_first_image(record):
    """A prompt without the tokens before its first image."""
    spans = record["image_spans"] or [[0, 0]]
    start = spans[0][0]
    moved = [[first - start, end - start] for first, end in record["image_spans"] or ()]
    return record | {"prompt_ids": record["prompt_ids"][start:], "image_spans": moved}


@pytest.mark.parametrize("engine", ["padded", before_a_release("batches")])
def test_prompts_may_begin_with_an_image(setting, engine):
    """Padding on the left repeats the first token."""
    setting.skip_unless_fit(ENGINES[engine])
    cut = copy(setting)
    cut.prompts = setting.prompts.map(from_first_image)
    cut.greedy = {}
    assert cut.prompts[1]["image_spans"][0][0] == 0
    source = cut.source()
    rollout = cut.generate(source, ENGINES[engine])
    for row, ids in enumerate(rollout.response_ids.tolist()):
        assert ids == cut.expected(row // SAMPLES, source.banned_ids)
    cut.assert_log_probs(rollout, source.banned_ids)


def test_a_likely_placeholder_is_never_drawn(setting):
    """The plain model would draw it."""
    engine = "continuous"
    if setting.source().reason_to_pad is not None:
        engine = "padded"
    source = setting.source()
    head = setting.lm.get_output_embeddings().weight
    with torch.no_grad():
        before = head.clone()
        head[list(source.banned_ids)] = 3 * head[setting.expected(1, source.banned_ids)[0]]
        rollout = setting.generate(source, {"engine": engine})
        free = setting.generate(source, {"engine": engine, "static": True})
        head.copy_(before)
    assert not torch.isin(rollout.response_ids, torch.tensor(source.banned_ids)).any()
    assert torch.equal(rollout.response_ids, free.response_ids)


@pytest.mark.parametrize("fault", ["few slots", before_a_release("no memory")])
def test_sequences_that_start_again_see_their_images(setting, fault, monkeypatch):
    setting.skip_unless_fit({}, restarts=True)
    source = setting.source()
    if fault == "few slots":
        # as if they were used up after two tokens
        monkeypatch.setattr(continuous_batching, "POLL", 2)
        stop = RunningPool.stop_for_slots
        polls = []

        def stopping(pool):
            polls.append(pool)
            stopped = stop(pool)
            if len(polls) == 2:
                stopped += pool.rows.sequences[:3].tolist()
                for sequence in stopped:
                    pool.drop(sequence)
            return stopped

        monkeypatch.setattr(RunningPool, "stop_for_slots", stopping)
    else:
        forward = ContinuousBatching._forward
        calls = []

        def failing(*arguments, **further):
            calls.append(arguments)
            if len(calls) == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(*arguments, **further)

        monkeypatch.setattr(ContinuousBatching, "_forward", failing)
    returned = []
    return_to_queue = ContinuousBatching._return_to_queue

    def noting(engine, sequences):
        returned.append(sequences)
        return_to_queue(engine, sequences)

    monkeypatch.setattr(ContinuousBatching, "_return_to_queue", noting)
    rollout = setting.generate(source, {"static": True})
    assert returned
    for row, ids in enumerate(rollout.response_ids.tolist()):
        assert ids == setting.expected(row // SAMPLES, source.banned_ids)
    setting.assert_log_probs(rollout, source.banned_ids)


@pytest.mark.parametrize("engine", ["continuous", before_a_release("padded")])
def test_text_may_be_observed_after_images(setting, engine):
    """Each token ends a turn, and is then observed once to three times; by padded batches turn by
    turn."""
    setting.skip_unless_fit({"engine": engine})
    source = setting.source()
    ends = tuple(range(setting.lm.config.get_text_config().vocab_size))
    rollout = setting.generate(source, {"engine": engine}, Echo(), ends)
    assert not rollout.response_mask[rollout.real_mask].all()
    setting.assert_log_probs(rollout, source.banned_ids)


def test_the_self_check_tries_images(setting, monkeypatch):
    """It accepts the engine, and with the images of its prompts forgotten in generation it accepts
    none but that of whole rows."""
    setting.skip_unless_fit({})
    source = setting.source()
    stopping = StoppingCriteria(4, banned_ids=source.banned_ids)
    config = GenerationConfig(SamplingParameters(), stopping)
    assert choose_engine(setting.lm, config, source=source) == config
    prefill = ContinuousBatching._forward

    def forgetful(engine, ids, positions, cache, given=None, **mask):
        return prefill(engine, ids, positions, cache, None, **mask)

    monkeypatch.setattr(ContinuousBatching, "_forward", forgetful)
    chosen = choose_engine(setting.lm, config, source=source)
    assert chosen == replace(config, engine="padded")


def test_gemma_generates_in_padded_batches(setting, caplog):
    """For a reason in the log. The same engine is chosen where no reason is named: the prompts of
    the check have images."""
    source = setting.source()
    if source.reason_to_pad is None:
        pytest.skip("of another family")
    stopping = StoppingCriteria(4, banned_ids=source.banned_ids)
    config = GenerationConfig(SamplingParameters(), stopping)
    chosen = choose_engine(setting.lm, config, source=source)
    assert chosen == replace(config, engine="padded")
    assert f"does not fit {type(setting.lm).__name__} ({source.reason_to_pad}" in caplog.text
    source.reason_to_pad = None
    assert choose_engine(setting.lm, config, source=source) == chosen
