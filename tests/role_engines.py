"""The engines of step 3 around tiny models, and their log-probs."""

import torch

from dschat_ppo.common import dist
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine


def engines_of(
    assets,
    *words: str,
    actor: str = "lm",
    critic: str | None = "reward",
    reward: bool = True,
    reference: str = "",
) -> RLHFEngine:
    """The engines of models in `assets`; the reward model is that of the critic."""
    lm, scalar = str(assets / actor), str(assets / (critic or "reward"))
    flags = [
        "--actor_model_name_or_path",
        lm,
        "--critic_model_name_or_path",
        scalar,
        "--data_path",
        "d",
    ]
    flags += [
        "--output_dir",
        "o",
        "--dtype",
        "fp32",
        "--actor_learning_rate",
        "0.25",
        "--critic_learning_rate",
        "0.5",
    ]
    flags += [] if "--warmup_ratio" in words else ["--num_warmup_steps", "0"]
    flags += ["--ref_model_name_or_path", str(assets / reference)] if reference else []
    config, own = parse("ppo", [*flags, *words]), str(assets / reference) if reference else None
    folders = ModelFolders(lm, scalar if critic else None, scalar if reward else None, own)
    return RLHFEngine(config, plan_ppo(config.ppo, 40, 1, 0), folders)


IDS, LENGTHS = torch.tensor([[5, 6, 7, 8]]), torch.tensor([4])


@torch.no_grad()
def logprobs(model) -> torch.Tensor:
    return model(
        IDS.to(dist.device()), torch.ones_like(IDS, dtype=torch.bool, device=dist.device())
    )[0].cpu()
