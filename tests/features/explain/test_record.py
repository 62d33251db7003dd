"""The record of a run of step 3: what its files hold is what the loss received."""

import math

import numpy as np
import pytest
import torch
from plain_ppo import PlainRun, started, stopped
from tokenizers import AddedToken
from transformers import LlamaForCausalLM

from dschat_ppo.algorithms.aggregation import Denominators, aggregate
from dschat_ppo.features.explain.explained_tokens import loss_shares
from dschat_ppo.features.explain.record_files import (
    RecordedRow,
    RecordedStep,
    read_step,
    recorded_steps,
)
from dschat_ppo.features.explain.token_pieces import pieces_of, with_counted_repeats
from dschat_ppo.models.tokenizers import load_tokenizer

ALL = "--record_rows all"
RELEASE = pytest.mark.release


def steps_of(folder) -> dict[int, RecordedStep]:
    return {step: read_step(path) for step, path in recorded_steps(folder).items()}


@pytest.mark.parametrize(
    "words",
    [
        ALL,
        pytest.param(f"{ALL} --policy_loss gspo --actor_learning_rate 0.03", marks=RELEASE),
        f"{ALL} --advantage_estimator dr_grpo --n_samples_per_prompt 2 --clip_eps 0.001",
        pytest.param(
            f"{ALL} --loss_aggregation seq_mean_token_sum --entropy_coef 0.01", marks=RELEASE
        ),
    ],
)
def test_the_shares_of_all_tokens_are_the_loss_that_the_run_logs(assets, tmp_path, words):
    run = PlainRun(assets, tmp_path / "run", words)
    run.run()
    steps = steps_of(run.folder)
    assert list(steps) == [1, 2, 3]
    for line in run.lines[-3:]:
        step = steps[line["step"]]
        assert step.is_whole
        updates = len(step.constants["updates"])
        total = 0.0
        for row in step.rows:
            for update in range(updates):
                total += loss_shares(row, step, update).sum()
        assert total / updates == pytest.approx(line["policy/loss"], rel=1e-5, abs=1e-7)


def test_each_row_is_in_one_update_of_each_epoch_and_the_first_ratio_is_one(assets, tmp_path):
    run = PlainRun(assets, tmp_path / "run", ALL)
    run.run()
    step = steps_of(run.folder)[1]
    assert len(step.constants["updates"]) == 4  # 2 epochs of 2 updates
    for row in step.rows:
        seen = [update["trained"].all() for update in row.updates]
        assert [sum(seen[:2]), sum(seen[2:])] == [1, 1]
    first = [row.updates[0] for row in step.rows if row.updates[0]["trained"].any()]
    rows = [row for row in step.rows if row.updates[0]["trained"].any()]
    for row, update in zip(rows, first, strict=True):
        np.testing.assert_allclose(update["logprobs"], row.tokens["old_logprobs"], atol=1e-5)


def test_log_probs_and_entropies_are_those_of_plain_transformers(assets, tmp_path):
    """Of the first update of a run, whose policy is the model on the disk."""
    run = PlainRun(assets, tmp_path / "run", f"{ALL} --temperature 0.7")
    run.run()
    step = steps_of(run.folder)[1]
    model = LlamaForCausalLM.from_pretrained(assets / "lm").eval()
    tokenizer = load_tokenizer(str(assets / "lm"), "model")
    compared = 0
    for row in step.rows:
        update = row.updates[0]
        if not update["trained"].any():
            continue
        prompt = tokenizer("".join(row.prompt), add_special_tokens=False)["input_ids"]
        response = row.tokens["response_ids"].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
        log_probs = logits.double().log_softmax(dim=-1)
        of_tokens = log_probs[torch.arange(len(response)), response]
        entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
        np.testing.assert_allclose(update["logprobs"], of_tokens, atol=1e-5)
        np.testing.assert_allclose(update["entropies"], entropies, atol=1e-5)
        compared += len(response)
    assert compared > 5


def test_advantages_are_those_of_a_loop_over_the_recorded_numbers(assets, tmp_path):
    """Generalised advantage estimation with gamma 0.9 and lambda 0.5, whitened over the step."""
    run = PlainRun(assets, tmp_path / "run", f"{ALL} --gamma 0.9 --gae_lambda 0.5")
    run.run()
    step = steps_of(run.folder)[2]
    raw = []
    for row in step.rows:
        rewards = row.tokens["rewards"].astype(float)
        values = row.tokens["values"].astype(float)
        following, advantages = 0.0, []
        for at in reversed(range(len(rewards))):
            next_value = values[at + 1] if at + 1 < len(rewards) else 0.0
            following = rewards[at] + 0.9 * next_value - values[at] + 0.45 * following
            advantages.append(following)
        raw.append(advantages[::-1])
    everything = np.concatenate(raw)
    moments = step.constants["whitening"]
    assert moments["tokens"] == len(everything)
    assert moments["mean"] == pytest.approx(everything.mean(), abs=1e-6)
    assert moments["std"] == pytest.approx(everything.std(), abs=1e-6)
    for row, advantages in zip(step.rows, raw, strict=True):
        expected = (np.array(advantages) - everything.mean()) / everything.std()
        np.testing.assert_allclose(row.tokens["advantages"], expected, atol=1e-5)


