"""Generation while other memory sleeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from torch import Tensor

from dschat_ppo.common.logging import logger
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.engine.hybrid_engine import GenerationChange
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.features.sleep.flags import SleepFlags
from dschat_ppo.features.sleep.sleep import (
    HostMemory,
    asleep,
    gradient_buffers,
    training_states,
    weights_of,
)
from dschat_ppo.types import Engine


def generation_change(config: PPOConfig, engines: RLHFEngine) -> GenerationChange | None:
    """With `--sleep_in_rollout`, all engines sleep while the actor generates."""
    if not config.of(SleepFlags).sleep_in_rollout:
        return None
    sleep = Sleep(engines.actor, engines.all_engines)
    return GenerationChange(around=sleep.asleep, originals_on_host=True)


class Sleep:
    """Moves the training states of engines, and weights that the actor does not use, to host memory
    for the time of a rollout."""

    def __init__(self, actor: Engine, sleeping: Sequence[Engine]):
        """`sleeping`: the engines that sleep; of the actor only its training states do."""
        self.sleeping = sleeping
        self._actor = actor
        self._has_slept = False
        self.host_memory: HostMemory = {}

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """The engines in host memory. The first time, the log says how much that moves."""
        tensors: list[Tensor] = []
        scratch: list[Tensor] = []
        for engine in self.sleeping:
            tensors += chain(training_states(engine), weights_of(engine))
            scratch += gradient_buffers(engine)
        awake = weights_of(self._actor)
        with asleep(tensors, awake, scratch, self.host_memory) as moved_bytes:
            if not self._has_slept:
                logger().info(
                    f"--sleep_in_rollout: rollouts move {moved_bytes / 2**30:.2f} GiB of this rank"
                    " to host memory"
                )
                self._has_slept = True
            yield
