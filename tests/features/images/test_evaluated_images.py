"""`dschat-evaluate` with models that see images: tokens of transformers' `generate`, scores of a
reward model by hand, and the numbers of the evaluation in step 3."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from features.images.image_runs import (
    SIZES,
    alone_inputs,
    flags_of_prompts,
    prepared_prompts,
    write_pictures,
    write_rows,
)
from launch import metrics_of, run_steps
from safetensors.torch import load_file, save_file
from tiny_vlms import save_tiny_vlm
from transformers import AutoModel, AutoModelForImageTextToText

from dschat_ppo.common import exactness
from dschat_ppo.common.paths import VALIDATION
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.lm_kinds import OF_IMAGES
from dschat_ppo.features.judges.prompts import JudgePrompts
from dschat_ppo.models.loading import ModelChanges, load_sequence_classifier
from dschat_ppo.models.saving import SavedForm, parts_beside, save_model
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.tools import evaluate_models as module
from dschat_ppo.tools.evaluate import evaluation_request, main
from dschat_ppo.tools.evaluate_models import evaluate_models
from dschat_ppo.tools.evaluation_results import training_rows

TOKENS = 5
QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": "a.png", "prompt": QUESTION},
    {"image": "d.png", "prompt": QUESTION},  # the ids of the first row
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?"},
    {"image": None, "prompt": "what is red ?"},
]
FUNCTION = (
    "def widths(responses, images):\n"
    "    return [sum(i.width for i in row) / 100 + 0.01 * (len(r) % 7)\n"
    "            for r, row in zip(responses, images)]\n"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a model, of a reward model over the same tower, of pictures and of prompts."""
    folder = tmp_path_factory.mktemp("evaluated")
    vlm = save_tiny_vlm(folder / "vlm", "qwen3_vl")
    write_pictures(folder)
    data = write_rows(folder, ROWS)
    (folder / "widths.py").write_text(FUNCTION)
    prompts, config, tokenizer = prepared_prompts(vlm, data)
    torch.manual_seed(5)
    changes = ModelChanges(kinds=(OF_IMAGES,))
    scorer = ScalarModel(load_sequence_classifier(str(vlm), "fp32", None, True, changes))
    torch.nn.init.normal_(scorer.classifier.score.weight)
    form = SavedForm(merge=True, beside=parts_beside(config))
    save_model(SimpleNamespace(module=scorer), tokenizer, folder / "reward", form=form)
    return SimpleNamespace(
        folder=folder, vlm=vlm, data=data, prompts=prompts, config=config, tokenizer=tokenizer
    )


def words_of(made, *further):
    words = ["--model", str(made.vlm), "--data_path", str(made.data), "--dtype", "fp32"]
    words += ["--data_output_path", str(made.folder / "cache"), "--max_tokens", str(TOKENS)]
    return [*words, *further]


def reward_words(made):
    function = f"{made.folder}/widths.py:widths"
    model = ["--reward_model_name_or_path", str(made.folder / "reward")]
    return [*model, "--reward_function", function, "--reward_workers", "1"]


@pytest.fixture(scope="module")
def evaluated(made):
    words = [*reward_words(made), "--samples", "2", "--pass_score", "0.7", "--batch_size", "3"]
    return evaluate_models(evaluation_request(words_of(made, *words)))


def processor_of(made):
    from dschat_ppo.features.images.step_data import processor_of
    from dschat_ppo.models.loading import load_config

    model_config = load_config(str(made.vlm), "model")
    return processor_of(made.config, model_config, str(made.vlm), made.tokenizer)


@torch.no_grad()
def test_greedy_answers_and_scores_are_those_of_transformers(made, evaluated):
    processor = processor_of(made)
    lm = AutoModelForImageTextToText.from_pretrained(made.vlm).eval()
    body = AutoModel.from_pretrained(made.folder / "reward").eval()
    head = load_file(made.folder / "reward/model.safetensors")["score.weight"]
    [greedy] = [result for result in evaluated.results if result.decoding == "greedy"]
    for index, row in enumerate(greedy.prompts):
        record = dict(made.prompts[index])
        inputs = alone_inputs(record | {"answers": [[]]}, processor)
        suppressed = list(processor.placeholder_ids)
        ids = lm.generate(
            **inputs, max_new_tokens=TOKENS, do_sample=False, suppress_tokens=suppressed
        )[0]
        response = ids[inputs["input_ids"].shape[1] :].tolist()
        answer = made.tokenizer.decode(response, skip_special_tokens=True)
        assert [answer.strip() for answer in row.answers] == [answer]
        whole = alone_inputs(record | {"answers": [response]}, processor)
        score = body(**whole).last_hidden_state[0, -1] @ head[0]
        assert row.scores_by_source["model"] == [pytest.approx(float(score), abs=1e-4)]
        pictures = ROWS[index]["image"] or []
        if isinstance(pictures, str):
            pictures = [pictures.replace("d", "a")]
        width = sum(SIZES[picture][0] for picture in pictures) / 100
        # the function saw the pictures themselves
        assert -1e-6 <= row.scores_by_source["widths"][0] - width < 0.07
    # two pictures of one size have the same ids, and other scores
    assert len({row.scores_by_source["model"][0] for row in greedy.prompts[:2]}) == 2


