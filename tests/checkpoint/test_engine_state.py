"""Which parameters the states of an engine hold, and pieces of them from one layout into another; tests/ranks saves and
loads them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dschat_ppo.checkpoint import engine_state
from dschat_ppo.checkpoint.engine_state import (
    Fragment,
    _require_same_parameters,
    common_state,
    gather,
    partitioned_fragments,
    resume_schedule,
    whole_weights,
)
from dschat_ppo.errors import UserError

SHAPES = [{"a": torch.Size([2, 3]), "b": torch.Size([1])}, {"c": torch.Size([5])}]


def test_zero_3_pads_each_parameter_and_divides_it_into_equal_parts():
    # three ranks: a is 2 + 2 + 2, b is 1 + nothing + nothing, c is 2 + 2 + 1
    assert partitioned_fragments(SHAPES, 0, 3) == [
        Fragment("a", 0, 2, 0, 0), Fragment("b", 0, 1, 0, 2), Fragment("c", 0, 2, 1, 0),
    ]  # fmt: skip
    assert partitioned_fragments(SHAPES, 1, 3) == [Fragment("a", 2, 2, 0, 0), Fragment("c", 2, 2, 1, 0)]
    assert partitioned_fragments(SHAPES, 2, 3) == [Fragment("a", 4, 2, 0, 0), Fragment("c", 4, 1, 1, 0)]
    # four ranks: c is 2 + 2 + 1 + nothing
    assert partitioned_fragments(SHAPES, 3, 4) == []
    # padding lies between parameters: d is 2 + 2 + 1, e is 1 + 1 + 1
    assert partitioned_fragments([{"d": torch.Size([5]), "e": torch.Size([3])}], 2, 3) == [
        Fragment("d", 4, 1, 0, 0), Fragment("e", 2, 1, 0, 2),
    ]  # fmt: skip


def cut(sizes: dict[str, int], ranks: int, rng) -> list[list[Fragment]]:
    """A random layout: each parameter cut at random places, pieces in random order, two flat tensors, gaps."""
    layout: list[list[Fragment]] = [[] for _ in range(ranks)]
    ends = np.zeros((ranks, 2), dtype=int)
    for name in rng.permutation(list(sizes)):
        places = np.sort(rng.integers(0, sizes[name] + 1, ranks - 1))
        starts, stops = [0, *places.tolist()], [*places.tolist(), sizes[name]]
        for rank, start, stop in zip(rng.permutation(ranks).tolist(), starts, stops, strict=True):
            flat = int(rng.integers(2))
            ends[rank, flat] += rng.integers(3)
            layout[rank].append(Fragment(str(name), start, stop - start, flat, int(ends[rank, flat])))
            ends[rank, flat] += stop - start
    return layout


@pytest.mark.parametrize("seed", range(8))
def test_any_layout_can_be_resharded_into_any_other(seed):
    rng = np.random.default_rng(seed)
    sizes = {name: int(rng.integers(1, 12)) for name in "abcd"}
    truth = {name: {key: rng.normal(size=size) for key in ("fp32", "exp_avg", "exp_avg_sq")}
             for name, size in sizes.items()}  # fmt: skip
    shards = []
    for fragments in cut(sizes, int(rng.integers(1, 5)), rng):
        flats = [{key: torch.full((80,), 99.0) for key in truth["a"]} for _ in range(2)]
        for piece in fragments:
            for key, values in truth[piece.name].items():
                part = torch.tensor(values[piece.start : piece.start + piece.length])
                flats[piece.flat][key][piece.offset : piece.offset + piece.length] = part
        shards.append({"fragments": fragments, "flats": flats, "steps": 3})
    for wanted in cut(sizes, int(rng.integers(1, 5)), rng):
        found = gather(shards, wanted, [80, 80])
        for key in truth["a"]:
            expected = np.zeros((2, 80), dtype=np.float32)
            for piece in wanted:
                values = truth[piece.name][key][piece.start : piece.start + piece.length]
                expected[piece.flat, piece.offset : piece.offset + piece.length] = values
            np.testing.assert_array_equal(np.stack([flat[key].numpy() for flat in found]), expected)


def engine_with(**sizes):
    """An engine without ZeRO in which these parameters train."""
    module = torch.nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
    module.register_buffer("passes", torch.zeros(()))
    return SimpleNamespace(
        module=module, param_names={weight: name for name, weight in module.items()},
        zero_optimization=lambda: False, optimizer=SimpleNamespace(param_groups=[{"params": [*module.values()]}]),
    )  # fmt: skip


def test_states_of_another_model_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"actor: holds no states of an engine \(common.pt is missing\)"):
        common_state(tmp_path / "actor")
    common = {"shapes": {"a": (3,), "b": (1,)}, "buffers": {"passes": torch.zeros(())}}
    _require_same_parameters(Path("actor"), common, engine_with(b=1, a=3))
    with pytest.raises(UserError, match=r"actor: .*\(differing: 1; the first is a\); use the flags and the model of"):
        _require_same_parameters(Path("actor"), common, engine_with(a=4, b=1))
    with pytest.raises(UserError, match="the first is b"):
        _require_same_parameters(Path("actor"), common, engine_with(a=3))
    for buffers in ({}, {"passes": 0, "more": 0}):
        with pytest.raises(UserError, match=f"the first is {'more' if buffers else 'passes'}"):
            _require_same_parameters(Path("actor"), {**common, "buffers": buffers}, engine_with(a=3, b=1))


def test_whole_weights_are_joined_from_the_pieces_of_all_ranks(monkeypatch):
    """Padding (99) lies between the pieces; the second rank holds the end of `a` and all of `c`."""
    shards = [
        {"fragments": [Fragment("a", 0, 4, 0, 0), Fragment("b", 0, 1, 0, 5)],
         "flats": [{"fp32": torch.tensor([1.0, 2, 3, 4, 99, 7]), "exp_avg": torch.zeros(6)}]},
        {"fragments": [Fragment("c", 0, 5, 1, 1), Fragment("a", 4, 2, 0, 0)],
         "flats": [{"fp32": torch.tensor([5.0, 6])}, {"fp32": torch.tensor([99.0, 10, 11, 12, 13, 14])}]},
    ]  # fmt: skip
    monkeypatch.setattr(engine_state, "read_shards", lambda folder, common: shards)
    found = {name: weight.tolist() for name, weight in whole_weights(Path("x"), {"shapes": SHAPES[0] | SHAPES[1]})}
    assert found == {"a": [[1, 2, 3], [4, 5, 6]], "b": [7], "c": [10, 11, 12, 13, 14]}
    shards.pop()
    with pytest.raises(UserError, match="hold 4 of the 6 elements of a$"):
        list(whole_weights(Path("x"), {"shapes": SHAPES[0] | SHAPES[1]}))


def scheduled(rate=0.5, warmup=10, steps=0):
    """Optimizer and schedule of an engine after some steps."""
    weights = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights], lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / warmup))
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return SimpleNamespace(optimizer=optimizer, lr_scheduler=scheduler)


@pytest.mark.parametrize("flags", [{}, {"rate": 0.25, "warmup": 8}])
def test_the_schedule_goes_on_where_it_was_with_the_rates_of_now(flags):
    engine, whole = scheduled(**flags), scheduled(**flags, steps=4)
    resume_schedule(engine, scheduled(steps=4).lr_scheduler.state_dict())
    for _ in range(2):
        assert [group["lr"] for group in engine.optimizer.param_groups] == whole.lr_scheduler.get_last_lr()
        assert engine.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
        for one in (engine, whole):
            one.optimizer.step()
            one.lr_scheduler.step()
