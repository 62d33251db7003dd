"""The benchmark of a step's fixed costs: what it counts, and a run on two ranks."""

import json
import sys
from collections import Counter

import pytest
import torch
from launch import ROOT, forked, succeed

sys.path.insert(0, str(ROOT / "benchmarks"))
import op_counts  # noqa: E402
import step_costs  # noqa: E402


def test_operators_are_seen_forward_and_backward_with_their_caller():
    seen, callers = Counter(), set()

    def count(name, arguments):
        seen[name] += 1
        callers.add(op_counts.caller(str(ROOT / "tests/benchmarks")).split(":")[0])

    weight = torch.ones(2, 3, requires_grad=True)
    with op_counts.Operators(count):
        (torch.ones(4, 2) @ weight).sum().backward()
        float(weight.grad.sum())
    torch.ones(1).item()
    assert (seen["aten::mm"], seen["aten::_local_scalar_dense"]) == (2, 1), "one product forward, one backward"
    assert callers == {"test_step_costs_benchmark.py"}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_step_on_two_ranks(tmp_path):
    step_costs.make_models(tmp_path)
    succeed(forked(2, "tests/workers/costs_of_a_step.py", tmp_path, "--max_answer_seq_len 4"))
    found = json.loads((tmp_path / "costs.json").read_text())
    kinds = {name.split()[1]: calls for name, (calls, _) in found["collectives"].items()}
    assert kinds["allreduce"] > 0 and sum(size for _, size in found["collectives"].values()) > 2 * 1.7e6
    assert found["calls"]["optimizer steps"] == 8, "two models, two epochs of two mini-batches"
    assert found["optimizer_kernels"]["aten::_fused_adamw_"] >= 8
    of_layers = {"module hooks of ZeRO-3", "submodules fetched", "submodules released"}
    assert {name for name, count in found["calls"].items() if count == 0} == of_layers, "the model is whole"
    assert 8 <= found["calls"]["gathers of weights"] <= 10, "one after each update"
    assert sum(kinds.values()) <= 64
    assert found["step_seconds"]["a step"] > found["step_seconds"]["its arithmetic"] > 0
    assert "| gathers of weights | 257 -> " in step_costs.summary({"2": found}, {"2": found | {
        "calls": found["calls"] | {"gathers of weights": 257},
    }})  # fmt: skip
    assert {"rollout", "score", "train", "reward"} <= set(found["cpu_seconds"])
    assert "| 2 rank(s) |" in step_costs.tables({"2": found})
