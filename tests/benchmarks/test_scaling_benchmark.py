"""The benchmark of scaling: its arithmetic by hand, what it counts, and a run on two ranks."""

import json
import sys

import pytest
from launch import ROOT, forked, succeed

sys.path.insert(0, str(ROOT / "benchmarks"))
import scaling  # noqa: E402
import scaling_model  # noqa: E402
import scaling_tables  # noqa: E402
from scaling_model import Bytes, Shape, Work  # noqa: E402

from dschat_ppo.config.cli import parse  # noqa: E402

TINY = Shape(layers=2, hidden=4, intermediate=6, heads=2, kv_heads=1, head_size=2, vocabulary=10, tied=True)
WEIGHTS = Bytes(actor=100, critic=80, reference=100, reward=80)


def test_parameters_of_a_shape():
    # per layer: query and output 4 x 4, key and value 4 x 2, three matrices 4 x 6
    assert TINY.layer_weights == 2 * (2 * 16 + 2 * 8 + 3 * 24) == 240
    assert TINY.parameters == 240 + 10 * 4 + 5 * 4  # embedding; two norms per layer and one at the end
    assert Shape(2, 4, 6, 2, 1, 2, 10, tied=False).parameters == TINY.parameters + 40
    assert TINY.cache_bytes(tokens=5) == 5 * 2 * 2 * 1 * 2 * 2  # tokens, layers, keys and values, heads, size, bytes


def test_operations_of_a_forward_pass():
    products = 2 * 240 * 3 + 2 * 40 * 2  # three tokens through the layers, two through the head
    attention = (1 + 2 + 3) * 2 * 2 * 2 * 2 * 2  # pairs, layers, heads, head size, scores and values, 2 each
    assert TINY.forward_flops(rows=1, length=3, predicted=2) == products + attention
    assert TINY.forward_flops(rows=7, length=3, predicted=2) == 7 * (products + attention)


def test_bytes_of_a_step():
    once = Work(ranks=4, rows=8, prompt=4, answer=4)
    assert scaling_model.gathered(WEIGHTS, once) == {"rollout": 100, "reward": 80, "score": 100, "train": 2 * 180}
    assert scaling_model.reduced(WEIGHTS, once) == 180
    more = Work(
        4, 8, 4, 4, updates=2, micro_batches=3, scoring_passes=5, reward_passes=7, recompute=True, checkpointing=True
    )
    assert scaling_model.gathered(WEIGHTS, more) == {
        "rollout": 100, "reward": 7 * 80, "score": 5 * 280, "train": 3 * 180 * 6,
    }  # fmt: skip
    assert scaling_model.reduced(WEIGHTS, more) == 180 * 6
    assert scaling_model.sent(100, 4) == 75 and scaling_model.sent(100, 1) == 0


@pytest.mark.parametrize("run", [*scaling.TIME_RUNS.values(), *scaling.bytes_runs([1, 2, 4]).values()], ids=str)
def test_every_run_parses(run):
    words = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
    assert parse("ppo", f"{words} {run.flags}".split()).ppo.max_answer_seq_len == run.answer


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_move_the_predicted_bytes(tmp_path):
    run = scaling.Run("small", 2, rows=4, answer=4, updates=2)
    scaling.prepare(tmp_path, run)
    succeed(forked(2, "tests/workers/scaling_rank.py", tmp_path, json.dumps(scaling.asdict(run))))
    found = json.loads((tmp_path / "found.json").read_text())
    expected = scaling_tables.predicted(found)
    assert expected == {name: found["measured"][name] for name in expected}
    assert found["passes"]["train actor"] == found["passes"]["train critic"] == 2
    assert min(expected.values()) > 0
    assert "small" in scaling_tables.tables({"small, 2 rank(s)": found, "base": found})
