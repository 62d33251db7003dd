"""Reward models that see images: scores and gradients of pairs are those of transformers' own body
over each row alone, from ids and pixels, with a linear head by hand."""

import io
import re
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from features.images.image_runs import alone_inputs, flags, source_of, write_pictures, write_rows
from features.images.image_runs import prepared_pairs as prepared
from one_rank import one_rank  # noqa: F401
from safetensors.torch import load_file
from tiny_vlms import save_tiny_vlm
from transformers import AutoModel

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.checks import check_trained_model
from dschat_ppo.features.images.lm_kinds import OF_IMAGES
from dschat_ppo.models.adapters.settings import AdapterSettings
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import (
    ModelChanges,
    changes_to_train,
    check_causal_lm,
    check_sequence_classifier,
    load_config,
    load_sequence_classifier,
)
from dschat_ppo.models.saving import SavedForm, parts_beside, save_model
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.planner.model_parts import sizes_of
from dschat_ppo.rewards.learned_reward import scores_in_batches
from dschat_ppo.run.model_card import model_card
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.tools.serve_reward import text_scorer

pytestmark = pytest.mark.usefixtures("one_rank")

QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": "a.png", "prompt": QUESTION, "chosen": "red", "rejected": "blue circle"},
    {"image": "d.png", "prompt": QUESTION, "chosen": "red", "rejected": "no"},  # ids as above
    {"image": ["b.png", "c.png"], "prompt": QUESTION, "chosen": "green", "rejected": "no"},
    {"image": None, "prompt": "what is big ?", "chosen": "this", "rejected": "a red square"},
]
WAYS = {
    "padded": {"packed": False, "shares": False, "reads_few": False},
    "packed": {"packed": True, "shares": False, "reads_few": True},
    "shared": {"packed": True, "shares": True, "reads_few": True},
}
CPU = torch.device("cpu")
KINDS = ModelChanges(kinds=(OF_IMAGES,))


@pytest.fixture(scope="module", params=["smolvlm", "qwen3_vl"])
def family(request, tmp_path_factory):
    """(folder of the model, a reward model without its tower, its objective, the rows, the whole
    body of transformers, the inputs of each row: chosen, then rejected)."""
    folder = tmp_path_factory.mktemp(request.param)
    vlm = save_tiny_vlm(folder / "vlm", request.param)
    write_pictures(folder)
    rows, config, tokenizer = prepared(vlm, write_rows(folder, ROWS))
    torch.manual_seed(1)
    changes = changes_to_train(config)
    model = ScalarModel(load_sequence_classifier(str(vlm), "fp32", None, True, changes))
    torch.nn.init.normal_(model.classifier.score.weight)
    source = source_of(config, str(vlm), tokenizer, CPU)
    model.given_source = source
    objective = reward_objective(tokenizer.pad_token_id, CPU, config, given_for=source.for_rows)
    alone = [alone_inputs(row, source._processor, side) for side in (0, 1) for row in rows]
    body = AutoModel.from_pretrained(vlm).eval()
    return SimpleNamespace(
        folder=vlm,
        model=model.eval(),
        objective=objective,
        rows=rows,
        body=body,
        alone=alone,
        config=config,
        tokenizer=tokenizer,
    )


def rows_with_equal_ids(family, batch):
    """(2,): the chosen answers of the two prompts with one picture of the same size."""
    red = family.tokenizer.convert_tokens_to_ids("red")
    [rows] = (batch.input_ids[:4] == red).any(dim=1).nonzero(as_tuple=True)
    return rows


def scores_alone(body, head, alone):
    """(2B,): the score of each row by hand, at its last token."""
    states = [body(**inputs).last_hidden_state[0, -1] for inputs in alone]
    return torch.stack(states) @ head[0]


def bradley_terry(scores):
    """The mean loss of pairs, by hand: log(1 + exp(rejected - chosen))."""
    chosen, rejected = scores.chunk(2)
    return (1 + (rejected - chosen).exp()).log().mean()


