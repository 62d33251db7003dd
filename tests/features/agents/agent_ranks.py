"""Random agents on every rank, whose weights are divided by ZeRO-3, beside plain transformers.

agent_ranks.py FOLDER      has the model; each rank writes FOLDER/RANK.json
"""

import json
import sys
from pathlib import Path

import torch
from role_engines import engines_of
from transformers import AutoModelForCausalLM
from workers.quick import joined_ranks

from dschat_ppo.common import dist
from dschat_ppo.engine import ds_config
from dschat_ppo.models.wrapped_models import response_logprobs

sys.path.insert(0, str(Path(__file__).parent))  # ranks are forked without it
from random_calls import TEMPERATURE, RandomCalls, contexts_of, replies_in, worst_logprob  # noqa: E402
from random_programs import talkative  # noqa: E402

EPISODES = 6  # of rank 0; the second rank has fewer, and ends earlier
NAME = "tools"
FLAGS = (
    "--actor_zero_stage 3 --use_reward_model False --advantage_estimator grpo"
    " --n_samples_per_prompt 2 --agent own.py:play"
).split()
KINDS = {  # kind of engine -> (engine, flags)
    "late sequences": ("continuous", []),
    "rounds": ("continuous", ["--unpin_actor_parameters"]),
    "padded": ("padded", ["--unpin_actor_parameters"]),
}


@torch.no_grad()
def found(folder: Path, engine: str, flags: list[str]) -> dict:
    """What this rank's episodes are worth, with one kind of engine."""
    tokenizer, tools, _ = talkative(NAME)
    engines = engines_of(folder, *FLAGS, *flags, actor="lm", critic=None, reward=False)
    count = EPISODES - 4 * dist.rank()
    calls = RandomCalls(NAME, tokenizer, tools, count, first=EPISODES * dist.rank())
    with engines.hybrid.generating() as model:
        rows = calls.answer(model, engine, max_over_ranks=engines.hybrid.max_over_ranks)
    plain = AutoModelForCausalLM.from_pretrained(folder / "lm", dtype=torch.float32).eval()
    is_chosen_once = True
    for row in range(count):
        chosen = sorted(replies_in(contexts_of(rows, row)))
        is_chosen_once &= chosen == sorted(calls.taken(row).elements())
    trained = response_logprobs(engines.actor, rows, TEMPERATURE).logprobs
    return {
        "chosen": int(rows.response_mask.sum()),
        "chosen once": is_chosen_once,
        "contexts": int(rows.contexts.max()) + 1,
        "worst": worst_logprob(plain, rows),
        "trained": float((trained - rows.rollout_logprobs).abs().max()),
        "layer by layer": engines.hybrid.max_over_ranks is not None,
    }


def main() -> None:
    folder = Path(sys.argv[-1])
    ds_config.PERSISTENT_ELEMENTS = 0  # ZeRO-3 divides the small weights too
    results = {kind: found(folder, engine, flags) for kind, (engine, flags) in KINDS.items()}
    (folder / f"{dist.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    with joined_ranks():
        main()
