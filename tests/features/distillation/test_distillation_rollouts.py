"""Rollouts of training that teachers read: answers of the data, further prompts, and which teacher
has which row."""

import json

import pytest
import torch
from datasets import Dataset
from plain_ppo import PlainRun
from tiny_models import tokens_of

from dschat_ppo.features.distillation.flags import TEACHER
from dschat_ppo.features.distillation.rollouts import actor_logprobs
from dschat_ppo.ppo.rollouts import RolloutTask

ALONE = "--advantage_estimator none --use_reward_model False"


def task_for(ppo, rows: list[dict], indices: list[int], step: int = 1) -> RolloutTask:
    """Responses of training to some of these prompts."""
    config = ppo.collection.sampler.config
    prompts = Dataset.from_list(rows)
    return RolloutTask(prompts, indices, config, 0, (step,), 0, step)


def test_rows_go_to_the_teacher_of_their_source_and_a_source_without_one_is_named(
    assets, tmp_path, capsys
):
    words = f"--n_samples_per_prompt 2 {ALONE} {TEACHER} chat={assets}/lm math={assets}/uniform_lm"
    ppo = PlainRun(assets, tmp_path / "run", words).ppo
    taught = ppo.collection.sampler.sample_rollout
    rows = []
    for source in ("math", "code", "chat"):
        rows.append({"prompt_ids": [5, 6], "row": json.dumps({"data_source": source})})
    rollout = taught(task_for(ppo, rows, [0, 2]))
    assert rollout.extra["teachers"].tolist() == [1, 1, 0, 0]
    for count in (1, 0):
        teachers = taught.teachers_of_prompts(task_for(ppo, rows, [1, 2]))
        assert teachers.tolist() == [-1, 0]
        said = capsys.readouterr().out
        assert said.count("no teacher") == count
        assert said.count("1 of 2 prompts have no teacher (data_source 'code')") == count


def test_answers_of_the_data_are_cut_and_have_the_log_probs_of_the_actor(assets, tmp_path):
    words = f"--n_samples_per_prompt 1 --distill_on data {ALONE} {TEACHER} {assets}/uniform_lm"
    ppo = PlainRun(assets, tmp_path / "run", words).ppo
    limit = ppo.config.ppo.max_answer_seq_len
    answers = [[5, 6], [*range(5, 5 + limit + 1)]]
    rows = [
        {"prompt_ids": [7, 8, 9], "answers": [answers[0]]},
        {"prompt_ids": [7], "answers": [answers[1]]},
    ]
    rollout = ppo.collection.sampler.sample_rollout(task_for(ppo, rows, [1, 0]))
    assert tokens_of(rollout) == [answers[1][:limit], answers[0]]
    assert rollout.finish_reason.tolist() == [2, 0]
    assert rollout.prompt_mask.sum(dim=1).tolist() == [1, 3]
    logprobs = actor_logprobs(ppo.collection.passes, rollout)
    torch.testing.assert_close(logprobs, rollout.rollout_logprobs)
    for row_index, row in enumerate((rows[1], rows[0])):
        ids = torch.tensor([row["prompt_ids"] + row["answers"][0][:limit]])
        logits = ppo.engines.actor.module.lm(ids).logits[0] / ppo.config.ppo.temperature
        table = torch.log_softmax(logits, dim=-1).detach()
        expected = []
        for position in range(len(row["prompt_ids"]), ids.shape[1]):
            expected.append(float(table[position - 1, ids[0, position]]))
        of_row = logprobs[row_index][rollout.response_mask[row_index]]
        assert of_row.tolist() == pytest.approx(expected, abs=1e-4)


def test_a_share_of_the_steps_is_sampled_the_same_on_every_rank(assets, tmp_path):
    words = f"--n_samples_per_prompt 1 --distill_on mix:0.5 {ALONE} {TEACHER} {assets}/uniform_lm"
    taught = PlainRun(assets, tmp_path / "run", words).ppo.collection.sampler.sample_rollout
    drawn = [taught.samples_in(step) for step in range(1, 401)]
    assert 160 < sum(drawn) < 240
    assert drawn[:20] == [taught.samples_in(step) for step in range(1, 21)]


def test_what_a_teacher_reads_in_place_of_the_prompts_is_as_wide_as_they(assets, tmp_path):
    words = f"--n_samples_per_prompt 2 {ALONE} --teacher_prompt_column c"
    ppo = PlainRun(assets, tmp_path / "run", words).ppo
    rows = [
        {"prompt_ids": [7, 8, 9], "teacher_prompt_ids": [4]},
        {"prompt_ids": [7], "teacher_prompt_ids": [7, 8, 9, 4]},
    ]
    rollout = ppo.collection.sampler.sample_rollout(task_for(ppo, rows, [1, 0]))
    assert rollout.prompt_ids.shape == rollout.extra["teacher_prompt_ids"].shape == (4, 4)
    assert rollout.extra["teacher_prompt_ids"][0].tolist() == [7, 8, 9, 4]
    assert rollout.extra["teacher_prompt_mask"].sum(dim=1).tolist() == [4, 4, 1, 1]
    assert rollout.prompt_mask.sum(dim=1).tolist() == [1, 1, 3, 3]


def test_advantages_of_a_run_have_the_kl_to_the_teacher_of_each_row(assets, tmp_path):
    """The teacher is the actor's start, so that before the first update the KL is 0."""
    words = f"--distill_policy_gradient {TEACHER} {assets}/lm"
    run = PlainRun(assets, tmp_path / "run", words)
    run.run()
    first, *later = [line["distill/kl_k1"] for line in run.lines if "distill/kl_k1" in line]
    assert first == pytest.approx(0, abs=1e-6)
    assert later and all(abs(kl) > 1e-4 for kl in later)
    plain = PlainRun(assets, tmp_path / "plain")
    plain.run()
    assert not any("distill/kl_k1" in line for line in plain.lines)
    assert plain.lines[0]["policy/advantage_mean"] == pytest.approx(
        run.lines[0]["policy/advantage_mean"], abs=1e-5
    )
