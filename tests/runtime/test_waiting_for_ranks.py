"""Ranks wait until the store of rank 0 is open and all ranks have started."""

import socket
import threading
import time
from datetime import timedelta

import pytest
from launch import _free_port
from torch.distributed import DistNetworkError, HashStore, TCPStore

from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.runtime import process_group, stop_requests
from dschat_ppo.runtime.process_group import connect, wait_for_all_ranks

MINUTE = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def second_machine(monkeypatch):
    """This process is rank 2, the first one of the second of two machines, and waits a second at most."""
    for name, value in {"RANK": 2, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 1.0)
    monkeypatch.setattr(process_group, "_LOG_SECONDS", 0.3)


def test_a_store_that_never_opens_is_one_error_after_some_lines(capfd):
    port = _free_port()
    with pytest.raises(
        UserError, match=rf"^rank 2 on .* cannot reach rank 0 at 127.0.0.1, port {port} \(Connection refused\): start"
    ):
        connect("127.0.0.1", port, False, MINUTE)
    out, err = capfd.readouterr()  # of torch's C++ code too
    assert set(out.splitlines()) == {f"rank 2 waits for rank 0 at 127.0.0.1, port {port}"}
    assert 2 <= len(out.splitlines()) <= 3 and err == ""


def test_only_the_first_rank_of_a_machine_prints_lines(capfd, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError):
        connect("127.0.0.1", _free_port(), False, MINUTE)
    assert capfd.readouterr() == ("", "")


def test_a_name_that_does_not_exist_yet_is_waited_for(capfd):
    with pytest.raises(UserError, match=r"at nowhere.invalid, port 1 \(.*\): start"):
        connect("nowhere.invalid", 1, False, MINUTE)
    assert capfd.readouterr().err == ""


def test_a_store_that_opens_later_is_connected_to(capfd, monkeypatch):
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 60.0)
    port, opened = _free_port(), []

    def open_later() -> None:
        time.sleep(0.7)
        opened.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        opened[0].set("name", "alpha")

    thread = threading.Thread(target=open_later)
    thread.start()
    store = connect("127.0.0.1", port, False, timedelta(seconds=7))
    thread.join()
    assert store.get("name") == b"alpha" and store.timeout == timedelta(seconds=7)
    out, err = capfd.readouterr()
    assert f"rank 2 waits for rank 0 at 127.0.0.1, port {port}" in out and err == ""


def test_rank_0_opens_the_store_or_says_why_it_cannot(monkeypatch):
    monkeypatch.setattr(process_group, "_TRY_SECONDS", 1.0)
    store = connect("127.0.0.1", _free_port(), True, timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)
    with socket.create_server(("", 0)) as program, pytest.raises(DistNetworkError, match="EADDRINUSE"):
        connect("127.0.0.1", program.getsockname()[1], True, MINUTE)
    with pytest.raises(UserError, match="^rank 0 on .* cannot reach itself at MASTER_ADDR 192.0.2.1, port "):
        connect("192.0.2.1", _free_port(), True, MINUTE)  # an address for examples, which nobody has


def test_a_stop_request_ends_the_wait(monkeypatch):
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 60.0)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    began = time.monotonic()
    with pytest.raises(StopRequested, match="waited for the other machines"):
        connect("127.0.0.1", _free_port(), False, MINUTE)
    with pytest.raises(StopRequested):
        wait_for_all_ranks(HashStore())
    assert time.monotonic() - began < 30


def start(store: HashStore, monkeypatch, rank: int, local_size: int) -> None:
    """Let a rank of a machine with this number of ranks start, while nobody waits for the others."""
    with monkeypatch.context() as there:
        there.setattr(process_group.ranks, "rank", lambda: rank)
        there.setattr(process_group.ranks, "local_world_size", lambda: local_size)
        there.setattr(process_group.ranks, "world_size", lambda: 0)
        wait_for_all_ranks(store)


def test_ranks_that_do_not_start_are_named(capfd, monkeypatch):
    store = HashStore()
    start(store, monkeypatch, 1, 2)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"^ranks 2, 3 of 4 did not start within 1 s"):
        wait_for_all_ranks(store)
    assert set(capfd.readouterr().out.splitlines()) == {"waiting for ranks 2, 3 of 4"}


def test_ranks_of_an_earlier_start_of_torchrun_do_not_count(monkeypatch, capfd):
    store = HashStore()
    for rank in range(3):
        start(store, monkeypatch, rank, 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UserError, match=r"^ranks 0, 1, 3 of 4 did not start"):
        wait_for_all_ranks(store)
    assert capfd.readouterr().out == "", "rank 0 alone prints"


@pytest.mark.parametrize("others", [[2, 2, 2], [2, 2, 1]])
def test_machines_have_the_same_number_of_ranks(monkeypatch, others):
    store = HashStore()
    for rank, size in zip((0, 1, 3), others, strict=True):
        start(store, monkeypatch, rank, size)
    if others == [2, 2, 2]:
        wait_for_all_ranks(store)
    else:
        with pytest.raises(UserError, match=r"different numbers of ranks \(1, 2\)"):
            wait_for_all_ranks(store)
