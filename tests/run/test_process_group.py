"""Ranks use the GPUs, wait for the others of their own launch, and join them."""

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch import _free_port, forked, succeed
from torch.distributed import HashStore, TCPStore

from dschat_ppo.errors import UserError
from dschat_ppo.run import process_group
from dschat_ppo.run.process_group import connect, init_process_group, open_store, wait_for_all_ranks
from dschat_ppo.run.unused_gpu import require_usable_gpu


def accelerator_of(kind: str, count: int = 8) -> SimpleNamespace:
    """Stands for the one that DeepSpeed chooses."""
    devices: list[int] = []
    return SimpleNamespace(
        devices=devices,
        set_device=devices.append,
        device_count=lambda: count,
        device_name=lambda: kind,
        create_op_builder=lambda name: None,
        communication_backend_name=lambda: "gloo",
    )


def test_a_rank_that_does_not_see_its_gpu_is_refused(monkeypatch):
    accelerator = accelerator_of("cuda", 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    with pytest.raises(
        UserError, match="rank 3 is number 1 on its machine, .* and sees 1 GPUs.*--gpus-per-node"
    ):
        init_process_group()
    assert accelerator.devices == []


@pytest.mark.ranks
def test_every_group_waits_as_long_as_data_may_take_also_that_of_deepspeed():
    said = succeed(forked(2, "tests/workers/two_ranks.py", "group_timeouts", timeout=100)).stdout
    assert said.splitlines()[-1] == "zero 6 rows 6 all 6 hpz 6 local_0 6 sum 2"


@pytest.fixture
def second_machine(monkeypatch):
    """This process is rank 2, the first one of the second of two machines, and waits a second at
    most."""
    for name, value in {"RANK": 2, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 1.0)
    monkeypatch.setattr(process_group, "_LOG_SECONDS", 0.3)


def test_a_store_that_never_opens_is_one_error_after_some_lines(second_machine, capfd):
    port = _free_port()
    with pytest.raises(
        UserError,
        match=rf"^rank 2 on .* cannot reach rank 0 at .* {port} \(Connection refused\): st",
    ):
        connect("127.0.0.1", port)
    out, err = capfd.readouterr()  # of torch's C++ code too
    assert (
        set(out.splitlines()) == {f"rank 2 waits for rank 0 at 127.0.0.1, port {port}"}
        and err == ""
    )


def test_a_store_that_opens_later_is_connected_to(second_machine, capfd, monkeypatch):
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 60.0)
    port, opened = _free_port(), []

    def open_later() -> None:
        time.sleep(0.7)
        opened.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        opened[0].set("name", "alpha")

    thread = threading.Thread(target=open_later)
    thread.start()
    store = connect("127.0.0.1", port)
    thread.join()
    assert store.get("name") == b"alpha"
    out, err = capfd.readouterr()
    assert f"rank 2 waits for rank 0 at 127.0.0.1, port {port}" in out and err == ""


def test_rank_0_opens_the_store_or_says_why_it_cannot(second_machine, monkeypatch):
    monkeypatch.setattr(process_group, "_TRY_SECONDS", 1.0)
    open_store("127.0.0.1", _free_port()).set("name", "alpha")
    with (
        socket.create_server(("", 0)) as program,
        pytest.raises(UserError, match=r"^port \d+ .* in use.*--master_port"),
    ):
        open_store("127.0.0.1", program.getsockname()[1])
    with pytest.raises(
        UserError, match=r"^rank 0 cannot listen at 192.0.2.1, port \d+: .*--master_addr"
    ):
        open_store("192.0.2.1", _free_port())  # an address for examples, which nobody has


def test_ranks_that_do_not_start_are_named(second_machine, capfd, monkeypatch):
    store = HashStore()
    store.set("rank/1", "here")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"^ranks 2, 3 of 4 did not start within 1 s"):
        wait_for_all_ranks(store)
    assert set(capfd.readouterr().out.splitlines()) == {"rank 0 waits for ranks 2, 3 of 4"}
    for rank in (2, 3):
        store.set(f"rank/{rank}", "here")
    wait_for_all_ranks(store)


def test_ranks_of_another_start_or_folder_share_no_names(second_machine, monkeypatch):
    """torchrun keeps its store when it starts the ranks again; another launch may use the same
    port."""
    shared = HashStore()
    monkeypatch.setattr(process_group, "connect", lambda *_: shared)
    monkeypatch.setattr(process_group, "wait_for_all_ranks", lambda _: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    stores = []
    for start, folder in (("0", "out"), ("1", "out"), ("0", "out"), ("0", "other")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        stores.append(process_group._store_of_this_launch(folder))
    stores[0].set("name", "first")
    assert [store.check(["name"]) for store in stores] == [True, False, True, False]


@pytest.fixture
def devices(tmp_path, monkeypatch) -> Path:
    """The devices of a machine with one GPU, and a torch that does not find it."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(("cuda", "built"), [("13.0", "for CUDA 13.0"), (None, "for CPUs only")])
def test_a_gpu_that_torch_does_not_find_is_an_error_of_one_line(devices, monkeypatch, cuda, built):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(
        UserError, match=f"^[^\\n]* {built} [^\\n]*TORCH_INDEX_URL[^\\n]*DS_ACCELERATOR=cpu[^\\n]*$"
    ):
        require_usable_gpu(devices)


def test_who_asks_for_the_cpu_gets_it_and_a_gpu_that_torch_finds_is_used(devices, monkeypatch):
    for name, value in (
        ("DS_ACCELERATOR", "cpu"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            require_usable_gpu(devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_usable_gpu(devices)
    monkeypatch.undo()
    (devices / "nvidia0").rename(devices / "nvidiactl")  # as in a container that was given no GPU
    require_usable_gpu(devices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this run is not on the CPU")
def test_a_run_on_the_cpu_checks_before_it_joins_the_ranks(monkeypatch):
    def refuse():
        raise UserError("a GPU is not used")

    monkeypatch.setattr(process_group, "require_usable_gpu", refuse)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="not used"):
        process_group.init_process_group()