def test_by_default_the_samples_of_the_first_step_are_kept_and_nothing_else_changes(
    assets, tmp_path
):
    plain = PlainRun(assets, tmp_path / "plain", "--record_rows none")
    recorded = PlainRun(assets, tmp_path / "recorded", "--record_steps 3")
    for run in (plain, recorded):
        run.run()
    assert plain.lines == recorded.lines
    assert not (plain.folder / "record").exists()
    steps = steps_of(recorded.folder)
    assert list(steps) == [1, 3]
    assert [row.index for row in steps[1].rows] == steps[1].samples
    for name, weight in plain.weights.items():
        assert torch.equal(recorded.weights[name], weight), name


@pytest.mark.parametrize("at", [(1, 2), pytest.param((2, 0), marks=RELEASE)])
def test_a_stopped_and_resumed_run_leaves_the_same_files(assets, tmp_path, at):
    run, checkpointer, did = started(assets, tmp_path / "whole", ALL)
    whole = (run, did, run.run(checkpointer))
    before, _, after, require_equal = stopped(assets, tmp_path, ALL, position=at)
    require_equal(whole)
    expected = recorded_steps(run.folder)
    files = recorded_steps(after.folder)
    assert list(files) == list(expected)
    for step, path in files.items():
        ours, theirs = read_step(path), read_step(expected[step])
        for row, same in zip(ours.rows, theirs.rows, strict=True):
            for columns, others in zip(
                [row.tokens, *row.updates], [same.tokens, *same.updates], strict=True
            ):
                assert columns.keys() == others.keys()
                assert all(np.array_equal(columns[name], others[name]) for name in columns)


def test_records_of_steps_that_run_again_are_removed(assets, tmp_path):
    run = PlainRun(assets, tmp_path / "run", ALL)
    run.run()
    [record] = run.ppo.token_records
    record.begin(2)
    assert list(recorded_steps(run.folder)) == [1]


@pytest.mark.parametrize(
    "mode", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"]
)
def test_a_share_is_the_part_of_the_aggregate(mode):
    """The aggregate with the losses of all other tokens at 0."""
    mask = torch.tensor([True, True, False, True])
    losses = torch.tensor([0.5, -1.5, 9.0, 2.0])
    counts = {"tokens": 7.0, "rows": 3.0, "constant": 40.0}
    row = RecordedRow(
        0,
        [],
        [""] * 4,
        {"loss_mask": mask.numpy()},
        [{"losses": losses.numpy()}],
        {},
        None,
    )
    constants = {"updates": [{"denominators": counts}], "aggregation": mode}
    shares = loss_shares(row, RecordedStep(1, [row], 1, [], {}, [], constants), 0)
    for at in range(4):
        alone = torch.where(torch.arange(4) == at, losses, 0.0)[None]
        expected = aggregate(alone, mask[None], mode, Denominators(**counts))
        assert math.isclose(shares[at], expected, rel_tol=1e-6)


def test_pieces_are_the_text_the_names_of_special_tokens_and_bytes(assets):
    tokenizer = load_tokenizer(str(assets / "lm"), "model")
    text = "I am a few words"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(pieces_of(tokenizer, ids)) == text
    assert len(pieces_of(tokenizer, ids)) == len(ids)
    [first, *_] = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert pieces_of(tokenizer, [first]) == ["\\xc3"]
    end = tokenizer.eos_token.strip("<|>")
    assert pieces_of(tokenizer, [tokenizer.eos_token_id]) == [f"⟨{end}⟩"]
    assert pieces_of(tokenizer, [10**6]) == ["⟨1000000⟩"]
    # one without a role, as the placeholders of many models of images
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    placeholder = tokenizer.convert_tokens_to_ids("<image>")
    assert placeholder not in tokenizer.all_special_ids
    assert pieces_of(tokenizer, [placeholder]) == ["⟨image⟩"]


def test_tokens_that_repeat_on_end_are_one_with_their_number():
    pieces = ["⟨image⟩"] * 3 + ["a", "a", "a", "a", "⟨pad⟩"] + ["⟨image⟩"] * 300 + [" end"]
    few = [*pieces[:8], "⟨image⟩[300 times]", " end"]
    assert with_counted_repeats(pieces) == few
