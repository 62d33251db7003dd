"""Teachers of a student that sees images: what each of them says is what transformers' own pass
over each row alone gives, from its own weights, tower included."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from features.images.image_runs import (
    alone_inputs,
    flags,
    flags_of_prompts,
    prepared,
    prepared_prompts,
    write_pictures,
    write_rows,
)
from one_rank import one_rank  # noqa: F401
from tiny_vlms import save_tiny_vlm, tiny_vlm_config
from transformers import AutoModelForImageTextToText

from dschat_ppo.algorithms.divergence import Divergence, dense_divergence
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.features.distillation.rollouts import TaughtRollouts
from dschat_ppo.features.distillation.sft_terms import sft_divergence_term
from dschat_ppo.features.distillation.teachers import Teachers
from dschat_ppo.features.images.checks import check_readers, check_trained_model
from dschat_ppo.features.images.columns import ROW_OF_IMAGES
from dschat_ppo.features.images.given_embeddings import sources_of_roles
from dschat_ppo.features.replay.replayed_step import frozen_model
from dschat_ppo.models.loading import (
    changes_to_train,
    frozen_changes,
    load_causal_lm,
    load_config,
)
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import PolicyModel, response_logprobs
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.rollouts import prompt_batch
from dschat_ppo.run.run_models import PromptReader
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.types import ForbiddenTokens, Rollout

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": "a.png", "prompt": QUESTION, "response": "red", "data_source": "pictures"},
    {"image": "d.png", "prompt": QUESTION, "response": "two", "data_source": "pictures"},
    {
        "image": ["b.png", "c.png"],
        "prompt": "first <image> second <image> ?",
        "response": "big small",
        "data_source": "pictures",
    },
    {"image": None, "prompt": "what is red ?", "response": "it is", "data_source": "texts"},
]
TEMPERATURE = 0.7
TEACHER = "--teacher_model_name_or_path"


def save_larger(folder, family):
    """A model of the family whose decoder is wider, so that its projector differs too."""
    save_tiny_vlm(folder, family)
    config = tiny_vlm_config(family)
    config.text_config.hidden_size = 96
    config.text_config.head_dim = 16
    if family == "qwen3_vl":
        config.vision_config.out_hidden_size = 96
    torch.manual_seed(7)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["smolvlm", "qwen3_vl"])
def models(request, tmp_path_factory):
    """A student and a wider teacher, and pictures beside a data file."""
    folder = tmp_path_factory.mktemp(request.param)
    write_pictures(folder)
    return SimpleNamespace(
        folder=folder,
        student=save_tiny_vlm(folder / "student", request.param),
        teacher=save_larger(folder / "teacher", request.param),
        data=write_rows(folder, ROWS),
    )


def policies_of(models, config, tokenizer, first_role):
    """Student and teacher as a run loads them, without their towers, with the images of each."""
    folders = {first_role: str(models.student), "teacher": str(models.teacher)}
    sources = sources_of_roles(config, folders, "fp32", tokenizer, CPU)
    policies = []
    for role, changes in ((first_role, changes_to_train(config)), ("teacher", None)):
        changes = changes or frozen_changes(config)
        policy = PolicyModel(load_causal_lm(folders[role], "fp32", None, changes)).eval()
        policy.given_source = sources[role]
        policies.append(policy)
    return policies


def tables_alone(folder, token_rows, processor, banned=(), temperature=1.0):
    """(answer, V) log-probs of each row before its answer's tokens, by transformers' whole model
    from ids and pixels."""
    whole = AutoModelForImageTextToText.from_pretrained(folder).eval()
    tables = []
    for token_row in token_rows:
        inputs = alone_inputs(token_row, processor)
        with torch.no_grad():
            logits = whole(**inputs).logits[0, :-1] / temperature
        logits[:, list(banned)] = -torch.inf
        tables.append(logits.log_softmax(-1)[len(token_row["prompt_ids"]) - 1 :])
    return tables


def divergence_of(tables_of_student, tables_of_teacher):
    """The sum of the forward KL over all tokens."""
    total = 0.0
    for log_p, log_q in zip(tables_of_student, tables_of_teacher, strict=True):
        drawable = log_p[0] > -torch.inf
        kl = dense_divergence(log_p[:, drawable], log_q[:, drawable], "forward_kl")
        total += float(kl.sum())
    return total


def test_the_divergence_of_step_1_is_that_of_each_row_alone(models):
    rows, config, tokenizer = prepared(models.student, models.data)
    student, teacher = policies_of(models, config, tokenizer, "model")
    assert student.given_source is not teacher.given_source  # the teacher has another tower
    term = sft_divergence_term(teacher, Divergence("forward_kl"), 1.0)
    objective = sft_objective(0, False, CPU, [term], student.given_source)
    batch = objective.collate(rows, range(len(rows)))
    tokens = batch.loss_mask.sum()
    loss = objective.loss(student, batch, tokens, MetricSums())
    processor = student.given_source._processor
    of_student = tables_alone(models.student, rows, processor)
    of_teacher = tables_alone(models.teacher, rows, processor)
    expected = divergence_of(of_student, of_teacher) / int(tokens)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_a_teacher_whose_tower_gives_another_number_of_tokens_is_refused(models):
    rows, config, tokenizer = prepared(models.student, models.data)
    student, teacher = policies_of(models, config, tokenizer, "model")
    batch = sft_objective(0, False, CPU, [], student.given_source).collate(rows, range(len(rows)))
    others = {images: tokens + 1 for images, tokens in batch.given.tokens_of_images.items()}
    with pytest.raises(UserError, match="the vision tower gives .* tokens, but the row has"):
        teacher.given_source.for_same_rows(replace(batch.given, tokens_of_images=others))


def test_a_replay_loads_a_teacher_that_sees_images_for_a_student_of_text(models, assets):
    words = flags(models.student, models.data, TEACHER, str(models.teacher))
    words[words.index(str(models.student))] = str(assets / "lm")
    model = frozen_model(parse("sft", words), "teacher")
    assert model.lm.config.model_type == load_config(str(models.teacher), "").model_type


@pytest.fixture(scope="module")
def step3(models):
    """Student and teacher, answers of the data to the prompts of step 3, and the divergence."""
    prompts, config, tokenizer = prepared_prompts(models.student, models.data)
    student, teacher = policies_of(models, config, tokenizer, "actor")
    source = student.given_source
    batch = prompt_batch(prompts, range(len(prompts)), 0, source)
    response_ids = torch.tensor([[40, 41, 42], [43, 44, 0], [45, 46, 47], [48, 49, 50]])
    mask = torch.ones(response_ids.shape, dtype=torch.bool)
    mask[1, 2] = False
    token_rows = []
    for prompt, ids, of_response in zip(prompts, response_ids, mask, strict=True):
        token_rows.append(dict(prompt) | {"answers": [ids[of_response].tolist()]})
    rollout = Rollout(
        batch.prompt_ids,
        batch.prompt_mask,
        response_ids,
        mask,
        torch.zeros(mask.shape),
        torch.zeros(len(mask), dtype=torch.int8),
        extra=batch.extra,
    )
    banned = ForbiddenTokens((), 0, source.banned_ids)
    teachers = Teachers([teacher], Divergence("forward_kl"), TEMPERATURE, banned)
    tables = []
    for folder in (models.student, models.teacher):
        tables.append(
            tables_alone(folder, token_rows, source._processor, source.banned_ids, TEMPERATURE)
        )
    return SimpleNamespace(
        student=student,
        teachers=teachers,
        rollout=rollout,
        banned=banned,
        tables=tables,
        folder=models.folder,
        data=models.data,
        prompts=prompts,
    )


def test_the_divergence_of_step_3_is_that_of_each_row_alone(step3):
    teachings = step3.teachers.teachings(step3.rollout)
    outputs = response_logprobs(
        step3.student,
        step3.rollout,
        TEMPERATURE,
        forbidden_tokens=step3.banned,
        teachings=teachings,
    )
    [divergences] = outputs.divergences
    total = float(divergences[step3.rollout.response_mask].detach().sum())
    assert total == pytest.approx(divergence_of(*step3.tables), rel=1e-4)


def test_log_probs_of_a_teacher_are_those_of_each_row_alone(step3):
    logprobs = step3.teachers.logprobs(step3.rollout)
    mask = step3.rollout.response_mask
    expected = []
    for table, ids, of_response in zip(
        step3.tables[1], step3.rollout.response_ids, mask, strict=True
    ):
        expected.append(table.gather(1, ids[of_response].unsqueeze(1))[:, 0])
    torch.testing.assert_close(logprobs[mask], torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_answers_of_the_data_keep_the_images_of_their_prompts(step3):
    words = flags_of_prompts(step3.folder / "student", step3.data, "--distill_on", "data")
    words += ["--advantage_estimator", "none", "--use_reward_model", "False", TEACHER, "t"]
    config = parse("ppo", words)
    source = step3.student.given_source
    sampler = SimpleNamespace(pad_id=0, given_source=source, device=CPU)
    taught = TaughtRollouts(None, config, sampler, None)
    prompts = step3.prompts.map(lambda row: {"answers": [[40, 41]]})
    stopping = SimpleNamespace(max_new_tokens=4)
    task = SimpleNamespace(
        prompts=prompts, indices=[1, 3], config=SimpleNamespace(stopping=stopping)
    )
    rollout = taught.responses_of_the_data(task)
    expected = prompt_batch(prompts, [1, 3], 0, source).extra[ROW_OF_IMAGES]
    assert torch.equal(rollout.extra[ROW_OF_IMAGES], expected)
    assert expected.tolist()[1] == -1 != expected.tolist()[0]


def check_teacher(models, teacher, *further, sources=()):
    """The checks of a run of step 3 that learns from the model in the folder `teacher`."""
    words = flags_of_prompts(models.student, models.data, TEACHER, str(teacher), *further)
    config = parse("ppo", [*words, "--advantage_estimator", "none", "--use_reward_model", "False"])
    student = str(models.student)
    tokenizer = load_tokenizer(student, "model")
    check_trained_model(config, load_config(student, "model"), "--actor_model_name_or_path a")
    prompts, _, _ = prepared_prompts(models.student, models.data)
    reader = PromptReader("teacher", TEACHER, str(teacher), sources)
    check_readers(config, student, [reader], [prompts], tokenizer)


def test_which_teachers_can_read_prompts_with_images(models, assets):
    check_teacher(models, models.teacher)
    text = assets / "lm"
    # step 1 refuses SOURCE=
    said = "reads text alone, but prompts have images; give one that sees them; in step 3 it may"
    with pytest.raises(UserError, match=said):
        check_teacher(models, text)
    check_teacher(models, text, sources=["texts"])
    other = models.folder / "other"
    shutil.copytree(models.teacher, other)
    config = json.loads((other / "config.json").read_text())
    config["vision_config"]["patch_size"] *= 2
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{other}: patch_size is 8 in its config.json, and 4 in"):
        check_teacher(models, other)
    with pytest.raises(UserError, match="do not go with --teacher_prompt_column yet"):
        check_teacher(models, models.teacher, "--teacher_prompt_column", "data_source")
