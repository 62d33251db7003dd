"""The arithmetic of a process with `--exact_rollout`."""

from __future__ import annotations

import os

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.exactness import require_exact_rollouts
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.exact_rollout.flags import ExactRolloutFlags
from dschat_ppo.features.exact_rollout.refusals import MKL_MODE, STRICT


def begin_rank(config: StepConfig) -> None:
    """Begin exact rollouts of this rank, if the flags ask for them."""
    if isinstance(config, PPOConfig) and config.of(ExactRolloutFlags).exact_rollout:
        begin_exact_rollouts()


def begin_exact_rollouts() -> None:
    """Let all products of this process add in one order, whatever the rows. MKL reads the
    variable at its first product."""
    if dist.device().type != "cpu":
        raise UserError("--exact_rollout: generation on a GPU is not exact yet; leave it out")
    require_exact_rollouts("--exact_rollout")
    instructions = torch.backends.cpu.get_cpu_capability()
    if instructions in ("AVX2", "AVX512"):
        os.environ.setdefault(MKL_MODE, instructions + STRICT)
