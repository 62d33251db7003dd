"""CPU tensors that claim to be on cuda:0, with real values: they show what a GPU would wait for or
refuse.

with pretended_gpu() as seen:
    model = moved(model)
    ...

Without gradients: a build of torch for CPUs has no backward pass for another device.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda:0")
# Their results, or the sizes of these, are read by the host.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "_unique2",
    "unique_dim",
    "bincount",
    "repeat_interleave",
}
# with booleans they count these first
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Seen:
    """What happened: `waits` of the host for the device, and `mixed` operands, as (operation,
    place) -> number."""

    def __init__(self) -> None:
        self.waits: Counter[tuple[str, str]] = Counter()
        self.mixed: Counter[tuple[str, str]] = Counter()

    def count(self, counter: Counter[tuple[str, str]], what: str) -> None:
        """Add one, at the line of the innermost function of the package or of transformers."""
        frame, ours = sys._getframe(1), ("/dschat_ppo/", "/transformers/")
        while frame is not None and not any(folder in frame.f_code.co_filename for folder in ours):
            frame = frame.f_back
        counter[
            what,
            f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}" if frame else "?",
        ] += 1


_SEEN: list[Seen] = []


class OnGPU(Tensor):
    """A tensor that claims to be on the GPU; `held` has its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: Tensor):
        """A tensor without memory that has the layout of `real`."""
        empty = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="meta")
        made = Tensor._make_subclass(
            cls, empty, False, dispatch_device=True, device_for_backend_keys=GPU
        )
        made.held = real
        return made

    def _read(self, how: str):
        _SEEN[-1].count(_SEEN[-1].waits, how)
        return getattr(self.held, how)()

    def tolist(self):
        """The host reads, as in the next ones: torch does so without an operation, or with a guard
        for CUDA."""
        return self._read("tolist")

    def item(self):
        """A number."""
        return self._read("item")

    def __int__(self):
        """A number."""
        return self._read("__int__")

    def __float__(self):
        """A number."""
        return self._read("__float__")

    def __bool__(self):
        """A condition."""
        return self._read("__bool__")

    def __index__(self):
        """A number."""
        return self._read("__index__")

    def __getitem__(self, index):
        """Indexing guards the device too."""
        return OnGPU(self.held[self._held_index(index)])

    def __setitem__(self, index, value):
        """As `__getitem__`."""
        self.held[self._held_index(index)] = value.held if isinstance(value, OnGPU) else value

    def _held_index(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if isinstance(part, Tensor) and part.dtype == torch.bool:
                _SEEN[-1].count(_SEEN[-1].waits, "index")
            if isinstance(part, list) or (
                isinstance(part, Tensor) and part.dim() and not isinstance(part, OnGPU)
            ):
                _SEEN[-1].count(_SEEN[-1].mixed, "index")
        held = tuple(part.held if isinstance(part, OnGPU) else part for part in parts)
        return held if isinstance(index, tuple) else held[0]

    def nonzero(self, *, as_tuple=False):
        """The host reads how many there are."""
        _SEEN[-1].count(_SEEN[-1].waits, "nonzero")
        found = self.held.nonzero()
        return tuple(map(OnGPU, found.unbind(1))) if as_tuple else OnGPU(found)

    def contiguous(self):
        """The methods from here on guard the device in torch's bindings, but their operations do
        not."""
        return self if self.held.is_contiguous() else OnGPU(self.held.contiguous())

    def to(self, *args, **kwargs):
        """Of a GPU the host waits for its memory."""
        device, args = (
            (args[0], args[1:])
            if args and isinstance(args[0], str | torch.device)
            else (None, args)
        )
        device = kwargs.pop("device", device)
        moved = self.held.to(
            *args, **{name: value for name, value in kwargs.items() if name != "non_blocking"}
        )
        if device is None or torch.device(device).type == "cuda":
            return self if moved is self.held else OnGPU(moved)
        _SEEN[-1].count(_SEEN[-1].waits, "to")
        return moved.clone()

    def cpu(self):
        """As `to`."""
        return self.to("cpu")

    def __invert__(self):
        return OnGPU(~self.held)

    def __iter__(self):
        return iter([OnGPU(part) for part in self.held.unbind(0)])

    def copy_(self, other, non_blocking=False):
        """The host's memory is not pinned."""
        if not isinstance(other, OnGPU):
            _SEEN[-1].count(_SEEN[-1].waits, "copy_")
        self.held.copy_(other.held if isinstance(other, OnGPU) else other)
        return self

    def new_tensor(self, value, dtype=None):
        """A copy from the host."""
        _SEEN[-1].count(_SEEN[-1].waits, "new_tensor")
        return OnGPU(torch.tensor(value, dtype=dtype or self.dtype))

    def __repr__(self) -> str:
        return f"OnGPU({self.held})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        """Outside the mode too."""
        return _run(operation, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})


def _run(operation, args, kwargs):
    if operation is torch.ops.prim.device.default:
        return GPU
    name, seen = operation._schema.name.split("::")[1], _SEEN[-1]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
    wrapper_of = {id(tensor.held): tensor for tensor in ours}
    args, kwargs = tree_map(
        lambda leaf: leaf.held if isinstance(leaf, OnGPU) else leaf, (args, kwargs)
    )
    target = kwargs.get("device")
    goes = bool(ours) if target is None else torch.device(target).type == "cuda"
    if target is not None and goes:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    is_copy = name in ("_to_copy", "copy_")
    if (name == "_to_copy" and bool(ours) != goes) or (name == "copy_" and len(ours) == 1):
        seen.count(seen.waits, name)
    waits = name in WAITING and not (name == "repeat_interleave" and "output_size" in kwargs)
    waits = waits or name in INDEXING and any(t.dtype == torch.bool for t in tensors[1:])
    if ours and waits:
        seen.count(seen.waits, name)
    if ours and not is_copy and any(t.dim() for t in tensors if not isinstance(t, OnGPU)):
        seen.count(seen.mixed, name)
    found = operation(*args, **kwargs)

    def wrapped(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in wrapper_of:
            return wrapper_of[id(leaf)]
        return OnGPU(leaf) if goes else leaf

    return tree_map(wrapped, found)


def on_gpu(tensor: Tensor) -> OnGPU:
    """The tensor, moved before the counting begins."""
    return tensor if isinstance(tensor, OnGPU) else OnGPU(tensor.detach())


def moved(model: nn.Module) -> nn.Module:
    """The same model with its parameters and buffers on the GPU."""
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = nn.Parameter(on_gpu(value), requires_grad=False)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = on_gpu(value)
    return model


@contextmanager
def pretended_gpu() -> Iterator[Seen]:
    """Make `OnGPU` tensors work in the block, without gradients; "cuda" as a device gives such
    tensors."""
    before = torch.cuda._lazy_init
    torch.cuda._lazy_init = lambda: None
    torch._C._ensureCUDADeviceGuardSet()
    # `torch.tensor(..., device="cuda")` is made on the CPU and copied
    torch._C._set_only_lift_cpu_tensors(True)
    _SEEN.append(Seen())
    try:
        with torch.no_grad(), _Mode():
            yield _SEEN[-1]
    finally:
        _SEEN.pop()
        torch._C._set_only_lift_cpu_tensors(False)
        torch.cuda._lazy_init = before
