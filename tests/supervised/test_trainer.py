"""The order of rows, evaluations and boundaries in steps 1 and 2, whole and resumed; the engine is a stand-in."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from dschat_ppo.checkpoint.resumable import NO_CHECKPOINTS, RankStates
from dschat_ppo.checkpoint.state_file import load_state, save_state
from dschat_ppo.config.cli import parse
from dschat_ppo.config.safety_flags import SafetyFlags
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine.skip_update import StepResult
from dschat_ppo.errors import NonFiniteError, StopRequested
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.supervised import trainer as trainer_module
from dschat_ppo.supervised.trainer import Objective, SupervisedTrainer

ROWS, LAST = 7, 8  # two rows a step: four steps in each of two epochs, the fourth with one row and a filler
LOSSES = {0: 1.0, 3: 5.0, 4: 3.0, 6: 4.0, 8: 3.0}  # evaluations, by steps done; the untrained model is not kept as best
MEASURED = ("time", "seconds/", "peak_memory_gib/")


class Checkpointer:
    """Where the trainer stands at each boundary, and whether it is the best so far; ends at one of them."""

    def __init__(self, trainer, last=None):
        self.trainer, self.last, self.passed = trainer, last, []

    def save_if_due(self):
        self.passed.append((*self.trainer.position, self.trainer.is_best))
        if len(self.passed) == self.last:
            raise StopRequested("here")

    def stop_requested(self):
        return False


@pytest.fixture
def seen(monkeypatch):
    """Rows of each optimizer step; -1 before those of an evaluation."""
    rows = []

    def optimizer_step(engine, batches, loss_of):
        for batch in batches:
            loss_of(batch)
        rows.append([row for batch in batches for row in batch.tolist()])
        engine.made += 1
        return StepResult(2.5, applied=engine.made != 3, overflow=engine.made == 3)

    def train_engine(model, config, settings):
        engine = SimpleNamespace(made=0, settings=settings, evaluates=False)

        def change(evaluates):
            engine.evaluates = evaluates
            rows.extend(["eval"] * evaluates)

        engine.eval, engine.train = lambda: change(True), lambda: change(False)
        return engine

    monkeypatch.setattr(trainer_module, "train_engine", train_engine)
    monkeypatch.setattr(trainer_module, "select_kernels", lambda engine: None)
    monkeypatch.setattr(trainer_module, "learning_rate", lambda engine: engine.made / 100)
    monkeypatch.setattr(trainer_module, "optimizer_step", optimizer_step)
    return rows


def make(*more) -> SupervisedTrainer:
    words = "--model_name_or_path m --data_path d --output_dir o --per_device_train_batch_size 1"
    words += " --gradient_accumulation_steps 2 --num_train_epochs 2 --eval_interval 3 --num_warmup_steps 3"
    config = parse("sft", [*words.split(), *more])

    def loss(engine, batch, total, sums):
        sums.add_mean("loss", torch.tensor([LOSSES[engine.made] if engine.evaluates else 7.0]))
        return torch.zeros(())

    objective = Objective(
        collate=lambda rows, indices: torch.tensor(indices),
        count=lambda batch: (batch >= 0).sum(),
        loss=loss,
        summary=lambda metrics: metrics,
        headline=("loss",),
    )
    rows = TokenRows(Dataset.from_dict({"x": list(range(ROWS))}), Dataset.from_dict({"x": [0, 1]}))
    guard = NonFinitePolicy(SafetyFlags())
    return SupervisedTrainer(torch.nn.Linear(1, 1), {}, rows, objective, config.fit, config.run, guard)


def run(trainer, folder, checkpointer=NO_CHECKPOINTS, resumed=None):
    with MetricsWriter(folder, None, resumed) as writer:
        trainer.run(writer, checkpointer, "title")
        return writer.saved_offset()


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if not name.startswith(MEASURED)} for line in lines]


def test_each_epoch_sees_each_row_once_and_is_evaluated(tmp_path, seen):
    trainer = make()
    checkpointer, judged, judge = Checkpointer(trainer), [], trainer.guard.judge

    def note(role, step, result, scene):
        judged.append((role, step, scene().constants["rows"]))
        judge(role, step, result, scene)

    trainer.guard.judge = note
    run(trainer, tmp_path, checkpointer)
    steps = [rows for rows in seen if rows != "eval"]
    first, second = sum(steps[:4], []), sum(steps[4:], [])
    assert sorted(first) == sorted(second) == [-1, *range(ROWS)] and first != second
    assert [len(rows) for rows in steps] == [2] * LAST and -1 in steps[3]
    assert checkpointer.passed == [(step, 0, step in (3, 4)) for step in range(1, LAST + 1)]
    assert judged == [("model", step, [[row] for row in rows]) for step, rows in enumerate(steps, start=1)]
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(LAST + 1))
    assert {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line} == LOSSES
    assert [number for number, rows in enumerate(seen) if rows == "eval"] == [0, 4, 6, 9, 12], "after the step"
    assert [line["lr"] for line in lines[1:]] == [step / 100 for step in range(LAST)], "of the step, not of the next"
    assert [line["epoch"] for line in lines[1:]] == [step / 4 for step in range(1, LAST + 1)]
    assert [line["counted"] for line in lines[1:]] == [2, 2, 2, 1] * 2
    assert [line["overflow/model"] for line in lines[1:]] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert (trainer.before, trainer.after) == ({"eval_loss": 1.0}, {"eval_loss": 3.0})
    settings = trainer.engine.settings
    assert (settings.warmup_steps, settings.total_steps) == (3, LAST)


def test_weights_that_are_not_finite_are_neither_measured_nor_saved(tmp_path, seen, monkeypatch):
    trainer, saved = make(), []
    monkeypatch.setattr(trainer_module, "save_model", lambda *arguments, **_: saved.append(arguments[2]))
    monkeypatch.setattr(trainer_module, "answer_ends", lambda _: ())
    trainer.engine.module = torch.nn.Linear(1, 1)
    trainer.save(tmp_path, None)
    assert saved == [tmp_path]
    trainer.engine.module.bias.data.fill_(torch.inf)
    with pytest.raises(NonFiniteError, match=r"^model: weights are not finite \(rank 0: bias\)"):
        trainer.save(tmp_path / "bad", None)
    assert saved == [tmp_path]


@pytest.mark.parametrize("at", [1, 3, 4, 5, 8])
def test_a_run_that_is_stopped_sees_the_rows_that_are_left(tmp_path, seen, at):
    run(make(), tmp_path)
    whole, lines = [rows for rows in seen if rows != "eval"], lines_of(tmp_path)
    seen.clear()
    before = make()
    with pytest.raises(StopRequested):
        run(before, tmp_path, Checkpointer(before, last=at))
    assert before.position == (at, 0) and before.engines_to_save == {"model": before.engine}
    save_state(tmp_path / "state", before.shared_state())
    evaluated = [before.before, before.after]
    after = make()
    after.engine.made = at
    after.load_state(load_state(tmp_path / "state"), RankStates(before.rank_state(), lambda: iter([])))
    assert after.is_best is before.is_best is (at in (3, 4))
    assert (after.position, [after.before, after.after]) == ((at, 0), evaluated)
    assert after.best == before.best
    assert after.guard.metrics("model") == before.guard.metrics("model")
    length = (tmp_path / "metrics.jsonl").stat().st_size
    checkpointer = Checkpointer(after)
    run(after, tmp_path, checkpointer, (length, at + 1))
    assert checkpointer.passed == [(step, 0, step in (3, 4)) for step in range(at + 1, LAST + 1)]
    assert [rows for rows in seen if rows != "eval"] == whole
    assert lines_of(tmp_path) == lines, "step 0 is there once"
    assert after.before == evaluated[0]


def test_without_evaluation_rows_nothing_is_evaluated_and_step_0_says_so_once(tmp_path, seen):
    trainer = make()
    trainer.rows = TokenRows(trainer.rows.train, None)
    run(trainer, tmp_path)
    assert "eval" not in seen and trainer.before == trainer.after == {}
    again = make()
    again.load_state(trainer.shared_state(), RankStates({}, lambda: iter([])))
    again.rows = trainer.rows
    run(again, tmp_path / ".", resumed=((tmp_path / "metrics.jsonl").stat().st_size, 9))
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(LAST + 1))


def test_no_interval_means_the_ends_of_epochs(tmp_path, seen):
    run(make("--eval_interval", "0"), tmp_path)
    assert [line["step"] for line in lines_of(tmp_path) if "eval_loss" in line] == [0, 4, 8]
