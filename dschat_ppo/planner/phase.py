"""The phases of a run, and what each model holds in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dschat_ppo.planner.role_memory import Memory

PARTS = ("weights", "gradients", "optimizer", "activations", "KV cache", "logits", "buffers")


@dataclass
class Phase:
    """Bytes of one rank at the peak of a phase, by role and part (`PARTS`).

    Attributes:
        name: of the phase.
        held: (role, part) -> bytes.
        once: bytes of host memory that rank 0 alone needs.
    """

    name: str
    held: dict[tuple[str, str], Memory] = field(default_factory=dict)
    once: int = 0

    def add(self, role: str, part: str, memory: Memory) -> None:
        """Add memory to a part of a role."""
        if memory.device or memory.host:
            self.held[role, part] = self.held.get((role, part), Memory()) + memory

    @property
    def roles(self) -> list[str]:
        """The roles that hold something."""
        return list(dict.fromkeys(role for role, _ in self.held))

    def total(self, role: str | None = None, part: str | None = None) -> Memory:
        """The sum of some entries; None: of all roles or parts."""
        chosen: Iterable[Memory] = (
            memory for (whose, what), memory in self.held.items()
            if role in (None, whose) and part in (None, what)
        )  # fmt: skip
        return sum(chosen, Memory())
