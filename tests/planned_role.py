"""A made-up model as a role of the planner, whose sizes are small enough for hand arithmetic."""

from dschat_ppo.planner.model_parts import ModelParts, SavedActivations
from dschat_ppo.planner.role_memory import Role

SAVED = SavedActivations((100, 120), 20, 16)
PARTS = ModelParts(
    embedding=300, layers=(200, 200), head=300, other=0, trained=1000, adapted=0, largest=300, packed=700, hidden=8,
    vocabulary=50, kv_bytes=64, saved=SAVED,
)  # fmt: skip


def role(stage=1, dtype="bf16", ranks=4, **settings):
    running = 1 if stage == 0 and dtype != "fp32" else stage
    return Role("actor", PARTS, dtype, ranks, running, True, **settings)
