"""Where the scores of step 3 come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dschat_ppo.config.schema import (
    MOST_PROCESSES,
    flag,
    flag_list,
    require,
    require_at_most,
    require_not_negative,
    require_positive,
)


@dataclass(frozen=True)
class RewardSourceFlags:
    """Sources of reward and their weights; an answer's score is the weighted sum of theirs."""

    _argument_group_name: ClassVar[str] = "reward sources"

    use_reward_model: bool = flag("score with a learned reward; False: with functions or a remote service alone", True)
    reward_model_name_or_path: str | None = flag(
        "reward model, where it is not what the critic starts from; its tokenizer may be another than the actor's", None
    )
    reward_model_weight: float = flag("weight of the learned reward; 0: only reported", 1.0)
    reward_model_max_length: int | None = flag(
        "most tokens of a row for a --reward_model_name_or_path with a tokenizer of its own; longer rows lose their "
        "start. Not given: the positions that it knows",
        None,
    )
    reward_function: list[str] = flag_list(
        "functions that score: path.py:name, module.path:name or the name of a shipped rule, each with ?key=value "
        "settings and :weight if wanted (docs/rewards.md)",
        list,
    )
    reward_workers: int = flag("processes on each rank that run the functions, for each function", 2)
    reward_timeout: float = flag("seconds after which a call of a function is given up", 10.0)
    reward_default: float = flag("score of a row that a function failed on", 0.0)
    remote_reward_url: str | None = flag("reward service, http://host:port/get_reward; several with commas", None)
    remote_reward_weight: float = flag("weight of the remote reward; 0: only reported", 1.0)
    remote_reward_timeout: float = flag("seconds after which a request is given up", 60.0)
    remote_reward_retries: int = flag("further attempts after a connection error, a time-out, 429 or 5xx", 5)
    remote_reward_batch_size: int = flag("most rows of a request", 64)

    def __post_init__(self) -> None:
        require_positive(
            self,
            "reward_model_max_length reward_workers reward_timeout remote_reward_timeout remote_reward_batch_size",
        )
        require_not_negative(self, "remote_reward_retries")
        require_at_most(self, "reward_workers", MOST_PROCESSES, "each is a process of this machine")
        require_at_most(self, "reward_timeout remote_reward_timeout", 10**6, "10^6 seconds are eleven days")
        for name, value in (
            ("reward_model_weight", self.reward_model_weight),
            ("reward_default", self.reward_default),
            ("remote_reward_weight", self.remote_reward_weight),
        ):
            require(math.isfinite(value), f"--{name} must be finite, got {value}")
        require(all(self.reward_function), "--reward_function must not be an empty text")
        require(self.remote_reward_url is None or all(self.remote_urls), "--remote_reward_url has an empty address")
        self._check_combinations()

    def _check_combinations(self) -> None:
        require(
            self.use_reward_model or bool(self.reward_function) or self.remote_reward_url is not None,
            "--use_reward_model False leaves no reward: give --reward_function or --remote_reward_url",
        )
        require(
            self.use_reward_model or self.reward_model_name_or_path is None,
            "--reward_model_name_or_path is of no use with --use_reward_model False; leave one of them out",
        )
        require(
            self.reward_model_max_length is None or self.reward_model_name_or_path is not None,
            "--reward_model_max_length is for the model of --reward_model_name_or_path; give that too",
        )

    @property
    def remote_urls(self) -> list[str]:
        """The addresses of `--remote_reward_url`, none if it is not given."""
        return [] if self.remote_reward_url is None else [url.strip() for url in self.remote_reward_url.split(",")]
