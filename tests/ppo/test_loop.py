"""The order of things in step 3, whole, stopped and resumed; everything around `PPOTrainer` is a stand-in.

Row 0 of the experience carries the number of its PPO step as its score.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_mini_dataset import experience

from dschat_ppo.algorithms.controllers import AdaptiveEntropy
from dschat_ppo.checkpoint.resumable import RankStates
from dschat_ppo.checkpoint.state_file import load_state, save_state
from dschat_ppo.common import dist
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.errors import RolloutCancelled, StopRequested
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.ppo import loop
from dschat_ppo.ppo.loop import PPOTrainer
from dschat_ppo.ppo.state import PPOState
from dschat_ppo.ppo.update import Outcome

CPU = torch.device("cpu")
UPDATES = 4  # of a PPO step: 8 rows, 4 an update, 2 epochs
MEASURED = ("time", "seconds/", "tokens_per_second/", "peak_memory_gib/")


def alone(state):
    """The states of a run on one rank."""
    return RankStates(state, lambda: iter([state]))


class Stream:
    """Stands for what hands out the next things: prompts, blocks of text."""

    def __init__(self):
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state, device=None):
        self.taken = state["taken"]


class AdvantageComputation:
    """Its KL coefficient adapts at each step."""

    def __init__(self):
        self.kl_coef = SimpleNamespace(value=0.5)

    def state_dict(self):
        return {"value": self.kl_coef.value}

    def load_state_dict(self, state):
        self.kl_coef.value = state["value"]


class World:
    """What the trainer acts on, and what it did, in order."""

    def __init__(self, steps=3):
        self.did = []
        self.bad_steps, self.applied, self.ends_at, self.stop_at_boundary = (), ("actor", "critic"), None, None
        self.asked_in_step = None
        self.trainer = trainer = object.__new__(PPOTrainer)
        flags = AlgorithmFlags(entropy_target=10.0)
        ppo_flags = SimpleNamespace(ppo_epochs=2)
        trainer.config = SimpleNamespace(ppo=ppo_flags, algorithm=flags, recompute_old_logprobs=False)
        trainer.plan = SimpleNamespace(ppo_steps=steps, warmup_rollouts=1, global_batch=4)
        roles = {"actor": "A", "critic": "C"}
        modes = {mode: lambda mode=mode: self.did.append(mode) for mode in ("train", "eval")}
        average = SimpleNamespace(update=lambda: self.did.append("average"), state_dict=lambda: {"w": torch.ones(1)})
        average.has_layout_of = lambda part: part.keys() == {"w"}
        average.load_state_dict = lambda part: self.did.append("average goes on")
        average.load_parts = self.load_average
        average.begin = lambda: self.did.append("average begins")
        trainer.engines = SimpleNamespace(trained=roles, actor_average=average, **modes)
        trainer.device, trainer.progress, trainer.clock, trainer.health = CPU, PPOState(), PhaseClock(), HealthWatch()
        trainer.texts = SimpleNamespace(stream=Stream())
        trainer.collector = Stream()
        trainer.collector.collect, trainer.collector.pool = self.collect, None
        trainer.collector.judge = SimpleNamespace(mixture=SimpleNamespace(names=["model"]))
        trainer.shaping = AdvantageComputation()
        trainer.rows_check = SimpleNamespace(experience=self.shaped)
        trainer.mini_dataset = SimpleNamespace(updates=self.updates)
        trainer.updater = SimpleNamespace(once=self.once)
        trainer.guard = NonFinitePolicy(SimpleNamespace())
        trainer.entropy_coef = AdaptiveEntropy(0.25, target=10.0, delta=0.125, smallest=0, largest=9)
        trainer.validation = SimpleNamespace(best=None, due=lambda step, last: step in (0, 2, last), run=self.evaluate)

    def load_average(self, parts):
        found = [part for part in parts if part]
        self.did += [("average of", len(found))] * bool(found)
        return bool(found)

    def collect(self, step, checkpointer):
        self.did.append(f"collect {step}")
        self.trainer.collector.taken += 1
        if checkpointer.stop_requested():
            raise RolloutCancelled
        return step, {"dynamic_sampling/rounds": 1.0}

    def shaped(self, rows, step):
        assert rows == step
        self.trainer.shaping.kl_coef.value += 1  # as it adapts
        made = experience(range(8))
        return None if step in self.bad_steps else replace(made, scores=made.scores + step)

    def updates(self, rows, epochs, step):
        assert float(rows.scores[0]) == step and epochs == 2
        yield from (f"{step}.{number}" for number in range(1, UPDATES + 1))

    def once(self, part, sums, entropy_coef, train_actor, step):
        assert part.startswith(f"{step}.")
        self.did.append((part, train_actor, entropy_coef))
        self.trainer.texts.stream.taken += 1
        number = float(part[-1])
        for name in ("policy/entropy", "policy/log_ratio_abs_mean"):
            sums.add_mean(name, torch.tensor([number]))
        sums.add_max("policy/log_ratio_abs_max", torch.tensor([10 * number]))
        roles = [role for role in self.applied if train_actor or role == "critic"]
        return Outcome(dict.fromkeys(roles, number), ends=part == self.ends_at)

    def evaluate(self, step):
        self.did.append(f"evaluate {step}")
        score = {0: 1.0, 1: 0.5, 2: 3.0, 3: 2.0}[step]
        if self.trainer.validation.best is None or score > self.trainer.validation.best[0]:
            self.trainer.validation.best = (score, step)
        return {"eval/score": score}

    def save_if_due(self):
        self.did.append(("boundary", self.trainer.position, self.trainer.is_best))
        if self.trainer.position == self.stop_at_boundary:
            raise StopRequested("here")

    def stop_requested(self):
        return self.asked_in_step == self.trainer.progress.steps + 1

    def run(self, folder, resumed=None):
        with MetricsWriter(folder, None, resumed) as writer:
            return self.trainer.run(writer, self)


@pytest.fixture(autouse=True)
def learning_rate(monkeypatch):
    monkeypatch.setattr(loop, "learning_rate", {"A": 0.5, "C": 0.25}.get)


def lines_of(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if not name.startswith(MEASURED)} for line in lines]


def train(step, number, coef=None):
    """What is done in one update; the boundary after it, but not after the last one."""
    checkpointer = [("boundary", (step - 1, number), False)] if number < UPDATES else []
    return [(f"{step}.{number}", step > 1, coef), *["average"] * (step > 1), *checkpointer]


def test_the_order_of_a_run(tmp_path):
    world = World()
    result = world.run(tmp_path)
    # the coefficient grows by 0.125 after a step that moved the actor: its mean entropy, 2.5, is below the target
    expected = ["eval", "evaluate 0", "collect 1", "train"]
    expected += sum((train(1, number, 0.25) for number in (1, 2, 3, 4)), [])
    expected += [("boundary", (1, 0), False), "collect 2", "train"]
    expected += sum((train(2, number, 0.25) for number in (1, 2, 3, 4)), [])
    expected += ["eval", "evaluate 2", ("boundary", (2, 0), True), "collect 3", "train"]
    expected += sum((train(3, number, 0.375) for number in (1, 2, 3, 4)), [])
    expected += ["eval", "evaluate 3", ("boundary", (3, 0), False)]
    assert world.did == expected
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert result["eval/score_before"] == 1.0 and result["eval/score_after"] == 2.0
    assert result["reward/score_mean_before"] == 3.5 + 1 and result["reward/score_mean_after"] == 3.5 + 3
    assert (result["best_eval_score"], result["best_step"]) == (3.0, 2)
    zero, first, second, third = lines
    assert set(zero) == {"step", "eval/score"}
    assert (first["coef/kl"], second["coef/kl"]) == (0.5, 1.5), "of the rows, before it adapts to them"
    assert [line["coef/entropy"] for line in lines[1:]] == [0.25, 0.25, 0.375]
    assert (first["lr/actor"], first["lr/critic"], first["dynamic_sampling/rounds"]) == (0.5, 0.25, 1.0)
    assert "grad_norm/actor" not in first and first["grad_norm/critic"] == second["grad_norm/actor"] == 2.5
    assert "policy/updates_done_share" not in first and second["policy/updates_done_share"] == 1.0
    for line in (first, second, third):
        assert (line["policy/log_ratio_abs_mean"], line["policy/log_ratio_abs_max"]) == (2.5, 40)
        assert (line["policy/first_log_ratio_abs_mean"], line["policy/first_log_ratio_abs_max"]) == (1, 10)
        assert (line["rollout/logprob_diff_mean"], line["rollout/logprob_diff_max"]) == (1, 10)


@pytest.mark.parametrize("at", [(0, 1), (1, 0), (1, 3), (2, 0), (2, 2), (3, 0)])
def test_a_run_that_is_stopped_and_resumed_is_that_of_one_piece(tmp_path, at):
    whole, before, after = World(), World(), World()
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    result = whole.run(tmp_path / "whole")
    before.stop_at_boundary = at
    with pytest.raises(StopRequested):
        before.run(tmp_path / "cut")
    save_state(tmp_path / "shared", before.trainer.shared_state())
    save_state(tmp_path / "rank", before.trainer.rank_state())
    after.trainer.load_state(load_state(tmp_path / "shared"), alone(load_state(tmp_path / "rank")))
    assert after.trainer.position == at and after.trainer.is_best is before.trainer.is_best is (at == (2, 0))
    assert after.did.pop(0) == "average goes on"
    collected = at[0] + (at[1] > 0)
    assert (after.trainer.collector.taken, after.trainer.shaping.kl_coef.value) == (collected, collected + 0.5)
    assert after.trainer.texts.stream.taken == at[0] * UPDATES + at[1]
    length = (tmp_path / "cut/metrics.jsonl").stat().st_size
    assert after.run(tmp_path / "cut", (length, at[0] + 1)) == result
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")
    if at[1]:  # in the middle of a step it passes the place where it was saved once more
        assert after.did[:2] == ["train", ("boundary", at, False)]
        after.did = after.did[2:]
    assert before.did + after.did == whole.did


def test_the_health_of_the_past_and_what_was_left_out_go_along(tmp_path):
    before, after = World(), World()
    before.stop_at_boundary = (2, 0)
    before.trainer.guard.load_state_dict({"in_a_row": {}, "skipped": 3, "overflows": {"actor": 2}})
    with pytest.raises(StopRequested):
        before.run(tmp_path)
    after.trainer.load_state(before.trainer.shared_state(), alone(before.trainer.rank_state()))
    assert len(after.trainer.health.state_dict()["past"]) == 2
    assert after.trainer.guard.metrics("actor") == {"nonfinite/skipped": 3, "overflow/actor": 2}


def test_what_was_collected_while_the_run_was_asked_to_stop_is_collected_again(tmp_path):
    world = World()
    world.asked_in_step, passed = 2, []

    def save_if_due():
        passed.append((world.trainer.position, world.trainer.collector.taken, world.trainer.progress.experience))
        if world.did[-1] == "collect 2":
            raise StopRequested("here")

    world.save_if_due = save_if_due
    with pytest.raises(StopRequested):
        world.run(tmp_path)
    assert passed[-1] == ((1, 0), 1, None), "nothing of step 2 is there"
    assert world.trainer.shaping.kl_coef.value == 1.5 and [line["step"] for line in lines_of(tmp_path)] == [0, 1]


def test_rows_that_are_not_finite_make_no_update_but_a_step(tmp_path):
    world = World(steps=2)
    world.bad_steps = (2,)
    world.run(tmp_path)
    tail = world.did[world.did.index("collect 2") :]
    assert tail == ["collect 2", "eval", "evaluate 2", ("boundary", (2, 0), True)]
    last = lines_of(tmp_path)[-1]
    assert last["step"] == 2 and last["eval/score"] == 3.0 and last["nonfinite/skipped"] == 0
    assert not any(name.startswith(("policy/", "reward/", "lr/")) for name in last)


def test_a_limit_ends_the_updates_of_its_step_alone(tmp_path):
    world = World()
    world.ends_at = "2.3"
    world.run(tmp_path)
    done = [what[0] for what in world.did if what[0][1:2] == "."]
    assert done == ["1.1", "1.2", "1.3", "1.4", "2.1", "2.2", "2.3", "3.1", "3.2", "3.3", "3.4"]
    assert ("boundary", (1, 3), False) not in world.did, "no update follows it"
    assert [line.get("policy/updates_done_share") for line in lines_of(tmp_path)] == [None, None, 0.75, 1.0]


def test_updates_of_the_critic_alone_move_neither_average_nor_entropy_bonus(tmp_path):
    world = World(steps=2)
    world.applied = ("critic",)
    world.run(tmp_path)
    assert "average" not in world.did
    assert {what[2] for what in world.did if what[0][1:2] == "."} == {0.25}
    assert lines_of(tmp_path)[-1]["policy/updates_done_share"] == 0


@pytest.mark.parametrize(("ranks", "rank", "mine"), [(1, 0, 6.0), (2, 0, 2.0), (2, 1, 4.0), (3, 0, 6.0), (3, 2, 0.0)])
def test_what_the_ranks_measured_is_counted_once(monkeypatch, ranks, rank, mine):
    """Two ranks have saved, with sums 2 and 4."""
    world, saved = World(), []
    for total in (2.0, 4.0):
        world.trainer.progress.begin_step(experience(range(4)), {})
        world.trainer.progress.sums.add_sum("a", torch.tensor(total), torch.tensor(1.0))
        saved.append(world.trainer.rank_state())
    shared, other = world.trainer.shared_state(), World()
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    monkeypatch.setattr(dist, "rank", lambda: rank)
    own = saved[rank] if ranks == 2 else None
    other.trainer.load_state(shared, RankStates(own, lambda: iter(saved)))
    means = other.trainer.progress.sums.state_dict()["means"]
    assert {name: float(part[0]) for name, part in means.items()} == {"a": mine}, "the name is on every rank"
    assert other.did == ["average goes on" if ranks == 2 else ("average of", 2)]


def test_what_the_saved_run_did_not_have_begins_and_what_this_one_has_not_is_left(tmp_path):
    """`--resume_force`: average, texts, validation and adapting coefficients come or go."""
    plain, full = World(), World()
    plain.trainer.engines.actor_average = plain.trainer.texts = plain.trainer.validation = None
    plain.trainer.entropy_coef = loop.FixedCoefficient(0.25)
    plain.trainer.config.algorithm = AlgorithmFlags()
    without, ranks = plain.trainer.shared_state(), alone(plain.trainer.rank_state())
    full.trainer.load_state(without, ranks)
    assert full.did == ["average begins"] and full.trainer.validation.best is None
    assert full.trainer.texts.stream.taken == 0 and full.trainer.entropy_coef.value == 0.25
    full.trainer.validation.best = (1.0, 2)
    plain.trainer.load_state(full.trainer.shared_state(), alone(full.trainer.rank_state()))
    assert plain.did == [] and plain.trainer.entropy_coef.value == 0.25 and not plain.trainer.is_best


def test_before_is_before_the_first_step_although_that_one_is_evaluated_too(tmp_path):
    world = World(steps=1)
    world.trainer.plan.warmup_rollouts = 0
    result = world.run(tmp_path)
    assert (result["eval/score_before"], result["eval/score_after"], result["best_step"]) == (1.0, 0.5, 0)


def test_evaluation_that_comes_later_does_not_make_a_first_one(tmp_path):
    """`--resume_force`: the weights of before the first step are gone."""
    world = World(steps=2)
    world.trainer.progress = PPOState(steps=1, evaluated={}, first={"a": 1.0}, last={"a": 1.0})
    world.run(tmp_path)
    assert [line["step"] for line in lines_of(tmp_path)] == [2] and "evaluate 0" not in world.did


def test_nothing_is_evaluated_where_there_is_nothing_to_answer(tmp_path):
    world = World(steps=1)
    world.trainer.plan.warmup_rollouts = 0
    world.trainer.validation = None
    result = world.run(tmp_path)
    assert [line["step"] for line in lines_of(tmp_path)] == [1] and "best_step" not in result
    assert "evaluate 0" not in world.did and world.trainer.progress.evaluated == {}
