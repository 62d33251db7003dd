"""Under `--resume_force` what was off when the checkpoint was saved begins anew, and what is off now is passed over."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_advantages import scored, shaping
from test_group_pool import clipped, rows
from test_mini_dataset import experience

from dschat_ppo.algorithms.controllers import AdaptiveEntropy, FixedCoefficient
from dschat_ppo.checkpoint.resumable import RankStates
from dschat_ppo.config.cli import parse
from dschat_ppo.data.sampler import IndexStream
from dschat_ppo.errors import UserError
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.ppo.collect import ExperienceCollector
from dschat_ppo.ppo.group_pool import GroupPool
from dschat_ppo.ppo.loop import PPOTrainer
from dschat_ppo.ppo.state import PPOState

CPU = torch.device("cpu")
BEGINS = ": was off when the checkpoint was saved, so it starts from scratch\n"
WORDS = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
ENTROPY = "--entropy_coef 0.01 --entropy_target 2"


def test_what_adapts_begins_anew_where_it_was_off(capsys):
    was_off, now_on = shaping(), shaping(kl_target=0.01, normalize_rewards="running")
    was_off.experience(scored(), step=1)
    now_on.load_state_dict(was_off.state_dict())
    assert capsys.readouterr().out == f"--kl_target{BEGINS}--normalize_rewards running{BEGINS}"
    assert now_on.kl_coef.value == 0.1 and now_on.running.count == 0


def test_what_adapted_is_passed_over_where_it_is_off(capsys):
    was_on, now_off = shaping(kl_target=0.01, normalize_rewards="running"), shaping()
    was_on.experience(scored(), step=1)
    now_off.load_state_dict(was_on.state_dict())
    assert was_on.kl_coef.value != 0.1 == now_off.kl_coef.value
    assert now_off.running.count == 0 and capsys.readouterr().out == ""
    same = shaping(kl_target=0.01, normalize_rewards="running")
    same.load_state_dict(was_on.state_dict())
    assert same.kl_coef.value == was_on.kl_coef.value and same.running.count == 6
    assert capsys.readouterr().out == ""


def collector(pool: GroupPool | None) -> ExperienceCollector:
    made = ExperienceCollector.__new__(ExperienceCollector)
    made.stream, made.pool = IndexStream(9, seed=1), pool
    return made


def test_groups_that_wait_come_and_go_with_dynamic_sampling(capsys):
    pool = GroupPool(2, clipped)
    pool.add(rows([0, 0, 1, 1], [0.0, 1.0, 2.0, 1.0]))
    pool.take()
    for was, now, missing in ((None, GroupPool(2, clipped), 2), (pool, None, 0), (pool, GroupPool(2, clipped), 0)):
        before, after = collector(was), collector(now)
        before.stream.take(4)
        after.load_state_dict(before.state_dict(), CPU)
        assert after.stream.taken == 4
        assert now is None or now.missing == missing
        assert capsys.readouterr().out == (f"--dynamic_sampling{BEGINS}" if was is None else "")


class Average:
    """Stands for a moving average of one rank."""

    def __init__(self):
        self.loaded, self.begun = [], False

    def state_dict(self):
        return {"weight": torch.ones(1)}

    def has_layout_of(self, part):
        return part.keys() == {"weight"}

    def load_state_dict(self, part):
        self.loaded.append(part)

    def load_parts(self, ranks):
        self.loaded += [part for part in ranks if part]
        return bool(self.loaded)

    def begin(self):
        self.begun = True


def trainer(words: str = "", texts: bool = False, average: bool = False) -> PPOTrainer:
    """A trainer without engines."""
    made = PPOTrainer.__new__(PPOTrainer)
    made.config = parse("ppo", [*WORDS.split(), *words.split()])
    algorithm = made.config.algorithm
    made.device, made.progress, made.health, made.guard = CPU, PPOState(), HealthWatch(), NonFinitePolicy(None)
    made.shaping, made.collector, made.validation = shaping(), collector(None), None
    made.texts = SimpleNamespace(stream=IndexStream(5, seed=2)) if texts else None
    made.engines = SimpleNamespace(actor_average=Average() if average else None)
    made.entropy_coef = FixedCoefficient(algorithm.entropy_coef)
    if algorithm.entropy_target:
        made.entropy_coef = AdaptiveEntropy(algorithm.entropy_coef, algorithm.entropy_target, 0.005, 0.0, 1.0)
    return made


def go_on(before: PPOTrainer, after: PPOTrainer, alone: bool = False) -> PPOTrainer:
    """`after` in the state of `before`; `alone`: without looking at other ranks' files."""
    own = before.rank_state()
    after.load_state(before.shared_state(), RankStates(own, (lambda: pytest.fail()) if alone else lambda: iter([own])))
    return after


