"""A trace of one step: its blocks, its size, and that nothing is recorded outside."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from dschat_ppo.common.phases import PhaseClock, block
from dschat_ppo.errors import StopRequested
from dschat_ppo.monitor.step_trace import StepTrace


def spans_of(file: Path) -> list[dict]:
    """The events of a trace that have a duration, in the order of their begin."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        events = json.load(text)["traceEvents"]
    return sorted(
        (event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"]
    )


def inside(block: dict, events: list[dict]) -> list[str]:
    """Names of the events of the same thread that begin and end inside the block."""
    begin, end, thread = block["ts"], block["ts"] + block["dur"], (block["pid"], block["tid"])
    within = (
        event for event in events if event is not block and (event["pid"], event["tid"]) == thread
    )
    return [
        event["name"]
        for event in within
        if begin <= event["ts"] and event["ts"] + event["dur"] <= end
    ]


def blocks(events: list[dict]) -> list[dict]:
    """The events that the run has named."""
    return [
        event
        for event in events
        if event.get("cat") == "user_annotation" and "Profiler" not in event["name"]
    ]


def work(trace: StepTrace, steps: int, first: int = 1, tokens: int = 3) -> list[str]:
    """Do steps of two phases; returns the items."""
    clock, done = PhaseClock(), []
    x = torch.ones(4, 4)
    for item in trace.around([f"step {number}" for number in range(first, first + steps)], first):
        done.append(item)
        with clock.phase("rollout"):
            for _ in range(tokens):
                torch.mm(x, x)
            torch.neg(x)
        with clock.phase("train"), block("train actor"):
            torch.exp(x)
    return done


def test_the_trace_of_a_step_has_its_phases_around_their_operators(tmp_path, capsys):
    assert work(StepTrace(tmp_path, 2), 3) == ["step 1", "step 2", "step 3"]
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == ["profile/step_2_rank_0.json.gz"]
    events = spans_of(tmp_path / files[0])
    assert [event["name"] for event in blocks(events)] == ["rollout", "train", "train actor"]
    rollout, train, actor = blocks(events)
    assert inside(rollout, events).count("aten::mm") == 3 and "aten::exp" not in inside(
        rollout, events
    )
    assert {"train actor", "aten::exp"} <= set(inside(train, events)) and "aten::exp" in inside(
        actor, events
    )
    assert [event["name"] for event in events].count("aten::mm") == 3, "of one step alone"
    out = capsys.readouterr().out
    assert (
        f"the trace of step 2 is {tmp_path}/profile/step_2_rank_0.json.gz" in out
        and "ui.perfetto.dev" in out
    )


@pytest.mark.parametrize(("step", "first"), [(None, 1), (2, 3)])
def test_other_steps_leave_nothing(tmp_path, step, first):
    assert len(work(StepTrace(tmp_path, step), 3, first)) == 3
    assert not any(tmp_path.iterdir())
    work(StepTrace(tmp_path, first + 1), 3, first)
    assert (tmp_path / f"profile/step_{first + 1}_rank_0.json.gz").exists()


@pytest.mark.parametrize("raised", [ZeroDivisionError, StopRequested])
def test_a_step_that_ends_by_an_exception_leaves_its_trace_and_no_profiler(tmp_path, raised):
    def fail() -> None:
        for _ in StepTrace(tmp_path, 1).around([0, 0], 1):
            torch.neg(torch.ones(2))
            raise raised("saved")

    with pytest.raises(raised):
        fail()
    [file] = tmp_path.rglob("*.gz")
    assert "aten::neg" in [event["name"] for event in spans_of(file)]
    assert not torch.autograd._profiler_enabled()
