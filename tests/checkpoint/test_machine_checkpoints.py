"""The newest checkpoint of which every machine has its part on its own disk."""

import re
from pathlib import Path

import pytest
from checkpoints import save_checkpoint

from dschat_ppo.checkpoint.machine_checkpoints import HeldByMachine, HeldCheckpoint, choose, newest_on_all_machines
from dschat_ppo.errors import UserError

OUTPUT = Path("out")


def machine(
    host: str, ranks: tuple[int, ...], *names: str, held: tuple[int, ...] | None = None, at: str = "",
    faults: tuple[str, ...] = (),
) -> HeldByMachine:  # fmt: skip
    parts = tuple(HeldCheckpoint(name, f"{name} {at}", held or ranks, world_size=4) for name in names)
    return HeldByMachine(host, ranks, parts, faults)


def refusal(*machines: HeldByMachine) -> str:
    with pytest.raises(UserError) as raised:
        choose(machines, OUTPUT)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_no_machine_has_any():
    assert choose([machine("a", (0, 1)), machine("b", (2, 3))], OUTPUT) is None


def test_the_newest_that_all_have():
    machines = [machine("a", (0, 1), "step_000002", "step_000004"), machine("b", (2, 3), "step_000002", "step_000004")]
    assert choose(machines, OUTPUT) == "step_000004"


@pytest.mark.parametrize(
    ("older", "newer"),
    [("step_999999", "step_1000000"), ("step_000004", "step_000004_update_0002"),
     ("step_000004_update_9999", "step_000004_update_10000"), ("step_000004_update_0002", "step_000005")],
)  # fmt: skip
def test_the_newest_is_that_of_the_most_steps_and_updates(older, newer):
    machines = [machine("a", (0, 1), older, newer), machine("b", (2, 3), older, newer)]
    assert choose(machines, OUTPUT) == newer


def test_power_was_lost_before_the_last_machine_committed():
    machines = [machine("a", (0, 1), "step_000002", "step_000004"), machine("b", (2, 3), "step_000002")]
    assert choose(machines, OUTPUT) == "step_000002"


@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_disk_is_named(empty):
    machines = [machine("a", (0, 1), "step_000004"), machine("b", (2, 3), "step_000004")]
    machines[empty] = machine(machines[empty].host, machines[empty].ranks)
    title = ("machine a (ranks 0, 1)", "machine b (ranks 2, 3)")[empty]
    words = f"the part of {title} of checkpoint step_000004 is missing: its disk has no checkpoint"
    assert re.search(f"--output_dir out.*{re.escape(words)}.*--overwrite_output_dir", refusal(*machines))


def test_a_disk_that_is_behind_is_named():
    found = refusal(machine("a", (0, 1), "step_000004"), machine("b", (2, 3), "step_000002"))
    assert "machine b (ranks 2, 3) of checkpoint step_000004 is missing: its newest is step_000002" in found


def test_a_damaged_part_is_named():
    broken = machine("b", (2, 3), faults=("out/checkpoints/step_000004: rank_2.pt of rank 2 is missing",))
    assert "rank_2.pt of rank 2 is missing" in refusal(machine("a", (0, 1), "step_000004"), broken)
    assert "rank_2.pt of rank 2 is missing" in refusal(machine("a", (0, 1)), broken)


def test_machines_in_another_order():
    machines = [machine("b", (0, 1), "step_000004", held=(2, 3)), machine("a", (2, 3), "step_000004", held=(0, 1))]
    assert "machine b (ranks 0, 1) has the files of ranks 2, 3" in refusal(*machines)


def test_parts_of_two_runs():
    machines = [machine("a", (0, 1), "step_000004", at="Monday"), machine("b", (2, 3), "step_000004", at="Tuesday")]
    assert "step_000004 on machine b (ranks 2, 3) is of another run than on machine a" in refusal(*machines)


def test_another_number_of_ranks():
    machines = [machine("a", (0,), "step_000004", held=(0, 1)), machine("b", (1,), "step_000004", held=(2, 3))]
    assert "was saved by 4 ranks, and this run has 2" in refusal(*machines)


def test_a_whole_checkpoint_that_was_copied_to_every_disk():
    everything = (0, 1, 2, 3)
    machines = [
        machine("a", (0, 1), "step_000004", held=everything),
        machine("b", (2, 3), "step_000004", held=everything),
    ]
    assert choose(machines, OUTPUT) == "step_000004"


def test_parts_whose_checksums_differ_are_passed_over_and_a_run_does_not_start_without_any(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert newest_on_all_machines(tmp_path) is None
    for step in (2, 4):
        save_checkpoint(tmp_path, step)
    for name, left in (("step_000004", "step_000002"), ("step_000002", None)):
        (tmp_path / "checkpoints" / name / "shared.pt").write_bytes(bytes(200))  # of the same size
        if left is not None:
            assert newest_on_all_machines(tmp_path) == left
    with pytest.raises(UserError, match=r"--local_checkpoints: .*step_000004 on rank 0's machine: .*--over"):
        newest_on_all_machines(tmp_path)
