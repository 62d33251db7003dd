"""Files of tensors and plain values; which parameters the states of an engine hold, and pieces of
them from one layout into another (tests/ranks saves and loads them)."""

import enum
import hashlib
import os
import pickle
import threading
from collections import namedtuple
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
    master_weights,
    partitioned_fragments,
    resume_schedule,
)
from dschat_ppo.checkpoint.state_files import BackgroundWriter, host_copy, load_state, save_state
from dschat_ppo.errors import UserError

STATE = {
    "text": "é",
    "whole": 2**70,
    "number": 0.1,
    "flag": True,
    "nothing": None,
    "nested": {"list": [1, (2.5, "x", [])], 7: {}},
    "tensors": [
        torch.arange(3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 4, dtype=torch.bool),
    ],
}


def test_a_state_is_loaded_as_it_was_saved(tmp_path):
    save_state(tmp_path / "state.pt", STATE)
    # with the types of numbers and tensors
    assert repr(load_state(tmp_path / "state.pt")) == repr(STATE)


Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


REFUSED = [np.float64(1.0), np.zeros(2), Colour.RED, Point(1, 2), Path("x")]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_values_that_the_loader_refuses_are_refused_with_their_place(tmp_path, value):
    with pytest.raises(
        TypeError, match=rf"state\['a'\]\[1\]\['b'\]\[1\] is a .*{type(value).__name__}"
    ):
        save_state(tmp_path / "state.pt", {"a": [0, {"b": (1, value)}]})
    with pytest.raises(TypeError, match=r"state\['a'\] has the key "):
        save_state(tmp_path / "state.pt", {"a": {0.5: 1}})
    assert os.listdir(tmp_path) == []


def test_files_that_cannot_be_loaded_are_named(tmp_path):
    save_state(tmp_path / "cut.pt", STATE)
    whole = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "words.pt").write_bytes(b"no state" * 100)
    torch.save([1], tmp_path / "list.pt")
    for name in ("cut.pt", "missing.pt", "words.pt"):
        with pytest.raises(
            UserError, match=rf"{name}: cannot be loaded: it is damaged, or holds more .* \(.+\)"
        ):
            load_state(tmp_path / name)
    with pytest.raises(UserError, match=r"list\.pt: holds a list"):
        load_state(tmp_path / "list.pt")


def write(state, path):
    writer = BackgroundWriter()
    writer.save(state, path)
    return writer.wait()


