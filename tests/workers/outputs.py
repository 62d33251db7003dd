"""Trains actor and critic for one step under ZeRO-3 in fp32, saves them, and writes their logits.

outputs.py ASSETS OUT_FOLDER
"""

import sys
from pathlib import Path

import torch

from dschat_ppo.common import dist
from dschat_ppo.ppo.train_ppo import save_models
from dschat_ppo.run.launch import leave
from workers.ppo_setup import experience_of, make_ppo, train_on


def main() -> None:
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    flags = ("--actor_zero_stage", 3, "--critic_zero_stage", 3, "--actor_learning_rate", 0.01)
    flags += ("--per_device_generation_batch_size", 4, "--per_device_training_batch_size", 4)
    flags += ("--max_answer_seq_len", 6, "--critic_learning_rate", 0.01)
    ppo = make_ppo(assets, *flags)
    rollout = ppo.collection.generator.answer([0, 1, 2, 3], 1)
    train_on(ppo, experience_of(ppo, rollout))
    tokenizer = ppo.collection.requests.tokenizer
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|system|>")  # not its EOS
    save_models(ppo.engines, tokenizer, out)
    ppo.engines.eval()
    ids = torch.tensor([[7, 60, 90, 40, 1], [9, 80, 3, 2, 1]])
    with torch.no_grad():
        scores = ppo.engines.critic(ids, torch.tensor([5, 5]), last_only=True)
        with ppo.engines.hybrid.generating() as model:
            logits = model(ids).logits
    if dist.is_main():
        torch.save({"ids": ids, "logits": logits, "scores": scores}, out / "expected.pt")
    dist.shutdown()
    leave(0)


main()
