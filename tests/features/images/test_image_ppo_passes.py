"""The passes of step 3 over rows with images: log-probs, values, scores, and the gradients of the
losses of actor and critic are those of transformers' own pass over each row alone, from ids and
pixels, with the placeholders at -inf."""

from dataclasses import replace
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
from features.images.lfm2_by_hand import by_hand
from one_rank import one_rank  # noqa: F401
from tiny_experience import record
from tiny_vlms import save_tiny_vlm
from transformers import AutoModelForImageTextToText

from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.features.images import processors
from dschat_ppo.features.images.columns import ROW_OF_IMAGES
from dschat_ppo.features.images.tower import ImageTower
from dschat_ppo.models.loading import changes_to_train, load_causal_lm, load_sequence_classifier
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.given_metrics import given_metrics
from dschat_ppo.ppo.mini_dataset import MiniDataset
from dschat_ppo.ppo.rollouts import prompt_batch
from dschat_ppo.ppo.score import ForwardPasses
from dschat_ppo.ppo.token_losses import ActorLoss, critic_loss
from dschat_ppo.rewards.learned_reward import ModelReward
from dschat_ppo.types import Experience, ForbiddenTokens, Rollout, repeat_rows

pytestmark = pytest.mark.usefixtures("one_rank")

QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": "a.png", "prompt": QUESTION},
    {"image": "d.png", "prompt": QUESTION},  # the ids of the first row
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?"},
    {"image": None, "prompt": "what is red ?"},
]
RESPONSES = [[40, 41, 42], [43], [40, 41, 42], [44, 45], [46, 47], [48, 49, 50], [51], [52, 53]]
WAYS = {
    "padded": {"packed": False, "shares": False, "reads_few": False},
    "packed": {"packed": True, "shares": False, "reads_few": True},
    "shared": {"packed": True, "shares": True, "reads_few": True},
}
TEMPERATURE = 0.7
MANY_TOKENS = 10**6


def experience_of(batch):
    """Two responses to each prompt, with random advantages and returns."""
    prompts = repeat_rows(batch, 2)
    width = max(map(len, RESPONSES))
    ids = torch.tensor([response + [0] * (width - len(response)) for response in RESPONSES])
    lengths = torch.tensor([len(response) for response in RESPONSES])
    mask = torch.arange(width) < lengths.unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    numbers = {
        name: torch.where(mask, torch.randn(mask.shape, generator=generator), 0.0)
        for name in ("advantages", "returns", "values")
    }
    return record(
        Experience,
        mask,
        prompt_ids=prompts.prompt_ids,
        prompt_mask=prompts.prompt_mask,
        response_ids=ids,
        groups=torch.arange(8) // 2,
        old_logprobs=None,
        row_indices=torch.arange(8),
        loss_weights=mask.float(),
        **prompts.extra,
        **numbers,
    )


# families, and whether the tower trains
OFTEN = [(name, trains) for name in ("smolvlm", "qwen3_vl") for trains in (False, True)]
OFTEN.append(("gemma3", False))
BEFORE_A_RELEASE = [
    pytest.param((name, trains), marks=pytest.mark.release)
    for name in ("qwen3_5", "llava", "internvl", "gemma3")
    for trains in (False, True)
    if (name, trains) not in OFTEN
]
BEFORE_A_RELEASE.append(pytest.param(("lfm2_vl", False), marks=pytest.mark.release))


