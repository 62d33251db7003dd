"""Flags of the reward sources of step 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dschat_ppo.config.schema import finite, flag, positive, refuse, require_used


@dataclass(frozen=True)
class RewardSourceFlags:
    """Reward sources; the score of an answer is their weighted sum."""

    # fmt: off
    use_reward_model: bool = flag(True,
        "score with a learned reward; False: only with reward functions or a remote reward service")
    reward_model_name_or_path: str | None = flag(None,
        "reward model, if it is not the model that initialises the critic; its tokenizer may differ from the actor's")
    reward_model_weight: float = finite(1.0, "weight of the learned reward; 0 = only log it")
    reward_model_sources: list[str] = flag([],
        "data sources whose rows the learned reward scores; not given: all rows", commas=True)
    process_reward: Literal["min", "mean", "last", "product"] | None = flag(None,
        "with a process reward model (step 2, --objective process): score an answer by the smallest, the mean, the "
        "last or the product of the probabilities that its steps are right. Not given: the raw score at the last token")
    reward_function: list[str] = flag([],
        "reward functions: path.py:name, module.path:name or the name of a built-in rule, each with optional "
        "?key=value settings and :weight; SOURCE= in front: only for the rows of this data source (docs/rewards.md)")
    reward_workers: int = positive(2, "number of worker processes on each rank, for each reward function")
    reward_timeout: float = positive(10.0, "timeout of a reward function call, in seconds")
    reward_default: float = finite(0.0, "score of a row whose reward function call failed, or that no source scores")
    allow_weak_sandbox: bool = flag(False,
        "run code_tests also where bubblewrap does not work: programs of the model can then write and delete the files "
        "of this user")
    remote_reward_url: str | None = flag(None,
        "URL of a reward service, http://host:port/get_reward, or of several; with *** for credentials, it is taken "
        "from DSCHAT_PPO_REMOTE_REWARD_URL", commas=True)
    remote_reward_weight: float = finite(1.0, "weight of the remote reward; 0 = only log it")
    remote_reward_sources: list[str] = flag([],
        "data sources whose rows are sent to the reward service; not given: all rows", commas=True)
    remote_reward_timeout: float = positive(60.0, "timeout of a request, in seconds")
    # fmt: on

    def __post_init__(self) -> None:
        without, remote = not self.use_reward_model, self.remote_reward_url is not None
        refuse({
            "--reward_timeout and --remote_reward_timeout must be at most 10^6 seconds, eleven days":
                max(self.reward_timeout, self.remote_reward_timeout) > 10**6,
            "--reward_function must not be an empty string": not all(self.reward_function),
            "--remote_reward_url contains an empty URL": not all(self.remote_urls),
            "--use_reward_model False leaves no reward: give --reward_function or --remote_reward_url":
                without and not self.reward_function and not remote,
        })  # fmt: skip
        require_used(self, [
            (not without, "--use_reward_model", "reward_model_name_or_path process_reward reward_model_sources"),
            (remote, "--remote_reward_url", "remote_reward_sources"),
        ])  # fmt: skip

    @property
    def remote_urls(self) -> list[str]:
        """The URLs in `--remote_reward_url`; empty if it is not given."""
        return [] if self.remote_reward_url is None else [url.strip() for url in self.remote_reward_url.split(",")]

    @property
    def learned_alone(self) -> bool:
        """Whether scores are those of the learned reward: the other sources, if there are any, are only logged."""
        others = [split_weight(text)[1] for text in self.reward_function]
        others += [self.remote_reward_weight] if self.remote_urls else []
        return self.use_reward_model and not any(others)


def split_weight(text: str) -> tuple[str, float]:
    """`"name:0.5"` of a `--reward_function` -> ("name", 0.5); without a number at its end the weight is 1."""
    before, colon, number = text.rpartition(":")
    try:
        return (before, float(number)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0
