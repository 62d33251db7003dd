"""From the flags to the sources of reward."""

from __future__ import annotations

from dschat_ppo.common.logging import logger
from dschat_ppo.config.reward_flags import RewardSourceFlags
from dschat_ppo.errors import UserError, in_one_line
from dschat_ppo.rewards.function_reward import FLAG, FunctionReward, FunctionSpec, parse_function
from dschat_ppo.rewards.remote_reward import RemoteReward, check_url
from dschat_ppo.rewards.reward_mixture import RewardMixture
from dschat_ppo.rewards.reward_source import RewardSource
from dschat_ppo.rewards.sandbox import Limits, missing_isolation

WEAKER = {
    "network": "programs are kept from the network by Python alone, which can be got round",
    "files": "programs may write every file that the user of this run may write",
    "processes": "programs are kept from starting processes by Python alone (the run is root's, and Python's files are "
    "not for others to read, or the machine permits no namespaces)",
}


def check_sources(flags: RewardSourceFlags) -> None:
    """Find out before any model is loaded whether the sources can be used; says what the sandbox cannot shut off.

    Each function is imported in a process of its own, which ends again. Whether a service answers is not asked.

    Raises:
        UserError: names the flag and what is wrong: the form of a function's name, a missing file, rule, extra, module,
            callable or setting, or an address that is none.
    """
    for url in flags.remote_urls:
        check_url(url)
    specs = [parse_function(text) for text in flags.reward_function]
    for spec in specs:
        FunctionReward(spec, 1, flags.reward_timeout, flags.reward_default).close()
    if any(spec.rule == "code_tests" for spec in specs):
        _check_sandbox()
    for spec in specs:
        _check_wall_seconds(spec, flags.reward_timeout)


def _check_sandbox() -> None:
    try:
        missing = missing_isolation()
    except RuntimeError as problem:
        raise UserError(f"{FLAG} code_tests: {in_one_line(problem)}") from None
    for what in missing:
        logger().warning(f"{FLAG} code_tests: weaker isolation on this machine: {WEAKER[what]} (docs/rewards.md)")


def _check_wall_seconds(spec: FunctionSpec, timeout: float) -> None:
    """A program that takes all its time must score 0, not cost its row the default."""
    if spec.rule != "code_tests":
        return
    wall = float(dict(spec.settings).get("wall_seconds", Limits.wall_seconds))
    if wall >= timeout:
        raise UserError(
            f"{FLAG} code_tests: wall_seconds={wall:g} must be below --reward_timeout {timeout:g}, or a program that "
            "takes too long would get --reward_default"
        )


def build_sources(flags: RewardSourceFlags, model_source: RewardSource | None) -> RewardMixture:
    """All sources that the flags name, with their weights: the learned reward, functions, the remote service.

    Starts the functions' processes; `RewardMixture.close` ends them.

    Args:
        flags: of the sources.
        model_source: the learned reward; None exactly with `--use_reward_model False`.
    """
    if flags.use_reward_model != (model_source is not None):
        raise ValueError("a learned reward is given exactly if --use_reward_model is on")
    sources: list[tuple[RewardSource, float]] = []
    if model_source is not None:
        sources.append((model_source, flags.reward_model_weight))
    for spec in map(parse_function, flags.reward_function):
        function = FunctionReward(spec, flags.reward_workers, flags.reward_timeout, flags.reward_default)
        sources.append((function, spec.weight))
    if flags.remote_urls:
        remote = RemoteReward(
            flags.remote_urls, flags.remote_reward_timeout, flags.remote_reward_retries, flags.remote_reward_batch_size
        )
        sources.append((remote, flags.remote_reward_weight))
    return RewardMixture(sources)