def test_a_likely_placeholder_is_not_drawn(made, evaluated, tmp_path):
    """With the weights of the likeliest token, made larger."""
    shutil.copytree(made.vlm, tmp_path / "vlm")
    weights = load_file(tmp_path / "vlm/model.safetensors")
    [greedy] = [result for result in evaluated.results if result.decoding == "greedy"]
    first = made.tokenizer.encode(greedy.prompts[0].answers[0].strip())[0]
    head = weights["lm_head.weight"]
    head[made.tokenizer.convert_tokens_to_ids("<|image_pad|>")] = 3 * head[first]
    save_file(weights, tmp_path / "vlm/model.safetensors", {"format": "pt"})
    words = words_of(made, "--decoding", "greedy", "--max_prompts", "1")
    words[words.index("--model") + 1] = str(tmp_path / "vlm")
    [again] = evaluate_models(evaluation_request(words)).results
    assert again.prompts[0].answers == greedy.prompts[0].answers


def test_rows_of_training_hold_the_images_in_their_places(made, evaluated):
    [greedy] = [result for result in evaluated.results if result.decoding == "greedy"]
    ended = [replace(row, ended=["eos"]) for row in greedy.prompts]
    written = training_rows(replace(evaluated, results=[replace(greedy, prompts=ended)]), False)
    lines = written.splitlines()
    messages = [json.loads(line)["messages"] for line in lines]
    parts = messages[2][0]["content"]
    assert [part.get("path") or part["text"] for part in parts] == [
        "first ",
        str(made.folder / "b.png"),
        " second ",
        str(made.folder / "c.png"),
        " ?",
    ]
    assert messages[3][0]["content"] == "what is red ?"
    again = made.folder / "again.jsonl"
    again.write_text("".join(f"{line}\n" for line in lines))
    # an evaluation reads them again, in the folder of the pictures
    words = words_of(made, "--decoding", "greedy")
    words[words.index("--data_path") + 1] = str(again)
    answers = [row.answers for row in evaluate_models(evaluation_request(words)).results[0].prompts]
    assert answers == [row.answers for row in greedy.prompts]


def refusal(made, *further):
    """The message of an evaluation that is refused."""
    with pytest.raises(UserError) as error:
        evaluate_models(evaluation_request(words_of(made, *further)))
    return str(error.value)


def test_what_does_not_go_with_images_is_refused_before_a_model_is_loaded(
    made, assets, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "load_causal_lm", None)
    monkeypatch.setattr(module, "load_sequence_classifier", None)
    monkeypatch.setattr(exactness, "_requirements", [])  # the mode of other tests stays
    exact = refusal(made, "--exact_rollout", "True")
    assert "sees images, which do not go with --exact_rollout yet" in exact
    blind = refusal(made, "--reward_model_name_or_path", str(assets / "reward"))
    assert "reads text alone, but prompts have images; train one that sees them" in blind
    judge = refusal(made, "--judge", str(made.vlm))
    assert "Qwen3VLConfig sees images, but a model of text is needed here" in judge
    broken = made.folder / "broken.jsonl"
    broken.write_text('{"image": "no.png", "prompt": "what is this ?"}\n')
    assert "image 'no.png' cannot be read" in refusal(made, "--data_path", str(broken))
    column = ["--model", str(assets / "lm"), "--image_column", "image"]
    assert "--image_column image: --model" in refusal(made, *column)


def test_a_judge_reads_a_place_for_each_image(made, assets, tmp_path, monkeypatch):
    template = tmp_path / "t.jinja"
    template.write_text("{{ prompt }} {{ answer }}")
    asked = []
    question = JudgePrompts.question

    def recorded(prompts, *judged):
        ids = question(prompts, *judged)
        asked.append(prompts.tokenizer.decode(ids))
        return ids

    monkeypatch.setattr(JudgePrompts, "question", recorded)
    judge = f"{assets}/lm?labels=no,yes&template={template}"
    words = words_of(made, "--judge", judge, "--decoding", "greedy")
    [result] = evaluate_models(evaluation_request(words)).results
    assert len(asked) == len(ROWS)
    text = next(text for text in asked if "second" in text)
    assert "first<image>second<image>?" in text.replace(" ", "")
    assert result.scores.min() > 0 and result.scores.max() < 1


def test_the_command(made, tmp_path, capsys):
    path = tmp_path / "out.json"
    words = words_of(made, "--decoding", "greedy", "--show", "3", "--json", str(path))
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "<image 32x32, 16 tokens>what is the colour" in shown
    assert "<image 20x50, 12 tokens>" in shown and "<image 64x40, 15 tokens>" in shown
    assert "image_pad" not in shown + path.read_text()


@pytest.mark.ranks
@pytest.mark.release
def test_the_numbers_are_those_of_the_evaluation_in_step_3(made, evaluated):
    words = flags_of_prompts(made.vlm, made.data, *reward_words(made))
    words += ["--critic_model_name_or_path", str(made.folder / "reward")]
    words += ["--eval_data_path", str(made.data), "--validate_only", "True"]
    words += ["--eval_samples", "2", "--eval_pass_score", "0.7", "--eval_greedy", "False"]
    words += ["--max_answer_seq_len", str(TOKENS), "--per_device_generation_batch_size", "2"]
    words += ["--per_device_training_batch_size", "2"]
    ended = run_steps({"validate": ("ppo", words)}, made.folder, ranks=1)
    assert ended["validate"]["error"] is None, ended
    [line] = metrics_of(made.folder / "out" / VALIDATION)
    [sampled] = [result for result in evaluated.results if result.decoding == "sampled"]
    for name in ("score", "pass@1", "pass@2", "length_mean", "reward/widths_mean"):
        assert sampled.metrics[name] == pytest.approx(line[f"eval/{name}"], abs=1e-5), name