def test_a_trainer_begins_anew_with_what_was_off(capsys):
    after = go_on(trainer(), trainer(ENTROPY, texts=True, average=True))
    said = capsys.readouterr().out
    assert sorted(said.splitlines(keepends=True)) == [
        f"{flag}{BEGINS}" for flag in ("--enable_ema", "--entropy_target", "--unsupervised_dataset_name")
    ]
    assert after.entropy_coef.value == 0.01 and after.texts.stream.taken == 0 and after.engines.actor_average.begun


def test_a_trainer_passes_over_what_is_off_and_goes_on_with_what_stays(capsys):
    before = trainer(ENTROPY, texts=True, average=True)
    before.entropy_coef.update(1.0, 1)
    before.texts.stream.take(3)
    go_on(before, trainer())
    go_on(trainer(), trainer())
    after = go_on(before, trainer(ENTROPY, texts=True, average=True), alone=True)
    assert capsys.readouterr().out == ""
    assert after.entropy_coef.value == before.entropy_coef.value == 0.015
    assert after.texts.stream.taken == 3
    assert len(after.engines.actor_average.loaded) == 1 and not after.engines.actor_average.begun


def test_rows_in_flight_that_lack_what_is_asked_for_now_are_refused():
    before = trainer()
    whole = replace(experience(range(3)), selected=None)
    for lacking, words in (
        ({}, ""), ({"values": None}, ""), ({"ref_logprobs": None, "kl": None}, ""),
        ({"values": None}, "--advantage_estimator grpo --n_samples_per_prompt 2"),
        ({"ref_logprobs": None}, "--kl_coef 0"), ({}, "--policy_loss kl_cov"),
    ):  # fmt: skip
        before.progress.begin_step(replace(whole, **lacking), {})
        missing = [name for name in lacking if name != "kl" and not words] + ["selected"] * ("kl_cov" in words)
        if missing:
            with pytest.raises(UserError, match=f"have no {', '.join(missing)}, which"):
                go_on(before, trainer(words))
        else:
            assert go_on(before, trainer(words)).progress.experience is not None


def test_waiting_rows_that_lack_what_is_asked_for_now_are_refused():
    before, after = trainer("--advantage_estimator grpo --n_samples_per_prompt 2"), trainer()
    before.collector.pool, after.collector.pool = GroupPool(2, clipped), GroupPool(2, clipped)
    go_on(before, after)
    before.collector.pool.add(rows([0, 0], [0.0, 1.0]))
    with pytest.raises(UserError, match="have no values, ref_logprobs, which"):
        go_on(before, after)


def test_rows_that_are_gone_are_left_out_of_a_stream():
    before, after = IndexStream(9, seed=1), IndexStream(4, seed=1)
    first = before.take(2)
    after.load_state_dict(before.state_dict())
    kept = [row for row in before.take(7) if row < 4]
    assert after.take(len(kept)) == kept and len(kept) == 4 - sum(row < 4 for row in first)
    assert sorted(after.take(4)) == [0, 1, 2, 3]
