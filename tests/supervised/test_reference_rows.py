"""DPO and KTO compute the reference's log-probs of the rows that a run uses, and of no others."""

import math

import pytest
import torch
from one_rank import one_rank  # noqa: F401
from pairs_of_answers import CPU, config_of, language_model
from pairs_of_answers import ROWS as PAIRS
from test_kto_objective import ROWS as LABELLED

from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.supervised.policy_objectives import dpo_objective, kto_objective
from dschat_ppo.supervised.trainer import SupervisedTrainer, fit_ds_config

pytestmark = pytest.mark.usefixtures("one_rank")
OBJECTIVES = {"dpo": (dpo_objective, PAIRS), "kto": (kto_objective, LABELLED)}
NONE = ("--dtype", "fp32", "--zero_stage", "0", "--per_device_train_batch_size", "1")


def trainer_of(name: str, *words: str) -> SupervisedTrainer:
    """Of five rows, one in each optimizer step; the reference takes two rows at a time."""
    config = config_of("--objective", name, *NONE, "--per_device_eval_batch_size", "2", *words)
    make, rows = OBJECTIVES[name]
    model, ds_config = PolicyModel(language_model(1)), fit_ds_config(config)
    objective = make(0, CPU, config)
    return SupervisedTrainer(model, ds_config, TokenRows(rows, rows), objective, config)


def references(rows) -> dict[int, list[float]]:
    """Row number -> its two log-probs, of the rows that have them."""
    values = dict(enumerate(rows["ref_logprobs"]))
    return {number: pair for number, pair in values.items() if not math.isnan(sum(pair))}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_reference_of_the_rows_of_a_run(name):
    every = trainer_of(name, "--num_train_epochs", "2")
    whole = references(every.rows.train)
    assert len(whole) == 5 and len(references(every.rows.eval)) == 5
    used = [number for [[number]] in every.steps_left()][:5]
    for steps, computed in ((1, 2), (2, 2), (3, 4), (5, 5)):
        trainer = trainer_of(name, "--max_steps", str(steps), "--eval_iters", "1")
        assert [number for [[number]] in trainer.steps_left()] == used[:steps]
        # whole batches, of which a longer run has the same: equal to the last bit
        assert references(trainer.rows.train) == {row: whole[row] for row in used[:computed]}
        assert set(references(trainer.rows.eval)) == {0, 1}
        metrics = trainer.evaluate()
        for micro_batches in trainer.steps_left():
            metrics |= trainer.train_step(micro_batches)
        assert all(math.isfinite(value) for value in metrics.values())


def test_the_reference_of_packed_rows_and_of_an_evaluation_alone():
    packed = trainer_of("dpo", "--packing", "--max_seq_len", "9", "--max_steps", "1")
    [[first]] = list(packed.steps_left())
    assert len(packed.packing.epoch(packed.seed, 0)) > 1
    assert set(first) <= set(references(packed.rows.train)) and len(first) < 5
    assert len(references(packed.rows.train)) == 2 * math.ceil(len(first) / 2)
    alone = trainer_of("dpo", "--validate_only")
    assert references(alone.rows.train) == {} and len(references(alone.rows.eval)) == 5
    torch.testing.assert_close(
        torch.tensor(alone.rows.eval["ref_logprobs"]),
        torch.tensor(trainer_of("dpo").rows.eval["ref_logprobs"]),
        rtol=0,
        atol=0,
    )
