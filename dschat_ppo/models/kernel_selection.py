"""Which ways of computing fit a model, tried on a few tokens once its engine stands. A wrong way is never taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common.dist import all_reduce
from dschat_ppo.common.logging import logger
from dschat_ppo.models.backbone import hidden_window, unwrap
from dschat_ppo.models.packing import can_pack, recorded_windows
from dschat_ppo.models.policy import PolicyModel
from dschat_ppo.models.scalar_head import ScalarModel
from dschat_ppo.types import Model

ROWS, TOKENS = 3, 16
# mean difference of log-probs and entropies, in nats
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# mean difference between packed and padded rows, as a share of the numbers' spread
PACKED_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
LEAK_TOLERANCE = 1e-3  # the same products in the same order: only their grouping can differ


@torch.no_grad()
def select_kernels(engine: Model) -> None:
    """Settle `fused` and `packed` of the model inside. Collective: every rank calls it, and all come to the same end.

    Args:
        engine: DeepSpeed engine around a `PolicyModel` or a `ScalarModel`, or the model itself.
    """
    module: Any = unwrap(engine)
    was_training = module.training
    engine.eval()
    size = module.config.get_text_config().vocab_size
    ids = torch.linspace(0, size - 1, ROWS * TOKENS, device=engine.device).long().view(ROWS, TOKENS)
    if isinstance(module, PolicyModel):
        _check_head(engine, module, ids)
    _try_packing(engine, module, ids)
    engine.train(was_training)


def _check_head(engine: Model, policy: PolicyModel, ids: Tensor) -> None:
    """Change to the plain way, with a warning, if the head does something that the fused way does not know."""
    if policy.fused:
        fused = _outputs(engine, ids)
        policy.fused = False
        difference = (fused - _outputs(engine, ids)).abs().mean(dim=-1).max()
        policy.fused = bool(all_reduce(difference, "max") < TOLERANCE[policy.lm.dtype])
    if not policy.fused:
        logger().warning(
            f"{type(policy.lm).__name__}: its output head is more than a matrix product with a known scale and soft "
            "cap; log-probs are taken from whole logits, which costs memory and time"
        )


def _try_packing(engine: Model, module: PolicyModel | ScalarModel, ids: Tensor) -> None:
    """Pack rows if that gives the numbers of padded rows, and if other tokens in the first row leave the rest as it is:
    layers other than attention may hold a state along the row."""
    if engine.device.type != "cpu" or not can_pack(module.backbone):  # measured on CPU only
        return
    padded = _outputs(engine, ids)
    module.packed = True
    with recorded_windows() as windows:
        packed = _outputs(engine, ids)
    changed = _outputs(engine, torch.cat([ids[:1].flip(1), ids[1:]]))
    of_first_row = TOKENS if isinstance(module, ScalarModel) else TOKENS - 1
    spread = padded.std(dim=-1)  # of each kind of number by itself
    difference = ((packed - padded).abs().mean(dim=-1) / spread).max() / PACKED_TOLERANCE[module.backbone.dtype]
    leak = ((packed - changed)[..., of_first_row:].abs().amax(dim=-1) / spread).max() / LEAK_TOLERANCE
    worst = float(all_reduce(torch.maximum(difference, leak), "max"))
    module.packed = worst < 1 and not hidden_window(module.config, windows)
    if not module.packed:
        name = type(module.backbone).__name__
        logger().info(f"{name}: packed rows do not give the numbers of padded ones, so rows are padded")


def _outputs(engine: Model, ids: Tensor) -> Tensor:
    """What the model says of rows of uneven lengths, without padding: log-probs and entropies (2, N), or values (N)."""
    lengths = torch.arange(TOKENS, 0, -TOKENS // (2 * ROWS), device=ids.device)[:ROWS]
    real = torch.arange(TOKENS, device=ids.device) < lengths.unsqueeze(1)
    if isinstance(unwrap(engine), ScalarModel):
        return engine(ids, lengths)[real]
    return torch.stack(engine(ids, real))