def test_states_are_copied_at_the_save_before_they_change(tmp_path):
    writer, gate = BackgroundWriter(), threading.Event()
    writer._thread.submit(gate.wait)
    numbers, groups = torch.arange(6.0), [{"lr": 0.5, "params": [0]}]
    writer.save({"numbers": numbers, "groups": groups}, tmp_path / "a.pt")
    numbers.add_(1)
    groups[0]["lr"] = 9.0
    pending = not writer.done()
    gate.set()
    assert pending
    written = writer.wait()
    content = (tmp_path / "a.pt").read_bytes()
    assert written == {
        tmp_path / "a.pt": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    }
    assert writer.done() and writer.wait() == {}
    found = load_state(tmp_path / "a.pt", mapped=True)
    assert found["numbers"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["groups"] == [{"lr": 0.5, "params": [0]}]


def test_a_view_is_saved_without_the_buffer_behind_it_and_tied_weights_once(tmp_path):
    buffer = torch.arange(1_000_000.0)
    [entry] = write(
        {"view": buffer[10:20], "turned": buffer[:6].view(2, 3).t()}, tmp_path / "a.pt"
    ).values()
    assert entry["bytes"] < 10_000
    found = load_state(tmp_path / "a.pt", mapped=True)
    assert found["view"].tolist() == list(range(10, 20))
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    tied = torch.zeros(50_000)
    [entry] = write(
        {"head": tied, "embedding": tied, "half": tied[:25_000]}, tmp_path / "b.pt"
    ).values()
    assert 300_000 < entry["bytes"] < 310_000
    found = host_copy({"head": tied, "embedding": tied, "half": tied[:25_000], "other": tied + 1})
    assert found["head"] is found["embedding"] and found["half"].shape == (25_000,)
    assert (found["other"] == 1).all() and found["head"].data_ptr() != tied.data_ptr()


class Malicious:
    """Unpickled by `pickle`, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["archive", "old format", "plain pickle"])
def test_pickles_from_outside_are_not_executed(tmp_path, kind):
    path, mark = tmp_path / "a.pt", tmp_path / "executed"
    state = {"module": {}, "optimizer_state_dict": [Malicious(mark)]}
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "archive")
    with pytest.raises(UserError, match=r"a\.pt: cannot be loaded: it is damaged, or holds more"):
        load_state(path, mapped=True)
    assert not mark.exists()
    torch.load(path, weights_only=False) if kind != "plain pickle" else pickle.loads(
        path.read_bytes()
    )
    assert mark.exists(), "the file would have done nothing anyway"


def test_wait_raises_an_oserror_for_a_full_disk_and_the_writer_can_be_used_again(tmp_path):
    numbers = 3_000_000
    (tmp_path / "full.pt").symlink_to("/dev/full")
    writer = BackgroundWriter()
    writer.save({"numbers": torch.ones(numbers)}, tmp_path / "full.pt")
    writer.save({"numbers": torch.ones(numbers)}, tmp_path / "good.pt")
    with pytest.raises(OSError, match="No space left on device"):
        writer.wait()
    assert load_state(tmp_path / "good.pt", mapped=True)["numbers"].sum() == numbers
    writer.save({}, tmp_path / "a.pt")
    assert len(writer.wait()) == 1


SHAPES = [{"a": torch.Size([2, 3]), "b": torch.Size([1])}, {"c": torch.Size([5])}]


def test_zero_3_pads_each_parameter_and_divides_it_into_equal_parts():
    # three ranks: a is 2 + 2 + 2, b is 1 + nothing + nothing, c is 2 + 2 + 1
    assert partitioned_fragments(SHAPES, 0, 3) == [
        Fragment("a", 0, 2, 0, 0),
        Fragment("b", 0, 1, 0, 2),
        Fragment("c", 0, 2, 1, 0),
    ]
    assert partitioned_fragments(SHAPES, 1, 3) == [
        Fragment("a", 2, 2, 0, 0),
        Fragment("c", 2, 2, 1, 0),
    ]
    assert partitioned_fragments(SHAPES, 2, 3) == [
        Fragment("a", 4, 2, 0, 0),
        Fragment("c", 4, 1, 1, 0),
    ]
    # four ranks: c is 2 + 2 + 1 + nothing
    assert partitioned_fragments(SHAPES, 3, 4) == []
    # padding lies between parameters: d is 2 + 2 + 1, e is 1 + 1 + 1
    assert partitioned_fragments([{"d": torch.Size([5]), "e": torch.Size([3])}], 2, 3) == [
        Fragment("d", 4, 1, 0, 0),
        Fragment("e", 2, 1, 0, 2),
    ]


def cut(sizes: dict[str, int], ranks: int, rng) -> list[list[Fragment]]:
    """A random layout: each parameter cut at random places, pieces in random order, two flat
    tensors, gaps."""
    layout: list[list[Fragment]] = [[] for _ in range(ranks)]
    ends = np.zeros((ranks, 2), dtype=int)
    for name in rng.permutation(list(sizes)):
        places = np.sort(rng.integers(0, sizes[name] + 1, ranks - 1))
        starts, stops = [0, *places.tolist()], [*places.tolist(), sizes[name]]
        for rank, start, stop in zip(rng.permutation(ranks).tolist(), starts, stops, strict=True):
            flat = int(rng.integers(2))
            ends[rank, flat] += rng.integers(3)
            layout[rank].append(
                Fragment(str(name), start, stop - start, flat, int(ends[rank, flat]))
            )
            ends[rank, flat] += stop - start
    return layout


@pytest.mark.parametrize("seed", range(8))
def test_any_layout_can_be_resharded_into_any_other(seed):
    rng = np.random.default_rng(seed)
    sizes = {name: int(rng.integers(1, 12)) for name in "abcd"}
    truth = {
        name: {key: rng.normal(size=size) for key in ("fp32", "exp_avg", "exp_avg_sq")}
        for name, size in sizes.items()
    }
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
            np.testing.assert_array_equal(
                np.stack([flat.get(key, torch.zeros(80)) for flat in found]), expected
            )


def engine_with(**sizes):
    """An engine without ZeRO in which these parameters train."""
    module = torch.nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
    module.register_buffer("passes", torch.zeros(()))
    return SimpleNamespace(
        module=module,
        param_names={weight: name for name, weight in module.items()},
        zero_optimization=lambda: False,
        optimizer=SimpleNamespace(param_groups=[{"params": [*module.values()]}]),
    )


def test_states_of_another_model_are_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"actor: holds no states of an engine \(common.pt is missing\)"
    ):
        common_state(tmp_path / "actor")
    common = {"shapes": {"a": (3,), "b": (1,)}, "buffers": {"passes": torch.zeros(())}}
    _require_same_parameters(Path("actor"), common, engine_with(b=1, a=3))
    with pytest.raises(
        UserError,
        match=r"actor: .*\(differing: 1; the first is a\); use the flags and the model of",
    ):
        _require_same_parameters(Path("actor"), common, engine_with(a=4, b=1))
    with pytest.raises(UserError, match="the first is b"):
        _require_same_parameters(Path("actor"), common, engine_with(a=3))
    for buffers in ({}, {"passes": 0, "more": 0}):
        with pytest.raises(UserError, match=f"the first is {'more' if buffers else 'passes'}"):
            _require_same_parameters(
                Path("actor"), {**common, "buffers": buffers}, engine_with(a=3, b=1)
            )


def test_whole_weights_are_joined_from_the_pieces_of_all_ranks(monkeypatch):
    """Padding (99) lies between the pieces; the second rank holds the end of `a` and all of `c`."""
    shards = [
        {
            "fragments": [Fragment("a", 0, 4, 0, 0), Fragment("b", 0, 1, 0, 5)],
            "flats": [{"fp32": torch.tensor([1.0, 2, 3, 4, 99, 7]), "exp_avg": torch.zeros(6)}],
        },
        {
            "fragments": [Fragment("c", 0, 5, 1, 1), Fragment("a", 4, 2, 0, 0)],
            "flats": [
                {"fp32": torch.tensor([5.0, 6])},
                {"fp32": torch.tensor([99.0, 10, 11, 12, 13, 14])},
            ],
        },
    ]
    monkeypatch.setattr(engine_state, "read_shards", lambda folder, common: shards)
    found = {
        name: weight.tolist()
        for name, weight in master_weights(Path("x"), {"shapes": SHAPES[0] | SHAPES[1]})
    }
    assert found == {"a": [[1, 2, 3], [4, 5, 6]], "b": [7], "c": [10, 11, 12, 13, 14]}
    shards.pop()
    with pytest.raises(UserError, match="hold 4 of the 6 elements of a$"):
        list(master_weights(Path("x"), {"shapes": SHAPES[0] | SHAPES[1]}))


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
        assert [
            group["lr"] for group in engine.optimizer.param_groups
        ] == whole.lr_scheduler.get_last_lr()
        assert engine.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
        for one in (engine, whole):
            one.optimizer.step()
            one.lr_scheduler.step()
