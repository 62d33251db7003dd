"""Models of further families: pairs, reward models, the saved folder, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from features.images.image_runs import (
    alone_inputs,
    flags,
    prepared,
    prepared_pairs,
    source_of,
    write_pictures,
    write_rows,
)
from one_rank import one_rank  # noqa: F401
from PIL import Image
from safetensors.torch import load_file
from tiny_vlms import plain_logprobs, save_tiny_vlm
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
)

from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.errors import UserError
from dschat_ppo.features.images import processors
from dschat_ppo.features.images.step_data import read_by_model
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import (
    changes_to_train,
    check_causal_lm,
    load_causal_lm,
    load_config,
    load_sequence_classifier,
)
from dschat_ppo.models.saving import SavedForm, parts_beside, save_model
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.objective import UsedRows
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.supervised.train_preference import OBJECTIVES

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
QUESTION = "what is the colour of this picture ?"
PAIRS = [
    {"image": "a.png", "prompt": QUESTION, "chosen": "red", "rejected": "blue circle"},
    {"image": ["b.png", "c.png"], "prompt": QUESTION, "chosen": "green", "rejected": "no"},
    {"image": None, "prompt": "what is big ?", "chosen": "this", "rejected": "a red square"},
]
# families whose processor transformers loads without torchvision
WITH_PROCESSOR = ("llava", "gemma3")


BEFORE_A_RELEASE = [
    pytest.param(name, marks=pytest.mark.release) for name in ("qwen3_5", "llava", "internvl")
]


@pytest.fixture(scope="module", params=[*BEFORE_A_RELEASE, "gemma3"])
def family(request, tmp_path_factory):
    """A model with pairs, as step 2 reads them."""
    folder = tmp_path_factory.mktemp(request.param)
    vlm = save_tiny_vlm(folder / "vlm", request.param)
    write_pictures(folder)
    data = write_rows(folder, PAIRS)
    rows, config, tokenizer = prepared_pairs(vlm, data, "--objective", "dpo")
    source = source_of(config, str(vlm), tokenizer, CPU)
    alone = [alone_inputs(row, source._processor, side) for side in (0, 1) for row in rows]
    return SimpleNamespace(
        name=request.param,
        vlm=vlm,
        data=data,
        rows=rows,
        config=config,
        tokenizer=tokenizer,
        source=source,
        alone=alone,
    )


def test_log_probs_of_pairs_are_those_of_each_row_alone(family):
    policy = PolicyModel(
        load_causal_lm(str(family.vlm), "fp32", None, changes_to_train(family.config))
    )
    policy.given_source = family.source
    select_kernels(policy)
    built = OBJECTIVES["dpo"].build(0, CPU, family.config, given_for=family.source.for_rows)
    token_rows = TokenRows(family.rows, None, ("rows",))
    rows = built.prepare(policy, token_rows, UsedRows()).train
    sums = MetricSums()
    with torch.no_grad():
        built.loss(policy, built.collate(rows, [0, 1, 2]), torch.tensor(3), sums)
    metrics = sums.reduce()
    whole = AutoModelForImageTextToText.from_pretrained(family.vlm).eval()
    answers = [row["answers"][side] for side in (0, 1) for row in family.rows]
    logprobs = [
        plain_logprobs(whole, inputs)[-len(answer) :].sum()
        for inputs, answer in zip(family.alone, answers, strict=True)
    ]
    chosen, rejected = torch.stack(logprobs).chunk(2)
    assert metrics["chosen_logprob"] == pytest.approx(chosen.mean().item(), abs=1e-4)
    assert metrics["rejected_logprob"] == pytest.approx(rejected.mean().item(), abs=1e-4)
    assert metrics["loss"] == pytest.approx(0.6931472, abs=1e-5)  # it is its own reference


def test_scores_of_a_reward_model_are_those_of_each_row_alone(family):
    torch.manual_seed(1)
    changes = changes_to_train(family.config)
    classifier = load_sequence_classifier(str(family.vlm), "fp32", None, True, changes)
    torch.nn.init.normal_(classifier.score.weight)
    names = [name for name, _ in classifier.named_parameters()]
    assert not any("vision" in name or "visual" in name for name in names)
    model = ScalarModel(classifier).eval()
    model.given_source = family.source
    select_kernels(model)
    objective = reward_objective(0, CPU, family.config, given_for=family.source.for_rows)
    with torch.no_grad():
        scores = objective.score(model, family.rows, [0, 1, 2])
        body = AutoModel.from_pretrained(family.vlm).eval()
        states = [body(**inputs).last_hidden_state[0, -1] for inputs in family.alone]
        expected = torch.stack(states) @ classifier.score.weight[0]
    torch.testing.assert_close(scores, expected.view(2, -1).T, atol=1e-5, rtol=1e-5)


def test_the_saved_model_is_the_whole_one_with_another_decoder(family, tmp_path):
    model = load_causal_lm(str(family.vlm), "fp32", None, changes_to_train(family.config))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    policy = PolicyModel(model).eval()
    form = SavedForm(beside=parts_beside(family.config))
    save_model(SimpleNamespace(module=policy), family.tokenizer, tmp_path, form=form)
    before = load_file(family.vlm / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    is_of_decoder = {name: "language_model" in name or "lm_head" in name for name in before}
    for name in before:
        assert torch.equal(before[name], after[name]) != is_of_decoder[name], name

    whole = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with_one = [len(row["images"]) for row in family.rows].index(1)
    row = family.rows[with_one]
    inputs = family.alone[with_one]
    ids = inputs["input_ids"]
    given = family.source.for_rows([row], ids)
    targets = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        logprobs = policy(ids, targets, given=given)[0]
    expected = plain_logprobs(whole, inputs)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    if family.name in WITH_PROCESSOR:
        processor = AutoProcessor.from_pretrained(tmp_path)
        parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": parts}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        with Image.open(family.data.parent / "a.png") as image:
            encoded = processor(text=text, images=[image], return_tensors="pt")
        assert encoded["input_ids"][0].tolist() == row["prompt_ids"]
        torch.testing.assert_close(encoded["pixel_values"], inputs["pixel_values"])


# What is refused, and what needs a flag


def words_without_flag(vlm, data, *further):
    words = flags(vlm, data, *further)
    place = words.index("--with_images")
    return words[:place] + words[place + 2 :]


def test_a_model_of_text_too_is_trained_on_text_unless_it_is_asked(tmp_path, caplog):
    vlm = save_tiny_vlm(tmp_path / "qwen", "qwen3_5")
    data = write_rows(tmp_path, [{"prompt": "what is red ?", "response": "a colour"}])
    config = parse("sft", words_without_flag(vlm, data))
    with caplog.at_level("INFO"):
        step_data = read_by_model(config, config.step_data, str(vlm), None)
    assert step_data == config.step_data
    assert "--with_images True gives it both" in caplog.text
    model = load_causal_lm(str(vlm), "fp32", None, changes_to_train(config))
    assert type(model) is type(AutoModelForCausalLM.from_config(load_config(str(vlm), "model")))
    config = parse("sft", words_without_flag(vlm, data, "--image_column", "image"))
    with pytest.raises(UserError, match="--image_column image: .* add --with_images True"):
        read_by_model(config, config.step_data, str(vlm), None)


def test_a_processor_that_needs_torchvision(tmp_path, monkeypatch):
    vlm = save_tiny_vlm(tmp_path / "lfm2", "lfm2_vl")
    monkeypatch.setattr(processors, "is_installed", lambda module: False)
    with pytest.raises(UserError, match="Lfm2VlConfig needs torchvision, which is not installed"):
        processors.load_processor(load_config(str(vlm), "model"), "", str(vlm), None, {}, None)


def test_a_setting_that_the_processor_overrides_is_refused(family):
    fixed = {"internvl": "crop_to_patches=false", "gemma3": "do_pan_and_scan=true"}
    if family.name not in fixed:
        pytest.skip("its processor overrides none")
    words = ["--image_options", fixed[family.name]]
    with pytest.raises(UserError, match="--image_options .* in every call; omit it"):
        prepared(family.vlm, family.data, *words)


def test_other_families_are_refused_by_name(tmp_path):
    transformers.AriaConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="AriaConfig sees images in a way .* qwen3_5, llava"):
        check_causal_lm(str(tmp_path))
    mllama = transformers.MllamaConfig()  # it has a language model of text
    mllama.save_pretrained(tmp_path / "mllama")
    data = write_rows(tmp_path, PAIRS)
    config = parse("sft", flags(tmp_path / "mllama", data, "--with_images", "True"))
    with pytest.raises(UserError, match="MllamaConfig sees images in a way .* qwen3_5, llava"):
        read_by_model(config, config.step_data, str(tmp_path / "mllama"), None)