@pytest.mark.parametrize("way", WAYS)
def test_scores_and_gradients_are_those_of_each_row_alone(family, way):
    model, body = family.model, family.body
    model.layout = replace(model.layout, **WAYS[way])
    batch = family.objective.collate(family.rows, [0, 1, 2, 3])
    scores = model(batch.input_ids, batch.lengths, last_only=True, given=batch.given)
    head = model.classifier.score.weight.detach().clone().requires_grad_()
    expected = scores_alone(body, head, family.alone)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    # of two rows with equal ids the pictures differ
    first, second = rows_with_equal_ids(family, batch)
    assert torch.equal(batch.input_ids[first], batch.input_ids[second])
    assert abs(float(scores[first] - scores[second])) > 1e-3
    given_by_row = family.objective.score(model, family.rows, [0, 1, 2, 3])
    torch.testing.assert_close(given_by_row, expected.view(2, -1).T, atol=1e-5, rtol=1e-5)

    model.zero_grad()
    sums = MetricSums()
    loss = family.objective.loss(model, batch, torch.tensor(4), sums)
    loss.backward()
    body.zero_grad()
    expected_loss = bradley_terry(expected)
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.classifier.score.weight.grad, head.grad, atol=1e-5, rtol=1e-4)
    gradients = {f"model.{name}": weight.grad for name, weight in body.named_parameters()}
    trained = dict(model.classifier.named_parameters())
    del trained["score.weight"]
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4, msg=name)


def test_values_of_every_token_are_those_of_each_row_alone(family):
    """As a critic's: also within the prompt, after its image."""
    batch = family.objective.collate(family.rows, [0, 1, 2, 3])
    with torch.no_grad():
        values = family.model(batch.input_ids, batch.lengths, given=batch.given)
        for row, inputs in enumerate(family.alone):
            states = family.body(**inputs).last_hidden_state[0]
            expected = states @ family.model.classifier.score.weight[0]
            torch.testing.assert_close(values[row, : len(expected)], expected, atol=2e-5, rtol=1e-5)


def test_a_probe_with_an_image_selects_the_ways(family):
    seen = []
    hook = family.model.backbone.register_forward_pre_hook(
        lambda backbone, args, kwargs: seen.append(kwargs.get("mm_encoder_outputs")),
        with_kwargs=True,
    )
    assert select_kernels(family.model) is None
    hook.remove()
    assert family.model.layout.packed and family.model.layout.shares
    assert seen and all(seen)


def test_scores_in_several_passes_know_pictures_apart(family):
    """Rows in passes of a few tokens, in an order of their own, with shared prompts."""
    model = family.model
    select_kernels(model)
    batch = family.objective.collate(family.rows, [0, 1, 2, 3])
    for most_tokens in (1, 40, 10_000):
        scores = scores_in_batches(
            model, batch.input_ids, batch.lengths, most_tokens, given=batch.given
        )
        with torch.no_grad():
            head = model.classifier.score.weight
            expected = scores_alone(family.body, head, family.alone)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("same_picture", "passes"), [(True, 1), (False, 2)])
def test_a_pass_counts_the_prompts_of_two_pictures_twice(family, same_picture, passes):
    """Of two rows with equal ids, with room for one of them and a few tokens more."""
    model = family.model
    select_kernels(model)
    batch = family.objective.collate(family.rows, [0, 1, 2, 3])
    pair = rows_with_equal_ids(family, batch)
    if same_picture:
        pair = torch.stack([pair[0], pair[0]])
    width = int(batch.lengths[pair[0]])
    given = batch.given.of_rows(pair, width)
    calls = []
    hook = model.backbone.register_forward_hook(lambda *_: calls.append(1))
    scores_in_batches(
        model, batch.input_ids[pair, :width], batch.lengths[pair], width + 8, given=given
    )
    hook.remove()
    assert len(calls) == passes


