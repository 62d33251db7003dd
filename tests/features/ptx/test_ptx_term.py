"""The loss of plain text: its term of an optimizer step, and in whole runs."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from plain_ppo import CPU, PlainRun, StopAt

from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.engine.step_loss import StepLoss
from dschat_ppo.errors import StopRequested
from dschat_ppo.features.ptx.flags import PtxFlags
from dschat_ppo.features.ptx.further_data import TextBatches, as_further_data
from dschat_ppo.features.ptx.step_terms import losses_of_batches, step_term_of
from dschat_ppo.monitor.metric_sums import MetricSums

CONFIG = SimpleNamespace(of=lambda kind: PtxFlags("texts", unsup_coef=0.5))
TEXT = SFTBatch(torch.tensor([[7, 8, 9]]), torch.tensor([[False, True, True]]))


def actor(input_ids, loss_mask):
    """The log-prob of each token is minus its id."""
    return -input_ids[loss_mask].float(), None


def test_texts_follow_the_micro_batches_of_a_step_and_are_divided_by_all_their_tokens():
    texts = SimpleNamespace(take=lambda: ([TEXT], torch.tensor(6)))
    assert step_term_of(CONFIG, actor, {}) is None
    term = step_term_of(CONFIG, actor, {"texts": texts})
    assert (term.name, term.coef) == ("ptx", 0.5)
    before = StepLoss(["rows"], lambda batch, sums: batch, None, MetricSums(), constants={"a": 1})
    step_loss = term.added_to(before)
    assert step_loss.all_batches == ["rows", TEXT]
    assert [step_loss(batch) for batch in step_loss.all_batches] == ["rows", 0.5 * (8 + 9) / 6]
    assert step_loss.sums.reduce() == {"policy/ptx_loss": 8.5}
    assert step_loss.constants == {"a": 1, "text_tokens": 6}
    losses = losses_of_batches(CONFIG, actor, step_loss.constants, MetricSums())
    assert {kind: float(loss(TEXT)) for kind, loss in losses.items()} == {
        SFTBatch: pytest.approx(0.5 * (8 + 9) / 6)
    }


WORDS = "--unsup_coef 0.5 --critic_warmup_rollouts 1"
ONE_UPDATE = "--per_device_training_batch_size 4 --ppo_epochs 1 --micro_batch_tokens 24"


def run_with_texts(assets, folder, words: str = "") -> tuple[PlainRun, TextBatches]:
    blocks = Dataset.from_dict(
        {"prompt_ids": [[7]] * 5, "answers": [[[9, 10 + row]] for row in range(5)]}
    )
    texts = TextBatches(blocks, 2, 1, 3, 0, CPU)
    return PlainRun(assets, folder, f"{WORDS} {words}", [as_further_data(texts)]), texts


def test_each_update_of_the_actor_takes_texts_and_a_resumed_run_takes_those_that_follow(
    assets, tmp_path
):
    """A stop inside a PPO step, after 2 of its 4 updates; the first step trains the critic."""
    whole, texts = run_with_texts(assets, tmp_path / "whole")
    result = whole.run()
    assert texts.stream.taken == 2 * 4 * 2
    assert ["policy/ptx_loss" in line for line in whole.lines] == [False, True, True]
    assert all(line.get("policy/ptx_loss", 1) > 0 for line in whole.lines)

    before, _ = run_with_texts(assets, tmp_path / "run")
    with pytest.raises(StopRequested):
        before.run(StopAt(before, position=(1, 2)))
    before.save(tmp_path / "saved")
    after, texts = run_with_texts(assets, tmp_path / "run")
    after.load(tmp_path / "saved")
    assert texts.stream.taken == 2 * 2
    length = (tmp_path / "run/metrics.jsonl").stat().st_size
    assert after.run(resumed=(length, 2)) == result and after.lines == whole.lines
    for name, weight in whole.weights.items():
        assert torch.equal(after.weights[name], weight), name


def test_an_only_update_gives_old_log_probs_beside_texts(assets, tmp_path):
    runs = []
    for source in ("auto", "recompute"):
        run, _ = run_with_texts(assets, tmp_path / source, f"{ONE_UPDATE} --old_logprobs {source}")
        run.run()
        runs.append(run)
    assert [run.ppo.old_logprobs for run in runs] == ["update", "recompute"]
    for name, weight in runs[1].weights.items():
        torch.testing.assert_close(runs[0].weights[name], weight, atol=1e-5, rtol=0, msg=name)
