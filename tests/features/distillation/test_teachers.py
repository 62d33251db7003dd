"""Teachers of step 3: which rows each of them reads, what it reads, and the advantages that its
log-probs change."""

from dataclasses import replace

import pytest
import torch
from episodes import fixed_episodes, logprobs_alone, rollout_of, tables_alone
from tiny_experience import record
from tiny_models import VOCABULARY, new_model

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.algorithms.divergence import Divergence, dense_divergence
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.config.cli import parse
from dschat_ppo.features.distillation.advantage_terms import advantage_term_of
from dschat_ppo.features.distillation.loss_terms import divergence_term
from dschat_ppo.features.distillation.teachers import Teachers
from dschat_ppo.models.wrapped_models import PolicyModel, response_logprobs
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.advantages import AdvantageComputation, AdvantageTerm
from dschat_ppo.ppo.loss_terms import full_kl_term
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.token_losses import ActorLoss
from dschat_ppo.types import (
    Experience,
    ForbiddenTokens,
    RewardedRollout,
    concat_rows,
    select_rows,
    with_columns,
)

TEMPERATURE, ANSWERS, PROMPTS, SEEN = 0.8, (4, 2, 0, 3), (3, 5, 2, 1), (6, 5, 2, 4)
# the second row's tokens count for the critic alone; an observation stands in the middle of the
# first row's answer
ACTIONS = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]).bool()
MINIBATCH = MiniBatch(
    [], Denominators(tokens=5.0, rows=4.0, constant=16.0), value_tokens=5.0, metric_weight=0.5
)


def rows_of(**changes) -> Experience:
    drawn = torch.Generator().manual_seed(0)
    real = torch.arange(4) < torch.tensor(ANSWERS).unsqueeze(1)
    prompts = torch.arange(6) >= 6 - torch.tensor(PROMPTS).unsqueeze(1)
    seen = torch.arange(6) >= 6 - torch.tensor(SEEN).unsqueeze(1)
    made = {
        "prompt_ids": torch.randint(0, VOCABULARY, (4, 6), generator=drawn),
        "prompt_mask": prompts,
        "response_ids": torch.randint(0, VOCABULARY, (4, 4), generator=drawn),
        "episode_lengths": real.sum(dim=1),
        "teacher_prompt_ids": torch.randint(0, VOCABULARY, (4, 6), generator=drawn),
        "teacher_prompt_mask": seen,
        "loss_mask": ACTIONS & torch.tensor([[True], [False], [True], [True]]),
    }
    return record(Experience, ACTIONS, **made | changes)


def tables(lm, rows, number: int, of_teacher: bool) -> torch.Tensor:
    """(chosen tokens, V) log-probs of one row, by whole logits of plain transformers."""
    ids, mask = (
        (rows.extra["teacher_prompt_ids"], rows.extra["teacher_prompt_mask"])
        if of_teacher
        else (rows.prompt_ids, rows.prompt_mask)
    )
    prompt, answer = ids[number][mask[number]], rows.response_ids[number, : ANSWERS[number]]
    logits = lm(input_ids=torch.cat([prompt, answer]).unsqueeze(0), use_cache=False).logits[0]
    before = logits[len(prompt) - 1 : len(prompt) - 1 + len(answer)]
    return torch.log_softmax(before / TEMPERATURE, dim=-1)[ACTIONS[number, : len(answer)]]


@pytest.fixture(scope="module")
def models():
    """A student and two teachers of other sizes."""
    return [new_model("llama"), new_model("llama", hidden_size=64), new_model("gpt2")]


