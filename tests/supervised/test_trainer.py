"""The training loop of steps 1 and 2, with a real engine on one rank: rows, evaluations, metrics,
NaN and resuming."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checkpoints import NO_CHECKPOINTS
from conftest import tiny_config
from datasets import Dataset
from deepspeed.accelerator import get_accelerator
from one_rank import one_rank  # noqa: F401
from pairs_of_answers import ROWS as PAIRS
from transformers import AutoTokenizer, LlamaForCausalLM

from dschat_ppo.checkpoint.engine_state import load_engine, save_engine
from dschat_ppo.checkpoint.manager import RankStates
from dschat_ppo.checkpoint.state_files import BackgroundWriter, load_state, save_state
from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.errors import NonFiniteError, StopRequested, UserError
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.nonfinite import NonFinitePolicy
from dschat_ppo.run.output_folder import KeptModels
from dschat_ppo.supervised import trainer as trainer_module
from dschat_ppo.supervised.objective import score_rows
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.trainer import SupervisedTrainer, fit_ds_config

pytestmark = pytest.mark.usefixtures("one_rank")

# two rows a step: four steps in each of two epochs, the fourth with one row and a filler
ROWS, LAST = 7, 8
EVALUATED = [0, 3, 4, 6, 8]  # steps done: every third, and the ends of epochs
RATE = 0.1
MEASURED = ("time", "time/", "memory/")

TRAIN = Dataset.from_list(
    [
        {
            "prompt_ids": [10 + row, 20 + row][: 1 + row % 2],
            "answers": [[40 + row, 50 + 2 * row, 1][row % 3 :]],
        }
        for row in range(ROWS)
    ]
)
HELD_OUT = Dataset.from_list(
    [{"prompt_ids": [10 + row], "answers": [[70 + row, 1]]} for row in range(3)]
)


class Seen:
    """The objective of step 1; notes the row numbers of its batches, after "eval" in eval mode.

    The loss of training batch number `bad_batch` (from 0) is NaN.
    """

    def __init__(self, bad_batch: int | None = None):
        self.batches: list = []
        collated, own = [], sft_objective(0, False, dist.device())

        def collate(rows, indices):
            collated.append((own.collate(rows, indices), list(indices)))
            return collated[-1][0]

        def loss(model, batch, total, sums):
            indices = next(indices for made, indices in collated if made is batch)
            self.batches.append(indices if model.module.training else ["eval", *indices])
            found = own.loss(model, batch, total, sums)
            is_bad = model.module.training and len(self.of_training) - 1 == bad_batch
            return found * math.nan if is_bad else found

        self.objective = replace(own, collate=collate, loss=loss)

    @property
    def of_training(self) -> list[list[int]]:
        return [batch for batch in self.batches if batch[0] != "eval"]


def config_of(output, *more: str):
    words = "--model_name_or_path m --data_path d --per_device_train_batch_size 1"
    if "--dtype" not in more:
        words += " --dtype fp32 --zero_stage 0"
    words += (
        " --gradient_accumulation_steps 2 --num_train_epochs 2 --eval_interval 3"
        " --num_warmup_steps 3"
    )
    words += f" --per_device_eval_batch_size 2 --learning_rate {RATE} --lr_scheduler_type linear"
    return parse("sft", [*words.split(), "--output_dir", str(output), *more])


def make(
    config, seen: Seen, held_out: Dataset | None = HELD_OUT, recorders=()
) -> SupervisedTrainer:
    torch.manual_seed(5)
    model = PolicyModel(LlamaForCausalLM(tiny_config(attention_dropout=0.1)))
    return SupervisedTrainer(
        model,
        fit_ds_config(config),
        TokenRows(TRAIN, held_out),
        seen.objective,
        config,
        NonFinitePolicy(config.safety, recorders),
    )


def run(trainer, folder, checkpointer=NO_CHECKPOINTS, resumed=None):
    with MetricsWriter(folder, None, resumed) as writer:
        trainer.run(writer, checkpointer, "title")


def lines_of(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if not name.startswith(MEASURED)} for line in lines]


class CheckpointManager:
    """Notes where the trainer can be saved, and whether its last evaluation is the best; may stop
    the run there."""

    def __init__(self, trainer, last=None):
        self.trainer, self.last, self.passed = trainer, last, []

    def save_if_due(self):
        self.passed.append((*self.trainer.position, self.trainer.is_best))
        if len(self.passed) == self.last:
            raise StopRequested("here")

    def stop_requested(self):
        return False


def best_steps(lines: list[dict]) -> list[int]:
    """Steps whose evaluation during training has a lower loss than all before."""
    found, least = [], math.inf
    for line in lines[1:]:
        if line.get("eval_loss", math.inf) < least:
            least = line["eval_loss"]
            found.append(line["step"])
    return found


def test_each_epoch_trains_on_each_row_once_and_is_evaluated(tmp_path):
    seen = Seen()
    trainer = make(config_of(tmp_path), seen)
    checkpointer = CheckpointManager(trainer)
    run(trainer, tmp_path, checkpointer)
    rows = [row for batch in seen.of_training for row in batch]
    first, second = rows[: ROWS + 1], rows[ROWS + 1 :]
    assert sorted(first) == sorted(second) == [-1, *range(ROWS)] and first != second
    assert -1 in first[-2:], "the filler completes the last step"
    assert [len(batch) for batch in seen.of_training] == [1] * 2 * LAST
    places = [
        sum(1 for batch in seen.batches[:place] if batch[0] != "eval") // 2
        for place, batch in enumerate(seen.batches)
        if batch == ["eval", 0, 1]
    ]
    assert places == EVALUATED, "after the step"
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(LAST + 1))
    assert [line["step"] for line in lines if "eval_loss" in line] == EVALUATED
    assert all(
        line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
        for line in lines
        if "eval_loss" in line
    )
    assert [line["epoch"] for line in lines[1:]] == [step / 4 for step in range(1, LAST + 1)]
    tokens = {row: len(TRAIN[row]["answers"][0]) for row in range(ROWS)} | {-1: 0}
    counted = [sum(tokens[row] for row in rows[2 * step : 2 * step + 2]) for step in range(LAST)]
    assert [line["counted"] for line in lines[1:]] == counted
    warm, cold = (
        [RATE * step / 3 for step in range(3)],
        [RATE * (LAST - step) / 5 for step in range(3, LAST)],
    )
    assert [line["lr"] for line in lines[1:]] == pytest.approx(warm + cold), (
        "of the step, not of the next"
    )
    assert all(0 < line["grad_norm"] < 1e3 for line in lines[1:])
    assert lines[-1]["loss"] < lines[1]["loss"]
    best = best_steps(lines)
    assert 0 < len(best) < len(EVALUATED) - 1, (
        "some evaluation is not the best: else the test shows nothing"
    )
    assert checkpointer.passed == [(step, 0, step in best) for step in range(1, LAST + 1)]
    assert trainer.best.value_and_step == (lines[best[-1]]["eval_loss"], best[-1])
    for found, step in ((trainer.before, 0), (trainer.after, LAST)):
        assert found == {name: lines[step][name] for name in ("eval_loss", "eval_perplexity")}


def test_ranks_that_share_rows_count_each_row_once(tmp_path, monkeypatch):
    """Two ranks with the same rows: the sums over ranks are twice those of the rows."""
    lines = []
    for ranks, folder in ((1, tmp_path / "alone"), (2, tmp_path / "shared")):
        trainer = make(config_of(folder, "--max_steps", "2"), Seen())
        shared = {
            "all_reduce": lambda counts, ranks=ranks: ranks * counts,
            "ranks_of_row": lambda ranks=ranks: ranks,
        }
        monkeypatch.setattr(trainer_module, "dist", SimpleNamespace(**{**vars(dist), **shared}))
        folder.mkdir()
        run(trainer, folder)
        lines.append(lines_of(folder))
    assert lines[0] == lines[1]


def test_a_nan_loss_skips_the_update_and_is_recorded(tmp_path, assets):
    """Step 3 (batches 4 and 5) is skipped: the schedule does not advance."""
    seen = Seen(bad_batch=5)
    config = config_of(tmp_path, "--on_nonfinite", "skip")
    bad_steps = []
    trainer = make(config, seen, recorders=[lambda bad_step: bad_steps.append(bad_step) or ""])
    run(trainer, tmp_path)
    lines = lines_of(tmp_path)[1:]
    assert [line["optim/nonfinite_skipped"] for line in lines] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [line["optim/overflow/model"] for line in lines] == [0] * LAST
    result = trainer.save(tmp_path / "saved", AutoTokenizer.from_pretrained(assets / "lm"))
    assert (result["optimizer_steps"], result["skipped_steps"]) == (LAST - 1, 1)
    assert [line["grad_norm"] is None for line in lines] == [step == 2 for step in range(LAST)], (
        "infinite: null"
    )
    assert [line["lr"] for line in lines] == pytest.approx(
        [RATE * f for f in (0, 1 / 3, 2 / 3, 2 / 3, 1, 0.8, 0.6, 0.4)]
    )
    [bad_step] = bad_steps
    step = seen.of_training[4:6]
    assert (bad_step.role, bad_step.step, str(bad_step.fault)) == (
        "model",
        3,
        "the loss is not finite (rank 0, micro-batch 1)",
    )
    assert bad_step.constants == {"total": lines[2]["counted"], "rows": step}
    expected = sft_objective(0, False, torch.device("cpu"))
    for record, indices in zip(bad_step.records, step, strict=True):
        assert torch.equal(record.input_ids, expected.collate(TRAIN, indices).input_ids)


def test_a_nan_loss_stops_the_run_before_the_update(tmp_path):
    trainer = make(config_of(tmp_path), Seen(bad_batch=2))
    weight = trainer.engine.module.lm.get_output_embeddings().weight
    checkpointer = CheckpointManager(trainer)
    with pytest.raises(
        NonFiniteError, match=r"^model, step 2: the loss is not finite \(rank 0, micro-batch 0\)"
    ):
        run(trainer, tmp_path, checkpointer)
    assert (
        bool(weight.isfinite().all())
        and trainer.position == (1, 0)
        and len(checkpointer.passed) == 1
    )


@pytest.fixture
def fp16(monkeypatch):
    """An accelerator that multiplies fp16 numbers."""
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)


FP16 = ("--dtype", "fp16", "--zero_stage", "2", "--learning_rate", "1e-2")


def test_an_fp16_update_that_overflows_is_made_again_with_a_lower_scale(tmp_path, fp16):
    """The run makes each update that its schedule plans, on each row."""
    seen = Seen()
    config = config_of(tmp_path, *FP16)
    run(make(config, seen), tmp_path)
    lines = lines_of(tmp_path)[1:]
    overflows = lines[-1]["optim/overflow/model"]
    assert overflows >= 2 and lines[0]["optim/overflow/model"] > 0
    assert all(0 < line["grad_norm"] < math.inf for line in lines)
    factors = [0, 1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4, 0.2]
    assert [line["lr"] for line in lines] == pytest.approx([1e-2 * each for each in factors])
    assert len(seen.of_training) == 2 * (LAST + overflows), "two micro-batches in each pass"


@pytest.mark.parametrize(("at", "words"), [(4, ()), (5, ()), (2, FP16)])
def test_a_resumed_run_makes_the_steps_that_are_left(tmp_path, at, words, fp16):
    """The same numbers as of a run that was not stopped."""
    whole = Seen()
    run(make(config_of(tmp_path, *words), whole), tmp_path)
    lines = lines_of(tmp_path)
    best, config = best_steps(lines), config_of(tmp_path, *words)
    stopped, left = Seen(), Seen()
    before = make(config, stopped)
    with pytest.raises(StopRequested):
        run(before, tmp_path, CheckpointManager(before, last=at))
    assert before.position == (at, 0) and before.engines_to_save == {"model": before.engine}
    save_state(tmp_path / "state", before.shared_state())
    writer = BackgroundWriter()
    (tmp_path / "engine").mkdir()
    save_engine(before.engine, tmp_path / "engine", writer)
    writer.wait()
    random_state = torch.get_rng_state()

    after = make(config, left)
    load_engine(after.engine, tmp_path / "engine")
    after.load_state(
        load_state(tmp_path / "state"), RankStates(before.rank_state(), lambda: iter([]))
    )
    torch.set_rng_state(random_state)
    assert after.is_best is before.is_best is (at in best)
    assert (after.position, after.before, after.after, after.best.value_and_step) == (
        (at, 0),
        before.before,
        before.after,
        before.best.value_and_step,
    )
    length = (tmp_path / "metrics.jsonl").stat().st_size
    checkpointer = CheckpointManager(after)
    run(after, tmp_path, checkpointer, (length, at + 1))
    assert checkpointer.passed == [(step, 0, step in best) for step in range(at + 1, LAST + 1)]
    assert stopped.of_training + left.of_training == whole.of_training
    assert lines_of(tmp_path) == lines, "step 0 is there once"


@pytest.mark.parametrize(
    ("words", "evaluated", "factors"),
    [
        ("--num_train_epochs 1.25", [0, 3, 4, 5], [1, 0.8, 0.6, 0.4, 0.2]),
        ("--max_steps 1", [0, 1], [1]),
        (
            "--max_steps 10 --warmup_ratio 0.11 --min_lr_ratio 0.5",
            [0, 3, 4, 6, 8, 9, 10],
            [0, 0.5, *(0.5 + 0.5 * (1 - step / 8) for step in range(8))],
        ),  # 2 warm-up steps: 1.1, rounded up
    ],
)
def test_a_run_may_end_inside_an_epoch_and_is_evaluated_there(tmp_path, words, evaluated, factors):
    """Its rows are those that a run of whole epochs sees first; its schedule is planned for its
    length."""
    whole, seen, steps = (
        make(config_of(tmp_path, "--num_train_epochs", "3"), Seen()),
        Seen(),
        len(factors),
    )
    rows = list(whole.steps_left())
    trainer = make(config_of(tmp_path, "--num_warmup_steps", "0", *words.split()), seen)
    run(trainer, tmp_path)
    assert seen.of_training == sum(rows[:steps], []) and len(rows) == 12
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(steps + 1)) and trainer.position == (
        steps,
        0,
    )
    assert [line["step"] for line in lines if "eval_loss" in line] == evaluated
    assert [line["lr"] for line in lines[1:]] == pytest.approx(
        [RATE * factor for factor in factors]
    )
    for trainer.steps in range(steps + 1):  # as after a resume
        assert list(trainer.steps_left()) == rows[trainer.steps : steps]


def test_without_evaluation_rows_step_0_is_written_once_and_nothing_is_evaluated(tmp_path):
    config, seen = config_of(tmp_path), Seen()
    trainer = make(config, seen, held_out=None)
    run(trainer, tmp_path)
    assert len(seen.of_training) == len(seen.batches) and trainer.before == trainer.after == {}
    assert not trainer.is_best
    again = make(config, Seen(), held_out=None)
    again.load_state(trainer.shared_state(), RankStates({}, lambda: iter([])))
    run(again, tmp_path, resumed=((tmp_path / "metrics.jsonl").stat().st_size, 9))
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(LAST + 1))


def test_evaluation_is_the_mean_over_all_rows_without_dropout_and_may_be_cut_short(tmp_path):
    trainer = make(config_of(tmp_path), Seen())
    losses, tokens = [], []
    trainer.engine.module.eval()
    for row in range(len(HELD_OUT)):
        batch = sft_objective(0, False, dist.device()).collate(HELD_OUT, [row])
        with torch.no_grad():
            losses.append(-trainer.engine.module(batch.input_ids, batch.loss_mask)[0].sum().item())
        tokens.append(int(batch.loss_mask.sum()))
    trainer.engine.module.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(losses) / sum(tokens), rel=1e-5)
    assert trainer.engine.module.training
    cut = make(config_of(tmp_path, "--eval_iters", "1"), Seen())
    assert cut.evaluate()["eval_loss"] == pytest.approx(sum(losses[:2]) / sum(tokens[:2]), rel=1e-5)


def test_the_best_model_by_the_metric_and_those_of_some_steps_are_kept(tmp_path):
    (tmp_path / "out").mkdir()
    config, saved = config_of(tmp_path / "out", "--metric_for_best", "perplexity:max"), []
    trainer = make(config, Seen())

    def save(folder):
        saved.append((folder.relative_to(tmp_path).as_posix(), trainer.steps))
        folder.mkdir(parents=True)

    checkpointer = CheckpointManager(trainer)
    with MetricsWriter(tmp_path / "out", None, None) as writer:
        trainer.run(writer, checkpointer, "title", KeptModels(tmp_path, 4, True, save))
    values = {
        line["step"]: line["eval_perplexity"]
        for line in lines_of(tmp_path / "out")[1:]
        if "eval_loss" in line
    }
    best: list[int] = []
    for step, value in values.items():
        if value > max([0.0, *(values[earlier] for earlier in best)]):
            best.append(step)
    assert best != list(values), "not every evaluation is the best so far"
    wanted = [("best.partial", step) for step in best] + [
        (f"hf/step_{s:06d}.partial", s) for s in (4, 8)
    ]
    assert sorted(saved) == sorted(wanted) and [step for _, step in saved] == sorted(
        step for _, step in saved
    )
    assert [step for step, _, is_best in checkpointer.passed if is_best] == best
    assert trainer.best.value_and_step == (values[best[-1]], best[-1])
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"step_000004", "step_000008"}


LOSSES = {0: 0.1, 3: 0.5, 4: 0.6, 6: 0.7, 8: 0.4}  # of `EVALUATED`


def with_losses(config) -> SupervisedTrainer:
    """A trainer whose evaluations have the losses of `LOSSES`."""
    trainer = make(config, Seen())
    trainer.evaluate = lambda: {"eval_loss": LOSSES[trainer.steps]}
    return trainer


@pytest.mark.parametrize("at", [3, 4, 6])
def test_a_run_ends_after_evaluations_without_an_improvement_also_if_it_resumes(
    tmp_path, assets, said, at
):
    """The evaluations after steps 4 and 6 are worse than that after step 3; stopped after `at`."""
    words = ("--early_stop_patience", "2")
    trainer = with_losses(config_of(tmp_path, *words))
    with pytest.raises(StopRequested):
        run(trainer, tmp_path, CheckpointManager(trainer, at))
    resumed = with_losses(config_of(tmp_path, *words))
    resumed.load_state(trainer.shared_state(), RankStates({}, lambda: iter(())))
    described = []
    resumed.describe = lambda: described.append(resumed.steps) or {}
    checkpointer = CheckpointManager(resumed)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    run(resumed, tmp_path, checkpointer, resumed=(size, at + 1))
    assert [step for step, _, _ in checkpointer.passed] == list(range(at + 1, 7))
    assert described == ([6] if at < 6 else []), "before the last checkpoint"
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(7))
    [line] = [line for line in said if "--early_stop_patience" in line]
    assert "ends after step 6: eval_loss was 0.5 after step 3 and has not improved since" in line
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    result = resumed.save(tmp_path / "saved", tokenizer)
    assert (result["optimizer_steps"], result["early_stop"]) == (6, line)
    assert (result["best_eval_loss"], result["eval_loss_after"]) == (0.5, 0.7)


def test_a_metric_that_the_evaluation_lacks_ends_the_run_before_the_first_step(tmp_path):
    seen = Seen()
    trainer = make(config_of(tmp_path, "--metric_for_best", "loss/wiki"), seen)
    with pytest.raises(
        UserError, match="the evaluation has no eval_loss/wiki; it has eval_loss, eval_perplexity"
    ):
        run(trainer, tmp_path)
    assert seen.of_training == []


def test_a_model_is_described_once_a_step_and_saved_with_it_and_nan_weights_are_neither(
    tmp_path, assets
):
    seen, asked = Seen(), []

    def describe(model, rows):
        asked.append(rows)
        return {"reward_mean": float(len(asked))}

    seen.objective = replace(seen.objective, describe=describe)
    trainer, tokenizer = (
        make(config_of(tmp_path), seen),
        AutoTokenizer.from_pretrained(assets / "lm"),
    )
    run(trainer, tmp_path)
    # after the last step
    assert len(asked) == 1 and trainer.shared_state()["described"] == {"reward_mean": 1.0}
    trainer.before, trainer.after, trainer.best.value_and_step = {"eval_loss": 2.0}, {}, None
    result = trainer.save(tmp_path / "good", tokenizer)
    assert result == {
        "eval_loss_before": 2.0,
        "eval_loss_after": 2.0,
        "reward_mean": 1.0,
        "optimizer_steps": LAST,
        "world_size": 1,
    }
    assert json.loads((tmp_path / "good/config.json").read_text())["reward_mean"] == 1.0
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "good")
    weight = trainer.engine.module.lm.get_output_embeddings().weight
    assert torch.equal(saved.get_output_embeddings().weight, weight)
    trainer.after = {"eval_loss": 1.0}
    assert trainer.save(tmp_path / "good", tokenizer)["eval_loss_after"] == 1.0
    resumed = make(config_of(tmp_path), seen)
    resumed.load_state(trainer.shared_state(), RankStates({}, lambda: iter(())))
    assert resumed.describe() == {"reward_mean": 1.0} and len(asked) == 1
    resumed.steps -= 1
    assert resumed.shared_state()["described"] is None and resumed.describe() == {
        "reward_mean": 2.0
    }
    weight.data[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"^model: weights are not finite \(rank 0: "):
        trainer.save(tmp_path / "bad", tokenizer)
    assert len(asked) == 2 and not (tmp_path / "bad").exists()


def test_rows_are_scored_in_order_without_fillers():
    seen = []

    def score(rows, indices):
        seen.append(list(indices))
        return torch.tensor([[float(i), len(rows[max(i, 0)]["prompt_ids"])] for i in indices])

    engine = torch.nn.Linear(1, 1)
    found = score_rows(engine, PAIRS, score, 2, "title")
    assert found.tolist() == [[0, 3], [1, 1], [2, 2], [3, 4], [4, 1]]
    assert [len(indices) for indices in seen] == [2, 2, 1]
    assert engine.training


def test_health_is_watched_and_the_watch_resumes(tmp_path):
    config = config_of(
        tmp_path, "--health", "loss_grows=1.001,window=2", "--stop_on_health", "error"
    )
    trainer, reasons = make(config, Seen()), []
    trainer.health.begin(tmp_path)
    checkpointer = CheckpointManager(trainer)
    checkpointer.stop_if = reasons.append
    run(trainer, tmp_path, checkpointer)
    assert len(reasons) == 8, "after each optimizer step"
    events = [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]
    assert {"loss_grows"} <= {event["name"] for event in events}, "a window of two steps is noise"
    stops = [step for step, reason in enumerate(reasons, 1) if reason is not None]
    assert stops == sorted({event["step"] for event in events if event["level"] == "error"})

    save_state(tmp_path / "state", trainer.shared_state())
    after = make(config, Seen())
    after.load_state(load_state(tmp_path / "state"), RankStates({}, lambda: iter([])))
    assert after.health.state_dict() == trainer.health.state_dict()
