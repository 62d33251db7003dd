from dschat_ppo.rewards.functions import FunctionReward, parse_function
from dschat_ppo.rewards.mixture import RewardMixture


def check_sources(flags):
    for s in flags.reward_function:
        parse_function(s)


def build_sources(flags, model_source):
    out = []
    if model_source is not None:
        out.append((model_source, flags.reward_model_weight))
    for s in flags.reward_function:
        p = parse_function(s)
        out.append((FunctionReward(p, flags.reward_workers, flags.reward_timeout, flags.reward_default), p.weight))
    return RewardMixture(out)