@pytest.mark.parametrize("form", ["whole", "adapter"])
def test_it_is_saved_and_loaded_again(family, tmp_path, form):
    """The saved folder gives the scores again: by transformers' body with the head by hand, and by
    this project, as step 3 loads a critic."""
    config = family.config
    adapter = None
    if form == "adapter":
        adapter = AdapterSettings(4, 8.0, 0.0, None, False, False, freeze_base=True)
    changes = replace(KINDS, adapter=adapter)
    classifier = load_sequence_classifier(str(family.folder), "fp32", None, True, changes)
    torch.manual_seed(3)
    for name, parameter in classifier.named_parameters():
        if "lora" in name or name.startswith("score"):
            torch.nn.init.normal_(parameter, std=0.1)
        assert "vision" not in name and "visual" not in name and "connector" not in name
    model = ScalarModel(classifier).eval()
    batch = family.objective.collate(family.rows, [0, 1, 2, 3])
    again = tmp_path / "again"
    saved_as = SavedForm(merge=form == "whole", beside=parts_beside(config))
    save_model(SimpleNamespace(module=model), family.tokenizer, again, form=saved_as)
    assert check_sequence_classifier(str(again), False, KINDS) is False
    loaded = ScalarModel(load_sequence_classifier(str(again), "fp32", None, False, KINDS)).eval()
    with torch.no_grad():
        scores = model(batch.input_ids, batch.lengths, last_only=True, given=batch.given)
        of_loaded = loaded(batch.input_ids, batch.lengths, last_only=True, given=batch.given)
    torch.testing.assert_close(of_loaded, scores, atol=1e-5, rtol=1e-5)
    if form == "adapter":
        return
    weights = load_file(again / "model.safetensors")
    before = load_file(family.folder / "model.safetensors")
    assert weights.keys() ^ before.keys() == {"score.weight", "lm_head.weight"}
    assert all(torch.equal(weights[name], before[name]) for name in weights.keys() & before.keys())
    source = source_of(config, str(again), family.tokenizer, CPU)  # a later run starts from it
    given = source.for_rows(list(family.rows) * 2, batch.input_ids)
    assert torch.equal(given.features.states, batch.given.features.states)
    body = AutoModel.from_pretrained(again).eval()
    with torch.no_grad():
        expected = scores_alone(body, weights["score.weight"], family.alone)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="is a reward model or critic"):
        check_causal_lm(str(again), KINDS)
    with pytest.raises(UserError, match="has no trained scalar head"):
        check_sequence_classifier(str(family.folder), False, KINDS)


def test_the_code_of_its_readme_gives_its_score(tmp_path):
    """In the family whose `AutoProcessor` needs no torchvision."""
    vlm = save_tiny_vlm(tmp_path / "vlm", "idefics3")
    write_pictures(tmp_path)
    row = {"image": "a.png", "prompt": "What is this?", "chosen": "A cat.", "rejected": "no"}
    rows, config, tokenizer = prepared(vlm, write_rows(tmp_path, [row]))
    model = ScalarModel(load_sequence_classifier(str(vlm), "fp32", None, True, KINDS)).eval()
    folder = tmp_path / "saved"
    card = partial(model_card, config, "model")
    form = SavedForm(card=card, beside=parts_beside(config))
    save_model(SimpleNamespace(module=model), tokenizer, folder, form=form)
    source = source_of(config, str(vlm), tokenizer, CPU)
    objective = reward_objective(tokenizer.pad_token_id, CPU, config, given_for=source.for_rows)
    with torch.no_grad():
        expected = objective.score(model, rows, [0])[0, 0].item()
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    code = code.replace('folder = "."', f"folder = {str(folder)!r}")
    code = code.replace('"picture.png"', repr(str(tmp_path / "a.png")))
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    assert float(printed.getvalue()) == pytest.approx(expected, abs=1e-5)


def test_what_is_counted_is_the_decoder_and_a_head(family):
    model_config = load_config(str(family.folder), "model")
    counted = sizes_of(model_config, "fp32", True, KINDS)
    expected = sum(parameter.numel() for parameter in family.model.parameters())
    assert counted.total == expected
    assert expected < sum(parameter.numel() for parameter in family.body.parameters())


def test_where_models_that_see_images_cannot_be_used_is_said(family):
    vlm = str(family.folder)
    with pytest.raises(UserError, match="sees images, but a model of text is needed here"):
        check_sequence_classifier(vlm, False)  # as step 3 checks a critic
    words = flags(family.folder, family.folder.parent / "rows.jsonl", "--objective", "process")
    config = parse("reward", words)
    with pytest.raises(UserError, match="do not go with --objective process yet; omit it"):
        check_trained_model(config, load_config(vlm, "model"), vlm)


def test_a_reward_model_of_text_does_not_train_blind(assets, tmp_path):
    """Pairs with pictures end its run; nobody finds out later that it has seen none."""
    write_pictures(tmp_path)
    data = write_rows(tmp_path, ROWS)
    with pytest.raises(UserError, match="'image' holds .*, because the model does not see it"):
        prepared(assets / "lm", data)


def test_the_reward_server_takes_texts_alone(family):
    with pytest.raises(UserError, match="sees images, but requests to this server are texts; let"):
        text_scorer(str(family.folder), "fp32", 100)
