"""What a generation gets: which responses it samples, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dschat_ppo.models.given_embeddings import GivenPrompts
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import PromptBatch

EngineName = Literal["continuous", "padded", "recomputed"]
ENGINES: dict[EngineName, str] = {  # the faster ones first
    "continuous": "continuous batching",
    "padded": "padded batches",
    "recomputed": "passes of whole rows",
}


@dataclass(frozen=True)
class GenerationConfig:
    """How rollouts are generated: `samples` responses per prompt, by `engine`, one of `ENGINES`.

    `rows` sequences run at a time, 0 = as many as memory allows, up to `MAX_ROWS` or
    `MAX_ROWS_GPU`. `prepack` lays the weights out for few rows (on a CPU), at the cost of their
    memory. `static` runs decode steps at fixed addresses (None: on a GPU, unless forward passes are
    collective).
    """

    sampling: SamplingParameters
    stopping: StoppingCriteria
    samples: int = 1
    rows: int = 0
    prepack: bool = True
    static: bool | None = None
    engine: EngineName = "continuous"


@dataclass(frozen=True, eq=False)
class RolloutRequest:
    """The A responses that a generation samples: `GenerationConfig.samples` for each of B prompts,
    those of one prompt one after another.

    Attributes:
        prompts: B left-padded prompts on the model's device, each of at least one token.
        seeds: (A,) int64, one for each response.
        limits: (A,) int64, most tokens of each response, from 1 to `max_new_tokens`; None:
            `max_new_tokens`.
        drawn: (A,) int64, how many tokens were drawn with each seed before; None: none.
        stop_strings: A tuples of texts that end a response besides those of the configuration;
            None: no others.
        given: what the model gets for the prompts in place of the embeddings of some ids; None: of
            none.
    """

    prompts: PromptBatch
    seeds: Tensor
    limits: Tensor | None = None
    drawn: Tensor | None = None
    stop_strings: Sequence[tuple[str, ...]] | None = None
    given: GivenPrompts | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU."""
        return self.prompts.prompt_ids.is_cuda
