"""The benchmark of scaling: its arithmetic by hand, what it counts, and a run on two ranks."""

import json
import re
import sys

import pytest
import torch
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


def test_operations_of_a_step():
    policy, scalar = TINY.forward_flops(5, 3, 2), TINY.forward_flops(5, 3, 0)
    once = scaling_model.flops(TINY, Work(ranks=2, rows=5, prompt=1, answer=2))
    assert once == {"rollout": policy, "reward": scalar, "score": policy, "train": 3 * (policy + scalar)}
    twice = scaling_model.flops(TINY, Work(2, 5, 1, 2, epochs=2, recompute=True, checkpointing=True))
    assert twice["score"] == 2 * policy + scalar
    assert twice["train"] == 2 * 4 * (policy + scalar)


def test_a_step_of_large_models_takes_18_operations_per_parameter_and_token():
    large = Shape(32, 4096, 14336, 32, 8, 128, 128256, tied=False)
    assert large.parameters == pytest.approx(8.03e9, rel=1e-3)  # Llama 3 8B
    assert large.cache_bytes(1) == 128 * 1024
    work = Work(ranks=8, rows=1, prompt=0, answer=64)
    total = sum(scaling_model.flops(large, work).values())
    # no product with the embedding, and none with the head in 8 of the 18 (reward model, critic)
    expected = 64 * (18 * large.layer_weights + 10 * large.head_weights)
    assert total == pytest.approx(expected, rel=1e-2)


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


def test_time_where_nothing_is_hidden():
    work = Work(ranks=2, rows=5, prompt=1, answer=2)
    computing, moving = scaling_model.seconds(TINY, WEIGHTS, work, rate=10.0, bandwidth=5.0)
    assert computing == sum(scaling_model.flops(TINY, work).values()) / 10
    assert moving == (100 + 80 + 100 + 360 + 180) / 2 / 5


def test_whole_tensors_of_a_collective():
    part, whole = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)
    assert scaling.whole_tensors("allgather", (whole, part)) == [whole]
    assert scaling.whole_tensors("reduce_scatter", (part, whole)) == [whole]
    assert [len(tensor) for tensor in scaling.whole_tensors("allreduce", ([part, whole],))] == [3, 6]
    assert scaling.kind_of("c10d::_allgather_base_") == "allgather"
    assert scaling.kind_of("c10d::barrier") is None and scaling.kind_of("aten::mm") is None


@pytest.mark.parametrize("run", [*scaling.TIME_RUNS.values(), *scaling.bytes_runs([1, 2, 4]).values()], ids=str)
def test_every_run_parses(run):
    words = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
    assert parse("ppo", f"{words} {run.flags}".split()).ppo.max_answer_seq_len == run.answer


def found_of(folder, run):
    """What a run of `scaling.launch` returns, with made-up measurements."""
    passes = dict.fromkeys(("train actor", "train critic"), run.updates) | {"score reference": 1, "reward reward": 1}
    return {
        "run": scaling.asdict(run), "prompt": 3.0, "seconds": 0.5 * run.rows / 16, "shape": scaling.asdict(TINY),
        "weights": scaling.asdict(WEIGHTS), "measured": {"train allgather": 2 * 2**20}, "passes": passes,
    }  # fmt: skip


def start_main(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["scaling.py", *map(str, words)])
    scaling.main()


def test_the_command_runs_all_and_writes_its_tables(tmp_path, monkeypatch, capsys):
    docs, kept = tmp_path / "page.md", tmp_path / "found.json"
    docs.write_text("before\n<!-- scaling -->\nold\n<!-- /scaling -->\nafter\n")
    monkeypatch.setattr(scaling, "launch", found_of)
    start_main(monkeypatch, "--json", kept, "--only", "larger models", "base")
    assert list(json.loads(kept.read_text())) == ["larger models", "base"]
    start_main(monkeypatch, "--json", kept, "--docs", docs)
    found = json.loads(kept.read_text())
    assert set(found) == {*scaling.bytes_runs([1, 2, 4]), *scaling.TIME_RUNS}
    text = docs.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    names = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    runs = [name for name in names if name in found]
    assert runs == [*scaling.bytes_runs([1, 2, 4]), *scaling.TIME_RUNS]  # whatever the order in the file
    assert re.search(r"prompts x 4 \| .* \| 2.00 \| .* \| 4.00 \|", text)
    launched = capsys.readouterr().err.count("---")
    start_main(monkeypatch, "--json", kept, "--only")
    assert capsys.readouterr() == (text.split("<!-- scaling -->\n\n")[1].split("\n\n<!--")[0] + "\n", "")
    assert launched == 2 + len(found)


def test_an_unknown_run_is_named(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        start_main(monkeypatch, "--parts", "time", "--only", "small, 1 rank(s)")
    assert "no run 'small, 1 rank(s)'; there are base, prompts x 2" in capsys.readouterr().err


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