@pytest.mark.parametrize(
    ("teachers", "reads_more"),
    [(None, False), (None, True), ([1, 0, 0, -1], True), ([1, 1, 1, 1], False)],
)
def test_the_loss_is_the_mean_divergence_over_the_counted_tokens_of_the_rows_of_each_teacher(
    models, teachers, reads_more
):
    """Beside it stands the full KL to the reference, which reads what the student reads, and scores
    all rows. Teachers that are given as if they trained drop nothing out."""
    student, *others = models
    rows = rows_of()
    if not reads_more:
        rows = replace(rows, extra={})
    if teachers is not None:
        rows = with_columns(rows, {"teachers": torch.tensor(teachers)})
    engines = [PolicyModel(each).train() for each in (others if teachers else others[:1])]
    reference = full_kl_term(PolicyModel(others[1]), 0.5, TEMPERATURE)
    taught = Teachers(engines, Divergence("jsd", 0.3), TEMPERATURE)
    flags = AlgorithmFlags(advantage_estimator="none", kl_loss_coef=0.5, kl_loss_estimator="full")
    actor_loss, sums = (
        ActorLoss(
            PolicyModel(student),
            flags,
            TEMPERATURE,
            terms=[reference, divergence_term(taught, 2.0)],
            has_policy_loss=False,
        ),
        MetricSums(),
    )
    loss = actor_loss(rows, MINIBATCH, 0.0, sums)
    expected, kl = torch.zeros(()), torch.zeros(())
    for number in (0, 3):  # the rows with counted tokens
        teacher, log_p = (
            0 if teachers is None else teachers[number],
            tables(student, rows, number, False),
        )
        log_q = tables(others[1], rows, number, of_teacher=False).detach()
        kl = kl + dense_divergence(log_p, log_q, "reverse_kl").sum() / 5
        if teacher >= 0:
            log_q = tables(others[teacher], rows, number, of_teacher=reads_more).detach()
            expected = expected + dense_divergence(log_p, log_q, "jsd", 0.3).sum() / 5
    found = sums.reduce()
    assert found["distill/divergence"] == pytest.approx(expected.item() / 0.5, rel=1e-4)
    assert found["policy/kl_loss"] == pytest.approx(kl.item() / 0.5, rel=1e-4)
    expected = 2.0 * expected + 0.5 * kl
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    parameters = list(student.parameters())
    for a, b in zip(
        *(torch.autograd.grad(each, parameters) for each in (loss, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_log_probs_of_sampled_tokens_come_from_the_rows_teacher_without_what_could_not_be_drawn(
    models,
):
    rows, engines = (
        rows_of(teachers=torch.tensor([1, 0, 0, -1])),
        [PolicyModel(each) for each in models[1:]],
    )
    end = next(token for token in range(VOCABULARY) if token not in rows.response_ids)
    found = Teachers(
        engines, Divergence("reverse_kl"), TEMPERATURE, ForbiddenTokens((end,), 2)
    ).logprobs(rows)
    for number, teacher in ((0, 2), (1, 1)):
        chosen, table = (
            rows.response_ids[number][ACTIONS[number]],
            tables(models[teacher], rows, number, True),
        )
        early = ACTIONS[number].nonzero().squeeze(1) < 2  # the end token is not drawn there
        expected = table.gather(1, chosen.unsqueeze(1)).squeeze(1) - early * torch.log1p(
            -table[:, end].exp()
        )
        torch.testing.assert_close(found[number][ACTIONS[number]], expected, rtol=1e-4, atol=1e-5)
    assert not found[~ACTIONS].any() and not found[3].any()


def test_a_teacher_reads_each_context_of_its_rows_alone():
    student, *others = [new_model(name) for name in ("llama", "qwen3", "gemma2")]
    made = fixed_episodes()
    rows = with_columns(rollout_of(made), {"teachers": torch.tensor([1, -1, 0])})
    taught = Teachers([PolicyModel(each) for each in others], Divergence("jsd", 0.3), TEMPERATURE)
    logprobs = taught.logprobs(rows)
    divergences = response_logprobs(
        PolicyModel(student), rows, TEMPERATURE, teachings=taught.teachings(rows)
    ).divergences
    for row, teacher in ((0, 1), (2, 0)):
        episode, mask = [made[row]], rows.response_mask[row]
        expected = logprobs_alone(others[teacher], episode, TEMPERATURE)[0]
        torch.testing.assert_close(logprobs[row][mask], expected, rtol=0, atol=1e-5)
        log_p, log_q = (
            tables_alone(model, episode, TEMPERATURE) for model in (student, others[teacher])
        )
        expected = dense_divergence(log_p, log_q, "jsd", 0.3)
        torch.testing.assert_close(divergences[teacher][row][mask], expected, rtol=1e-4, atol=1e-5)
        assert not divergences[1 - teacher][row].any()
    assert not logprobs[1].any() and not logprobs[~rows.response_mask].any()


def term(words: str = "") -> AdvantageTerm:
    """What a run with a teacher and these flags adds to its advantages."""
    known = (
        "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
        " --teacher_model_name_or_path t --distill_policy_gradient"
    )
    made = advantage_term_of(parse("ppo", f"{known} {words}".split()))
    assert made is not None
    return made


def test_the_kl_of_each_token_is_subtracted_from_its_advantage():
    """Returns of 1 for the first answer and -1 for the second are whitened to 1 and -1; the KL is
    not whitened."""
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    rows = record(
        RewardedRollout,
        mask,
        scores=torch.tensor([1.0, -1.0, 0.0]),
        penalised_scores=torch.tensor([1.0, -1.0, 0.0]),
        rewards=torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.0, 0.0]]),
        old_logprobs=torch.full((3, 2), -1.0),
        teacher_logprobs=torch.tensor([[-1.0, -3.0], [-0.5, -1.0], [-9.0, -9.0]]),
    )
    flags = AlgorithmFlags(advantage_estimator="reinforce_plus_plus", kl_coef=0.0)
    plain = AdvantageComputation(flags, 2, 0, 0.0).advantages(replace(rows, extra={}), 1).advantages
    taught = AdvantageComputation(flags, 2, 0, 0.0, terms=[term("--distill_coef 0.5")])
    torch.testing.assert_close(
        taught.advantages(rows, 1).advantages - plain,
        torch.tensor([[0, -1], [0.25, 0], [-4, 0]]).float(),
    )
    routed = with_columns(rows, {"teachers": torch.tensor([0, 1, -1])})
    assert float(taught.advantages(routed, 1).advantages[2, 0]) == float(plain[2, 0]), (
        "no teacher teaches this row"
    )
    flags = AlgorithmFlags(advantage_estimator="none")
    alone = AdvantageComputation(flags, 2, 0, 0.0, terms=[term()])
    assert alone.advantages(rows, 1).advantages.tolist() == [[0, -2], [0.5, 0], [-8, 0]]


def test_what_a_teacher_reads_goes_with_its_row():
    rows = rows_of()
    found = select_rows(rows, torch.tensor([3, 1]))
    assert found.prompt_ids.shape == found.extra["teacher_prompt_ids"].shape == (2, 5), (
        "the longest of both, 4 and 5"
    )
    read = found.extra["teacher_prompt_ids"][0, 1:]
    assert read.tolist() == rows.extra["teacher_prompt_ids"][3, 2:].tolist()
    both = concat_rows([found, select_rows(rows, torch.tensor([0]))])
    assert both.extra["teacher_prompt_mask"].sum(dim=1).tolist() == [4, 5, 6]
    assert both.prompt_mask.sum(dim=1).tolist() == [1, 5, 3]
