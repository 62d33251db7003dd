"""The scores of a judge of a run, on every rank, beside those of transformers.

judge_ranks.py ASSETS OUT_FILE      each rank writes OUT_FILE.RANK
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from workers.hybrid import ppo_with
from workers.quick import joined_ranks

from dschat_ppo.common import dist
from dschat_ppo.engine import ds_config
from dschat_ppo.rewards.build_rewards import sources_with_models

sys.path.insert(0, str(Path(__file__).parent))  # ranks are forked without it
from judge_parts import ROLLOUT, label_sums, request  # noqa: E402

JUDGED = ["in the hall", "I do not know", "here", " naïve 😀 hall"]


def difference(assets: Path, stage: int) -> dict:
    """The largest difference of this rank's scores, whose number depends on the rank; how many of
    the judge's weights are in parts."""
    judge = f"{assets}/lm?labels=no,in the hall,10&template={assets}/short.jinja"
    rewards = ["--judge", judge, "--use_reward_model", "False"]
    ppo = ppo_with(
        assets, stage, *rewards, "--advantage_estimator", "rloo", "--n_samples_per_prompt", 2
    )
    [(source, weight)] = sources_with_models(
        ppo.config, ppo.engines.frozen, {"judge": f"{assets}/lm"}, batch_tokens=256, seed=1
    )
    asked = request(JUDGED[dist.rank() :])
    scores = source(asked, ROLLOUT)
    expected = label_sums(
        AutoModelForCausalLM.from_pretrained(f"{assets}/lm", dtype=torch.float32), source, asked
    )
    values = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    weights = list(ppo.engines.frozen("judge").module.parameters())
    return {
        "largest": float((scores - expected.softmax(dim=1) @ values).abs().max()),
        "spread": float(scores.max() - scores.min()),
        "divided": sum(parameter.numel() == 0 for parameter in weights),
    }


def main() -> None:
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    ds_config.PERSISTENT_ELEMENTS = 0  # ZeRO-3 divides the small weights too
    results = {stage: difference(assets, stage) for stage in (2, 3)}
    Path(f"{out}.{dist.rank()}").write_text(json.dumps(results))


if __name__ == "__main__":
    with joined_ranks():
        main()
