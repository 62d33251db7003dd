"""CUDA graphs without a GPU: stand-ins for the parts of `torch.cuda` that recording uses.

A capture notes every operation that runs on the recording stream; a replay repeats them on the same
tensors, whatever Python would do now. As on a GPU, an operation that gives the host a number is
refused in a capture, and where the sync debug mode forbids it. A memory pool whose graphs have all
died takes no other, as since PyTorch 2.11
(`CachingHostAllocator::create_or_incref_pool_under_lock`).
"""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKS_HOST = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "item"}


class FakeGraph:
    """One recorded step."""

    def __init__(self, device: "FakeDevice"):
        self.device, self.operations, self._pool = device, [], None

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert capture_error_mode == "thread_local"
        assert self.device.stream is not self.device.main
        assert pool is not None and pool is self.device.used_pool, (
            "a step ran with memory of this pool before"
        )
        self.device.attempts += 1
        if self.device.users.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.device.users[pool] = self.device.users.get(pool, 0) + 1
        weakref.finalize(self, self.device.release, pool)
        self.device.capturing, self.device.broken = self, False
        self._pool = pool
        self.device.pools.append(pool)

    def capture_end(self):
        self.device.capturing = None
        if self.device.broken:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        if self.device.fail_at_end:
            raise self.device.fail_at_end.pop()

    def replay(self):
        self.device.replays += 1
        for function, args, kwargs, outputs in self.operations:
            for before, now in zip(outputs, tree_leaves(function(*args, **kwargs)), strict=True):
                if before.data_ptr() != now.data_ptr():
                    before.copy_(now)

    def pool(self):
        return self._pool


class _Watch(TorchDispatchMode):
    def __init__(self, device: "FakeDevice"):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        device, graph = self.device, self.device.capturing
        if function._schema.name.split("::")[1] in ASKS_HOST:
            if graph is not None:
                device.broken = True
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            if device.sync_mode == "error":
                raise RuntimeError("called a synchronizing CUDA operation")
        if graph is not None and device.fail_inside:
            problem, device.broken = device.fail_inside.pop()
            try:
                raise problem
            finally:
                del problem  # else its traceback and this frame refer to each other
        outputs = function(*args, **(kwargs or {}))
        if graph is not None:
            # A clone of the inputs of an operation is not needed: it reads the tensors that earlier
            # ones wrote.
            graph.operations.append((function, args, kwargs or {}, tree_leaves(outputs)))
        return outputs


class FakeDevice:
    """What was done on the device; `fail_inside` and `fail_at_end` hold errors of the next
    captures.

    An entry of `fail_inside` is (error, whether it breaks the capture, so that its end fails too).
    """

    def __init__(self, monkeypatch):
        self.main = self.stream = SimpleNamespace(wait_stream=lambda other: None)
        self.capturing, self.broken, self.sync_mode = None, False, 0
        self.attempts = self.replays = self.streams = self.synchronised = self.emptied = 0
        self.free = 2**40
        self.used_pool: object | None = None
        self.pools: list[object] = []
        self.users: dict[object, int] = {}  # pool -> graphs that use it
        self.fail_inside: list[tuple[Exception, bool]] = []
        self.fail_at_end: list[Exception] = []
        for name, stand_in in {
            "Stream": self._new_stream,
            "current_stream": lambda: self.stream,
            "stream": self._on,
            "MemPool": lambda: SimpleNamespace(id=object()),
            "use_mem_pool": self._with_pool,
            "CUDAGraph": lambda: FakeGraph(self),
            "synchronize": lambda: self._count("synchronised"),
            "get_sync_debug_mode": lambda: self.sync_mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "sync_mode", mode),
            "mem_get_info": lambda device: (self.free, 2**40),
            "empty_cache": lambda: self._count("emptied"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def _count(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)

    def release(self, pool: object) -> None:
        self.users[pool] -= 1

    def _new_stream(self):
        self.streams += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def _with_pool(self, pool):
        assert self.stream is not self.main and self.capturing is None
        yield
        self.used_pool = pool.id

    @contextmanager
    def _on(self, stream):
        before, self.stream = self.stream, stream
        try:
            with _Watch(self):
                yield
        finally:
            self.stream = before