@pytest.fixture(scope="module", params=[*OFTEN, *BEFORE_A_RELEASE])
def step3(request, tmp_path_factory):
    """A policy and a critic, without their towers unless these train, rows of their step,
    transformers' whole model, and what it takes of each row."""
    family, trains = request.param
    folder = tmp_path_factory.mktemp(family)
    vlm = save_tiny_vlm(folder / "vlm", family)
    write_pictures(folder)
    further = ["--train_vision_tower", str(trains), "--train_projector", str(trains)]
    with pytest.MonkeyPatch.context() as patch:
        if family == "lfm2_vl":
            patch.setattr(processors, "load_processor", by_hand)
        prompts, config, tokenizer = prepared_prompts(vlm, write_rows(folder, ROWS), *further)
        source = source_of(config, str(vlm), tokenizer, torch.device("cpu"))
    changes = changes_to_train(config, "actor_")
    policy = PolicyModel(load_causal_lm(str(vlm), "fp32", None, changes)).eval()
    torch.manual_seed(1)
    critic = ScalarModel(load_sequence_classifier(str(vlm), "fp32", None, True, changes)).eval()
    torch.nn.init.normal_(critic.classifier.score.weight, std=0.2)
    policy.given_source = critic.given_source = source
    rows = experience_of(prompt_batch(prompts, range(4), 0, source))
    alone = []
    for index, response in enumerate(RESPONSES):
        token_row = dict(prompts[index // 2]) | {"answers": [response]}
        alone.append(alone_inputs(token_row, source._processor))
    whole = AutoModelForImageTextToText.from_pretrained(vlm).eval()
    banned = ForbiddenTokens((), 0, source.banned_ids)
    return SimpleNamespace(
        policy=policy, critic=critic, rows=rows, whole=whole, alone=alone, banned=banned
    )


def logprobs_alone(step3):
    """The log-probs of each response, row after row: banned ids are at -inf."""
    of_rows = []
    for inputs, response in zip(step3.alone, RESPONSES, strict=True):
        logits = step3.whole(**inputs).logits[0, :-1] / TEMPERATURE
        logits = logits.index_fill(1, torch.tensor(step3.banned.banned), -torch.inf)
        of_tokens = logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        of_rows.append(of_tokens[-len(response) :])
    return torch.cat(of_rows)


def values_alone(step3, head):
    """The value before each response token, row after row."""
    of_rows = []
    for inputs, response in zip(step3.alone, RESPONSES, strict=True):
        states = step3.whole.model(**inputs).last_hidden_state[0]
        of_rows.append((states @ head[0])[-len(response) - 1 : -1])
    return torch.cat(of_rows)


def set_way(step3, way):
    """Run rows in one of `WAYS`."""
    if WAYS[way]["packed"] and step3.policy.given_source.reason_to_pad is not None:
        pytest.skip("it runs padded rows alone")
    for model in (step3.policy, step3.critic):
        model.layout = replace(model.layout, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [MANY_TOKENS, 60])
def test_scoring_gives_the_numbers_of_each_row_alone(step3, way, budget):
    set_way(step3, way)
    passes = ForwardPasses(
        actor=step3.policy,
        reference=step3.policy,
        critic=step3.critic,
        temperature=TEMPERATURE,
        micro_batch_tokens=budget,
        old_logprobs="recompute",
        kl_estimator="k1",
        forbidden_tokens=step3.banned,
    )
    columns = {name: getattr(step3.rows, name) for name in Rollout.__dataclass_fields__}
    scored = passes(Rollout(**columns), step3.rows.groups)
    mask = step3.rows.response_mask
    with torch.no_grad():
        expected = logprobs_alone(step3)
        values = values_alone(step3, step3.critic.classifier.score.weight)
    torch.testing.assert_close(scored.old_logprobs[mask], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scored.ref_logprobs[mask], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scored.values[mask], values, atol=2e-5, rtol=1e-5)
    assert scored.extra[ROW_OF_IMAGES].tolist() == step3.rows.extra[ROW_OF_IMAGES].tolist()
    # of two rows with equal ids the pictures differ
    assert abs(float(scored.old_logprobs[0, 0] - scored.old_logprobs[2, 0])) > 1e-4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [MANY_TOKENS, 60])
def test_gradients_of_an_update_are_those_of_each_row_alone(step3, way, budget):
    """Of the policy gradient at ratio 1, and of half the squared error of values, over all tokens
    of the optimizer step."""
    set_way(step3, way)
    rows, mask = step3.rows, step3.rows.response_mask
    [minibatch] = MiniDataset(8, budget, 3, 0, way == "shared").minibatches(rows, 1, 1)
    flags = AlgorithmFlags(value_clip_eps=0.0)
    actor_loss = ActorLoss(step3.policy, flags, TEMPERATURE, step3.banned)
    step3.policy.zero_grad()
    step3.critic.zero_grad()
    for micro_batch in minibatch.micro_batches:
        actor_loss(micro_batch, minibatch, 0.0, MetricSums()).backward()
        critic_loss(step3.critic, micro_batch, minibatch, flags, MetricSums()).backward()

    step3.whole.zero_grad()
    logprobs = logprobs_alone(step3)
    ratio = (logprobs - logprobs.detach()).exp()
    (-(rows.advantages[mask] * ratio).sum() / mask.sum()).backward()
    assert_same_gradients(step3.policy.lm, step3.whole)

    step3.whole.zero_grad()
    head = step3.critic.classifier.score.weight.detach().clone().requires_grad_()
    values = values_alone(step3, head)
    (0.5 * ((values - rows.returns[mask]) ** 2).sum() / mask.sum()).backward()
    torch.testing.assert_close(
        step3.critic.classifier.score.weight.grad, head.grad, atol=1e-5, rtol=1e-4
    )
    assert_same_gradients(step3.critic.classifier.model, step3.whole.model)


def assert_same_gradients(trained, whole):
    """Those of Qwen3.5's states, sums over chunks of tokens, relative to their norm."""
    gradients = {name: weight.grad for name, weight in whole.named_parameters()}
    for name, weight in trained.named_parameters():
        if weight.grad is None:  # of a part of a tower that no pass runs
            assert gradients[name] is None, name
        elif whole.config.model_type == "qwen3_5":
            error = (weight.grad - gradients[name]).norm() / gradients[name].norm()
            assert error < 3e-4, name
        else:
            torch.testing.assert_close(weight.grad, gradients[name], atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_learned_reward_scores_as_each_row_alone(step3, way):
    set_way(step3, way)
    scores = ModelReward(step3.critic, batch_tokens=60)(None, step3.rows)
    head = step3.critic.classifier.score.weight
    with torch.no_grad():
        states = [step3.whole.model(**inputs).last_hidden_state[0, -1] for inputs in step3.alone]
        torch.testing.assert_close(scores, torch.stack(states) @ head[0], atol=1e-5, rtol=1e-5)


def test_metrics_of_the_images_of_a_step(step3):
    """The share of tokens by the ids of each row alone; what a new store was asked for twice."""
    source = step3.policy.given_source.with_tower(step3.policy.given_source.tower)
    rows = step3.rows
    assert source.for_rollout(rows) is not None
    calls = source.tower_calls
    source.for_rollout(rows)
    metrics = given_metrics(source, rows)
    assert source.tower_calls == calls
    # a tower in training runs in the passes of the model
    assert (calls > 0) is isinstance(source.tower, ImageTower)
    assert metrics["memory/images/kept_share"] == 0.5
    assert metrics["time/images/tower"] > 0
    if step3.whole.config.model_type == "qwen3_vl":
        ids = torch.cat([inputs["input_ids"][0] for inputs in step3.alone])
        share = (ids == step3.whole.config.image_token_id).float().mean()
        assert metrics["images/token_share"] == pytest.approx(float(share))
    assert 0 < metrics["images/token_share"] < 1
    assert given_metrics(source, rows).keys() == {"images/token_share", "time/images/tower"}
    assert given_metrics(None, rows) == {}
