"""Which parameters the states of an engine hold, and pieces of them from one layout into another; tests/ranks saves and
loads them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dschat_ppo.checkpoint import engine_state
from dschat_ppo.checkpoint.engine_state import (
    PARAMETER_NAMES,
    Fragment,
    Shard,
    _require_same_parameters,
    gather,
    model_states,
    partitioned_fragments,
    read_shards,
    resume_schedule,
    trained_shapes,
    trained_state,
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
    assert partitioned_fragments([{"d": torch.Size([9]), "e": torch.Size([2])}], 3, 4) == []
    # padding lies between parameters: d is 2 + 2 + 1, e is 1 + 1 + 1
    assert partitioned_fragments([{"d": torch.Size([5]), "e": torch.Size([3])}], 2, 3) == [
        Fragment("d", 4, 1, 0, 0), Fragment("e", 2, 1, 0, 2),
    ]  # fmt: skip
    assert partitioned_fragments([{"d": torch.Size([9]), "e": torch.Size([3])}], 2, 4) == [
        Fragment("d", 6, 3, 0, 0), Fragment("e", 2, 1, 0, 3),
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


@pytest.mark.parametrize("seed", range(20))
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
        shards.append(Shard(fragments, flats, 3))
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


def test_states_of_another_model_are_refused():
    held = {"a": torch.zeros(3), "b": torch.zeros(1), "passes": torch.zeros(())}
    common = {"module": held, "param_shapes": None, PARAMETER_NAMES: ["a", "b"]}
    _require_same_parameters(Path("actor"), common, engine_with(b=1, a=3))
    with pytest.raises(UserError, match=r"actor: .*\(differing: 1; the first is a\); use the flags and the model of"):
        _require_same_parameters(Path("actor"), common, engine_with(a=4, b=1))
    with pytest.raises(UserError, match="the first is b"):
        _require_same_parameters(Path("actor"), common, engine_with(a=3))
    with pytest.raises(UserError, match="the first is c"):
        _require_same_parameters(Path("actor"), {**common, "module": held | {"c": held["b"]}}, engine_with(a=3, b=1))
    with pytest.raises(UserError, match="the first is passes"):
        _require_same_parameters(Path("actor"), {**common, "module": {"a": held["a"], "b": held["b"]}},
                                 engine_with(a=3, b=1))  # fmt: skip


def test_a_missing_file_of_a_rank_is_named(tmp_path):
    with pytest.raises(UserError, match=r"actor: holds no states of an engine \(state/\*_model_states.pt is missing\)"):
        model_states(tmp_path / "actor")
    common = {"optimizer": None, "dp_world_size": 2, "param_shapes": SHAPES}
    state = {"fp32_flat_groups": [torch.zeros(4), torch.zeros(3)], "optimizer_state_dict": {"state": {}}}
    (tmp_path / "state").mkdir()
    name = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": state}, tmp_path / "state" / ("bf16_" + name.format(0)))
    with pytest.raises(UserError, match=f"the states of rank 1 of 2 are missing .state/{name.format(1)}"):
        read_shards(tmp_path, common)
    torch.save({"optimizer_state_dict": state}, tmp_path / "state" / name.format(1))
    assert [len(shard.fragments) for shard in read_shards(tmp_path, common)] == [3, 2]


def test_whole_weights_are_joined_from_the_pieces_of_all_ranks(monkeypatch):
    """Padding (99) lies between the pieces; the second rank holds the end of `a` and all of `c`."""
    shards = [
        Shard([Fragment("a", 0, 4, 0, 0), Fragment("b", 0, 1, 0, 5)],
              [{"fp32": torch.tensor([1.0, 2, 3, 4, 99, 7]), "exp_avg": torch.zeros(6)}], 1),
        Shard([Fragment("c", 0, 5, 1, 1), Fragment("a", 4, 2, 0, 0)],
              [{"fp32": torch.tensor([5.0, 6])}, {"fp32": torch.tensor([99.0, 10, 11, 12, 13, 14])}], 1),
    ]  # fmt: skip
    monkeypatch.setattr(engine_state, "read_shards", lambda folder, common: shards)
    found = {name: weight.tolist() for name, weight in whole_weights(Path("x"), {"param_shapes": SHAPES})}
    assert found == {"a": [[1, 2, 3], [4, 5, 6]], "b": [7], "c": [10, 11, 12, 13, 14]}
    shards.pop()
    with pytest.raises(UserError, match="hold 4 of the 6 elements of a$"):
        list(whole_weights(Path("x"), {"param_shapes": SHAPES}))


def scheduled(rate=0.5, warmup=10, steps=0):
    """Optimizer and schedule of an engine after some steps."""
    weights = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights], lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / warmup))
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return SimpleNamespace(optimizer=optimizer, lr_scheduler=scheduler)


@pytest.mark.parametrize("flags", [{}, {"rate": 0.25}, {"warmup": 8}, {"rate": 0.25, "warmup": 8}])
def test_the_schedule_goes_on_where_it_was_with_the_rates_of_now(flags):
    engine, whole = scheduled(**flags), scheduled(**flags, steps=4)
    resume_schedule(engine, scheduled(steps=4).lr_scheduler.state_dict())
    for _ in range(2):
        assert [group["lr"] for group in engine.optimizer.param_groups] == whole.lr_scheduler.get_last_lr()
        assert engine.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
        for one in (engine, whole):
            one.optimizer.step()
            one.lr_scheduler.step()


def test_the_trained_state_has_all_names_of_what_trains_and_the_buffers():
    module = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "b": nn.Linear(2, 3), "c": nn.BatchNorm1d(3)})
    module["b"].weight = module["a"].weight  # tied
    module["c"].register_buffer("scratch", torch.zeros(1), persistent=False)
    module["c"].requires_grad_(False)
    buffers = {"c.running_mean", "c.running_var", "c.num_batches_tracked"}
    assert trained_state(module).keys() == {"a.weight", "b.weight", "b.bias"} | buffers
    module["a"].weight.requires_grad_(False)  # under both names
    assert trained_state(module).keys() == {"b.bias"} | buffers


def test_what_a_quantised_layer_stores_beside_its_frozen_weight_is_left_out():
    """bitsandbytes stores `weight.absmax` and others, or `SCB`, which are neither parameters nor buffers."""

    class Quantised(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination |= {f"{prefix}weight.absmax": torch.zeros(1), f"{prefix}SCB": torch.zeros(1)}

    layer = Quantised(2, 2)
    layer.weight.requires_grad_(False)
    assert len(layer.state_dict()) == 4 and trained_state(layer).keys() == {"bias"}


def test_shapes_are_those_of_all_groups_or_of_the_weights_at_stage_0():
    shapes = [{"b": torch.Size([3]), "a": torch.Size([2, 2])}, {"c": torch.Size([1])}]
    found = trained_shapes({"param_shapes": shapes, "module": {}})
    assert list(found.items()) == [("b", (3,)), ("a", (2, 2)), ("c", (1,))]
    common = {"param_shapes": None, "module": {"x": torch.zeros(2), "y": torch.zeros(4, 1)}}
    assert trained_shapes(common | {PARAMETER_NAMES: ["y"]}) == {"y": (4, 1)}
